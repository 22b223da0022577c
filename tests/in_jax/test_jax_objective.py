"""Expectations in JAX without float64, as it is by default: costs far from zero keep their slopes."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import assert_close, normal
from jax_problems import _quick_compilation, jax, to_jax, to_torch  # noqa: F401

import gapped.jax

jnp = jax.numpy
KEY = jax.random.key(0)


@pytest.mark.parametrize("samples", [3, 7])
@pytest.mark.parametrize("kind", [gapped.jax.RLOO, gapped.jax.DoubleCV])
def test_a_constant_cost_has_no_gradient(kind: Any, samples: int) -> None:
    def value(logits: Any) -> Any:
        cost = lambda z: 0 * z.sum((-1, -2)) + 1234567.1  # noqa: E731
        return gapped.jax.expectation(KEY, cost, logits, kind(samples)).sum()

    assert (jax.grad(value)(jnp.zeros((50, 2, 3))) == 0).all()


@pytest.mark.parametrize("level", [0.0, 1e5, 1e6])
def test_a_level_of_the_cost_takes_no_digits_from_the_slopes(level: float) -> None:
    """All costs are float32 numbers, and a linear one has no variance with the factor 1."""
    theta, slope = normal(5, 4), (16 * normal(5, 4, seed=1)).round() / 16
    p = theta.softmax(-1)
    exact = p * (slope - (p * slope).sum(-1, keepdim=True))
    weights = to_jax(slope.float())

    def value(logits: Any) -> Any:
        cost = lambda z: (z * weights).sum((-1, -2)) + level  # noqa: E731
        return gapped.jax.expectation(KEY, cost, logits, gapped.jax.DoubleCV(3, 1)).sum()

    gradient = to_torch(jax.grad(value)(to_jax(theta.float().expand(20, 5, 4))))
    assert_close(gradient.double(), exact.expand(20, 5, 4), 1e-5)
