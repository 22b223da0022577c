"""Triton kernels for the elementwise work of the tree, but for its backward sweep, and of the leaf LSTM.

A block is a few lines of a table times a range of columns. A line's elements are adjacent, so only its number
has to be looked up. `Tables`, `Sweep` and `lstm` are the definitions, names and shapes are explained there. A
pointer `p_name` is the tensor `name` of the tables or of the sweep, or one that the launcher passes.
"""

from __future__ import annotations

from inspect import signature

import triton
import triton.language as tl


def sized(kernel):
    """Compile a kernel once for all values of its sizes, the arguments `s_name`."""
    names = [name for name in signature(kernel).parameters if name.startswith("s_")]
    return triton.jit(kernel, do_not_specialize=names)


@triton.jit
def tanh(b_x):
    return 2.0 * tl.sigmoid(2.0 * b_x) - 1.0


@triton.jit
def _at(p, b_line, b_columns, START: tl.constexpr, STRIDE: tl.constexpr):
    """Addresses of columns, counted from `START`, in lines of `STRIDE` elements."""
    return p + b_line.to(tl.int64)[:, None] * STRIDE + (b_columns + START)[None, :]


@triton.jit
def load(p, b_line, b_columns, b_inside, START: tl.constexpr, STRIDE: tl.constexpr):
    return tl.load(_at(p, b_line, b_columns, START, STRIDE), mask=b_inside, other=0.0)


@triton.jit
def store(p, b_line, b_columns, b_inside, b_value, START: tl.constexpr, STRIDE: tl.constexpr):
    tl.store(_at(p, b_line, b_columns, START, STRIDE), b_value, mask=b_inside)


@triton.jit
def block(s_lines, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Lines and columns of this program: neighbouring programs share lines."""
    CHUNKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    b_line = tl.program_id(0) // CHUNKS * ROWS + tl.arange(0, ROWS)
    b_columns = tl.program_id(0) % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
    b_valid = b_line < s_lines
    return b_line, b_valid, b_columns, b_valid[:, None] & (b_columns < WIDTH)[None, :]


@triton.jit
def _gate(
    p_products, p_bias, b_left, b_right, b_run, b_columns, b_inside, GATE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b_gate = load(p_products, b_left, b_columns, b_inside, GATE * WIDTH, 10 * WIDTH)
    b_gate += load(p_products, b_right, b_columns, b_inside, (GATE + 5) * WIDTH, 10 * WIDTH)
    return b_gate + load(p_bias, b_run, b_columns, b_inside, GATE * WIDTH, 5 * WIDTH)


@triton.jit
def _cell(
    p_products, p_bias, p_states, b_left, b_right, b_run, b_columns, b_inside, WIDTH: tl.constexpr,
):  # fmt: skip
    """Activations of a pair's gates, and its children's cells."""
    b_i = tl.sigmoid(_gate(p_products, p_bias, b_left, b_right, b_run, b_columns, b_inside, 0, WIDTH))
    b_l = _gate(p_products, p_bias, b_left, b_right, b_run, b_columns, b_inside, 1, WIDTH)
    b_r = _gate(p_products, p_bias, b_left, b_right, b_run, b_columns, b_inside, 2, WIDTH)
    b_u = tanh(_gate(p_products, p_bias, b_left, b_right, b_run, b_columns, b_inside, 3, WIDTH))
    b_o = tl.sigmoid(_gate(p_products, p_bias, b_left, b_right, b_run, b_columns, b_inside, 4, WIDTH))
    b_c_left = load(p_states, b_left, b_columns, b_inside, WIDTH, 2 * WIDTH)
    b_c_right = load(p_states, b_right, b_columns, b_inside, WIDTH, 2 * WIDTH)
    return b_i, tl.sigmoid(b_l + 1.0), tl.sigmoid(b_r + 1.0), b_u, b_o, b_c_left, b_c_right


@triton.jit
def _cell_grads(
    p_products, p_bias, p_states, b_left, b_right, b_run, b_columns, b_inside, b_grad_h, b_grad_c, p_gates,
    b_gates_line, p_cells, b_cells_line, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a pair's gates and of its children's cells."""
    b_i, b_l, b_r, b_u, b_o, b_c_left, b_c_right = _cell(
        p_products, p_bias, p_states, b_left, b_right, b_run, b_columns, b_inside, WIDTH
    )
    b_top = tanh(b_l * b_c_left + b_r * b_c_right + b_i * b_u)
    b_c = b_grad_c + b_grad_h * b_o * (1.0 - b_top * b_top)
    b_out = b_c * b_u * b_i * (1.0 - b_i)
    store(p_gates, b_gates_line, b_columns, b_inside, b_out, 0, 5 * WIDTH)
    b_out = b_c * b_c_left * b_l * (1.0 - b_l)
    store(p_gates, b_gates_line, b_columns, b_inside, b_out, WIDTH, 5 * WIDTH)
    b_out = b_c * b_c_right * b_r * (1.0 - b_r)
    store(p_gates, b_gates_line, b_columns, b_inside, b_out, 2 * WIDTH, 5 * WIDTH)
    b_out = b_c * b_i * (1.0 - b_u * b_u)
    store(p_gates, b_gates_line, b_columns, b_inside, b_out, 3 * WIDTH, 5 * WIDTH)
    b_out = b_grad_h * b_top * b_o * (1.0 - b_o)
    store(p_gates, b_gates_line, b_columns, b_inside, b_out, 4 * WIDTH, 5 * WIDTH)
    store(p_cells, b_cells_line, b_columns, b_inside, b_c * b_l, 0, 2 * WIDTH)
    store(p_cells, b_cells_line, b_columns, b_inside, b_c * b_r, WIDTH, 2 * WIDTH)


@sized
def form_kernel(
    p_products,
    p_bias,
    p_query,
    p_states,
    p_children,
    p_pair_states,
    p_pair_scores,
    s_lines,
    s_batch,
    s_pairs,
    s_start,
    s_count,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b_item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b_valid = b_item < s_lines
    b_run = b_item // (s_count * s_batch)
    # The items of a run are neighbours in the table, from its place `s_start` on.
    b_line = b_item + (b_run * (s_pairs - s_count) + s_start) * s_batch
    b_left = tl.load(p_children + 2 * b_line, mask=b_valid, other=0)
    b_right = tl.load(p_children + 2 * b_line + 1, mask=b_valid, other=0)
    b_score = tl.zeros((ROWS, COLUMNS), tl.float32)
    for FIRST in tl.static_range(0, WIDTH, COLUMNS):
        b_columns = FIRST + tl.arange(0, COLUMNS)
        b_inside = b_valid[:, None] & (b_columns < WIDTH)[None, :]
        b_i, b_l, b_r, b_u, b_o, b_c_left, b_c_right = _cell(
            p_products, p_bias, p_states, b_left, b_right, b_run, b_columns, b_inside, WIDTH
        )
        b_c = b_l * b_c_left + b_r * b_c_right + b_i * b_u
        b_h = b_o * tanh(b_c)
        store(p_pair_states, b_line, b_columns, b_inside, b_h, 0, 2 * WIDTH)
        store(p_pair_states, b_line, b_columns, b_inside, b_c, WIDTH, 2 * WIDTH)
        b_score += b_h * load(p_query, b_run, b_columns, b_inside, 0, WIDTH)
    tl.store(p_pair_scores + b_line, tl.sum(b_score, 1), mask=b_valid)


@sized
def scores_kernel(
    p_pair_scores,
    p_pairs,
    p_lengths,
    p_out,
    s_elements,
    s_batch,
    s_size,
    s_layer,
    BLOCK: tl.constexpr,
):
    b_element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_valid = b_element < s_elements
    b_row, b_place = b_element // s_size, b_element % s_size
    b_item = (b_row // s_batch * s_size + b_place) * s_batch + b_row % s_batch
    b_pair = tl.load(p_pairs + b_item, mask=b_valid, other=0)
    b_length = tl.load(p_lengths + b_row, mask=b_valid, other=0)
    b_score = tl.load(p_pair_scores + b_pair, mask=b_valid, other=0.0)
    b_score = tl.where(b_place < b_length - 1 - s_layer, b_score, -float("inf"))
    tl.store(p_out + b_element, b_score, mask=b_valid)


@sized
def merge_kernel(
    p_sample,
    p_nodes,
    p_pairs,
    p_lengths,
    p_pair_states,
    p_states,
    p_children,
    p_merged_at,
    p_merges,
    p_around,
    p_next_nodes,
    p_next_pairs,
    s_batch,
    s_size,
    s_layer,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    s_row = tl.program_id(0)
    s_run, s_column = s_row // s_batch, s_row % s_batch
    s_count = s_size + 1 + s_layer
    b_place = tl.arange(0, PLACES)
    b_sample = tl.load(p_sample + s_row * s_size + b_place, mask=b_place < s_size, other=0.0)
    s_place = tl.max(tl.where(b_sample > 0.5, b_place, 0), 0)
    s_left = tl.load(p_lengths + s_row) - s_layer
    s_alive = s_left > 1
    s_at = (s_run * (s_count - 1) + s_layer) * s_batch + s_column
    tl.store(p_merges + s_at, tl.where(s_alive, s_place, -1))
    s_chosen = tl.where(s_alive, s_place, s_size + 1)

    # Lines of the new node and of the first new pair, which the second follows a batch later.
    s_fresh = (s_run * (2 * s_count - 1) + s_count + s_layer) * s_batch + s_column
    s_pair = (s_run * (3 * s_count - 5) + s_count - 1 + 2 * s_layer) * s_batch + s_column
    p_nodes += s_run * (s_size + 1) * s_batch + s_column
    p_pairs += s_run * s_size * s_batch + s_column
    b_near = tl.arange(0, 8)
    b_at = s_chosen - 2 + b_near
    b_exists = s_alive & (b_at >= 0) & (b_at < s_left)
    b_line = tl.load(p_nodes + b_at * s_batch, mask=b_exists, other=-1)
    tl.store(p_around + s_at * 11 + b_near, b_line, mask=b_near < 6)
    b_line = tl.load(p_pairs + b_at * s_batch, mask=b_exists & (b_at < s_left - 1), other=-1)
    tl.store(p_around + s_at * 11 + 6 + b_near, b_line, mask=b_near < 5)
    b_from = (b_place + (b_place >= s_chosen).to(tl.int32)) * s_batch
    b_kept = tl.load(p_nodes + b_from, mask=b_place < s_size, other=0)
    b_kept = tl.where(b_place == s_chosen, s_fresh, b_kept)
    p_next_nodes += s_run * s_size * s_batch + s_column
    tl.store(p_next_nodes + b_place * s_batch, b_kept, mask=b_place < s_size)
    b_kept = tl.load(p_pairs + b_from, mask=b_place < s_size - 1, other=0)
    b_kept = tl.where(b_place == s_chosen - 1, s_pair, b_kept)
    b_kept = tl.where(b_place == s_chosen, s_pair + s_batch, b_kept)
    p_next_pairs += s_run * (s_size - 1) * s_batch + s_column
    tl.store(p_next_pairs + b_place * s_batch, b_kept, mask=b_place < s_size - 1)

    s_picked = tl.load(p_pairs + tl.minimum(s_chosen, s_size - 1) * s_batch)
    tl.store(p_merged_at + s_picked, s_layer, mask=s_alive)
    s_before = tl.load(p_nodes + tl.minimum(tl.maximum(s_chosen - 1, 0), s_size) * s_batch)
    s_after = tl.load(p_nodes + tl.minimum(s_chosen + 2, s_size) * s_batch)
    tl.store(p_children + 2 * s_pair, s_before, mask=s_size > 1)
    tl.store(p_children + 2 * s_pair + 1, s_fresh, mask=s_size > 1)
    tl.store(p_children + 2 * (s_pair + s_batch), s_fresh, mask=s_size > 1)
    tl.store(p_children + 2 * (s_pair + s_batch) + 1, s_after, mask=s_size > 1)
    b_columns = tl.arange(0, COLUMNS)
    b_inside = b_columns < 2 * WIDTH
    b_state = tl.load(p_pair_states + s_picked.to(tl.int64) * (2 * WIDTH) + b_columns, mask=b_inside)
    tl.store(p_states + s_fresh.to(tl.int64) * (2 * WIDTH) + b_columns, b_state, mask=b_inside)


@sized
def slopes_kernel(
    p_products,
    p_bias,
    p_query,
    p_states,
    p_children,
    p_gates,
    p_cells,
    p_h,
    s_lines,
    s_batch,
    s_pairs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b_line, b_valid, b_columns, b_inside = block(s_lines, ROWS, COLUMNS, WIDTH)
    b_run = b_line // (s_pairs * s_batch)
    b_left = tl.load(p_children + 2 * b_line, mask=b_valid, other=0)
    b_right = tl.load(p_children + 2 * b_line + 1, mask=b_valid, other=0)
    b_h = load(p_states, b_left, b_columns, b_inside, 0, 2 * WIDTH)
    store(p_h, b_line, b_columns, b_inside, b_h, 0, 2 * WIDTH)
    b_h = load(p_states, b_right, b_columns, b_inside, 0, 2 * WIDTH)
    store(p_h, b_line, b_columns, b_inside, b_h, WIDTH, 2 * WIDTH)
    b_query = load(p_query, b_run, b_columns, b_inside, 0, WIDTH)
    _cell_grads(
        p_products, p_bias, p_states, b_left, b_right, b_run, b_columns, b_inside, b_query,
        tl.zeros_like(b_query), p_gates, b_line, p_cells, b_line, WIDTH,
    )  # fmt: skip


@sized
def select_kernel(
    p_adjoints,
    p_products,
    p_bias,
    p_states,
    p_children,
    p_pairs,
    p_merges,
    p_gates,
    p_cells,
    s_rows,
    s_batch,
    s_size,
    s_layers,
    s_layer,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b_row, b_valid, b_columns, b_inside = block(s_rows, ROWS, COLUMNS, WIDTH)
    b_run, b_column = b_row // s_batch, b_row % s_batch
    b_merge = tl.load(p_merges + (b_run * s_layers + s_layer) * s_batch + b_column, mask=b_valid, other=-1)
    b_item = (b_run * s_size + tl.maximum(b_merge, 0)) * s_batch + b_column
    b_pair = tl.load(p_pairs + b_item, mask=b_valid, other=0)
    b_left = tl.load(p_children + 2 * b_pair, mask=b_valid, other=0)
    b_right = tl.load(p_children + 2 * b_pair + 1, mask=b_valid, other=0)
    b_merged = b_inside & (b_merge >= 0)[:, None]
    b_node = (b_run * (2 * s_layers + 1) + s_layers + 1 + s_layer) * s_batch + b_column
    b_grad_h = load(p_adjoints, b_node, b_columns, b_merged, 0, 2 * WIDTH)
    b_grad_c = load(p_adjoints, b_node, b_columns, b_merged, WIDTH, 2 * WIDTH)
    _cell_grads(
        p_products, p_bias, p_states, b_left, b_right, b_run, b_columns, b_inside, b_grad_h, b_grad_c,
        p_gates, b_run * (s_layers * s_batch) + b_column, p_cells, b_row, WIDTH,
    )  # fmt: skip


@sized
def totals_kernel(
    p_gates,
    p_weights,
    p_merged_at,
    p_selected,
    s_lines,
    s_batch,
    s_pairs,
    s_layers,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """In place; here a line has `WIDTH` elements in all."""
    b_line, b_valid, b_columns, b_inside = block(s_lines, ROWS, COLUMNS, WIDTH)
    b_run = b_line // (s_pairs * s_batch)
    b_weight = tl.load(p_weights + b_line, mask=b_valid, other=0.0)
    b_layer = tl.load(p_merged_at + b_line, mask=b_valid, other=-1)
    b_from = (b_run * s_layers + b_layer) * s_batch + b_line % s_batch
    b_sum = b_weight[:, None] * load(p_gates, b_line, b_columns, b_inside, 0, WIDTH)
    b_sum += load(p_selected, b_from, b_columns, b_inside & (b_layer >= 0)[:, None], 0, WIDTH)
    store(p_gates, b_line, b_columns, b_inside, b_sum, 0, WIDTH)


@triton.jit
def _line(b_row, s_batch, s_run, s_row):
    """Line of a row whose runs are `s_run` and whose rows are `s_row` lines apart."""
    return (b_row // s_batch).to(tl.int64) * s_run + b_row % s_batch * s_row


@sized
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


@sized
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
