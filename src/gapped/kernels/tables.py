"""Selected rows of tables, one table for each group, and the sums of the rows' gradients: one kernel each.

The reference is in `gapped.choice`, which calls these where `backend.takes_table` says so.

Row r of the choices belongs to group r modulo the number of groups. Its index is `K` if it has no category,
and then its entries are zero; `K + 1` if it holds a NaN, and then they are NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapped.kernels.runner import Launch, power

# Numbers of a program's block, the most of them in a row, and warps: the default.
BLOCK = 2048
WIDEST = 512
WARPS = 4


@triton.jit
def _locate(p_index, s_rows, s_groups, s_categories, s_width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The entries of a block of rows: indices, their places in the tables, their own places, which exist."""
    s_parts = tl.cdiv(s_width, WIDTH)
    b_rows = (tl.program_id(0) // s_parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b_columns = (tl.program_id(0) % s_parts) * WIDTH + tl.arange(0, WIDTH)
    b_index = tl.load(p_index + b_rows, mask=b_rows < s_rows, other=0).to(tl.int64)
    b_places = (b_rows % s_groups) * s_categories + tl.minimum(b_index, s_categories - 1)
    b_inside = (b_rows < s_rows)[:, None] & (b_columns < s_width)[None, :]
    b_from = b_places[:, None] * s_width + b_columns[None, :]
    return b_index[:, None], b_from, b_rows[:, None] * s_width + b_columns[None, :], b_inside


@triton.jit
def _only_sampled(b_values, b_index, s_categories):
    b_values = tl.where(b_index == s_categories, 0.0, b_values)
    return tl.where(b_index > s_categories, float("nan"), b_values)


@triton.jit(do_not_specialize=["s_rows"])
def table_select_kernel(
    p_table, p_index, p_out, s_rows, s_groups, s_categories, s_width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Write the rows that are selected."""
    b_index, b_from, b_to, b_inside = _locate(p_index, s_rows, s_groups, s_categories, s_width, ROWS, WIDTH)
    b_values = tl.load(p_table + b_from, mask=b_inside, other=0.0).to(tl.float32)
    b_values = _only_sampled(b_values, b_index, s_categories)
    tl.store(p_out + b_to, b_values.to(p_out.dtype.element_ty), mask=b_inside)


@triton.jit(do_not_specialize=["s_rows"])
def table_sum_kernel(
    p_grad, p_index, p_sums, s_rows, s_groups, s_categories, s_width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Add the gradients of rows to the gradients of the selected entries of the tables, in any order."""
    b_index, b_to, b_from, b_inside = _locate(p_index, s_rows, s_groups, s_categories, s_width, ROWS, WIDTH)
    b_grad = tl.load(p_grad + b_from, mask=b_inside, other=0.0).to(tl.float32)
    b_grad = _only_sampled(b_grad, b_index, s_categories)
    # A row without a sample adds nothing, not even a zero.
    tl.atomic_add(p_sums + b_to, b_grad, mask=b_inside & (b_index != s_categories), sem="relaxed")


def _run(
    kernel: Any, pointers: tuple[Tensor, Tensor, Tensor], table: Tensor, categories: int, is_grouped: bool
) -> None:
    """Launch a kernel over all numbers of the selected rows, if there are any."""
    if rows := pointers[1].numel():
        groups = table.shape[0] if is_grouped else 1
        _launch(kernel, rows, groups, categories, table.numel(), BLOCK, WIDEST)(pointers, ())


# Launches are kept: working out how to launch takes the host longer than a small kernel runs.
@lru_cache(maxsize=1024)
def _launch(
    kernel: Any, rows: int, groups: int, categories: int, numbers: int, block: int, widest: int
) -> Launch:
    """The launch of a kernel for tables of `numbers` entries in all."""
    width = numbers // (groups * categories)
    part = min(power(width), widest)
    height = max(block // part, 1)
    flags = {"ROWS": height, "WIDTH": part, "num_warps": WARPS}
    programs = -(-rows // height) * -(-width // part)
    return Launch(kernel, programs, (rows, groups, categories, width), flags)


def select(table: Tensor, index: Tensor, categories: int, is_grouped: bool) -> Tensor:
    """The rows of a table that indices select.

    A table ``(K, *rest)`` and indices ``(*rows)`` give ``(*rows, *rest)``; where there is one for each group,
    ``(G, K, *rest)`` and ``(..., G)`` give ``(..., G, *rest)``.
    """
    out = table.new_empty((*index.shape, *table.shape[1 + is_grouped :]))
    _run(table_select_kernel, (table.contiguous(), index, out), table, categories, is_grouped)
    return out


def gradient(grad: Tensor, index: Tensor, table: Tensor, categories: int, is_grouped: bool) -> Tensor:
    """The gradient of such a table: sums of the rows' gradients in float32, added in any order."""
    sums = torch.zeros_like(table, dtype=torch.float32, memory_format=torch.contiguous_format)
    _run(table_sum_kernel, (grad.contiguous(), index, sums), table, categories, is_grouped)
    return sums.to(table.dtype)
