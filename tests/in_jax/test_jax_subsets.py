"""Subsets in JAX: torch's samples and gradients for the same uniforms, and the law written out."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from jax_problems import DTYPES, _float64, _quick_compilation, jax, pull, to_jax, to_torch  # noqa: F401
from statistical import chi_squared, counts_of, require_law, require_rejected
from subset_enumeration import covariances, enumerate_law, marginals, plackett_luce

import gapped
import gapped.jax
from gapped.jax import subsets
from gapped.subsets import conditional_bernoulli

KEY = jax.random.key(0)


def uniforms(rows: tuple[int, ...], n: int, seed: int = 0) -> Any:
    """The noise of torch for a tree over `n` elements, level by level, in the form that JAX takes."""
    generator = seeded(seed)
    counts = subsets.decisions(n)
    levels = [torch.rand(*rows, nodes, generator=generator, dtype=torch.float64) for nodes in counts]
    return to_jax(torch.cat(levels, -1))


@pytest.mark.parametrize(
    ("estimator", "n", "k", "hard", "is_masked", "dtype"),
    [
        ("simple", 9, 4, True, False, torch.float64),
        ("simple", 6, 5, False, True, torch.float64),
        ("gst:gap=1.5", 9, 4, False, True, torch.float64),
        ("gst:gap=1.5", 6, 5, True, False, torch.float64),
        ("gst:gap=1.5", 9, 4, True, True, torch.bfloat16),
    ],
)
def test_the_same_uniforms_give_the_same_subset_and_gradient(
    estimator: str, n: int, k: int, hard: bool, is_masked: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another axis than the last, with a temperature for each row; torch draws by its tree."""
    monkeypatch.setattr(conditional_bernoulli, "MOST_OPTIONS", 0)
    monkeypatch.setattr(subsets, "noise", lambda key, scores: uniforms((5, 3), n))
    logits, weight = normal(5, n, 3, dtype=dtype), normal(5, n, 3, seed=2, dtype=dtype)
    logits[1, 2, 0], logits[2, 1, 1], logits[3, :, 2] = torch.nan, torch.inf, -torch.inf
    logits[0] *= 50
    mask = (torch.rand(5, n, 3, generator=seeded(4)) < 0.8) | ~logits.isfinite() if is_masked else None
    tau = torch.linspace(0.5, 2, 15, dtype=torch.float64).view(5, 3)
    how: dict[str, Any] = {"hard": hard, "estimator": estimator}
    leaf = logits.clone().requires_grad_()
    theirs = gapped.subset(leaf, k, tau, dim=1, mask=mask, generator=seeded(), **how)
    (expected,) = torch.autograd.grad(theirs, leaf, weight)
    how |= {"axis": 1, "where": None if mask is None else to_jax(mask), "tau": to_jax(tau)}
    sample, gradient = pull(partial(gapped.jax.subset, KEY, k=k, **how), to_jax(logits), to_jax(weight))
    assert str(sample.dtype) == str(gradient.dtype) == str(dtype).removeprefix("torch.")
    tolerance = DTYPES[dtype]
    for ours, other in ((sample, theirs.detach()), (gradient, expected)):
        torch.testing.assert_close(
            to_torch(ours), other, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False
        )
    assert (to_torch(sample).isfinite().all(1).sum(), expected.nan_to_num().abs().sum() > 1) == (13, True)
    if hard:
        assert torch.equal(to_torch(sample).nan_to_num(), theirs.detach().nan_to_num().to(to_torch(sample)))


@pytest.mark.parametrize(("n", "k"), [(2, 1), (7, 3), (5, 4)])
def test_the_law_is_exact(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probability that the sampler's own decisions lead to each subset, marginals, covariances."""
    theta, g = 2 * normal(n, seed=n), normal(n, seed=3)
    law = enumerate_law(theta, k)
    targets = (1 - law.subsets if 2 * k > n else law.subsets).long()
    depth, chances = (n - 1).bit_length(), []

    def forced(weights: Any, u: Any) -> tuple[Any, None]:
        """The number that leads to the subset, whose probability is noted."""
        padded = torch.nn.functional.pad(targets, (0, 2**depth - n))
        parts = padded.unflatten(-1, (-1, 2, 2 ** (depth - 1 - len(chances))))
        left = to_jax(parts.sum(-1)[..., 0][..., : weights.shape[-2]])
        selected = jax.numpy.take_along_axis(weights, left[..., None], -1)[..., 0]
        chances.append((selected / weights.sum(-1)).prod(-1))
        return left, None

    @jax.jit
    def everything(scores: Any, grad: Any) -> Any:
        rows = jax.numpy.broadcast_to(scores, targets.shape)
        drawn = subsets.draw(rows, k, subsets.noise(KEY, rows))
        product = subsets.covariance_product(grad, scores, k)
        return drawn, jax.numpy.stack(chances).prod(0), subsets.marginals(scores, k), product

    monkeypatch.setattr(subsets, "inverse_cdf", forced)
    drawn, chance, inside, product = everything(to_jax(theta - theta.max()), to_jax(g))
    assert len(chances) == depth
    assert torch.equal(to_torch(drawn).double(), law.subsets)
    assert_close(to_torch(chance), law.p, 1e-12)
    assert_close(to_torch(inside), marginals(theta, k), 1e-12)
    assert_close(to_torch(product), covariances(theta, k) @ g, 1e-12)


def test_samples_follow_the_law_in_float32_and_the_largest_noisy_logits_do_not() -> None:
    theta, draws = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5, -0.5]), 40_000
    law = enumerate_law(theta.double(), 3)
    jax.config.update("jax_enable_x64", False)
    samples = jax.jit(partial(gapped.jax.subset, KEY, k=3))(to_jax(theta.expand(draws, 6)))
    assert samples.dtype == "float32"
    bits = 2 ** torch.arange(6)
    place = torch.full((64,), -1)
    place[law.subsets.long() @ bits] = torch.arange(20)
    counts = counts_of(place[to_torch(samples).long() @ bits], 20)
    require_law(chi_squared(counts, law.p))
    require_rejected(chi_squared(counts, plackett_luce(theta.double(), 3)))


@pytest.mark.slow
def test_many_elements_in_float32() -> None:
    """Steep logits, too: values and gradients are torch's, which are computed in float64."""
    n, k = 257, 130
    jax.config.update("jax_enable_x64", False)
    logits, weight = normal(2, n, dtype=torch.float32), normal(2, n, seed=2, dtype=torch.float32)
    logits[1] *= 30
    soft, gradient = pull(partial(gapped.jax.subset, KEY, k=k, hard=False), to_jax(logits), to_jax(weight))
    leaf = logits.double().requires_grad_()
    expected = gapped.subset(leaf, k, hard=False)
    (slope,) = torch.autograd.grad(expected, leaf, weight.double())
    assert_close(to_torch(soft).double(), expected.detach(), 1e-4)
    assert_close(to_torch(gradient).double(), slope, 1e-4)
    sample = jax.jit(partial(gapped.jax.subset, KEY, k=k))(to_jax(logits))
    assert (sample.sum(-1) == k).all()


def test_one_winner_nothing_and_everything() -> None:
    logits, weight = to_jax(normal(3, 5)), to_jax(normal(3, 5, seed=2))
    for estimator, same in (
        ("simple", gapped.jax.straight_through),
        ("gst:gap=0.3", partial(gapped.jax.gst, gap=0.3)),
    ):
        one = pull(partial(gapped.jax.subset, KEY, k=1, tau=0.6, estimator=estimator), logits, weight)
        expected = pull(lambda x, same=same: same(KEY, x, 0.6, True), logits, weight)
        for ours, theirs in zip(one, expected, strict=True):
            assert (ours == theirs).all()
    for k in (0, 5):
        sample, gradient = pull(partial(gapped.jax.subset, KEY, k=k, estimator="gst:gap=1"), logits, weight)
        assert (sample == float(k == 5)).all()
        assert (gradient == 0).all()


def test_vmap_and_the_refused_second_derivative() -> None:
    logits, keys = to_jax(normal(4, 6)), jax.random.split(KEY, 4)
    draw = partial(gapped.jax.subset, k=3, estimator="gst:gap=1")
    single = jax.jit(draw)
    rows = [single(key, row) for key, row in zip(keys, logits, strict=True)]
    assert (jax.jit(jax.vmap(draw))(keys, logits) == jax.numpy.stack(rows)).all()
    slope = jax.grad(lambda x: (draw(KEY, x) @ jax.numpy.arange(6.0) ** 2).sum())
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        jax.eval_shape(jax.grad(lambda x: (slope(x) ** 2).sum()), logits)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("k: got 7", {"k": 7}),
    ("k: got True", {"k": True}),
    ("k: got a int", {"k": jax.numpy.asarray(2)}),
    ("tau: got -1", {"tau": -1}),
    ("tau: got a float", {"tau": jax.numpy.ones(5)}),
    ("hard: got 1", {"hard": 1}),
    ("estimator: got 'reinmax'", {"estimator": "reinmax"}),
    ("estimator: got an object of type ReinMax", {"estimator": gapped.jax.ReinMax()}),
    ("estimator: got GST(tau=0.5", {"estimator": gapped.jax.GST(tau=0.5)}),
    ("gap: got 'auto'", {"estimator": "gst:gap=auto"}),
]


@pytest.mark.parametrize(("message", "options"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_of_a_subset_is_one_line(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(gapped.jax.GappedError) as caught:
        gapped.jax.subset(KEY, jax.numpy.zeros((2, 6)), **{"k": 2, **options})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_temperature_of_a_subset_is_not_learned_in_silence() -> None:
    def total(tau: Any) -> Any:
        return gapped.jax.subset(KEY, jax.numpy.zeros(6), 2, tau)[0]

    with pytest.raises(gapped.jax.GappedError, match="tau: got an array that is differentiated"):
        jax.eval_shape(jax.grad(total), 1.0)


def test_the_torch_function_has_the_same_arguments() -> None:
    names = {"dim": "axis", "mask": "where"}
    theirs = [names.get(name, name) for name in signature(gapped.subset).parameters if name != "generator"]
    assert ["key", *theirs] == list(signature(gapped.jax.subset).parameters)
