"""The vector quantizer: groups, images, schedules, averages over positions, evaluation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from conftest import MEMBERS, assert_all_close, assert_close, normal, seeded
from torch import Tensor

import gapped
from gapped.nn import Quantized, Quantizer

IN, OUT, G, K = 4, 6, 2, 5


def quantizer(**options: Any) -> Quantizer:
    torch.manual_seed(0)
    return Quantizer(IN, OUT, **{"codes": K, "groups": G, **options}).double()


def pulled(layer: Quantizer, x: Tensor, entries: Tensor) -> tuple[Tensor, ...]:
    """The entries, and the gradients of a cost for input, weights and codebook."""
    leaves = (x, layer.projection.weight, layer.codebook)
    weight = normal(*entries.shape, seed=5)
    return (entries.detach(), *torch.autograd.grad(entries, leaves, weight, allow_unused=True))


def by_hand(layer: Quantizer, x: Tensor, sample: Tensor) -> tuple[Tensor, ...]:
    """The same with the one-hot or mixed sample of logits ``(*positions, G, K)``, features last."""
    parts = [sample[..., g, :] @ layer.codebook[g] for g in range(len(layer.codebook))]
    return pulled(layer, x, torch.cat(parts, -1))


def logits_of(layer: Quantizer, x: Tensor) -> Tensor:
    return (x @ layer.projection.weight.T + layer.projection.bias).view(*x.shape[:-1], -1, K)


# DALL-E's way is mixtures while it trains.
@pytest.mark.parametrize("text", [*(f"{name}:tau=2" for name in MEMBERS), "gumbel-softmax:hard=False,tau=1"])
@pytest.mark.parametrize("groups", [1, G])
@pytest.mark.parametrize("positions", [(), (7,), (2, 3)], ids=str)
def test_entries_are_those_of_the_sample(text: str, groups: int, positions: tuple[int, ...]) -> None:
    estimator = gapped.estimator(text)
    layer, x = quantizer(groups=groups, estimator=estimator), normal(*positions, IN).requires_grad_()
    result = layer(x, generator=seeded())
    sample = estimator.sample(logits_of(layer, x), generator=seeded())
    assert_all_close(pulled(layer, x, result.entries), by_hand(layer, x, sample))
    assert result.indices.shape == (positions if groups == 1 else (*positions, groups))
    assert torch.equal(result.indices.view(*positions, groups), sample.argmax(-1))


def test_images() -> None:
    """`dim=1` is the transposed computation, and a convolution of size 1 gives its logits."""
    layer, x = quantizer(groups=1, estimator="gst", dim=1), normal(2, IN, 3, 3)
    result = layer(x, generator=seeded())
    assert result.entries.shape == (2, OUT, 3, 3)
    assert result.indices.shape == (2, 3, 3)
    last = quantizer(groups=1, estimator="gst")(x.movedim(1, -1), generator=seeded())
    assert_close(result.entries, last.entries.movedim(-1, 1))
    convolved = torch.conv2d(x, layer.projection.weight[:, :, None, None], layer.projection.bias)
    assert_close(result.logits, convolved.movedim(1, -1).unsqueeze(-2))
    assert torch.equal(result.entries[0, :, 1, 2], layer.codebook[0, result.indices[0, 1, 2]])


def test_evaluation_takes_the_most_likely_codes() -> None:
    layer, x = quantizer(estimator="gst").eval(), normal(7, IN).requires_grad_()
    state = torch.get_rng_state()
    result = layer(x)
    assert torch.equal(torch.get_rng_state(), state), "nothing is random here"
    expected = logits_of(layer, x).argmax(-1)
    assert torch.equal(result.indices, expected)
    hot = torch.nn.functional.one_hot(expected, K).double()
    _, of_x, of_weight, of_codebook = pulled(layer, x, result.entries)
    assert of_x is None
    assert of_weight is None
    assert_close(of_codebook, by_hand(layer, x, hot)[3])


def example(*positions: int, seed: int = 1) -> Quantized:
    logits = normal(*positions, G, K, seed=seed).requires_grad_()
    indices = normal(*positions, G, K, seed=seed + 1).argmax(-1)
    return Quantized(torch.empty(0), indices, logits)


@pytest.mark.parametrize("positions", [(9,), (3, 4), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_averages(positions: tuple[int, ...], masked: bool) -> None:
    """Written position by position."""
    result = example(*positions)
    mask = torch.rand(positions, generator=seeded()) < 0.5 if masked else None
    every = torch.ones(positions, dtype=torch.bool) if mask is None else mask
    rows = torch.softmax(result.logits, -1)[every]
    taken = torch.nn.functional.one_hot(result.indices, K).double()[every]
    for ours, values in ((result.prob_perplexity, rows), (result.code_perplexity, taken)):
        mean = sum(values) / len(values)
        expected = sum(torch.exp(-sum(p * torch.log(p) for p in group if p > 0)) for group in mean)
        assert_close(ours(mask), expected)
    assert not result.code_perplexity(mask).requires_grad
    each = [sum(sum(p * torch.log(p * K) for p in group) for group in row) for row in rows]
    assert_close(result.divergence(mask), sum(each) / len(each))
    for ours, theirs in (
        (result.divergence(mask), sum(each) / len(each)),
        (result.prob_perplexity(mask), torch.distributions.Categorical(rows.mean(0)).entropy().exp().sum()),
    ):
        slopes = [torch.autograd.grad(value, result.logits, retain_graph=True)[0] for value in (ours, theirs)]
        assert_close(*slopes)


def test_codes_that_are_never_likely_leave_gradients_finite() -> None:
    """Their average underflows to zero, where the slope of x log x is infinite."""
    logits = torch.zeros(3, 1, K)
    logits[..., 0] = -500.0
    result = Quantized(torch.empty(0), torch.zeros(3), logits.requires_grad_())
    for value in (result.prob_perplexity(), result.divergence()):
        (slope,) = torch.autograd.grad(value, logits)
        assert slope.isfinite().all()
    p = torch.softmax(logits, -1).mean(0)
    (slope,) = torch.autograd.grad(torch.xlogy(p, p).sum(), logits)
    assert slope.isnan().any(), "the usual expression has become safe"


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.bool), torch.ones(3, 4)], ids=["shape", "dtype"])
def test_a_mask_has_the_shape_of_the_positions(mask: Tensor) -> None:
    with pytest.raises(gapped.GappedError, match=r"mask: got .*positions, \(3, 4\)"):
        example(3, 4).prob_perplexity(mask)


def test_the_temperature_may_be_set_and_scheduled() -> None:
    layer = quantizer(estimator="gst:gap=1.2", schedule=(2.0, 0.5, 0.9))
    assert layer.tau == 2.0
    for step, expected in ((0, 2.0), (1, 1.8), (3, 2 * 0.9**3), (13, 2 * 0.9**13), (14, 0.5), (10**6, 0.5)):
        layer.set_step(step)
        assert layer.tau == pytest.approx(expected, rel=1e-12)
    layer.tau = 0.7
    assert layer.estimator == gapped.GST(0.7, gap=1.2)
    assert quantizer().tau == gapped.nn.Sample().tau


def test_twins_and_the_state_dict() -> None:
    layer = quantizer(estimator="gst:tau=0.5")
    assert list(layer.state_dict()) == ["codebook", "projection.weight", "projection.bias"]
    assert "codes=5, groups=2" in repr(layer)
    x = normal(7, IN)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, generator=seeded()).entries, layer(x, generator=seeded()).entries)


def test_in_half_precision_and_under_autocast() -> None:
    layer, x = quantizer(estimator="gst").to(torch.bfloat16), normal(7, IN, dtype=torch.bfloat16)
    result = layer(x)
    assert result.entries.dtype == torch.bfloat16
    assert result.prob_perplexity().dtype == torch.float32
    layer, x = layer.float(), x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x)
    assert result.entries.dtype == torch.float32
    (result.entries.sum() + result.prob_perplexity()).backward()
    assert layer.projection.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("out_features", {"groups": 4}),
        ("codes", {"codes": 0}),
        ("groups", {"groups": 1.0}),
        ("estimator", {"estimator": "rloo"}),
        ("schedule", {"schedule": (0.5, 2.0, 0.9)}),
        ("schedule", {"schedule": (2.0, 0.5, 1.1)}),
        ("schedule", {"schedule": (2.0, 0.5)}),
        ("schedule: end", {"schedule": (2.0, 0.0, 0.9)}),
    ],
)
def test_bad_arguments(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(gapped.GappedError, match=f"^{argument}: got .*, expected "):
        quantizer(**options)


def test_bad_calls() -> None:
    for x in (normal(7, IN + 1), torch.tensor(1.0)):
        with pytest.raises(gapped.GappedError, match=r"x: got a tensor of shape .*, expected 4 features"):
            quantizer()(x)
    with pytest.raises(gapped.GappedError, match=r"schedule: got None, expected \(start, end, factor\)"):
        quantizer().set_step(3)
    with pytest.raises(gapped.GappedError, match="step: got -1"):
        quantizer(schedule=(2.0, 0.5, 0.9)).set_step(-1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:.*torch.jit.* is deprecated")
def test_it_compiles_to_one_graph() -> None:
    """Straight-through's gradient does not depend on what was drawn, so it is the eager one."""
    torch.compiler.reset()
    layer, slopes = quantizer(estimator="straight-through"), []
    for use in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x = normal(7, IN).requires_grad_()
        result = use(x)
        assert isinstance(result, Quantized)
        cost = result.entries.sum() + result.prob_perplexity() + result.divergence()
        slopes.append(torch.autograd.grad(cost, x)[0])
    assert_close(*slopes)
    torch.compiler.reset()


@pytest.mark.parametrize("estimator", ["gumbel-softmax", "gumbel-softmax:hard=False"])
def test_nan_selects_no_code(estimator: str) -> None:
    result = gapped.nn.Quantizer(3, 4, codes=5, estimator=estimator)(torch.tensor([[torch.nan, 0.0, 0.0]]))
    assert result.indices.tolist() == [6]
    assert result.code_perplexity().isnan()


def test_no_code_is_certain_at_first() -> None:
    """Logits of 64 features of variance 1 have variance 1."""
    torch.manual_seed(0)
    result = gapped.nn.Quantizer(64, 4, codes=512)(normal(200, 64, dtype=torch.float32))
    assert 0.8 < result.logits.var() < 1.2
    assert result.logits.softmax(-1).amax() < 0.2
