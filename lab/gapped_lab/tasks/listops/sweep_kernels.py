"""Triton kernels for the backward sweep of the tree: one program for each row.

A row's program reads a few lines around the layer's merge and some numbers of each of its pairs. A line that
does not exist is -1, and zero when read. `Sweep` is the definition.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped_lab.tasks.listops.tree_kernels import sized


@triton.jit
def _take(p, s_line, b_columns, b_inside, START: tl.constexpr, STRIDE: tl.constexpr):
    return tl.load(p + s_line * STRIDE + (b_columns + START), mask=b_inside & (s_line >= 0), other=0.0)


@triton.jit
def _put(p, s_line, b_columns, b_inside, b_value, START: tl.constexpr, STRIDE: tl.constexpr):
    tl.store(p + s_line * STRIDE + (b_columns + START), b_value, mask=b_inside & (s_line >= 0))


@triton.jit
def _two(p, s_line, s_first, s_second, FROM: tl.constexpr):
    """Store two adjacent ones of a line's four numbers."""
    tl.store(p + s_line * 4 + FROM, s_first, mask=s_line >= 0)
    tl.store(p + s_line * 4 + (FROM + 1), s_second, mask=s_line >= 0)


@triton.jit
def _place(s_row, s_batch, s_layers, s_layer):
    """A row's run, its place in it, its line by layer, and those of the node and first pair the layer made."""
    s_run = (s_row // s_batch).to(tl.int64)
    s_column = s_row % s_batch
    s_count = s_layers + 1
    s_at = (s_run * s_layers + s_layer) * s_batch + s_column
    s_new = (s_run * (2 * s_count - 1) + s_count + s_layer) * s_batch + s_column
    s_pair = (s_run * (3 * s_count - 5) + s_count - 1 + 2 * s_layer) * s_batch + s_column
    return s_run, s_column, s_at, s_new, s_pair


@triton.jit
def relate_kernel(
    p_around,
    p_states,
    p_pair_states,
    p_score_h,
    p_score_cells,
    p_own,
    p_cross,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Four programs for each row of each layer: one for each node that two pairs share, q and p.

    What p's own weight does is found on the way, but for the last p, which is not next to the merge.
    """
    s_slot = tl.program_id(0) % 4
    s_row = (tl.program_id(0) // 4).to(tl.int64)
    p_around += s_row * 11 + s_slot
    s_0, s_1, s_2 = tl.load(p_around), tl.load(p_around + 1), tl.load(p_around + 2)
    s_q, s_p = tl.load(p_around + 6), tl.load(p_around + 7)
    b_none = tl.zeros((COLUMNS,), tl.float32)
    b_left_e, b_left_f, b_right_e, b_right_f = b_none, b_none, b_none, b_none
    b_q_e, b_q_f, b_p_e, b_p_f = b_none, b_none, b_none, b_none
    for HALF in tl.static_range(0, 2):
        p_slope = p_score_h if HALF == 0 else p_score_cells
        for FIRST in tl.static_range(0, WIDTH, COLUMNS):
            b_columns = FIRST + tl.arange(0, COLUMNS)
            b_inside = b_columns < WIDTH
            b_0 = _take(p_states, s_0, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_1 = _take(p_states, s_1, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_2 = _take(p_states, s_2, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_e = _take(p_pair_states, s_p, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH) - b_2
            b_f = b_2 - b_1
            b_left = _take(p_slope, s_p, b_columns, b_inside, 0, 2 * WIDTH)
            b_left_e += b_left * b_e
            b_left_f += b_left * b_f
            b_right = _take(p_slope, s_p, b_columns, b_inside, WIDTH, 2 * WIDTH)
            b_right_e += b_right * b_e
            b_right_f += b_right * b_f
            b_right = _take(p_slope, s_q, b_columns, b_inside, WIDTH, 2 * WIDTH)
            b_q_e += b_right * b_e
            b_q_f += b_right * b_f
            b_state = _take(p_pair_states, s_q, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_p_e += b_left * (b_state - b_1)
            b_p_f += b_left * (b_1 - b_0)
    s_own = tl.where(s_slot < 3, s_p, -1)
    _two(p_own, s_own, tl.sum(b_left_e, 0), tl.sum(b_left_f, 0), 0)
    _two(p_own, s_own, tl.sum(b_right_e, 0), tl.sum(b_right_f, 0), 2)
    s_both = (s_q >= 0) & (s_p >= 0)
    s_at = s_row * 4 + s_slot
    _two(p_cross, s_at, tl.where(s_both, tl.sum(b_q_e, 0), 0.0), tl.where(s_both, tl.sum(b_q_f, 0), 0.0), 0)
    _two(p_cross, s_at, tl.where(s_both, tl.sum(b_p_e, 0), 0.0), tl.where(s_both, tl.sum(b_p_f, 0), 0.0), 2)


@sized
def pull_kernel(
    p_around,
    p_states,
    p_pair_states,
    p_pairs,
    p_merges,
    p_score_h,
    p_score_cells,
    p_adjoints,
    p_weights,
    p_gains,
    p_out,
    s_batch,
    s_size,
    s_layers,
    s_layer,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
):
    s_row = tl.program_id(0)
    s_run, s_column, s_at, s_new, s_on_left = _place(s_row, s_batch, s_layers, s_layer)
    p_around += s_at * 11
    s_x, s_left, s_right = tl.load(p_around + 1), tl.load(p_around + 2), tl.load(p_around + 3)
    s_y, s_far_left, s_before = tl.load(p_around + 4), tl.load(p_around + 6), tl.load(p_around + 7)
    s_merged, s_after, s_far_right = tl.load(p_around + 8), tl.load(p_around + 9), tl.load(p_around + 10)
    s_new = tl.where(s_merged >= 0, s_new, -1)
    s_on_right = tl.where(s_y >= 0, s_on_left + s_batch, -1)
    s_on_left = tl.where(s_x >= 0, s_on_left, -1)
    s_w_left = tl.load(p_weights + s_on_left, mask=s_on_left >= 0, other=0.0)
    s_w_right = tl.load(p_weights + s_on_right, mask=s_on_right >= 0, other=0.0)
    s_w_far_left = tl.load(p_weights + s_far_left, mask=s_far_left >= 0, other=0.0)
    s_w_far_right = tl.load(p_weights + s_far_right, mask=s_far_right >= 0, other=0.0)
    b_none = tl.zeros((COLUMNS,), tl.float32)
    b_x_e, b_x_f, b_new_e, b_new_f, b_y_e, b_y_f = b_none, b_none, b_none, b_none, b_none, b_none
    for HALF in tl.static_range(0, 2):
        p_slope = p_score_h if HALF == 0 else p_score_cells
        for FIRST in tl.static_range(0, WIDTH, COLUMNS):
            b_columns = FIRST + tl.arange(0, COLUMNS)
            b_inside = b_columns < WIDTH
            b_left = _take(p_states, s_left, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_right = _take(p_states, s_right, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_a = _take(p_adjoints, s_x, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_a += s_w_left * _take(p_slope, s_on_left, b_columns, b_inside, 0, 2 * WIDTH)
            _put(p_adjoints, s_x, b_columns, b_inside, b_a, HALF * WIDTH, 2 * WIDTH)
            b_a += s_w_far_left * _take(p_slope, s_far_left, b_columns, b_inside, WIDTH, 2 * WIDTH)
            b_x_e += b_a * (
                _take(p_pair_states, s_before, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH) - b_left
            )
            b_x_f += b_a * (b_left - _take(p_states, s_x, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH))
            b_a = _take(p_adjoints, s_new, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_a += s_w_left * _take(p_slope, s_on_left, b_columns, b_inside, WIDTH, 2 * WIDTH)
            b_a += s_w_right * _take(p_slope, s_on_right, b_columns, b_inside, 0, 2 * WIDTH)
            _put(p_adjoints, s_new, b_columns, b_inside, b_a, HALF * WIDTH, 2 * WIDTH)
            b_state = _take(p_pair_states, s_merged, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_new_e += b_a * (b_state - b_right)
            b_new_f += b_a * (b_right - b_left)
            b_a = _take(p_adjoints, s_y, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_a += s_w_right * _take(p_slope, s_on_right, b_columns, b_inside, WIDTH, 2 * WIDTH)
            _put(p_adjoints, s_y, b_columns, b_inside, b_a, HALF * WIDTH, 2 * WIDTH)
            b_a += s_w_far_right * _take(p_slope, s_far_right, b_columns, b_inside, 0, 2 * WIDTH)
            b_state = _take(p_states, s_y, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_y_e += b_a * (
                _take(p_pair_states, s_after, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH) - b_state
            )
            b_y_f += b_a * (b_state - b_right)
    s_x_e, s_x_f, s_y_e, s_y_f = tl.sum(b_x_e, 0), tl.sum(b_x_f, 0), tl.sum(b_y_e, 0), tl.sum(b_y_f, 0)
    _two(p_gains, s_before, s_x_e, s_x_f, 0)
    _two(p_gains, s_after, s_y_e, s_y_f, 2)

    s_merge = tl.load(p_merges + s_at)
    b_place = tl.arange(0, PLACES)
    b_here = b_place < s_size
    b_pair = tl.load(p_pairs + (s_run * s_size + b_place) * s_batch + s_column, mask=b_here, other=0)
    p_gain = p_gains + b_pair * 4 + tl.where(b_place < s_merge, 0, 2)
    # What has just been stored is not read again.
    b_here = b_here & ((b_place < s_merge - 1) | (b_place > s_merge + 1))
    b_direct = tl.load(p_gain, mask=b_here, other=0.0)
    b_moved = tl.load(p_gain + 1, mask=b_here, other=0.0)
    b_direct = tl.where(b_place == s_merge - 1, s_x_e, b_direct)
    b_direct = tl.where(b_place == s_merge, tl.sum(b_new_e, 0), b_direct)
    b_direct = tl.where(b_place == s_merge + 1, s_y_e, b_direct)
    b_moved = tl.where(b_place == s_merge - 1, s_x_f, b_moved)
    b_moved = tl.where(b_place == s_merge, tl.sum(b_new_f, 0), b_moved)
    b_moved = tl.where(b_place == s_merge + 1, s_y_f, b_moved)
    b_moved = tl.where(b_place < s_size, b_moved, 0.0)
    b_value = b_direct + tl.cumsum(b_moved, 0, reverse=True)
    tl.store(p_out + s_row * s_size + b_place, b_value, mask=b_place < s_size)


@triton.jit
def _link(p_links, p_cross, b_node, b_slot, b_here, NUMBER: tl.constexpr):
    """A number of the links of nodes: those around the merge have new ones."""
    b_new = (b_slot >= 0) & (b_slot < 4)
    b_value = tl.load(p_links + b_node * 4 + NUMBER, mask=b_here & ~b_new, other=0.0)
    return b_value + tl.load(p_cross + b_slot * 4 + NUMBER, mask=b_here & b_new, other=0.0)


@sized
def push_kernel(
    p_around,
    p_states,
    p_pair_states,
    p_lengths,
    p_nodes,
    p_pairs,
    p_merges,
    p_g_h,
    p_g_cells,
    p_delta,
    p_adjoints,
    p_weights,
    p_gains,
    p_own,
    p_cross,
    p_links,
    s_batch,
    s_size,
    s_layers,
    s_layer,
    SCORED: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
):
    s_row = tl.program_id(0)
    s_run, s_column, s_at, _, _ = _place(s_row, s_batch, s_layers, s_layer)
    p_around += s_at * 11
    p_cross += s_at * 16
    s_x, s_left, s_right = tl.load(p_around + 1), tl.load(p_around + 2), tl.load(p_around + 3)
    s_y, s_before = tl.load(p_around + 4), tl.load(p_around + 7)
    s_merged, s_after = tl.load(p_around + 8), tl.load(p_around + 9)
    b_none = tl.zeros((COLUMNS,), tl.float32)
    b_before_e, b_before_f, b_after_e, b_after_f = b_none, b_none, b_none, b_none
    b_left_e, b_left_f, b_right_e, b_right_f = b_none, b_none, b_none, b_none
    for HALF in tl.static_range(0, 2):
        p_own_grad = (p_g_h if HALF == 0 else p_g_cells) + s_row.to(tl.int64) * (2 * WIDTH)
        for FIRST in tl.static_range(0, WIDTH, COLUMNS):
            b_columns = FIRST + tl.arange(0, COLUMNS)
            b_inside = b_columns < WIDTH
            b_x = _take(p_states, s_x, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_left = _take(p_states, s_left, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_right = _take(p_states, s_right, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_y = _take(p_states, s_y, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_e = _take(p_pair_states, s_merged, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH) - b_right
            b_f = b_right - b_left
            b_a = tl.load(p_own_grad + b_columns, mask=b_inside, other=0.0)
            _put(p_adjoints, s_left, b_columns, b_inside, b_a, HALF * WIDTH, 2 * WIDTH)
            b_left_e += b_a * b_e
            b_left_f += b_a * b_f
            b_state = _take(p_pair_states, s_before, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_before_e += b_a * (b_state - b_left)
            b_before_f += b_a * (b_left - b_x)
            b_a = tl.load(p_own_grad + (b_columns + WIDTH), mask=b_inside, other=0.0)
            _put(p_adjoints, s_right, b_columns, b_inside, b_a, HALF * WIDTH, 2 * WIDTH)
            b_right_e += b_a * b_e
            b_right_f += b_a * b_f
            b_state = _take(p_pair_states, s_after, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_after_e += b_a * (b_state - b_y)
            b_after_f += b_a * (b_y - b_right)

    b_number = tl.arange(0, 16)
    b_middle = tl.load(p_around + 1 + b_number // 4)
    tl.store(p_links + b_middle * 4 + b_number % 4, tl.load(p_cross + b_number), mask=b_middle >= 0)

    s_merge = tl.load(p_merges + s_at)
    b_place = tl.arange(0, PLACES)
    b_here = b_place < s_size
    b_pair = tl.load(p_pairs + (s_run * s_size + b_place) * s_batch + s_column, mask=b_here, other=0)
    p_gain = p_gains + b_pair * 4
    b_0, b_1 = tl.load(p_gain, mask=b_here, other=0.0), tl.load(p_gain + 1, mask=b_here, other=0.0)
    b_2, b_3 = tl.load(p_gain + 2, mask=b_here, other=0.0), tl.load(p_gain + 3, mask=b_here, other=0.0)
    # The children of the merged pair begin: with it, and with their pairs beside it.
    b_is = b_place == s_merge
    b_0 = tl.where(b_is, tl.sum(b_left_e, 0), b_0)
    b_1 = tl.where(b_is, tl.sum(b_left_f, 0), b_1)
    b_2 = tl.where(b_is, tl.sum(b_right_e, 0), b_2)
    b_3 = tl.where(b_is, tl.sum(b_right_f, 0), b_3)
    b_is = b_place == s_merge - 1
    b_2 = tl.where(b_is, tl.sum(b_before_e, 0), b_2)
    b_3 = tl.where(b_is, tl.sum(b_before_f, 0), b_3)
    b_is = (b_place == s_merge + 1) & (s_after >= 0)
    b_0 = tl.where(b_is, tl.sum(b_after_e, 0), b_0)
    b_1 = tl.where(b_is, tl.sum(b_after_f, 0), b_1)
    # Beyond the expression nothing changes.
    s_last = tl.load(p_lengths + s_row) - 2 - s_layer
    b_here = b_here & (b_place <= s_last)
    if SCORED:
        p_scored = p_delta + s_row * s_size + b_place
        b_delta = tl.load(p_scored, mask=b_here, other=0.0)
        b_before = tl.load(p_scored - 1, mask=b_here & (b_place > 0), other=0.0)
        b_after = tl.load(p_scored + 1, mask=b_here & (b_place < s_last), other=0.0)
        b_weight = tl.load(p_weights + b_pair, mask=b_here, other=0.0)
        tl.store(p_weights + b_pair, b_weight + b_delta, mask=b_here)
        p_node = p_nodes + (s_run * (s_size + 1) + b_place) * s_batch + s_column
        b_node = tl.load(p_node, mask=b_here, other=0)
        b_next = tl.load(p_node + s_batch, mask=b_here, other=0)
        b_slot = b_place - (s_merge - 1)
        p_change = p_own + b_pair * 4
        b_0 += b_delta * tl.load(p_change, mask=b_here, other=0.0)
        b_1 += b_delta * tl.load(p_change + 1, mask=b_here, other=0.0)
        b_2 += b_delta * tl.load(p_change + 2, mask=b_here, other=0.0)
        b_3 += b_delta * tl.load(p_change + 3, mask=b_here, other=0.0)
        b_0 += b_before * _link(p_links, p_cross, b_node, b_slot, b_here, 0)
        b_1 += b_before * _link(p_links, p_cross, b_node, b_slot, b_here, 1)
        b_2 += b_after * _link(p_links, p_cross, b_next, b_slot + 1, b_here, 2)
        b_3 += b_after * _link(p_links, p_cross, b_next, b_slot + 1, b_here, 3)
    tl.store(p_gain, b_0, mask=b_here)
    tl.store(p_gain + 1, b_1, mask=b_here)
    tl.store(p_gain + 2, b_2, mask=b_here)
    tl.store(p_gain + 3, b_3, mask=b_here)


@sized
def collect_kernel(
    p_adjoints,
    p_weights,
    p_score_h,
    p_score_cells,
    p_out,
    s_batch,
    s_count,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program for each leaf."""
    s_leaf = tl.program_id(0).to(tl.int64)
    s_run, s_place = s_leaf // (s_count * s_batch), s_leaf // s_batch % s_count
    s_from = s_leaf + s_run * (s_count - 1) * s_batch
    s_pair = s_leaf + s_run * (2 * s_count - 5) * s_batch
    s_before = tl.where(s_place > 0, s_pair - s_batch, -1)
    s_pair = tl.where(s_place < s_count - 1, s_pair, -1)
    s_w_before = tl.load(p_weights + s_before, mask=s_before >= 0, other=0.0)
    s_w_pair = tl.load(p_weights + s_pair, mask=s_pair >= 0, other=0.0)
    for HALF in tl.static_range(0, 2):
        p_slope = p_score_h if HALF == 0 else p_score_cells
        for FIRST in tl.static_range(0, WIDTH, COLUMNS):
            b_columns = FIRST + tl.arange(0, COLUMNS)
            b_inside = b_columns < WIDTH
            b_a = _take(p_adjoints, s_from, b_columns, b_inside, HALF * WIDTH, 2 * WIDTH)
            b_a += s_w_pair * _take(p_slope, s_pair, b_columns, b_inside, 0, 2 * WIDTH)
            b_a += s_w_before * _take(p_slope, s_before, b_columns, b_inside, WIDTH, 2 * WIDTH)
            _put(p_out, s_leaf, b_columns, b_inside, b_a, HALF * WIDTH, 2 * WIDTH)
