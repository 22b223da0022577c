"""The kernels for k of n categories by index against enumeration and against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from conftest import assert_close, seeded
from kernel_cases import DEVICE, GPU_MARKS, incoming
from statistical import chi_squared, counts_of, require_law, require_rejected
from subset_enumeration import enumerate_law, plackett_luce
from torch import Tensor

import gapped
from gapped import choices
from gapped.kernels import choices as kernel
from gapped.kernels.backend import takes_choices

pytestmark = GPU_MARKS

# Sums of float32 numbers; what they approximate is computed in float64.
CLOSE = 5e-6
SECOND_ORDER = gapped.ReinMax(backend="triton")
FIRST_ORDER = gapped.StraightThrough(backend="triton")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for every program."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernel, "ELEMENTS", 1 << 9)


def awkward(n: int, k: int) -> Tensor:
    """Rows of logits: ordinary, far apart, equal, with few or no categories, with NaN and infinity."""
    logits = torch.randn(14, n, generator=seeded(n)) * 2
    logits[1] *= 30
    logits[2] = 0.0
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    logits[5, ::2] = -torch.inf
    logits[6, 2] = torch.nan
    logits[7, 0] = torch.inf
    # Some more than k that lead: where one of them is left out, most of a sum is.
    for row, more in ((8, 1), (9, 2), (10, 4)):
        logits[row, : k + more] = 0.1 * logits[row, : k + more]
        logits[row, k + more :] = -12.0
    logits[11, 1:] = -1e10
    logits[12] += 1e6
    return logits.to(DEVICE)


@pytest.mark.slow_if(lambda n, **_: n == 100)
@pytest.mark.parametrize(("n", "k"), [(3, 2), (7, 5), (30, 8), (17, 16), (100, 12)])
@pytest.mark.parametrize("estimator", [SECOND_ORDER, FIRST_ORDER], ids=lambda each: each.name)
def test_gradients_are_those_of_torch_in_float64(n: int, k: int, estimator: Any) -> None:
    logits = awkward(n, k).requires_grad_()
    drawn = gapped.choose(logits, k=k, estimator=estimator)
    assert gapped.backend_used() == "triton"
    index, weights = drawn.index, drawn.weights()
    assert_equal_with_nan(drawn.gate(), choices._gate_of(logits, index))
    torch.testing.assert_close(
        weights.double(), choices._weights_of(logits.double(), index), rtol=1e-5, atol=1e-6, equal_nan=True
    )
    # Whatever comes at places without a category.
    g = incoming(*index.shape).masked_fill(index == n, torch.nan)
    pull, estimator = choices._pull_set, replace(estimator, backend="torch")
    exact, wide = logits.detach().double(), g.double()
    (ours,) = torch.autograd.grad(drawn.gate(), logits, g)
    expected = pull(estimator, exact, index, wide, True)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=CLOSE, equal_nan=True)
    (ours,) = torch.autograd.grad(weights, logits, g)
    values = choices._weights_of(exact, index)
    expected = choices._pull_weights(lambda *args: pull(estimator, *args), exact, index, wide, True, values)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=CLOSE, equal_nan=True)


def assert_equal_with_nan(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow_if(lambda n, k: n == 6)
@pytest.mark.parametrize(("n", "k"), [(4, 3), (8, 2), (6, 3)])
def test_sets_have_their_law(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of draws without replacement is the wrong twin."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernel, "ELEMENTS", 1 << 17)
    theta = 1.5 * torch.randn(n, generator=seeded(n))
    rows = theta.expand(36_000 if n == 8 else 12_000, n).to(DEVICE)
    index = kernel.draw(rows, k, torch.Generator(DEVICE).manual_seed(k), False).index.cpu()
    assert (index.diff(dim=-1) > 0).all()
    number = torch.full((1 << n,), -1)
    for i, chosen in enumerate(combinations(range(n), k)):
        number[sum(1 << j for j in chosen)] = i
    counts = counts_of(number[(1 << index).sum(-1)], int(number.max()) + 1)
    require_law(chi_squared(counts, enumerate_law(theta.double(), k).p))
    require_rejected(chi_squared(counts, plackett_luce(theta.double(), k)))


@pytest.mark.parametrize(("n", "k"), [(6, 2), (30, 9)])
def test_rows_with_few_categories_and_the_largest(n: int, k: int) -> None:
    logits = awkward(n, k)
    for draw in ("sample", "argmax"):
        index = gapped.choose(logits, k=k, estimator=SECOND_ORDER, draw=draw).index
        assert (index[3] == n).all()
        assert index[4].tolist() == [0] + [n] * (k - 1)
        assert (index[6:8] == n + 1).all()
        assert (index[8] < k + 1).all()
        exists = index[[0, 1, 2, 8, 9, 10, 11, 12]]
        assert (exists.sort(-1).values.diff(dim=-1) > 0).all()
    assert torch.equal(index[0].cpu(), logits[0].cpu().topk(k).indices)
    assert torch.equal(index[2].cpu(), torch.arange(k))


def test_the_largest_have_the_same_gradient() -> None:
    logits = awkward(30, 4)[:6].requires_grad_()
    drawn = gapped.choose(logits, k=4, estimator=SECOND_ORDER, draw="argmax")
    g = incoming(*drawn.index.shape)
    (ours,) = torch.autograd.grad(drawn.gate(), logits, g)
    expected = choices._pull_set(gapped.ReinMax(), logits.detach().double(), drawn.index, g.double(), True)
    assert_close(ours.double(), expected, CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    logits = awkward(12, 3)[:6].to(dtype).requires_grad_()
    drawn = gapped.choose(logits, k=3, estimator=SECOND_ORDER)
    assert drawn.gate().dtype == drawn.weights().dtype == dtype
    g = incoming(*drawn.index.shape).to(dtype)
    (ours,) = torch.autograd.grad(drawn.gate(), logits, g)
    expected = choices._pull_set(gapped.ReinMax(), logits.detach().float(), drawn.index, g.float(), True)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), expected, rtol=1e-2, atol=1e-3)


def test_any_axis_and_a_table() -> None:
    logits = awkward(9, 3)[:3].t().requires_grad_()
    drawn = gapped.choose(logits, k=3, estimator=SECOND_ORDER, dim=0)
    assert drawn.index.shape == (3, 3)
    table = torch.randn(9, 2, generator=seeded(3)).to(DEVICE)
    rows = drawn.select(table)
    assert torch.equal(rows, table[drawn.index])
    (ours,) = torch.autograd.grad(rows.sum(), logits)
    dense = table.sum(-1).expand(3, 3, 9)
    exact = choices._pull_set(
        gapped.ReinMax(), logits.detach().t().double(), drawn.index, dense.double(), False
    )
    assert_close(ours.t().double(), exact, CLOSE)


def test_which_rows_the_kernels_take() -> None:
    rows = torch.zeros(2, 8, device=DEVICE)
    assert takes_choices(rows, 2)
    assert not takes_choices(rows, 8)
    assert not takes_choices(rows.double(), 2)
    assert not takes_choices(torch.zeros(2, 1025, device=DEVICE), 2)
    assert not takes_choices(torch.zeros(2, 64, device=DEVICE), 17)
