"""The measurements of `gapped.diagnose` and `gapped.diagnose_model`, against closed forms."""

from __future__ import annotations

import itertools

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
from statistical import LEVEL

import gapped
from gapped.cli.diagnose import find_problem
from gapped.diagnostics.gradients import Coordinates, CostGradients, reference_of
from gapped.errors import GappedError

# A comparison with an interval of this confidence fails a correct package at the suite's own level.
SURE = 1 - LEVEL
GST = "GST(tau=1.0, gap=1.0)"
PATHWISE = [gapped.StraightThrough(), gapped.ReinMax(), gapped.GST(1.0, gap=1.0)]


def square(z):
    """The square of how many variables chose the first category."""
    return z[..., 0].sum(-1) ** 2


def measured(name: str, estimators=PATHWISE, samples: int = 2000, confidence: float = SURE, **how):
    f, logits = find_problem(name)
    return gapped.diagnose(f, logits, estimators, samples, generator=seeded(), confidence=confidence, **how)


# Facts


@pytest.mark.parametrize(
    ("name", "unbiased"),
    [("linear", {"StraightThrough", "ReinMax"}), ("quadratic", {"ReinMax"}), ("cubic", set())],
)
def test_who_is_biased_where(name, unbiased):
    """Failing falsely: at the suite's level for each zero; the others must be told from zero at it."""
    diagnosis = measured(name, samples=40_000)
    if name == "linear":
        row = diagnosis["StraightThrough"]
        assert max(row.bias.high, row.variance.high, 1 - row.cosine.value) < 1e-12
    assert {row.label for row in diagnosis.rows if row.bias.low == 0} == unbiased


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
        GST: [
            gradient_through(lambda t, i=i: gst_surrogate(t, i, 1.0, 1.0), theta, g)
            for i, g in enumerate(slope)
        ],
    }
    diagnosis = gapped.diagnose(
        lambda z: (z @ w + 0.5) ** 3, theta, PATHWISE, 4000, generator=seeded(), confidence=SURE
    )
    assert diagnosis.norm.value == pytest.approx(float(target.norm()), rel=1e-10)
    for row in diagnosis.rows:
        exact = exact_moments(torch.stack(by_hand[row.label]), p, target)
        for name, value in exact.items():
            interval = getattr(row, name)
            # Straight-through has one direction: an interval without width, up to rounding.
            assert interval.low - 1e-12 <= value <= interval.high + 1e-12, (row.label, name)
            # The interval says something: it is narrower than the number is large.
            assert interval.high - interval.low < max(interval.value, 0.5 * float(target.norm())), name
        assert row.relative_bias.value == pytest.approx(row.bias.value / float(target.norm()), rel=1e-9)
        assert row.mse.value == pytest.approx(row.bias.value**2 + row.variance.value, rel=1e-9)


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
        monkeypatch.setattr("gapped.diagnostics.gradients.draw_independent", lambda *_, i=index: i)
        given = logits.clone().requires_grad_()
        gapped.expectation(f, given, Coordinates()).sum().backward()
        weight = p[:, 0, first] * p[:, 1, second]
        total += weight.view(2, 1, 1) * given.grad
    assert_close(total, leaf.grad, 1e-12)


@pytest.mark.parametrize("reference", ["coordinate", "double-cv", "rloo"])
def test_an_estimated_reference_has_an_interval_around_the_exact_length(reference):
    exact = measured("cubic", samples=200).norm.value
    diagnosis = measured("cubic", samples=400, reference=reference)
    assert diagnosis.norm.low < exact < diagnosis.norm.high
    assert diagnosis["ReinMax"].bias.high > measured("cubic", samples=400)["ReinMax"].bias.value


def test_a_given_gradient_is_taken_as_exact():
    f, logits = find_problem("cubic")
    leaf = logits.clone().requires_grad_()
    gapped.expectation(f, leaf, gapped.Exact()).backward()
    given, own = (measured("cubic", samples=200, reference=r) for r in (leaf.grad, "auto"))
    assert given[GST].bias.value == pytest.approx(own[GST].bias.value, rel=1e-9)
    with pytest.raises(GappedError, match=r"reference: .*logits' shape \(3, 4\)"):
        measured("cubic", reference=leaf.grad[0])


def smooth(z):
    return torch.tanh(z[..., 0].sum(-1) / z.shape[-2])


def rough(z):
    """Its slopes say nothing about its differences."""
    return torch.cos(500 * z[..., 0].sum(-1))


@pytest.mark.parametrize(
    ("shape", "f", "kind"),
    [
        ((3, 4), smooth, "exact"),
        ((20, 4), smooth, "summed out"),
        ((300, 40), smooth, "DoubleCV"),
        ((300, 40), rough, "RLOO"),
        ((300, 40), lambda z: z.argmax(-1).to(z.dtype).sum(-1), "RLOO"),
    ],
)
def test_the_reference_is_what_is_affordable(shape, f, kind):
    assert kind in gapped.diagnose(f, torch.zeros(shape), [gapped.RLOO(2)], samples=200).reference


def test_slopes_make_the_reference_precise():
    """Exactly known: a cost that is linear. The factor found is then 1, and the reference has no noise."""
    slope = normal(4, seed=5)
    logits = normal(30, 4)
    p = logits.softmax(-1)
    exact = (p * (slope - (p * slope).sum(-1, keepdim=True))).flatten()
    source = CostGradients(lambda z: (z @ slope).sum(-1) + 3, logits, generator=seeded())
    double, plain = (reference_of(source, kind, 64, None) for kind in ("double-cv", "rloo"))
    assert_close(double.gradient, exact, 1e-6)
    assert double.noise < 1e-10 * plain.noise


def linear_at(level, logits, slope):
    """A linear cost at a level, in float32; slopes of four binary digits make every cost exact there."""
    slope = slope.float()
    return CostGradients(lambda z: (z * slope).sum((-1, -2)) + level, logits.float(), generator=seeded())


@pytest.mark.parametrize("level", [1e5, 1e6])
@pytest.mark.parametrize("reference", ["exact", "coordinate", "double-cv", "rloo"])
def test_a_level_of_the_cost_changes_no_reference(reference, level):
    logits, slope = normal(5, 4), (16 * normal(5, 4, seed=6)).round() / 16
    there, here = (
        reference_of(linear_at(x, logits, slope), reference, 64, None).gradient for x in (level, 0)
    )
    assert_close(there, here, 1e-6)
    if reference != "rloo":  # the others have no variance for a linear cost
        p = logits.softmax(-1)
        exact = p * (slope - (p * slope).sum(-1, keepdim=True))
        assert_close(there, exact.flatten(), 1e-6)


@pytest.mark.parametrize("level", [0.0, 1e5, 1e6])
def test_unbiased_members_cover_zero_at_any_level_of_the_cost(level):
    source = linear_at(level, normal(12, 6), (16 * normal(12, 6, seed=6)).round() / 16)
    members = [gapped.RLOO(16), gapped.DoubleCV(4)]
    diagnosis = gapped.diagnose(
        source.f, source.logits, members, samples=400, generator=seeded(), confidence=SURE
    )
    assert "summed out" in diagnosis.reference
    assert [row.relative_bias.low for row in diagnosis.rows] == [0, 0]


# Evaluations, state, randomness, shapes and dtypes


def test_evaluations_are_counted_and_equal_labels_get_numbers():
    members = [gapped.GST(), gapped.RLOO(4), gapped.MuProp(), gapped.REBAR(), gapped.ARSM(), gapped.Exact()]
    rows = measured("quadratic", [*members, gapped.GST()], samples=200).rows
    assert [row.evaluations for row in rows] == [1, 4, 2, 3, 7, 65, 1]
    assert (rows[0].label, rows[-1].label) == ("GST", "GST #2")


def test_the_size_of_a_call_does_not_grow_with_the_samples():
    sizes = []
    for samples in (8000, 16000):
        f = lambda z: sizes.append(len(z)) or square(z)  # noqa: E731
        gapped.diagnose(f, torch.zeros(2, 3), [gapped.GST()], samples)
    assert max(sizes) < 2 * 512


@pytest.mark.parametrize("model", [False, True])
def test_estimators_with_a_state_are_measured_as_they_are(model):
    """Neither memory nor modes change, not even that of a frozen network, and nothing is left to train on."""
    network = torch.nn.Sequential(torch.nn.Flatten(-2), torch.nn.Linear(12, 1), torch.nn.Flatten(-2))
    frozen = network.double().eval()
    members = {"nvil": gapped.NVIL(), "rebar": gapped.REBAR(), "relax": gapped.RELAX(frozen)}

    def state(member):
        return {k: v.clone() for k, v in member.state_dict().items()}, [m.training for m in member.modules()]

    before = {name: state(member) for name, member in members.items()}
    f, logits = find_problem("quadratic")
    if model:
        leaf = logits.clone().requires_grad_()
        gapped.diagnose_model(
            lambda e, g: gapped.expectation(f, leaf, e, generator=g).sum(),
            [leaf],
            members,
            200,
            gapped.NVIL(),
        )
    else:
        diagnosis = measured("quadratic", members, samples=200)
        assert all(row.bias.low == 0 for row in diagnosis.rows)
    for name, member in members.items():
        torch.testing.assert_close(state(member), before[name], rtol=0, atol=0)
        with pytest.raises(GappedError, match="nothing to train on"):
            member.variance_loss()


def test_randomness_comes_from_the_generator_alone():
    state = torch.get_rng_state()
    first, second = (measured("cubic", samples=200).to_dict() for _ in range(2))
    for row in (*first["rows"], *second["rows"]):
        del row["seconds"]
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cost_may_seed_torchs_generator():
    """Without a generator: the noise comes from another one, so that it does not repeat itself."""

    def cost(z):
        torch.manual_seed(0)
        return (z[..., 0] - 0.45).square().sum(-1)

    state = torch.get_rng_state()
    source = CostGradients(cost, torch.zeros(4, 3, dtype=torch.float64))
    first, second = (source.draw(gapped.RLOO(2), 16) for _ in range(2))
    torch.set_rng_state(state)
    assert not torch.equal(first, second)


def test_batches_and_masks():
    logits, target = normal(5, 2, 4), normal(5, seed=9)
    mask = torch.tensor([True, True, True, False])

    def f(z):  # (n, 5, 2, 4) -> (n, 5)
        assert not z[..., 3].any()
        return (z[..., 0].sum(-1) - target) ** 2 + z[..., 1].prod(-1)

    diagnosis = gapped.diagnose(
        f, logits, [gapped.RLOO(), gapped.GST(1.0, gap=1.0)], 400, mask=mask, generator=seeded()
    )
    assert diagnosis["RLOO"].entries == 40
    assert diagnosis["RLOO"].bias.low < 0.2 * diagnosis[GST].bias.value


def test_rounding_in_half_precision_is_not_bias():
    logits, slope = normal(3, 4).bfloat16(), torch.arange(4.0).bfloat16()
    diagnosis = gapped.diagnose(
        lambda z: (z @ slope).sum(-1), logits, [gapped.MuProp()], 256, generator=seeded(), confidence=SURE
    )
    assert diagnosis["MuProp"].bias.low == 0


def test_a_cost_may_compute_in_a_narrower_dtype_than_it_returns():
    weight = normal(24, 64).float(), normal(64).float()

    def cost(z):
        return ((z.flatten(-2) @ weight[0]).tanh() @ weight[1]).double() ** 2

    assert len(gapped.diagnose(cost, normal(6, 4).float(), PATHWISE, samples=200).rows) == 3


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
    """Score-function estimators need no derivative of it."""
    with pytest.raises(GappedError, match=message) as caught:
        gapped.diagnose(f, torch.zeros(3, 4), [gapped.GST()], samples=200)
    assert "\n" not in str(caught.value)
    if message == "derivative":
        gapped.diagnose(f, torch.zeros(3, 4), [gapped.RLOO(2)], samples=200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 199}, "samples: got 199, expected an integer of at least 200"),
        ({"samples": True}, "samples: got True"),
        ({"confidence": 1.0}, "confidence: got 1.0"),
        ({"reference": "exakt"}, "reference: got 'exakt'"),
        ({"estimators": "gst"}, "estimators: got 'gst'"),
        ({"estimators": []}, "estimators: got 'none'"),
        ({"estimators": ["gts"]}, r"estimator: got 'gts'; did you mean gst\? Expected one of "),
        ({"estimators": [3]}, "estimator: got an object of type int"),
        ({"logits": torch.zeros(3, 1)}, "no row with a choice"),
    ],
)
def test_arguments_are_checked(change, message):
    given = {"f": square, "logits": torch.zeros(3, 4), "estimators": [gapped.GST()]}
    with pytest.raises(GappedError, match=message):
        gapped.diagnose(**{**given, **change})


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


def flat_gradient(loss, model):
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])


def test_bias_of_a_models_gradient():
    model, loss = toy_model()
    length = flat_gradient(loss(gapped.Exact(), None), model).norm()
    members = [gapped.RLOO(), gapped.GST()]
    diagnosis = gapped.diagnose_model(loss, model, members, 200, gapped.RLOO(4), generator=seeded())
    assert diagnosis.norm.low < length < diagnosis.norm.high
    assert diagnosis["RLOO"].bias.low == 0
    assert diagnosis["RLOO"].evaluations is None
    assert "RLOO" in diagnosis.reference


def test_variances_are_those_of_two_passes():
    """Over replayed gradients; averaged over weights, it is the quantity of the paper's variance figure."""
    model, loss = toy_model()
    diagnosis = gapped.diagnose_model(loss, model, [gapped.GST()], 200, generator=seeded(3))
    row = diagnosis["GST"]
    assert (row.bias, diagnosis.norm) == (None, None), "there was no reference"
    noise = seeded(3)
    variance = torch.stack([flat_gradient(loss(gapped.GST(), noise), model) for _ in range(200)]).var(0)
    assert row.mean_variance == pytest.approx(float(variance.mean()), rel=1e-10)
    assert row.per_parameter["weight"] == pytest.approx(float(variance[:12].mean()), rel=1e-10)
    assert row.per_parameter["bias"] == pytest.approx(float(variance[12:].mean()), rel=1e-10)


def test_parameters_of_a_model_in_every_form():
    model, loss = toy_model()
    forms = (model, model.named_parameters(), dict(model.named_parameters()), model.parameters())
    rows = [gapped.diagnose_model(loss, each, [gapped.GST()], samples=200).rows[0] for each in forms]
    assert [list(row.per_parameter) for row in rows] == [["weight", "bias"]] * 3 + [["0", "1"]]


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
        gapped.diagnose_model(loss, [torch.zeros(2, requires_grad=True)], [gapped.GST()], 200)


def test_the_norm_of_the_mean_gradient_is_told_from_zero():
    unbiased, vanishing = measured("cubic", [gapped.RLOO(4), gapped.GST(tau=0.05)]).rows
    assert unbiased.relative_norm.low < 1 < unbiased.relative_norm.high
    assert not unbiased.vanishes
    assert vanishing.relative_norm.high < 1e-5
    assert vanishing.vanishes
