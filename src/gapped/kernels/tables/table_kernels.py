"""Selected rows of tables, one table for each group, and the sums of the rows' gradients.

Row r of the choices belongs to group r modulo the number of groups. Its index is `K` if it has no category,
and then its entries are zero; `K + 1` if it holds a NaN, and then they are NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _selected(p_index, s_rows, s_groups, s_categories, s_width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
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
    b_index, b_from, b_to, b_inside = _selected(p_index, s_rows, s_groups, s_categories, s_width, ROWS, WIDTH)
    b_values = tl.load(p_table + b_from, mask=b_inside, other=0.0).to(tl.float32)
    b_values = _only_sampled(b_values, b_index, s_categories)
    tl.store(p_out + b_to, b_values.to(p_out.dtype.element_ty), mask=b_inside)


@triton.jit(do_not_specialize=["s_rows"])
def table_sum_kernel(
    p_grad, p_index, p_sums, s_rows, s_groups, s_categories, s_width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Add the gradients of rows to those of the tables' entries that were selected, in any order."""
    b_index, b_to, b_from, b_inside = _selected(p_index, s_rows, s_groups, s_categories, s_width, ROWS, WIDTH)
    b_grad = tl.load(p_grad + b_from, mask=b_inside, other=0.0).to(tl.float32)
    b_grad = _only_sampled(b_grad, b_index, s_categories)
    # A row without a sample adds nothing, not even a zero.
    tl.atomic_add(p_sums + b_to, b_grad, mask=b_inside & (b_index != s_categories), sem="relaxed")
