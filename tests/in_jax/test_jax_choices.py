"""k categories by index in JAX: values and gradients of torch's for the same index, laws, and transforms."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from conftest import assert_close, normal
from jax_problems import (
    KEY,
    _float64,  # noqa: F401
    _quick_compilation,  # noqa: F401
    jax,
    to_jax,
    to_torch,
)
from statistical import chi_squared, counts_of, require_law, require_rejected
from subset_enumeration import enumerate_law, marginals, plackett_luce

import gapped.jax
from gapped import choices

jnp = jax.numpy

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "straight-through": (
        {"estimator": gapped.StraightThrough(tau=0.7)},
        {"estimator": gapped.jax.StraightThrough(tau=0.7)},
    ),
    "gst": ({"estimator": "gst:gap=1,tau=0.7"},) * 2,
    "sequential": ({"law": "sequential"},) * 2,
    "sequential-gst": ({"law": "sequential", "estimator": "gst"},) * 2,
    "argmax": ({"draw": "argmax"},) * 2,
}


def logits_of() -> torch.Tensor:
    """Ordinary rows; one with two categories, one with none, one with a NaN."""
    logits = 2 * normal(6, 7)
    logits[1, 2:] = logits[2] = -torch.inf
    logits[3, 4] = torch.nan
    return logits


@pytest.mark.slow_if(lambda kind: kind in ("straight-through", "sequential-gst"))
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_torchs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, table = logits_of(), normal(7, 2, seed=3)
    ours, k = KINDS[kind][1], 3

    @jax.jit
    def use(logits: Any, table: Any, *weights: Any) -> Any:
        def values(logits: Any, table: Any) -> Any:
            drawn = gapped.jax.choose(KEY, logits, k, **ours)
            return (drawn.gate(), drawn.weights(), drawn.select(table), drawn.log_prob), drawn.index

        used, back, index = jax.vjp(values, logits, table, has_aux=True)
        zeros = [jnp.zeros_like(value) for value in used]
        gradients = [back((*zeros[:i], weights[i], *zeros[i + 1 :])) for i in range(4)]
        return index, used, gradients

    weights = normal(6, k, seed=4), normal(6, k, seed=5), normal(6, k, 2, seed=6), normal(6, seed=7)
    index, used, gradients = use(to_jax(logits), to_jax(table), *map(to_jax, weights))
    index = to_torch(index).long()
    for name in ("_draw_set", "_draw_sequence"):
        monkeypatch.setattr(choices, name, lambda *_: index)
    leaves = logits.requires_grad_(), table.requires_grad_()
    drawn = gapped.choose(leaves[0], k=k, **KINDS[kind][0])
    expected = drawn.gate(), drawn.weights(), drawn.select(leaves[1]), drawn.log_prob
    for value, other, gradient, weight in zip(used, expected, gradients, weights, strict=True):
        torch.testing.assert_close(to_torch(value), other.detach(), equal_nan=True, rtol=1e-9, atol=1e-9)
        theirs = torch.autograd.grad(other, leaves, weight, allow_unused=True, retain_graph=True)
        finite = [0, 1, 2, 4, 5]
        assert_close(to_torch(gradient[0])[finite], theirs[0][finite], 1e-9)
        if theirs[1] is not None:
            # The last row also stands for places without a category.
            assert_close(to_torch(gradient[1])[:-1], theirs[1][:-1], 1e-9)


@pytest.mark.parametrize("law", ["subset", "sequential"])
def test_sets_have_their_law(law: Any) -> None:
    """The other law is the wrong twin."""
    theta, k = 1.5 * normal(6), 3
    draw = jax.jit(lambda key, x: gapped.jax.choose(key, x, k, law=law).index)
    index = to_torch(draw(KEY, to_jax(theta.expand(30_000, 6)))).long()
    number = torch.full((64,), -1)
    for i, chosen in enumerate(combinations(range(6), k)):
        number[sum(1 << j for j in chosen)] = i
    counts = counts_of(number[(1 << index).sum(-1)], 20)
    exact, sequential = enumerate_law(theta, k).p, plackett_luce(theta, k)
    require_law(chi_squared(counts, exact if law == "subset" else sequential))
    require_rejected(chi_squared(counts, sequential if law == "subset" else exact))


@pytest.mark.slow_if(lambda n, k: n == 9 or k == 2)
@pytest.mark.parametrize(("n", "k"), [(4, 1), (6, 2), (6, 5), (9, 4)])
def test_the_normaliser_of_sets(n: int, k: int) -> None:
    from gapped.jax import subsets

    theta = 2 * normal(n, seed=n)
    value, slope = jax.value_and_grad(lambda x: subsets.log_normaliser(x, k))(to_jax(theta))
    assert_close(to_torch(value), enumerate_law(theta, k).log_normaliser, 1e-10)
    assert_close(to_torch(slope), marginals(theta, k), 1e-10)


def test_nothing_comes_from_places_without_a_category() -> None:
    row = jnp.array([-jnp.inf, 0.3, -jnp.inf, 0.7, -jnp.inf])
    drawn = gapped.jax.choose(KEY, row, k=3)
    _, back = jax.vjp(lambda row: gapped.jax.choose(KEY, row, k=3).weights(), row)
    g = to_jax(normal(3))
    found, expected = (back(jnp.where(drawn.index == 5, filling, g))[0] for filling in (jnp.nan, 0.0))
    assert_close(to_torch(found), to_torch(expected), 0.0)


@pytest.mark.slow
def test_choices_leave_jit_and_can_be_batched() -> None:
    keys, logits = jax.random.split(KEY, 8), to_jax(normal(8, 5))
    drawn = jax.jit(jax.vmap(lambda key, row: gapped.jax.choose(key, row, k=2)))(keys, logits)
    assert isinstance(drawn, gapped.jax.Choices)
    assert drawn.gate().shape == drawn.weights().shape == (8, 2)
    gradient = jax.vmap(jax.grad(lambda row, key: gapped.jax.choose(key, row, k=2).weights()[0]))(
        logits, keys
    )
    assert_close(to_torch(gradient.sum(-1)), torch.zeros(8), 1e-12)
    assert jnp.abs(gradient).sum() > 0


def test_one_category_and_any_axis() -> None:
    logits = to_jax(normal(5, 3))
    drawn = gapped.jax.choose(KEY, logits, k=1, axis=0, where=jnp.arange(5)[:, None] > 2)
    assert drawn.index.shape == (3, 1)
    assert (drawn.index > 2).all()
    assert (drawn.weights() == 1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k: got 0, expected an integer from 1 to 4"),
        ({"k": 5}, "k: got 5"),
        ({"k": 2, "law": "exact"}, "law: got 'exact'"),
        ({"k": 2, "draw": "top"}, "draw: got 'top'"),
        ({"draw": "argmax"}, "draw: got 'argmax', expected 'sample' where k is not given"),
        ({"k": 2, "estimator": "gapmax"}, "estimator: got .*expected 'reinmax'"),
        ({"k": 2, "estimator": "gst"}, "gap: got 'auto', expected a number"),
        ({"k": 2, "estimator": gapped.jax.ReinMax(tau=2.0)}, "tau: got 2.0, expected 1"),
        ({"k": 2, "law": "sequential", "estimator": "gumbel-softmax"}, "estimator: got .*needs no noise"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        gapped.jax.choose(KEY, jnp.zeros((2, 4)), **arguments)
