"""What `gapped.diagnose` measures: against closed forms, and intervals against their declared rate."""

from __future__ import annotations

import itertools
import json
import math
import zipfile

import pytest
import torch
from conftest import (
    assert_close,
    gradient_through,
    gst_surrogate,
    jacobian_of_softmax,
    normal,
    reinmax_gradient,
    seeded,
)
from statistical import LEVEL, binomial, mean_is, require_law, require_rejected

import gapped
from gapped.diagnostics.gradients import CostGradients
from gapped.diagnostics.intervals import Interval, norm_interval
from gapped.diagnostics.measure import errors_of
from gapped.diagnostics.moments import Moments
from gapped.diagnostics.reference import Coordinates, Reference
from gapped.diagnostics.stream import GradientStream
from gapped.errors import GappedError
from gapped.lab.cli.app import main
from gapped.lab.problems import problem

# A comparison with an interval of this confidence fails a correct package at the suite's own level.
SURE = 1 - LEVEL
PATHWISE = [gapped.StraightThrough(), gapped.ReinMax(), gapped.GST()]


def measured(name: str, estimators=PATHWISE, samples: int = 2000, confidence: float = SURE, **how):
    f, logits = problem(name)
    return gapped.diagnose(f, logits, estimators, samples, generator=seeded(), confidence=confidence, **how)


# Facts


def test_straight_through_is_exact_on_linear_costs():
    row = measured("linear")["StraightThrough"]
    assert row.bias.high < 1e-12
    assert row.variance.high < 1e-24
    assert row.cosine.value == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "unbiased"),
    [("linear", {"StraightThrough", "ReinMax"}), ("quadratic", {"ReinMax"}), ("cubic", set())],
)
def test_who_is_biased_where(name, unbiased):
    """Failing falsely: at the suite's level for each zero; the others must be told from zero at it."""
    found = measured(name, samples=40_000)
    assert {row.label for row in found.rows if row.bias.low == 0} == unbiased


def test_unbiased_members_cover_zero_on_the_classic():
    members = [gapped.RLOO(2), gapped.DisARM(), gapped.MuProp(), gapped.REBAR(), gapped.ARSM()]
    for row in measured("classic", [*members, gapped.Exact()], samples=400).rows:
        assert row.bias.low == 0


def exact_moments(gradients, p, target):
    """Mean error, total variance, squared error and cosine of a gradient that takes K values."""
    mean = (p.unsqueeze(-1) * gradients).sum(0)
    bias = (mean - target).norm()
    variance = (p * (gradients - mean).square().sum(1)).sum()
    error = (p * (gradients - target).square().sum(1)).sum()
    cosine = (p * torch.nn.functional.cosine_similarity(gradients, target.expand_as(gradients), 1)).sum()
    return {"bias": bias, "variance": variance, "mse": error, "cosine": cosine}


def test_against_enumeration_of_the_gradients():
    theta, w = normal(4, seed=3), normal(4, seed=4)
    p, corners = theta.softmax(-1), torch.eye(4, dtype=torch.float64)
    slope = [3 * (w @ z + 0.5) ** 2 * w for z in corners]
    costs = (corners @ w + 0.5) ** 3
    target = p * (costs - p @ costs)
    by_hand = {
        "StraightThrough": [jacobian_of_softmax(p) @ g for g in slope],
        "ReinMax": [reinmax_gradient(theta, i, g, 1.0) for i, g in enumerate(slope)],
        "GST": [
            gradient_through(lambda t, i=i: gst_surrogate(t, i, 1.0, 1.0), theta, g)
            for i, g in enumerate(slope)
        ],
    }
    found = gapped.diagnose(
        lambda z: (z @ w + 0.5) ** 3, theta, PATHWISE, 4000, generator=seeded(), confidence=SURE
    )
    assert found.norm.value == pytest.approx(float(target.norm()), rel=1e-10)
    for row in found.rows:
        exact = exact_moments(torch.stack(by_hand[row.label]), p, target)
        for name, value in exact.items():
            interval = getattr(row, name)
            # Straight-through has one direction: an interval without width, up to rounding.
            assert interval.low - 1e-12 <= value <= interval.high + 1e-12, (row.label, name)
            # The interval says something: it is narrower than the number is large.
            assert interval.high - interval.low < max(interval.value, 0.5 * float(target.norm())), name
        assert row.relative_bias.value == pytest.approx(row.bias.value / float(target.norm()), rel=1e-9)
        assert row.mse.value == pytest.approx(row.bias.value**2 + row.variance.value, rel=1e-9)


# Intervals


def covering(samples: int, members, repetitions: int = 200) -> dict[str, int]:
    f, logits = problem("quadratic", shape=(2, 3))
    source, hits = seeded(5), dict.fromkeys(members, 0)
    for _ in range(repetitions):
        for row in gapped.diagnose(f, logits, members, samples, generator=source).rows:
            hits[row.label] += row.bias.low == 0
    return hits


def streamed(gradients, target=None) -> GradientStream:
    stream = GradientStream(gradients.shape[1], gradients.device, target)
    for group in gradients.chunk(2):
        stream.add(group)
    return stream


@pytest.mark.parametrize("kind", ["exact", "estimated"])
def test_zero_bias_is_covered_at_the_declared_rate(kind):
    """200 repetitions at 90%, each with a reference of its own where that is estimated."""
    source = CostGradients(*problem("quadratic", shape=(2, 3)), None, seeded(5), None)
    exact = source.draw(gapped.Exact(), 1)[0]
    draws = {e: source.draw(e, 200 * 100).view(200, 100, -1) for e in (gapped.RLOO(2), gapped.GST())}
    averaged = source.draw(gapped.RLOO(16), 200 * 50).view(200, 50, -1)
    hits = dict.fromkeys(draws, 0)
    for estimator, repetitions in draws.items():
        for gradients, others in zip(repetitions, averaged, strict=True):
            known = Reference("exact", exact) if kind == "exact" else Reference.of("rloo", streamed(others))
            bias = errors_of(streamed(gradients, known.gradient), known, 0.9, 1e-16)[0]
            hits[estimator] += bias.low == 0
    require_law(binomial(hits[gapped.RLOO(2)], 200, 0.9))
    require_rejected(binomial(hits[gapped.GST()], 200, 0.9))


@pytest.mark.slow
def test_zero_bias_is_covered_by_every_unbiased_member():
    names = ("Reinforce", "RLOO", "MuProp", "DisARMTree", "DisARMSticks", "ARSM", "REBAR", "ReinMax")
    for label, hits in covering(1000, {name: getattr(gapped, name)() for name in names}).items():
        assert binomial(hits, 200, 0.95) >= LEVEL, (label, hits)


@pytest.mark.parametrize("length", [0.0, 0.2, 3.0])
def test_a_norm_is_covered_at_the_declared_rate(length):
    """Normal errors with a known covariance; the plain length, not debiased, is the wrong twin."""
    scale = torch.tensor([1.0, 0.5, 0.5, 0.2], dtype=torch.float64)
    delta = torch.zeros(4, dtype=torch.float64)
    delta[0] = length
    draws = delta + scale * normal(400, 4, seed=11)
    squares = draws.square().sum(1).tolist()
    noise, overlap = float(scale.square().sum()), float((scale**4).sum())
    hits = naive = 0
    for square in squares:
        found = norm_interval(square, noise, overlap, float(scale[0]) ** 2, 0.9)
        hits += found.low <= length <= found.high
        naive += abs(math.sqrt(square) - length) <= 0.1
    assert hits >= 400 * 0.9 or binomial(hits, 400, 0.9) >= LEVEL
    if length == 0:
        require_law(binomial(hits, 400, 0.9))
        require_rejected(binomial(naive, 400, 0.9))


def test_the_overlap_is_estimated_without_bias():
    factor = normal(5, 5, seed=2)
    square = float((factor.T @ factor).square().sum())
    values, wrong = [], []
    for group in (normal(1000, 8, 5, seed=6) @ factor).unbind():
        stream = GradientStream(5, torch.device("cpu"))
        stream.add(group)
        values.append(float(stream.overlap.mean))
        wrong.append(float(torch.cov(group.T).square().sum()))
    require_law(mean_is(torch.tensor(values), square))
    require_rejected(mean_is(torch.tensor(wrong), square))


def test_the_variance_along_the_error():
    scale, delta = torch.tensor([3.0, 1.0, 0.1]).double(), torch.tensor([0.0, 50.0, 0.0]).double()
    stream = GradientStream(3, torch.device("cpu"), torch.zeros(3, dtype=torch.float64))
    for group in (delta + scale * normal(40, 100, 3)).unbind():
        stream.add(group)
    assert stream.along == pytest.approx(1.0, rel=0.1)


def test_a_group_equals_its_members_one_by_one():
    samples = normal(30, 4) + 1e6
    one, many = Moments(samples[0]), Moments(samples[0])
    for sample in samples:
        one.add(sample)
    for part in samples.split([7, 1, 22]):
        many.merge(part)
    assert many.count == 30
    assert_close(many.mean, one.mean, 1e-15)
    assert_close(many.variance / one.variance, torch.ones(4), 1e-8)


# References


def test_coordinates_are_the_exact_gradient_in_the_mean(monkeypatch):
    logits = normal(2, 2, 3).masked_fill(torch.tensor([False, False, True]), -torch.inf)
    weights = normal(2, 3, seed=8)

    def f(z):
        return torch.sin((z * weights).sum((-1, -2)) + z.prod(-2).sum(-1))

    leaf = logits.clone().requires_grad_()
    gapped.expectation(f, leaf, gapped.Exact()).sum().backward()
    p, total = logits.softmax(-1), torch.zeros_like(logits)
    for first, second in itertools.product(range(2), repeat=2):
        index = torch.tensor([first, second]).expand(1, 2, 2)
        monkeypatch.setattr("gapped.diagnostics.reference.draw_independent", lambda *_, i=index: i)
        given = logits.clone().requires_grad_()
        gapped.expectation(f, given, Coordinates()).sum().backward()
        weight = p[:, 0, first] * p[:, 1, second]
        total += weight.view(2, 1, 1) * given.grad
    assert_close(total, leaf.grad, 1e-12)


@pytest.mark.parametrize("reference", ["coordinate", "rloo"])
def test_an_estimated_reference_has_an_interval_around_the_exact_length(reference):
    exact = measured("cubic", samples=100).norm.value
    found = measured("cubic", samples=400, reference=reference)
    assert found.norm.low < exact < found.norm.high
    assert found["ReinMax"].bias.high > measured("cubic", samples=400)["ReinMax"].bias.value


def test_a_given_gradient_is_taken_as_exact():
    f, logits = problem("cubic")
    leaf = logits.clone().requires_grad_()
    gapped.expectation(f, leaf, gapped.Exact()).backward()
    given, own = (measured("cubic", samples=100, reference=r) for r in (leaf.grad, "auto"))
    assert given["GST"].bias.value == pytest.approx(own["GST"].bias.value, rel=1e-9)
    with pytest.raises(GappedError, match=r"reference: .*logits' shape \(3, 4\)"):
        measured("cubic", reference=leaf.grad[0])


def test_the_reference_is_what_is_affordable():
    def f(z):
        return z[..., 0].sum(-1) ** 2

    for shape, kind in [((3, 4), "exact"), ((20, 4), "summed out"), ((300, 40), "RLOO")]:
        found = gapped.diagnose(f, torch.zeros(shape), [gapped.GST()], samples=16)
        assert kind in found.reference


# What is counted, kept and left alone


def test_evaluations_are_counted():
    members = [gapped.GST(), gapped.RLOO(4), gapped.MuProp(), gapped.REBAR(), gapped.ARSM(), gapped.Exact()]
    found = measured("quadratic", members, samples=16)
    assert [row.evaluations for row in found.rows] == [1, 4, 2, 3, 7, 65]


def test_the_size_of_a_call_does_not_grow_with_the_samples():
    seen: list[int] = []

    def f(z):
        seen.append(z.shape[0])
        return z[..., 0].sum(-1) ** 2

    largest = []
    for samples in (8000, 16000):
        seen.clear()
        gapped.diagnose(f, torch.zeros(2, 3), [gapped.GST()], samples)
        largest.append(max(seen))
    assert max(largest) < 2 * 512


@pytest.mark.parametrize("model", [False, True])
def test_estimators_with_a_state_are_measured_as_they_are(model):
    """Memory, modes and what is left behind do not change, nor does the mode of a frozen network."""
    network = torch.nn.Sequential(torch.nn.Flatten(-2), torch.nn.Linear(12, 1), torch.nn.Flatten(-2))
    members = {
        "nvil": gapped.NVIL(),
        "rebar": gapped.REBAR(),
        "relax": gapped.RELAX(network.double().eval()),
    }

    def state(member):
        return {k: v.clone() for k, v in member.state_dict().items()}, [m.training for m in member.modules()]

    before = {name: state(member) for name, member in members.items()}
    f, logits = problem("quadratic")
    if model:
        leaf = logits.clone().requires_grad_()
        gapped.diagnose_model(
            lambda e, g: gapped.expectation(f, leaf, e, generator=g).sum(), [leaf], members, 16, gapped.NVIL()
        )
    else:
        found = measured("quadratic", members, samples=100)
        assert all(row.bias.low == 0 for row in found.rows)
    for name, member in members.items():
        torch.testing.assert_close(state(member), before[name], rtol=0, atol=0)
        with pytest.raises(GappedError, match="nothing to train on"):
            member.variance_loss()


def test_randomness_comes_from_the_generator_alone():
    state = torch.get_rng_state()
    first, second = (measured("cubic", samples=50).to_dict() for _ in range(2))
    for row in (*first["rows"], *second["rows"]):
        del row["seconds"]
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_and_masks():
    logits, target = normal(5, 2, 4), normal(5, seed=9)
    mask = torch.tensor([True, True, True, False])

    def f(z):  # (n, 5, 2, 4) -> (n, 5)
        assert not z[..., 3].any()
        return (z[..., 0].sum(-1) - target) ** 2 + z[..., 1].prod(-1)

    found = gapped.diagnose(f, logits, [gapped.RLOO(2), gapped.GST()], 400, mask=mask, generator=seeded())
    assert found["RLOO"].entries == 40
    assert found["RLOO"].bias.low < 0.2 * found["GST"].bias.value


def test_rounding_in_half_precision_is_not_bias():
    logits, slope = normal(3, 4).bfloat16(), torch.arange(4.0).bfloat16()
    found = gapped.diagnose(
        lambda z: (z @ slope).sum(-1), logits, [gapped.MuProp()], 256, generator=seeded(), confidence=SURE
    )
    assert found["MuProp"].bias.low == 0


def test_an_estimator_that_was_not_measured():
    with pytest.raises(GappedError, match="label: got 'nope', expected one of StraightThrough, ReinMax, GST"):
        measured("linear", samples=50)["nope"]


# Costs that cannot be measured


def noisy(z):
    return z[..., 0].sum(-1) + torch.rand(z.shape[0], dtype=z.dtype)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda z: z.sum((-1, -2)), "ignores its input"),
        (lambda z: z[..., 0].sum(-1) / 0 * 0, "not all finite"),
        (lambda z: z[..., 0].sum(), "shape"),
        (lambda z: z[:, 0], "shape"),
        (lambda z: 1.0, "float"),
        (noisy, "not deterministic"),
        (lambda z: z[..., 0].sum(-1) - z[..., 0].sum(-1).mean(0), "other samples"),
        (lambda z: (z.argmax(-1).sum(-1)).to(z.dtype), "derivative"),
        (lambda z: (z[..., 0] - 1).abs().sqrt().sum(-1), "not finite"),
        (3, "f: got an object of type int"),
    ],
)
def test_a_cost_that_cannot_be_measured_is_named(f, message):
    with pytest.raises(GappedError, match=message) as caught:
        gapped.diagnose(f, torch.zeros(3, 4), [gapped.GST()], samples=50)
    assert "\n" not in str(caught.value)


def test_no_derivative_is_needed_by_those_that_ask_for_none():
    gapped.diagnose(lambda z: z.argmax(-1).sum(-1).float(), torch.zeros(3, 4), [gapped.RLOO(2)], samples=50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 3}, "samples: got 3"),
        ({"samples": True}, "samples: got True"),
        ({"confidence": 1.0}, "confidence: got 1.0"),
        ({"reference": "exakt"}, "reference: got 'exakt'"),
        ({"estimators": "gst"}, "estimators: got 'gst'"),
        ({"estimators": []}, "estimators: got 'none'"),
        ({"estimators": ["gst"]}, "estimators: got an object of type str"),
        ({"logits": torch.zeros(3, 1)}, "no row with a choice"),
    ],
)
def test_arguments_are_checked(change, message):
    given = {"f": lambda z: z[..., 0].sum(-1), "logits": torch.zeros(3, 4), "estimators": [gapped.GST()]}
    with pytest.raises(GappedError, match=message):
        gapped.diagnose(**{**given, **change})


# The result


def test_the_table_has_a_line_for_each_estimator_and_a_recommendation():
    found = measured("linear", [gapped.StraightThrough(), gapped.GST(tau=0.5), gapped.GST(tau=0.5)])
    lines = str(found).splitlines()
    assert [line.split("  ")[0] for line in lines[2:5]] == [
        "StraightThrough",
        "GST(tau=0.5)",
        "GST(tau=0.5) #2",
    ]
    assert len({len(line) for line in lines[:2]}) == 1
    assert "exact, by enumeration" in lines[-2]
    assert lines[-1] == found.recommendation
    assert found.recommendation.startswith("Recommended: StraightThrough, with the lowest mean squared error")


def test_it_says_when_the_data_do_not_decide():
    found = measured("cubic", {"one": gapped.GST(), "other": gapped.GST()}, samples=50)
    assert found.recommendation.startswith("The data do not decide")
    assert "other" in found.recommendation
    assert "nothing to choose" in measured("cubic", [gapped.GST(), gapped.Exact()], samples=50).recommendation


def test_the_error_at_equal_cost_averages_the_variance_alone():
    row = measured("cubic", [gapped.RLOO(2)], samples=100).rows[0]
    at_eight = row.error_at(8)
    assert at_eight.value == pytest.approx(row.bias.value**2 + row.variance.value / 4)
    assert row.error_at(2) == row.mse
    assert Interval(1, 0, 2).overlaps(Interval(3, 2, 4))
    assert not Interval(1, 0, 2).overlaps(Interval(3, 2.1, 4))


def test_as_data_frame_and_as_figure():
    found = measured("cubic", samples=50)
    frame = found.to_pandas()
    assert list(frame.index) == ["StraightThrough", "ReinMax", "GST"]
    assert frame.loc["GST", "bias_low"] == found["GST"].bias.low
    assert len(found.plot().axes) == 3
    json.dumps(found.to_dict(), allow_nan=False)


# Models


def toy_model():
    model = torch.nn.Linear(3, 4).double()
    with torch.no_grad():
        for i, each in enumerate(model.parameters()):
            each.copy_(normal(*each.shape, seed=20 + i))
    x, w = normal(6, 3, seed=22), normal(4, seed=23)

    def loss(estimator, generator):
        cost = lambda z: (z @ w + 0.3) ** 3  # noqa: E731
        return gapped.expectation(cost, model(x), estimator, generator=generator).mean()

    return model, loss


def test_bias_of_a_models_gradient():
    model, loss = toy_model()
    parameters = dict(model.named_parameters())
    exact = torch.autograd.grad(loss(gapped.Exact(), None), list(parameters.values()))
    found = gapped.diagnose_model(
        loss, parameters, [gapped.RLOO(2), gapped.GST()], 200, gapped.RLOO(4), generator=seeded()
    )
    length = math.sqrt(sum(float(g.square().sum()) for g in exact))
    assert found.norm.low < length < found.norm.high
    assert found["RLOO"].bias.low == 0
    assert found["RLOO"].evaluations is None
    assert set(found["GST"].per_parameter) == {"weight", "bias"}
    mean = sum(found["GST"].per_parameter[n] * p.numel() for n, p in parameters.items()) / 16
    assert found["GST"].mean_variance == pytest.approx(mean)
    assert "RLOO" in str(found)


def test_without_a_reference_only_the_variance_is_measured():
    model, loss = toy_model()
    found = gapped.diagnose_model(loss, model.parameters(), [gapped.RLOO(2), gapped.GST()], 32)
    assert found["GST"].bias is None
    assert "bias is not measured" in found.recommendation
    assert list(found["GST"].per_parameter) == ["0", "1"]
    assert len(found.plot().axes) == 1
    assert "bias" not in str(found).splitlines()[0]


def test_the_papers_variance_is_one_call():
    from toy_tasks import vae_task

    from gapped.lab.fleet.estimator_groups import Grouped

    task, images, samples = vae_task(seeds=[0]), 20, 25

    def fleet(estimator):
        return Grouped.of([estimator], 2, torch.device("cpu"), torch.float64)

    expected = task.gradient_variance(fleet(gapped.GST(tau=0.5)), seeded(3), samples, images)

    def loss(estimator, generator):
        pixels = task.pixels(task.test[:images].unsqueeze(0), generator)
        return task.model.loss(pixels, fleet(estimator), generator).mean()

    encoder = dict(task.model.encoder.named_parameters())
    found = gapped.diagnose_model(loss, encoder, {"GST": gapped.GST(tau=0.5)}, samples, generator=seeded(3))
    assert found["GST"].mean_variance == pytest.approx(float(expected), rel=1e-10)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda e, g: 1.0, "one number in a tensor"),
        (lambda e, g: torch.zeros(2, requires_grad=True), "one number in a tensor"),
        (lambda e, g: torch.zeros(()), "depends on no parameter"),
        (lambda e, g: torch.zeros((), requires_grad=True) + 0, "not depend on the parameter '0'"),
        (lambda e, g: torch.full((), torch.nan), "not finite"),
        (None, "loss_fn: got an object of type NoneType"),
    ],
)
def test_a_loss_that_cannot_be_measured_is_named(loss, message):
    with pytest.raises(GappedError, match=message):
        gapped.diagnose_model(loss, [torch.zeros(2, requires_grad=True)], [gapped.GST()], 16)


# The command


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


TWO = ["--estimator", "gst:gap=1.2", "--estimator", "reinmax"]


def test_the_command_prints_a_table_and_writes_what_it_found(here, capsys):
    assert main(["diagnose", "--problem", "cubic", *TWO, "--samples", "50", "--out", "d"]) == 0
    shown = capsys.readouterr().out
    assert "gst:gap=1.2" in shown
    record = json.loads((here / "d" / "diagnosis.json").read_text())
    assert [row["estimator"] for row in record["rows"]] == ["gst:gap=1.2", "reinmax"]
    assert record["recommendation"] in shown
    assert (here / "d" / "diagnosis.svg").read_text().startswith("<svg")
    assert sorted(p.name for p in (here / "d").iterdir()) == ["diagnosis.json", "diagnosis.svg"]


def test_the_defaults_are_known(here, capsys):
    assert main(["diagnose", "--problem", "classic", "--samples", "16"]) == 0
    assert (here / "runs" / "diagnose" / "diagnosis.json").exists()


def test_sweeps_make_heat_maps(here, capsys):
    two = ["--sweep", "tau=0.5:1:2", "--sweep", "gap=0:2:3"]
    assert main(["diagnose", *two, "--samples", "16", "--out", "d"]) == 0
    record = json.loads((here / "d" / "diagnosis.json").read_text())
    assert record["sweep"] == {"tau": [0.5, 1.0], "gap": [0.0, 1.0, 2.0]}
    assert len(record["rows"]) == 6
    assert "over gap and tau" in (here / "d" / "heat-gst.svg").read_text()
    one = [
        "--sweep",
        "tau=0.5:1:2",
        "--metric",
        "variance",
        "--estimator",
        "gst",
        "--estimator",
        "straight-through",
    ]
    assert main(["diagnose", *one, "--samples", "16", "--out", "e"]) == 0
    assert "straight-through" in (here / "e" / "heat.svg").read_text()


def test_the_small_vae(here, capsys):
    assert main(["diagnose", "--problem", "vae", "--samples", "64", *TWO, "--out", "d"]) == 0
    assert "summed out" in capsys.readouterr().out


def test_logits_that_nobody_can_use_are_refused_in_a_line(here, capsys, monkeypatch):
    monkeypatch.setattr("gapped.lab.cli.diagnose._BYTES", 2**20)

    def compressed(tensor: torch.Tensor) -> None:
        torch.save(tensor, "plain.pt")
        with (
            zipfile.ZipFile("plain.pt") as plain,
            zipfile.ZipFile("logits.pt", "w", zipfile.ZIP_DEFLATED) as file,
        ):
            for part in plain.infolist():
                file.writestr(part.filename, plain.read(part))

    for save, tensor, message in [
        (torch.save, torch.zeros(3, 4).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
        (torch.save, torch.zeros(3, 4, dtype=torch.int64), "dtype torch.int64"),
        (torch.save, torch.zeros(1).expand(10**6, 10**6), "shape (1000000, 1000000)"),
        (compressed, torch.zeros(2**18 + 1), "1 MiB at most"),
    ]:
        save(tensor, *["logits.pt"] * (save is torch.save))
        assert main(["diagnose", *TWO, "--logits", "logits.pt", "--out", "d"]) == 2
        error = capsys.readouterr().err
        assert "--logits: got" in error
        assert message in error
        assert error.count("\n") == 1


def test_a_function_of_the_user(here, capsys):
    (here / "mine_diagnosed.py").write_text(
        "def cost(z):\n    return z[..., 0].sum(-1) ** 2\n\n"
        "def broken(z):\n    raise KeyError('x')\n\nnumber = 3\n"
    )
    torch.save(torch.zeros(2, 5), here / "logits.pt")
    run = ["diagnose", *TWO, "--samples", "16", "--out", "d", "--function"]
    assert main([*run, "mine_diagnosed:cost", "--logits", "logits.pt"]) == 0
    assert json.loads((here / "d" / "diagnosis.json").read_text())["shape"] == [2, 5]
    capsys.readouterr()
    for text, message in [
        ("mine_diagnosed:broken", "failed on samples of shape"),
        ("mine_diagnosed:number", "an object of type int"),
        ("mine_diagnosed:nothing", "no such name"),
        ("mine_diagnosed_not:cost", "ModuleNotFoundError"),
        ("mine", "module:function"),
    ]:
        assert main([*run, text]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problem", "lineer"], "--problem: got 'lineer'"),
        (["--shape", "3"], "--shape: got '3'"),
        (["--shape", "3,1"], "two categories"),
        (["--sweep", "tau=1:2"], "--sweep: got 'tau=1:2'"),
        (["--sweep", "tau=1:2:1"], "two values or more"),
        (["--sweep", "depth=1:2:3"], "options of one of the estimators"),
        (["--metric", "cost"], "--metric: got 'cost'"),
        (["--samples", "2"], "samples: got 2"),
        (["--estimator", "gts"], "estimator: got 'gts'"),
        (["--logits", "pyproject.toml"], "pyproject.toml"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_user_errors_are_one_line(here, capsys, arguments, message):
    assert main(["diagnose", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(here.iterdir()) == []


def test_a_cost_may_answer_in_a_wider_dtype_than_it_computes_in():
    weight = normal(24, 64).float(), normal(64).float()

    def cost(z):
        return ((z.flatten(-2) @ weight[0]).tanh() @ weight[1]).double() ** 2

    found = gapped.diagnose(cost, normal(6, 4).float(), PATHWISE, samples=64, generator=seeded())
    assert len(found.rows) == 3


def test_parameters_of_a_model_in_every_form():
    encoder = torch.nn.Linear(2, 3)

    def loss(estimator, generator):
        cost = gapped.expectation(
            lambda z: z[..., 0] ** 2, encoder(torch.ones(4, 2)), estimator, generator=generator
        )
        return cost.mean()

    every = (
        encoder,
        encoder.named_parameters(),
        dict(encoder.named_parameters()),
        list(encoder.parameters()),
    )
    found = [gapped.diagnose_model(loss, each, PATHWISE, samples=20)["GST"].per_parameter for each in every]
    assert [sorted(each) for each in found] == [["bias", "weight"]] * 3 + [["0", "1"]]


def test_the_command_measures_nothing_that_it_cannot_write(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("gapped.diagnostics.measure.diagnose", lambda *_, **__: pytest.fail("measured"))
    assert main(["diagnose", "--out", str(tmp_path / "file" / "out")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logits", "LOGITS"], "--logits: got a tensor of shape (5, 6), expected (3, 4)"),
        (["--seed", str(2**63)], "--seed"),
    ],
)
def test_the_command_names_bad_input(arguments, message, tmp_path, capsys):
    torch.save(torch.zeros(5, 6), tmp_path / "logits.pt")
    given = [str(tmp_path / "logits.pt") if each == "LOGITS" else each for each in arguments]
    assert main(["diagnose", "--out", str(tmp_path / "out"), *given]) == 2
    assert message in capsys.readouterr().err
