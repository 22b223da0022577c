"""Torch and JAX, given the same noise: the same samples, and gradients that agree to rounding."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from conftest import pull as torch_pull
from jax_problems import (
    DTYPES,
    EVERY,
    KEY,
    PATHWISE,
    SOFT,
    _float64,  # noqa: F401
    _quick_compilation,  # noqa: F401
    jax,
    make,
    noise_of,
    pull,
    replayed,
    to_jax,
    to_torch,
)
from torch import Tensor
from variants import make as make_torch

import gapped
import gapped.jax
from gapped.jax import pathwise

# One size for all axes: JAX compiles every operation once for each shape.
SHAPE = (5, 5, 5)


MASK = torch.rand(SHAPE, generator=seeded(3)) < 0.6
MASK[torch.arange(5), torch.arange(5)] = True
EMPTIED = MASK & (torch.arange(5) != 2).view(5, 1)
# Whether the sample is hard, its mask, its axis. One mask leaves rows without a category.
PLACES: list[tuple[bool, Tensor | None, int]] = [
    (True, MASK, 0),
    (True, EMPTIED, 1),
    (True, None, -1),
    (False, MASK, -1),
]
FREE = 2


@lru_cache
def program(name: str) -> Any:
    """Samples and gradients of all kinds and places at once, compiled once for each dtype."""

    def run(logits: Any, weight: Any, noises: Any) -> list[tuple[Any, Any]]:
        results = []
        for (hard, mask, dim), noise in zip(places(name), noises, strict=True):
            estimator = replayed(make(name, hard=hard), noise=noise)
            where = None if mask is None else to_jax(mask)
            draw = partial(estimator.sample, jax.random.key(0), axis=dim, where=where)
            sample, back = jax.vjp(draw, logits)
            results.append((sample, back(weight)[0]))
        return results

    return jax.jit(run)


def places(name: str) -> list[tuple[bool, Tensor | None, int]]:
    return [place for place in PLACES if place[0] or name in SOFT]


def compared(name: str, logits: Tensor, weight: Tensor, tolerance: float) -> list[tuple[Tensor, Tensor]]:
    """Samples and gradients of JAX, for the noise that torch drew, after comparing them with torch's."""
    theirs, noises = [], []
    for hard, mask, dim in places(name):
        estimator = make_torch(name, hard=hard)
        theirs.append(torch_pull(estimator, logits, weight, dim=dim, mask=mask))
        noises.append(noise_of(estimator, logits.movedim(dim, -1).contiguous()))
    ours = program(name)(to_jax(logits), to_jax(weight), noises)
    for (hard, *_), result, expected in zip(places(name), ours, theirs, strict=True):
        for array, tensor in zip(result, expected, strict=True):
            assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
            exactly = hard and array is result[0]
            torch.testing.assert_close(
                to_torch(array),
                tensor,
                rtol=0 if exactly else tolerance,
                atol=0 if exactly else tolerance,
                equal_nan=True,
                check_dtype=False,
            )
    return [(to_torch(sample), to_torch(gradient)) for sample, gradient in ours]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in EVERY]
    + [(name, dtype) for name in PATHWISE for dtype in (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_the_same_noise_gives_the_same_sample_and_gradient(name: str, dtype: torch.dtype) -> None:
    """Hard and soft, with masks and without, on every axis."""
    logits, weight = normal(*SHAPE, dtype=dtype), normal(*SHAPE, seed=2, dtype=dtype)
    for _, gradient in compared(name, logits, weight, DTYPES[dtype]):
        assert gradient.abs().sum() > 1
    if dtype == torch.float64:
        logits = wild_logits()
        sample, gradient = compared(name, logits, weight, 1e-12)[FREE]
        for result in (sample, gradient):
            rows = result.view(25, 5)
            assert rows[[1, 2, 5]].isnan().all()
            assert (rows[3] == 0).all()
            assert rows[6:].isfinite().all()


def wild_logits() -> Tensor:
    """Rows with a NaN, with infinities, with nothing allowed, and logits whose exponentials overflow."""
    logits = normal(25, 5)
    logits[1, 0], logits[2, 1], logits[3], logits[4, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[5, 1:], logits[5, 0] = -torch.inf, torch.nan
    logits[6:15] *= 1e4
    return logits.view(SHAPE)


@pytest.mark.parametrize("name", [*PATHWISE, "gst-1"])
def test_rows_of_several_blocks_agree_and_long_ones_have_the_same_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 categories, drawn from blocks of 16; then with the backward pass of rows too long for one kernel."""
    logits, weight = normal(6, 70), normal(6, 70, seed=2)
    estimator = make_torch(name)
    expected = torch_pull(estimator, logits, weight)
    ours = replayed(make(name), noise=noise_of(estimator, logits))
    for longest in (70, 69):
        monkeypatch.setattr(pathwise, "_LONGEST_BLOCK", longest)
        for array, tensor in zip(
            pull(partial(ours.sample, KEY), to_jax(logits), to_jax(weight)), expected, strict=True
        ):
            assert_close(to_torch(array), tensor)


@pytest.mark.parametrize("name", EVERY)
def test_the_backward_pass_keeps_the_logits_and_a_few_numbers_per_row(name: str) -> None:
    logits = jax.ShapeDtypeStruct((4, 100), "bfloat16")
    back = jax.eval_shape(lambda x: jax.vjp(partial(make(name).sample, jax.random.key(0)), x)[1], logits)
    kept = [leaf for leaf in jax.tree.leaves(back) if leaf.size >= logits.size]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(logits.shape, logits.dtype)]


@pytest.mark.parametrize("name", ["gst", "gumbel-softmax", "reinmax"])
def test_levels_with_a_value_per_row(name: str) -> None:
    """Without the category axis, or with it as one."""
    logits, weight = normal(*SHAPE), normal(*SHAPE, seed=2)
    tau = torch.rand(5, 5, generator=seeded(5), dtype=torch.float64) + 1
    estimator = make_torch(name, tau=tau)
    _, expected = torch_pull(estimator, logits, weight, dim=1)
    noise = noise_of(estimator, logits.movedim(1, -1).contiguous())
    for level in (tau, tau.unsqueeze(1)):
        ours = replayed(make(name, tau=level), noise=noise)
        assert_close(
            to_torch(pull(partial(ours.sample, KEY, axis=1), to_jax(logits), to_jax(weight))[1]), expected
        )


def test_gaps_with_a_value_per_row() -> None:
    logits, weight = normal(*SHAPE), normal(*SHAPE, seed=2)
    gap = torch.linspace(0, 3, 25, dtype=torch.float64).view(5, 5)
    _, expected = torch_pull(gapped.GST(gap=gap), logits, weight)
    ours = replayed(gapped.jax.GST(gap=to_jax(gap)), noise=noise_of(gapped.GST(), logits))
    assert_close(to_torch(pull(partial(ours.sample, KEY), to_jax(logits), to_jax(weight))[1]), expected)


@pytest.mark.parametrize("hard", [True, False])
def test_a_learned_temperature_of_gumbel_softmax(hard: bool) -> None:
    logits, weight, tau = normal(*SHAPE), normal(*SHAPE, seed=2), torch.tensor([0.7], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    learned = tau.clone().requires_grad_()
    gapped.GumbelSoftmax(learned, hard).sample(logits, mask=mask, generator=seeded()).backward(weight)
    noise = noise_of(gapped.GumbelSoftmax(), logits)

    def cost(tau: Any) -> Any:
        estimator = replayed(gapped.jax.GumbelSoftmax(tau, hard), noise=noise)
        sample = estimator.sample(jax.random.key(0), to_jax(logits), where=to_jax(mask))
        return (sample * to_jax(weight)).sum()

    assert learned.grad is not None
    assert_close(to_torch(jax.jit(jax.grad(cost))(to_jax(tau))), learned.grad)


# The table of closed forms that torch's estimators are tested with
