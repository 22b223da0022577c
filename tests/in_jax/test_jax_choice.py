"""Choices and gates in JAX: torch's look-ups for the same noise, and pytrees that leave `jax.jit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_close, normal, seeded
from jax_problems import (
    KEY,
    _float64,  # noqa: F401
    _quick_compilation,  # noqa: F401
    jax,
    make,
    noise_of,
    replayed,
    to_jax,
    to_torch,
)
from variants import make as make_torch

import gapped.jax

jnp = jax.numpy


@pytest.mark.parametrize("name", ["gst-1", "reinmax", "gapmax", "gumbel-rao-1"])
def test_looking_up_a_table_agrees(name: str) -> None:
    """Rows, and gradients of logits and table; one row has no categories."""
    logits, table, weight = normal(5, 5, 5), normal(5, 3, seed=4), normal(5, 5, 3, seed=2)
    logits[0, 3] = -torch.inf
    estimator = make_torch(name)
    leaves = logits.clone().requires_grad_(), table.clone().requires_grad_()
    choice = estimator.choose(leaves[0], generator=seeded())
    rows, gate = choice.select(leaves[1]), choice.gate()
    expected = torch.autograd.grad([rows, gate], leaves, [weight, weight[..., 0]])
    ours = replayed(make(name), noise=noise_of(estimator, logits))

    @jax.jit
    def use(logits: Any, table: Any, weight: Any) -> tuple[Any, ...]:
        def values(logits: Any, table: Any) -> tuple[tuple[Any, Any], Any]:
            choice = ours.choose(KEY, logits)
            return (choice.select(table), choice.gate()), choice.index

        used, back, index = jax.vjp(values, logits, table, has_aux=True)
        return index, *used, *back((weight, weight[..., 0]))

    index, *results = use(to_jax(logits), to_jax(table), to_jax(weight))
    assert torch.equal(to_torch(index), choice.index)
    for array, tensor in zip(results, (rows, gate, *expected), strict=True):
        assert_close(to_torch(array), tensor.detach())


def test_a_choice_leaves_jit_and_can_be_batched() -> None:
    keys, table = jax.random.split(KEY, 8), to_jax(normal(5, 5, seed=4))
    choices = jax.jit(jax.vmap(lambda k, x: gapped.jax.choose(k, x)))(keys, to_jax(normal(8, 5)))
    assert isinstance(choices, gapped.jax.Choice)
    rows = jax.vmap(lambda choice: choice.select(table))(choices)
    np.testing.assert_array_equal(rows, table[choices.index])


def test_gates_of_infinite_odds_are_certain() -> None:
    odds = jnp.asarray([jnp.inf, -jnp.inf])
    for estimator in (gapped.jax.GapMax(), gapped.jax.GumbelSoftmax(hard=False)):
        value, slope = jax.value_and_grad(
            lambda x, e=estimator: (gapped.jax.gate(KEY, x, estimator=e) * jnp.asarray([1.0, 2.0])).sum()
        )(odds)
        assert float(value) == 1
        assert slope.tolist() == [0, 0]
