"""Laws of samples and gates, and gradients behind masks, without float64, as JAX is by default."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_close, normal
from jax_problems import PATHWISE, _quick_compilation, jax, make, to_jax, to_torch  # noqa: F401
from statistical import chi_squared, counts_of, require_law, require_rejected

import gapped.jax

jnp = jax.numpy
KEY = jax.random.key(0)
INF, NAN = math.inf, math.nan


def counts(estimator: Any, logits: torch.Tensor, rows: int, **how: Any) -> np.ndarray:
    """How often each category is drawn."""
    spread = jnp.broadcast_to(to_jax(logits), (rows, len(logits)))
    index = jax.jit(lambda x: estimator.choose(jax.random.key(7), x, **how).index)(spread)
    return counts_of(to_torch(index).long(), len(logits))


@pytest.mark.parametrize("name", PATHWISE)
def test_hard_samples_follow_the_softmax_at_temperature_one(name: str) -> None:
    """With a category masked; the softmax at the surrogate's temperature is the twin."""
    logits, where = torch.linspace(-1.5, 1.5, 10)[torch.randperm(10)], torch.arange(10) != 3
    options = {"samples": 1} if name == "gumbel-rao" else {}
    drawn = counts(make(name, **options), logits, 50_000, where=to_jax(where))
    masked = logits.double().masked_fill(~where, -INF)
    require_law(chi_squared(drawn, torch.softmax(masked, -1)))
    require_rejected(chi_squared(drawn, torch.softmax(masked / 2, -1)))


def test_long_rows_are_drawn_in_two_steps() -> None:
    """1,000 categories in float32: a block first, then a category inside of it."""
    logits = torch.linspace(-1.5, 1.5, 1_000)[torch.randperm(1_000)]
    drawn = counts(gapped.jax.GST(), logits, 60_000)
    require_law(chi_squared(drawn, torch.softmax(logits.double(), -1)))
    require_rejected(chi_squared(np.roll(drawn, 1), torch.softmax(logits.double(), -1)))


@pytest.mark.parametrize("name", PATHWISE)
@pytest.mark.parametrize("categories", [5, 5000])
def test_gradients_and_tables_behind_a_mask_may_hold_anything(name: str, categories: int) -> None:
    """In a block and in several; what is not finite at a category that exists is not hidden."""
    estimator = make(name, **({"samples": 2} if name == "gumbel-rao" else {}))
    where = jnp.arange(categories) % 3 != 1
    logits, weight = (to_jax(normal(4, categories, seed=n, dtype=torch.float32)) for n in (1, 2))

    @jax.jit
    def gradients(filling: Any, at: Any) -> tuple[Any, Any]:
        filled = jnp.where(at, filling, weight)
        _, back = jax.vjp(lambda x: estimator.sample(KEY, x, where=where), logits)
        _, looked_up = jax.vjp(lambda x: estimator.choose(KEY, x, where=where).select(filled.T), logits)
        return back(filled)[0], looked_up(jnp.ones((4, 4)))[0]

    expected = gradients(0.0, ~where)
    for filling in (NAN, INF):
        for ours, theirs in zip(gradients(filling, ~where), expected, strict=True):
            assert theirs.any()
            np.testing.assert_array_equal(ours, theirs)
        for found in gradients(filling, jnp.arange(categories) == 2):
            assert not jnp.isfinite(found).all(-1).any()


def test_a_learned_temperature_ignores_gradients_behind_a_mask() -> None:
    logits, weight = jnp.asarray([[0.5, -1.0, 0.0]]), jnp.asarray([[1.0, 2.0, 3.0]])
    where = jnp.asarray([True, True, False])
    _, back = jax.vjp(lambda tau: gapped.jax.gumbel_softmax(KEY, logits, tau, where=where), jnp.asarray(0.7))
    assert back(weight)[0] != 0
    assert back(weight.at[0, 2].set(NAN))[0] == back(weight)[0]


def test_a_gate_is_a_bernoulli_sample_with_the_gradient_of_a_pair() -> None:
    logits = jnp.tile(jnp.asarray([0.7, -1.2, -INF, 0.0]), (20_000, 1))
    where = jnp.asarray([True, True, True, False])
    gates, back = jax.vjp(
        lambda x: gapped.jax.gate(KEY, x, estimator="gst:tau=0.5,gap=1", where=where), logits
    )
    (slope,) = back(jnp.ones_like(gates))
    ones = to_torch(gates)
    assert ((ones == 0) | (ones == 1)).all()
    for column, p in enumerate(torch.sigmoid(torch.tensor([0.7, -1.2]))):
        law = torch.stack([1 - p, p])
        require_law(chi_squared(counts_of(ones[:, column].long(), 2), law))
        require_rejected(chi_squared(counts_of(ones[:, column].long(), 2), law.flip(0)))
    assert (ones[:, 2:] == 0).all()
    assert (to_torch(slope)[:, 2:] == 0).all()
    # The pair (0.7, 0) has the gap 1 whichever entry was drawn: (0, -1) or (-1, 0), at temperature 1/2.
    h = torch.sigmoid(torch.tensor([2.0, -2.0]))
    expected = torch.where(ones[:, 0] == 1, h[0] * (1 - h[0]) / 0.5, h[1] * (1 - h[1]) / 0.5)
    assert_close(to_torch(slope)[:, 0], expected, 1e-6)
