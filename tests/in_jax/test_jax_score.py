"""Expectations in JAX: unbiased by enumeration, on the problems that torch's estimators are tested with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_close, normal, seeded
from jax_problems import _float64, _quick_compilation, jax, replayed, to_jax, to_torch  # noqa: F401
from score.test_score_exact import COUPLED, chances, pieces
from score_problems import (
    EXACT,
    SETTINGS,
    assert_unbiased,
    cost,
    independent,
    mean_of,
    oracle,
    replay,
    variance_of,
)
from torch import Tensor

import gapped
import gapped.jax
from gapped.jax.score import leave_one_out

jnp = jax.numpy
# Two variables of four categories, and one of eight; with absent categories.
CHOSEN = ["2x4-masked", "1x8-masked"]
every_setting = pytest.mark.parametrize("theta", [SETTINGS[name] for name in CHOSEN], ids=CHOSEN)


def cost_in_jax(z: Any) -> Any:
    """`score_problems.cost`."""
    flat = z.reshape(*z.shape[:-2], -1)
    size = flat.shape[-1]
    a, b = to_jax(normal(size, size, seed=2)), to_jax(normal(size, seed=3))
    quadratic = ((flat @ a) * flat).sum(-1)
    return 2.0 + jnp.sin(2 * (flat @ b)) + quadratic + 0.1 * ((flat @ a) ** 3).sum(-1)


def estimates(estimator: Any, theta: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and gradients of `count` examples with the same logits."""
    logits = to_jax(theta.expand(count, *theta.shape))

    @jax.jit
    def run(logits: Any) -> tuple[Any, Any]:
        value, back = jax.vjp(
            lambda x: gapped.jax.expectation(jax.random.key(0), cost_in_jax, x, estimator), logits
        )
        return value, back(jnp.ones(count))[0]

    value, gradient = run(logits)
    return to_torch(value), to_torch(gradient)


def with_samples(estimator: Any, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, gradients and weights for all tuples of samples that the estimator could draw."""
    index, weights = independent(theta, estimator.samples)
    return *estimates(replayed(estimator, noise=None, index=to_jax(index)), theta, len(weights)), weights


@every_setting
@pytest.mark.parametrize("estimator", [gapped.jax.RLOO(), gapped.jax.DoubleCV(alpha=0.7)], ids=repr)
def test_independent_samples_are_unbiased(estimator: Any, theta: Tensor) -> None:
    values, gradients, weights = with_samples(estimator, theta)
    assert_unbiased(values, gradients, weights, theta)


def test_double_cv_is_torchs() -> None:
    """Given the same three samples."""
    theta, index = SETTINGS["2x4"], torch.randint(4, (3, 20, 2), generator=seeded())
    ours = estimates(replayed(gapped.jax.DoubleCV(3, 0.75), noise=None, index=to_jax(index)), theta, 20)
    for mine, theirs in zip(ours, replay(gapped.DoubleCV(3, alpha=0.75), theta, index, 20), strict=True):
        assert_close(mine, theirs, EXACT)


def test_double_cv_contains_rloo_and_lowers_its_variance_for_linear_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theta, slope = SETTINGS["2x4"], to_jax(normal(8, seed=4))
    _, rloo, weights = with_samples(gapped.jax.RLOO(2), theta)
    _, none, _ = with_samples(gapped.jax.DoubleCV(alpha=0.0), theta)
    assert_close(none, rloo, EXACT)
    monkeypatch.setattr(f"{__name__}.cost_in_jax", lambda z: z.reshape(*z.shape[:-2], -1) @ slope)
    _, full, weights = with_samples(gapped.jax.DoubleCV(alpha=1.0), theta)
    assert variance_of(full, weights) < 1e-20


def test_a_baseline_that_contains_the_sample_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: each cost relative to the mean of all samples, itself included."""
    theta = SETTINGS["2x4"]
    monkeypatch.setattr("gapped.jax.score.leave_one_out", lambda costs: costs - costs.mean(0))
    _, gradients, weights = with_samples(gapped.jax.RLOO(), theta)
    assert (mean_of(gradients, weights) - oracle(theta)[1]).abs().max() > 1e-3
    assert np.allclose(leave_one_out(np.array([1.0, 2.0, 6.0])), [-3.0, -1.5, 4.5])


@pytest.mark.parametrize("name", ["2x4", "1x8-masked"])
def test_pairs_down_a_tree_are_unbiased_and_torchs(name: str) -> None:
    theta = SETTINGS[name]
    estimator, nodes_of = COUPLED["tree"]
    u, weights = pieces(chances(theta, nodes_of))
    values, gradients = estimates(replayed(gapped.jax.DisARMTree(), noise=to_jax(u)), theta, len(u))
    assert_unbiased(values, gradients, weights, theta)
    expected = replay(estimator, theta, u, len(u))
    assert_close(values, expected[0], EXACT)
    assert_close(gradients, expected[1], EXACT)


@every_setting
def test_enumeration_is_the_expectation(theta: Tensor) -> None:
    values, gradients = estimates(gapped.jax.Exact(), theta, 2)
    value, gradient = oracle(theta)
    assert_close(values, value.expand(2), EXACT)
    assert_close(gradients, gradient.expand(2, *theta.shape), EXACT)


def test_pathwise_estimators_and_parameters_of_the_cost() -> None:
    """A pathwise estimator is sampled; what the cost depends on keeps its own gradient."""
    logits, key = to_jax(normal(6, 2, 4)), jax.random.key(3)

    def value(logits: Any, scale: Any, estimator: Any) -> Any:
        return gapped.jax.expectation(key, lambda z: scale * cost_in_jax(z), logits, estimator).sum()

    for estimator in ("rloo", "double-cv", "disarm-tree", "exact", gapped.jax.GST(0.5), None):
        run = jax.jit(jax.value_and_grad(value, argnums=1), static_argnums=2)
        total, slope = run(logits, jnp.asarray(2.0), estimator)
        assert np.isclose(2 * slope, total)

    @jax.jit
    def through_the_sample(logits: Any) -> tuple[Any, Any]:
        sample, back = jax.vjp(lambda x: gapped.jax.GST(0.5).sample(key, x), logits)
        (expected,) = back(jax.grad(lambda z: cost_in_jax(z).sum())(sample))
        return jax.grad(value)(logits, 1.0, "gst:tau=0.5"), expected

    ours, expected = through_the_sample(logits)
    assert_close(to_torch(ours), to_torch(expected))
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(value)(x, 1.0, "rloo").sum()), logits)


def test_rows_without_a_law() -> None:
    """An empty row makes no choice and has no gradient."""
    logits = normal(2, 2, 4)
    logits[0, 1] = -torch.inf
    seen = []
    for estimator in ("disarm-tree", "exact"):
        key = jax.random.key(0)
        gradient = jax.grad(lambda x, e=estimator, k=key: gapped.jax.expectation(k, cost_in_jax, x, e).sum())(
            to_jax(logits)
        )
        assert (to_torch(gradient)[0, 1] == 0).all()
        assert to_torch(gradient).isfinite().all()
        seen.append(to_torch(gradient))
    leaf = logits.clone().requires_grad_()
    gapped.expectation(cost, leaf, gapped.Exact()).sum().backward()
    assert_close(seen[-1], leaf.grad, EXACT)


def test_a_slope_at_a_category_that_does_not_exist_counts_for_nothing() -> None:
    """The square root has an infinite one there; without the category the gradient is the same."""
    logits, where = to_jax(normal(4, 3)), jnp.array([True, True, False])

    def slopes(cost: Any) -> Any:
        def value(logits: Any) -> Any:
            key = jax.random.key(1)
            return gapped.jax.expectation(key, cost, logits, gapped.jax.DoubleCV(2), where=where).sum()

        return jax.grad(value)(logits)

    found = slopes(lambda z: (2 * z[..., 0] - z[..., 1]) ** 2 + jnp.sqrt(z[..., 2]))
    assert jnp.isfinite(found).all()
    assert (found == slopes(lambda z: (2 * z[..., 0] - z[..., 1]) ** 2)).all()
