"""Mixtures with the uniform law, against the formula written with probabilities in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import DTYPES, assert_all_close, assert_close, normal, pulled
from torch import Tensor

import gapped

AMOUNTS = [0.0, 1e-6, 0.01, 0.5, 1.0, 1]
MASK = torch.tensor([True, False, True, True])
COLUMNS = torch.tensor([0, 2, 3])


def formula(logits: Tensor, amount: float) -> Tensor:
    return ((1 - amount) * torch.softmax(logits, -1) + amount / logits.shape[-1]).log()


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (3, 1), (0, 4)], ids=str)
def test_values_and_gradients(amount: float, shape: tuple[int, ...]) -> None:
    ours, theirs = (
        pulled(lambda x, mix=mix: mix(x, amount), normal(*shape)) for mix in (gapped.unimix, formula)
    )
    assert_all_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize("by", ["mask", "inf"])
def test_masking_equals_deleting(amount: float, by: str) -> None:
    logits, weight = normal(5, 4), normal(5, 4, seed=2)
    logits[:, 1] = 30.0 if by == "mask" else -math.inf
    logits.requires_grad_()
    mixed = gapped.unimix(logits, amount, mask=MASK if by == "mask" else None)
    (gradient,) = torch.autograd.grad(mixed[:, COLUMNS], logits, weight[:, COLUMNS], retain_graph=True)
    small = logits.detach()[:, COLUMNS].requires_grad_()
    expected = formula(small, amount)
    assert_close(mixed.detach()[:, COLUMNS], expected.detach())
    assert (mixed[:, 1] == -math.inf).all()
    assert_close(gradient[:, COLUMNS], torch.autograd.grad(expected, small, weight[:, COLUMNS])[0])
    assert (gradient[:, 1] == 0).all()
    # A use of all of them, such as a softmax, gets finite gradients too.
    (gradient,) = torch.autograd.grad(torch.softmax(mixed, -1), logits, weight)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_logits_in_every_dtype(dtype: torch.dtype) -> None:
    """A probability below the smallest number is the uniform share; one half precision rounds once."""
    logits = torch.tensor([1e4, 0.0, -1e4, 9e3], dtype=dtype)
    mixed = gapped.unimix(logits)
    assert mixed.dtype == dtype
    expected = torch.tensor([0.99 + 0.0025, 0.0025, 0.0025, 0.0025], dtype=torch.float64).log()
    assert_close(mixed.double(), expected, 2 * torch.finfo(dtype).eps)


def test_axes_and_rows_without_a_law() -> None:
    logits = normal(3, 4, 2)
    for dim in (0, 1, -1):
        assert_close(
            gapped.unimix(logits, 0.3, dim=dim), formula(logits.movedim(dim, -1), 0.3).movedim(-1, dim)
        )
    rows = torch.tensor([[-math.inf, -math.inf], [math.nan, 0.0], [0.0, 0.0]], requires_grad=True)
    mixed = gapped.unimix(rows, 0.1)
    assert (mixed[0] == -math.inf).all()
    assert mixed[1].isnan().all()
    (gradient,) = torch.autograd.grad(mixed, rows, torch.tensor([1.0, 2.0]).expand(3, 2))
    assert (gradient[0] == 0).all()
    assert gradient[2, 1] > 0
    assert_close(mixed[2].detach(), torch.full((2,), -math.log(2)), 1e-6)


def test_it_has_a_second_derivative_and_goes_into_a_sample() -> None:
    logits = normal(3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: gapped.unimix(x, 0.2), logits)
    sample = gapped.gst(gapped.unimix(logits), 0.5, True)
    assert sample.sum() == 1


@pytest.mark.parametrize("amount", [-0.1, 1.1, math.nan, True, "1", None], ids=repr)
def test_amounts_out_of_range(amount: Any) -> None:
    with pytest.raises(gapped.GappedError, match=r"amount: got .*, expected a number from 0 to 1"):
        gapped.unimix(normal(3), amount)
