"""Triton kernels for a step of the leaf LSTM and of its backward pass.

`gapped.lab.tasks.listops.parts` is the definition.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.lab.tasks.listops.kernels import block, load, store, tanh


@triton.jit
def _line(b_row, s_batch, s_run, s_row):
    """Line of a row whose runs are `s_run` and whose rows are `s_row` lines apart."""
    return (b_row // s_batch).to(tl.int64) * s_run + b_row % s_batch * s_row


@triton.jit(
    do_not_specialize=[
        "s_rows",
        "s_batch",
        "s_gates_run",
        "s_gates_row",
        "s_inputs_run",
        "s_inputs_row",
        "s_before_run",
        "s_before_row",
        "s_after_run",
        "s_after_row",
    ]
)
def advance_kernel(
    p_gates,
    p_inputs,
    p_before,
    p_after,
    s_rows,
    s_batch,
    s_gates_run,
    s_gates_row,
    s_inputs_run,
    s_inputs_row,
    s_before_run,
    s_before_row,
    s_after_run,
    s_after_row,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b_row, _, b_columns, b_inside = block(s_rows, ROWS, COLUMNS, WIDTH)
    b_gates = _line(b_row, s_batch, s_gates_run, s_gates_row)
    b_inputs = _line(b_row, s_batch, s_inputs_run, s_inputs_row)
    b_before = _line(b_row, s_batch, s_before_run, s_before_row)
    b_after = _line(b_row, s_batch, s_after_run, s_after_row)
    b_i = load(p_gates, b_gates, b_columns, b_inside, 0, 4 * WIDTH)
    b_i += load(p_inputs, b_inputs, b_columns, b_inside, 0, 4 * WIDTH)
    b_f = load(p_gates, b_gates, b_columns, b_inside, WIDTH, 4 * WIDTH)
    b_f += load(p_inputs, b_inputs, b_columns, b_inside, WIDTH, 4 * WIDTH)
    b_g = load(p_gates, b_gates, b_columns, b_inside, 2 * WIDTH, 4 * WIDTH)
    b_g += load(p_inputs, b_inputs, b_columns, b_inside, 2 * WIDTH, 4 * WIDTH)
    b_o = load(p_gates, b_gates, b_columns, b_inside, 3 * WIDTH, 4 * WIDTH)
    b_o += load(p_inputs, b_inputs, b_columns, b_inside, 3 * WIDTH, 4 * WIDTH)
    store(p_gates, b_gates, b_columns, b_inside, b_i, 0, 4 * WIDTH)
    store(p_gates, b_gates, b_columns, b_inside, b_f, WIDTH, 4 * WIDTH)
    store(p_gates, b_gates, b_columns, b_inside, b_g, 2 * WIDTH, 4 * WIDTH)
    store(p_gates, b_gates, b_columns, b_inside, b_o, 3 * WIDTH, 4 * WIDTH)
    b_c = load(p_before, b_before, b_columns, b_inside, WIDTH, 2 * WIDTH)
    b_c = tl.sigmoid(b_f) * b_c + tl.sigmoid(b_i) * tanh(b_g)
    store(p_after, b_after, b_columns, b_inside, tl.sigmoid(b_o) * tanh(b_c), 0, 2 * WIDTH)
    store(p_after, b_after, b_columns, b_inside, b_c, WIDTH, 2 * WIDTH)


@triton.jit(
    do_not_specialize=[
        "s_rows",
        "s_batch",
        "s_gates_run",
        "s_gates_row",
        "s_before_run",
        "s_before_row",
        "s_own_run",
        "s_own_row",
        "s_out_run",
        "s_out_row",
    ]
)
def retreat_kernel(
    p_gates,
    p_before,
    p_own,
    p_out,
    p_grad_h,
    p_grad_c,
    s_rows,
    s_batch,
    s_gates_run,
    s_gates_row,
    s_before_run,
    s_before_row,
    s_own_run,
    s_own_row,
    s_out_run,
    s_out_row,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b_row, _, b_columns, b_inside = block(s_rows, ROWS, COLUMNS, WIDTH)
    b_gates = _line(b_row, s_batch, s_gates_run, s_gates_row)
    b_before = _line(b_row, s_batch, s_before_run, s_before_row)
    b_own = _line(b_row, s_batch, s_own_run, s_own_row)
    b_out = _line(b_row, s_batch, s_out_run, s_out_row)
    b_i = tl.sigmoid(load(p_gates, b_gates, b_columns, b_inside, 0, 4 * WIDTH))
    b_f = tl.sigmoid(load(p_gates, b_gates, b_columns, b_inside, WIDTH, 4 * WIDTH))
    b_g = tanh(load(p_gates, b_gates, b_columns, b_inside, 2 * WIDTH, 4 * WIDTH))
    b_o = tl.sigmoid(load(p_gates, b_gates, b_columns, b_inside, 3 * WIDTH, 4 * WIDTH))
    b_c = load(p_before, b_before, b_columns, b_inside, WIDTH, 2 * WIDTH)
    b_grad_h = load(p_own, b_own, b_columns, b_inside, 0, 2 * WIDTH)
    b_grad_h += load(p_grad_h, b_row, b_columns, b_inside, 0, WIDTH)
    b_grad_c = load(p_own, b_own, b_columns, b_inside, WIDTH, 2 * WIDTH)
    b_grad_c += load(p_grad_c, b_row, b_columns, b_inside, 0, WIDTH)
    b_top = tanh(b_f * b_c + b_i * b_g)
    b_grad_c += b_grad_h * b_o * (1.0 - b_top * b_top)
    b_grad = b_grad_c * b_g * b_i * (1.0 - b_i)
    store(p_out, b_out, b_columns, b_inside, b_grad, 0, 4 * WIDTH)
    b_grad = b_grad_c * b_c * b_f * (1.0 - b_f)
    store(p_out, b_out, b_columns, b_inside, b_grad, WIDTH, 4 * WIDTH)
    b_grad = b_grad_c * b_i * (1.0 - b_g * b_g)
    store(p_out, b_out, b_columns, b_inside, b_grad, 2 * WIDTH, 4 * WIDTH)
    b_grad = b_grad_h * b_top * b_o * (1.0 - b_o)
    store(p_out, b_out, b_columns, b_inside, b_grad, 3 * WIDTH, 4 * WIDTH)
    store(p_grad_c, b_row, b_columns, b_inside, b_grad_c * b_f, 0, WIDTH)
