"""The kernels of tables: selected rows and the tables' gradient, against torch and one-hot products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import assert_all_close, seeded
from kernel_cases import DEVICE, ESTIMATORS, GPU_MARKS, incoming
from torch import Tensor

import gapped
from gapped import choice as choices
from gapped.kernels import backend, tables

pytestmark = GPU_MARKS

K = 7
GROUPS = [1, 3]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, and several of them side by side."""
    monkeypatch.setattr(tables, "BLOCK", 64)
    monkeypatch.setattr(tables, "WIDEST", 16)


def drawn(*shape: int) -> Tensor:
    """Indices as a kernel writes them; the first rows have no category, the second a NaN."""
    index = torch.randint(K, shape, generator=seeded(3)).to(torch.int16)
    index.view(-1)[0], index.view(-1)[1] = K, K + 1
    return index.to(DEVICE)


def table_of(groups: int, *rest: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One table for all rows, or one for each of several groups."""
    shape = (K, *rest) if groups == 1 else (groups, K, *rest)
    return torch.randn(shape, generator=seeded(5)).to(DEVICE, dtype)


def equal(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("rest", [(), (1,), (5,), (40,), (2, 3)], ids=str)
def test_rows_and_sums_equal_torch(groups: int, rest: tuple[int, ...]) -> None:
    index, table, how = drawn(9, groups), table_of(groups, *rest), (K, groups > 1)
    equal(tables.select(table, index, *how), choices._look_up(table, index, *how), 0.0)
    grad = incoming(9, groups, *rest)
    expected = choices._summed(grad, table, index.long(), *how)
    equal(tables.gradient(grad, index, table, *how), expected, 1e-6)
    assert expected.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    index, table = drawn(40, 3), table_of(3, 6, dtype=dtype)
    index[:2] = 0
    equal(tables.select(table, index, K, True), choices._look_up(table, index, K, True), 0.0)
    grad = incoming(40, 3, 6).to(dtype)
    expected = choices._summed(grad.float(), table.float(), index.long(), K, True).to(dtype)
    equal(tables.gradient(grad, index, table, K, True), expected, 1e-3)


def test_layouts_and_nothing() -> None:
    index, table = drawn(9, 3), table_of(4, 3)[:3].mT.contiguous().mT
    grad = incoming(4, 3, 9).permute(2, 1, 0)[..., :3]
    equal(tables.select(table, index, K, True), choices._look_up(table, index, K, True), 0.0)
    expected = choices._summed(grad, table, index.long(), K, True)
    equal(tables.gradient(grad, index, table, K, True), expected, 1e-6)
    none = drawn(9, 3)[:0]
    assert tables.select(table, none, K, True).shape == (0, 3, 3)
    assert not tables.gradient(grad[:0], none, table, K, True).any()


def test_where_the_kernels_apply() -> None:
    index, table = drawn(4), table_of(1, 2)
    assert backend.takes_table(table, index)
    for other in (table.double(), table[:, :0]):
        assert not backend.takes_table(other, index)
    assert not backend.takes_table(table, index.long())
    torch.func.vmap(lambda each: each.sum() + backend.takes_table(table, index))(table)
    assert not torch.func.vmap(lambda each: torch.tensor(backend.takes_table(table, index)))(table).any()


def pulled(estimator: Any, logits: Tensor, table: Tensor, by_hand: bool) -> tuple[Tensor, ...]:
    leaves = logits.clone().requires_grad_(), table.clone().requires_grad_()
    x, t = leaves
    generator = torch.Generator(DEVICE).manual_seed(4)
    if by_hand:
        rows = torch.einsum("...gk,gkd->...gd", estimator.sample(x, generator=generator), t)
    else:
        rows = estimator.choose(x, generator=generator).select(t)
    return (rows.detach(), *torch.autograd.grad(rows, leaves, incoming(*rows.shape)))


# A product is the first thing that torch's thread of the backward pass does here.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("name", ["gst", "reinmax", "gapmax", "gumbel-softmax", "gumbel-rao"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_choice_of_the_kernels_equals_the_one_hot_product(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the logits is written over that of the sample, which nobody else may see."""
    estimator = replace(ESTIMATORS[name], backend="triton")
    logits = torch.randn(4, 5, 3, K, generator=seeded(1)).to(DEVICE)
    table = table_of(3, 6)
    expected = pulled(estimator, logits, table, by_hand=True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    calls: list[int] = []
    whole = tables.gradient
    monkeypatch.setattr(tables, "gradient", lambda *given: calls.append(1) or whole(*given))
    assert_all_close(pulled(estimator, logits, table, by_hand=False), expected, 1e-5)
    assert bool(calls) is not deterministic


def test_the_index_is_a_copy_of_what_the_kernel_wrote() -> None:
    choice = gapped.GST(backend="triton").choose(torch.zeros(4, K, device=DEVICE).requires_grad_())
    assert choice.index.dtype == torch.int64
    assert repr(choice) == f"Choice(index={choice.index})"
    index = choice.index
    choice.index.zero_()
    assert torch.equal(choice.select(torch.arange(float(K), device=DEVICE)).long(), index)
