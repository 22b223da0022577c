"""Adapters beside the released libraries that they are named after: the draw and its gradient are ours."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_all_close, assert_close, assert_one_hot, normal, seeded
from doc_pages import Block, blocks
from torch import Tensor, nn

import gapped
from gapped.nn import schedules

LOGITS = normal(6, 5, dtype=torch.float32)
WEIGHT = normal(6, 5, seed=2, dtype=torch.float32)
ESTIMATORS = ("gapmax", "gst:tau=0.7", "straight-through")


def peer(name: str) -> Any:
    """The adapter for a library, where that is installed; while it is imported its warnings are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name, reason=f"needs {name}, a release of which docs/adapters.md names")
        return pytest.importorskip(f"gapped.adapters.{name}", reason=f"{name} does not import here")


def pull(draw: Any, weight: Tensor = WEIGHT) -> tuple[Tensor, Tensor]:
    """A sample of `LOGITS` after an equal seed, and the gradient of a linear cost of it."""
    logits = LOGITS.clone().requires_grad_()
    torch.manual_seed(0)
    sample = draw(logits)
    (gradient,) = torch.autograd.grad(sample, logits, weight.expand_as(sample))
    return sample.detach(), gradient


# torchrl


@pytest.mark.parametrize("text", ESTIMATORS)
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_actions_of_torchrl_are_the_estimators(text: str, shape: tuple[int, ...]) -> None:
    ours = peer("torchrl").OneHotCategorical
    drawn = pull(lambda x: ours(logits=x, grad_method=text).rsample(shape))
    # Normalised first, as the distribution does; estimators ignore a constant added to the logits.
    expected = pull(
        lambda x: gapped.estimator(text).sample(torch.log_softmax(x, -1).expand(*shape, *x.shape))
    )
    assert torch.equal(drawn[0], expected[0])
    assert_close(drawn[1], expected[1], 1e-6)
    assert ours(logits=LOGITS).grad_method == gapped.GapMax()
    assert ours(logits=LOGITS).sample().dtype == torch.int64


@pytest.mark.parametrize("sparse", [False, True])
def test_forbidden_actions_of_torchrl_are_never_drawn(sparse: bool) -> None:
    ours = peer("torchrl").MaskedOneHotCategorical
    allowed = torch.tensor([0, 2, 4]).expand(6, 3)
    mask = torch.zeros(6, 5, dtype=torch.bool).scatter(1, allowed, True)
    logits = LOGITS.clone().requires_grad_()
    law = ours(logits=logits, grad_method="gst", **({"indices": allowed} if sparse else {"mask": mask}))
    torch.manual_seed(0)
    sample = law.rsample((50,))
    assert_one_hot(sample)
    assert (sample[..., [1, 3]] == 0).all()
    torch.manual_seed(0)
    expected = gapped.sample(torch.where(mask, LOGITS, -torch.inf).expand(50, 6, 5), estimator="gst")
    assert torch.equal(sample, expected)
    (gradient,) = torch.autograd.grad((sample * WEIGHT).sum(), logits)
    assert gradient.isfinite().all()
    assert (gradient.abs().amax(-1) > 0).all()


def test_padding_of_torchrls_indices_is_no_action() -> None:
    law = peer("torchrl").MaskedOneHotCategorical(
        logits=LOGITS[:2], indices=torch.tensor([[0, 2, 4], [3, -1, -1]]), padding_value=-1
    )
    sample = law.rsample((50,))
    assert_one_hot(sample)
    assert (sample[:, 0, [1, 3]] == 0).all()
    assert (sample[:, 1, 3] == 1).all()


def test_torchrls_own_strategies_stay() -> None:
    ours = peer("torchrl")
    for strategy in ours.distributions.ReparamGradientStrategy:
        results = [
            pull(lambda x, kind=kind: kind(logits=x, grad_method=strategy).rsample())  # noqa: B023
            for kind in (ours.OneHotCategorical, ours.distributions.OneHotCategorical)
        ]
        assert_all_close(*results)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_states_of_dreamer_are_the_estimators(share: float) -> None:
    ours = peer("torchrl")
    torch.manual_seed(1)
    net = ours.model_based.RSSMPosteriorV3(
        hidden_dim=8, rnn_hidden_dim=4, num_categoricals=3, num_classes=5, obs_embed_dim=7, unimix=share
    )
    inputs = torch.randn(2, 4, requires_grad=True), torch.randn(2, 7)
    theirs = ours.model_based._straight_through_categorical
    with ours.replacing_straight_through("gst:tau=0.7"):
        torch.manual_seed(0)
        logits, state = net(*inputs)
    assert ours.model_based._straight_through_categorical is theirs
    torch.manual_seed(0)
    mixed = gapped.unimix(logits, share) if share else logits
    expected = gapped.sample(mixed, estimator="gst:tau=0.7").flatten(-2)
    assert torch.equal(state, expected)
    gradients = [
        torch.autograd.grad(each[:, 0].sum(), inputs[0], retain_graph=True)[0] for each in (state, expected)
    ]
    assert_close(*gradients, 1e-6)
    assert gradients[0].abs().max() > 0


def test_contexts_of_dreamer_may_overlap_and_say_that_they_served_nothing() -> None:
    ours = peer("torchrl")
    theirs = ours.model_based._straight_through_categorical
    first, second = ours.replacing_straight_through(), ours.replacing_straight_through("gst")
    first.__enter__()
    second.__enter__()
    for each in (first, second):
        with pytest.warns(UserWarning, match="no module of torchrl drew a state"):
            each.__exit__(None, None, None)
    assert ours.model_based._straight_through_categorical is theirs


# Pyro


@pytest.mark.parametrize("kind", ["OneHotCategorical", "Bernoulli"])
def test_a_site_of_pyro_gets_the_estimators_gradient(kind: str) -> None:
    ours = peer("pyro")
    import pyro

    def guide(logits: Tensor) -> Tensor:
        law = getattr(pyro.distributions, kind)(logits=logits)
        with pyro.plate("rows", 6, dim=-1 if kind == "OneHotCategorical" else -2):
            return pyro.sample("z", law.mask(torch.tensor(True)))  # type: ignore[no-any-return]

    for text in ESTIMATORS:
        config = {"z": ours.EstimatorReparam(text)}
        drawn = pull(pyro.poutine.reparam(guide, config=config))
        plain = getattr(gapped.distributions, kind)
        assert_all_close(drawn, pull(lambda x: plain(logits=x, estimator=text).rsample()), 1e-6)  # noqa: B023
    site = pyro.poutine.trace(pyro.poutine.reparam(guide, config=config)).get_trace(LOGITS).nodes["z"]
    assert isinstance(site["fn"].base_dist, getattr(pyro.distributions, kind))
    theirs = getattr(torch.distributions, kind)(logits=LOGITS).log_prob(site["value"])
    assert_close(site["fn"].log_prob(site["value"]), theirs, 1e-6)


def test_observed_and_enumerated_sites_of_pyro_keep_their_probabilities() -> None:
    ours = peer("pyro")
    import pyro

    def model(logits: Tensor) -> None:
        z = pyro.sample("z", pyro.distributions.OneHotCategorical(logits=torch.zeros(5)))
        pyro.sample("y", pyro.distributions.OneHotCategorical(logits=logits), obs=torch.eye(5)[1])
        pyro.sample("x", pyro.distributions.Normal(z @ torch.arange(5.0), 1.0), obs=torch.tensor(2.0))

    def guide(logits: Tensor) -> None:
        law = pyro.distributions.OneHotCategorical(logits=logits)
        pyro.sample("z", law, infer={"enumerate": "parallel"})

    results = []
    for config in ({}, {"z": ours.EstimatorReparam(), "y": ours.EstimatorReparam()}):
        logits = LOGITS[0].clone().requires_grad_()
        elbo = pyro.infer.TraceEnum_ELBO(max_plate_nesting=0, strict_enumeration_warning=False)
        pair = [pyro.poutine.reparam(each, config=config) for each in (model, guide)]
        loss = elbo.differentiable_loss(*pair, logits)
        results.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
    assert_all_close(*results, 1e-5)
    site = pyro.poutine.reparam(
        lambda: pyro.sample("c", pyro.distributions.Categorical(logits=LOGITS)),
        config={"c": ours.EstimatorReparam()},
    )
    with pytest.raises(gapped.GappedError, match="site 'c': got a Categorical, expected a OneHotCategorical"):
        site()


# vector-quantize-pytorch


@pytest.mark.parametrize("text", ESTIMATORS)
def test_codes_of_vector_quantize_are_the_estimators(text: str) -> None:
    ours = peer("vector_quantize_pytorch")
    draw = {"stochastic": True, "straight_through": True, "estimator": text}
    drawn = pull(lambda x: ours.draw_codes(x, 0.5, **draw)[1])
    assert_all_close(drawn, pull(lambda x: gapped.estimator(text).sample(x / 0.5)), 1e-6)
    index, one_hot = ours.draw_codes(LOGITS.t(), dim=0, **draw)
    assert torch.equal(index, one_hot.argmax(0))
    draw["stochastic"] = False
    assert torch.equal(ours.draw_codes(LOGITS, **draw)[0], LOGITS.argmax(-1))
    assert pull(lambda x: ours.draw_codes(x, **draw)[1])[1].abs().max() > 0
    for options in ({"training": False}, {"topk": 2, "straight_through": False}, {"straight_through": False}):
        assert torch.equal(
            ours.draw_codes(LOGITS, **{**draw, **options})[0], ours.gumbel_sample(LOGITS, **options)[0]
        )


def test_a_quantizer_of_vector_quantize_trains_with_an_estimator() -> None:
    ours = peer("vector_quantize_pytorch")
    from vector_quantize_pytorch import ResidualVQ, VectorQuantize

    options = {"dim": 8, "codebook_size": 16, "stochastic_sample_codes": True, "straight_through": True}
    options["rotation_trick"] = False
    torch.manual_seed(0)
    x = torch.randn(1, 6, 8, requires_grad=True)
    chain = ResidualVQ(num_quantizers=3, **options)
    assert ours.use(chain) == 3
    assert chain(x)[0].shape == x.shape
    layer = VectorQuantize(**options, decay=1.0, threshold_ema_dead_code=0)
    assert ours.use(layer, "gst:tau=0.7") == 1
    codes = layer.codebook.clone()
    results = []
    for draw in (
        lambda: layer(x)[0],
        lambda: gapped.sample(-torch.cdist(x, codes), estimator="gst:tau=0.7") @ codes,
    ):
        torch.manual_seed(1)
        quantized = draw()
        results.append((quantized.detach(), torch.autograd.grad(quantized.square().sum(), x)[0]))
    assert_all_close(*results, 1e-5)
    assert results[0][1].abs().max() > 0
    with pytest.raises(gapped.GappedError, match=r"module: got a VectorQuantize, expected one with Vector"):
        ours.use(VectorQuantize(dim=8, codebook_size=16))


def test_the_line_before_of_the_page_on_migration() -> None:
    """It runs in the release, and what is written in its place has its values and gradients."""
    peer("vector_quantize_pytorch")
    from vector_quantize_pytorch import VectorQuantize

    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text("utf-8")
    line = page.split("```diff\n- vq = ")[1].split("- quantized")[0].replace("\n-", "\n").strip()
    # Without its moving average, which changes the codes before the backward pass.
    layer = eval(line[:-1] + ", decay=1.0)", {"VectorQuantize": VectorQuantize, "t": 0.7})
    codebook, x, weight = layer.codebook.clone(), torch.randn(1, 9, 16, requires_grad=True), torch.randn(16)
    quantized, index, _ = layer(x)
    assert_close(quantized.detach(), codebook[index], 1e-5)
    choice = gapped.StraightThrough().choose(-torch.cdist(x, codebook) / 0.7)
    # The gradient for a linear cost does not depend on what is drawn.
    values = quantized @ weight, choice.select(codebook) @ weight
    assert_close(*(torch.autograd.grad(value.sum(), x)[0] for value in values), 1e-5)


# torchlogix


@pytest.mark.parametrize(("parametrization", "use"), [("raw", "sample"), ("warp", "gate"), ("light", "gate")])
def test_neurons_of_torchlogix_are_the_estimators(parametrization: str, use: str) -> None:
    ours = peer("torchlogix")
    from torchlogix.layers import LogicDense

    torch.manual_seed(0)
    layer = LogicDense(8, 12, parametrization=parametrization)
    assert ours.use(nn.Sequential(layer), "gst:tau=0.7") == 1
    drawn = pull(layer.parametrization._sample_train)
    assert_all_close(drawn, pull(getattr(gapped.estimator("gst:tau=0.7"), use)))
    y = layer(torch.rand(4, 8))
    (gradient,) = torch.autograd.grad(y.sum(), layer.weight)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
    with torch.no_grad():
        assert layer.eval()((torch.rand(4, 8) > 0.5).float()).unique().tolist() in ([0.0, 1.0], [0.0], [1.0])
    with pytest.raises(gapped.GappedError, match="module: got a Linear, expected a model with layers"):
        ours.use(nn.Linear(2, 2))


def test_thresholds_of_torchlogix_are_gates() -> None:
    layer = peer("torchlogix").LearnableBinarization(torch.linspace(0.1, 0.9, 5).expand(6, 5).clone())
    assert peer("torchlogix").use(layer, "gst") == 1
    thresholds = torch.full((5,), 0.5)
    drawn = pull(lambda x: layer._sample_train(x, thresholds))
    assert_all_close(drawn, pull(lambda x: gapped.gate(x - thresholds, estimator="gst")))


# Optuna


def test_optuna_chooses_the_estimator_and_its_temperature() -> None:
    suggest = peer("optuna").suggest
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    found = []

    def objective(trial: Any) -> float:
        found.append(suggest(trial, ("gapmax", "gst:gap=auto", "reinmax:tau=1.5"), (0.25, 4.0)))
        return 0.0

    study.optimize(objective, 30)
    for trial, estimator in zip(study.trials, found, strict=True):
        text = trial.params["estimator"]
        tau = trial.params.get("estimator.tau")
        assert (tau is None) == (not text.startswith("gst"))
        assert estimator == (gapped.estimator(text) if tau is None else gapped.estimator(text, tau=tau))
        assert tau is None or 0.25 <= tau <= 4
    assert {type(each).name for each in found} == {"gapmax", "gst", "reinmax"}
    with pytest.raises(gapped.GappedError, match=r"estimators: got 'rloo:samples=4', expected pathwise"):
        suggest(optuna.trial.FixedTrial({"estimator": "rloo:samples=4"}), ("rloo:samples=4",))


# transformers


@pytest.mark.parametrize("attached", [True, False])
def test_the_trainer_of_transformers_anneals_and_logs(tmp_path: Path, attached: bool) -> None:
    adapter = peer("transformers")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.sample = nn.Linear(3, 4), gapped.nn.Sample("gst")

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.sample(self.encoder(x))[:, 0].mean()}

    class Reporter(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            reported.append(dict(logs))

    model, rows = Model(), [{"x": row} for row in torch.randn(8, 3, generator=seeded())]
    callback, reported = adapter.LayerCallback(schedules.Linear(1.0, 0.5, steps=4)), []
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, logging_steps=2, **quiet
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, callbacks=[Reporter()] if attached else [Reporter(), callback]
    )
    if attached:
        assert callback.attach(trainer) is callback
    trainer.train()
    assert model.sample.tau == 0.625
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["tau"] for line in lines] == [0.875, 0.625]
    assert all(1 <= line["sample/perplexity"] <= 4 for line in lines)
    assert all(("tau" in line) == attached for line in reported if "loss" in line)
    assert len(model.sample._forward_hooks) == 0


# The page


ADAPTER = re.compile(r"gapped\.adapters\.(\w+)")
STRANGERS = [block for block in blocks("python3") if ADAPTER.search(block.code)]


def test_the_page_has_a_strangers_model_for_every_adapter() -> None:
    named = {found for block in STRANGERS for found in ADAPTER.findall(block.code)}
    folder = Path(gapped.__file__).with_name("adapters")
    assert named == {path.stem for path in folder.glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("block", STRANGERS, ids=lambda block: block.where)
@pytest.mark.filterwarnings("ignore", "error:::gapped")  # the libraries' warnings are their own
def test_a_strangers_model_of_the_page_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = ADAPTER.findall(block.code)
    peer(name)
    if name == "transformers":
        pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
    ours = re.compile(r"gapped|gapmax|\buse\(|estimator|suggest|replacing|callback", re.I)
    lines = [line for line in block.code.splitlines() if ours.search(line)]
    assert len(lines) <= 5, "lines that are there for the estimator"
    # Trainers write into the folder that they run in.
    monkeypatch.chdir(tmp_path)
    exec(block.code, {})
