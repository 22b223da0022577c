"""Samples in one pass forward and one pass backward, for rows that fit into a block.

The forward pass reads the logits and writes the sample and its index. The backward pass reads logits,
index and incoming gradient and writes the gradient. Arithmetic is in float32 whatever the dtype of the
logits, running sums in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.parts import (
    DECOUPLED,
    GST,
    GUMBEL,
    RAO,
    REINMAX,
    capped,
    exponential,
    gumbel,
    lawless,
    level,
    rao_bits,
    rao_odds,
    rao_weight,
    reciprocal,
    row_uniforms,
    selected_gap,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_block(
    s_rows, s_categories, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, COPIES: tl.constexpr = False
):
    """Rows and columns of this program, and which of them exist; with `COPIES` one row as often as rows fit."""
    b_rows = tl.arange(0, BLOCK_ROWS)
    if COPIES:
        b_rows = tl.program_id(0).to(tl.int64) + b_rows * 0
    else:
        b_rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + b_rows
    b_columns = tl.arange(0, BLOCK_COLUMNS)
    b_row_inside = b_rows < s_rows
    return b_rows, b_columns, b_row_inside, b_row_inside[:, None] & (b_columns < s_categories)[None, :]


@triton.jit
def load_rows(p, b_rows, b_columns, s_stride, b_inside, other):
    return tl.load(p + b_rows[:, None] * s_stride + b_columns[None, :], mask=b_inside, other=other)


@triton.jit
def store_rows(p, b_rows, b_columns, s_stride, b_inside, b_values):
    p_to = p + b_rows[:, None] * s_stride + b_columns[None, :]
    tl.store(p_to, b_values.to(p.dtype.element_ty), mask=b_inside)


@triton.jit
def _shifted(b_logits):
    """Logits relative to the largest of their row; a row without categories stays -inf."""
    b_top = tl.max(b_logits, 1)
    return b_logits - tl.where(b_top == -float("inf"), 0.0, b_top)[:, None]


@triton.jit
def normalised(b_shifted):
    b_weights = tl.exp(b_shifted)
    return b_weights * capped(tl.sum(b_weights, 1))[:, None]


@triton.jit
def exceeds(b_running, b_threshold, b_weights):
    """Which categories an inverse CDF may choose: those whose running sum is above the threshold."""
    # The sum may exceed the last running sum by some roundings: then the last category must win.
    b_threshold = b_threshold * 0.99999999999999
    # A category without weight never wins, however the running sum was rounded.
    return (b_running > b_threshold[:, None]) & (b_weights > 0)


@triton.jit
def _through(b_point, b_grad):
    """J(q) g."""
    return b_point * (b_grad - tl.sum(b_point * b_grad, 1)[:, None])


@triton.jit
def _gap(
    p_gap,
    s_gap,
    s_every,
    b_rows,
    b_row_inside,
    b_shifted,
    b_selected,
    EXPECTED: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    if EXPECTED:
        b_gap = selected_gap(tl.sum(tl.where(b_selected, normalised(b_shifted), 0.0), 1))
    else:
        b_gap = level(p_gap, s_gap, s_every, b_rows, b_row_inside, PER_ROW)
    return b_gap[:, None]


@triton.jit
def _surrogate(
    s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE: tl.constexpr, FAST: tl.constexpr
):
    """The point of the simplex that carries the gradient, for the estimators that have just one."""
    if MODE == GST:
        b_scores = tl.where(b_selected, 0.0, tl.minimum(b_shifted, -b_gap)) / b_tau
    elif MODE == GUMBEL:
        b_scores = _shifted(b_shifted + gumbel(s_seed, b_element, FAST)) / b_tau
    elif MODE == DECOUPLED:
        b_scores = _shifted(b_shifted / b_tau + gumbel(s_seed, b_element, FAST))
    else:
        b_scores = b_shifted / b_tau
    return normalised(b_scores)


@triton.jit
def _odds(b_shifted, b_selected):
    b_total = tl.sum(tl.exp(b_shifted), 1)
    b_log2_p = b_shifted * _LOG2_E - tl.log2(tl.where(b_total == 0, 1.0, b_total))[:, None]
    return rao_odds(b_log2_p, b_selected)


@triton.jit
def _rao_add(
    b_acc,
    b_bits,
    b_winner,
    b_odds,
    b_drop,
    b_grad,
    b_sharpness,
    s_share,
    SOFT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add one conditional draw: its point to a soft sample, or its J(q) g to a gradient."""
    b_noise = exponential(b_bits, FAST)
    # Both sums are positive, but in rows without categories, whose result is overwritten.
    b_scale = reciprocal(tl.sum(b_noise * b_winner, 1), FAST)[:, None]
    b_weight = rao_weight(b_noise, b_odds, b_drop, b_scale, b_sharpness, FAST)
    b_norm = reciprocal(tl.sum(b_weight, 1), FAST)[:, None]
    if SOFT:
        return b_acc + s_share * (b_weight * b_norm)
    else:
        # The two sums do not wait for each other.
        b_mean = tl.sum(b_weight * b_grad, 1)[:, None] * b_norm
        return b_acc + s_share * (b_weight * b_norm * (b_grad - b_mean))


@triton.jit
def _rao_some(
    b_acc, s_seed, b_element, b_block, b_left, b_winner, b_odds, b_drop, b_grad, b_sharpness,
    SOFT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add four conditional draws, or as many as are left."""
    b_0, b_1, b_2, b_3 = rao_bits(s_seed, b_element, b_block)
    b_one = (b_left > 0).to(tl.float32)
    b_acc = _rao_add(b_acc, b_0, b_winner, b_odds, b_drop, b_grad, b_sharpness, b_one, SOFT, FAST)
    b_one = (b_left > 1).to(tl.float32)
    b_acc = _rao_add(b_acc, b_1, b_winner, b_odds, b_drop, b_grad, b_sharpness, b_one, SOFT, FAST)
    b_one = (b_left > 2).to(tl.float32)
    b_acc = _rao_add(b_acc, b_2, b_winner, b_odds, b_drop, b_grad, b_sharpness, b_one, SOFT, FAST)
    b_one = (b_left > 3).to(tl.float32)
    return _rao_add(b_acc, b_3, b_winner, b_odds, b_drop, b_grad, b_sharpness, b_one, SOFT, FAST)


@triton.jit
def _rao(
    s_seed, b_element, b_odds, b_rest, b_grad, b_sharpness, s_samples, SHARES: tl.constexpr,
    SOFT: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The sum over all conditional draws. The winner's noise is that of its own element.

    With more than one of `SHARES`, the rows of the block are so many copies of one, each with its share.
    """
    b_acc = tl.zeros_like(b_odds)
    # This ties the numbers to the threads that hold the loaded values: otherwise the noise of every draw would
    # go from thread to thread through shared memory.
    b_element = tl.where(b_odds >= 0, b_element, 0)
    b_winner = (b_odds == 0).to(tl.float32)
    b_drop = b_rest * b_sharpness
    if SHARES > 1:
        b_share = tl.arange(0, SHARES)[:, None]
        for s_turn in range(0, (s_samples + 4 * SHARES - 1) // (4 * SHARES)):
            b_block = s_turn * SHARES + b_share
            b_acc = _rao_some(
                b_acc, s_seed, b_element, b_block, s_samples - 4 * b_block, b_winner, b_odds, b_drop, b_grad,
                b_sharpness, SOFT, FAST,
            )  # fmt: skip
        b_acc = tl.broadcast_to(tl.sum(b_acc, 0)[None, :], b_acc.shape)
    else:
        for s_block in range(0, s_samples // 4):
            b_0, b_1, b_2, b_3 = rao_bits(s_seed, b_element, s_block)
            b_acc = _rao_add(b_acc, b_0, b_winner, b_odds, b_drop, b_grad, b_sharpness, 1.0, SOFT, FAST)
            b_acc = _rao_add(b_acc, b_1, b_winner, b_odds, b_drop, b_grad, b_sharpness, 1.0, SOFT, FAST)
            b_acc = _rao_add(b_acc, b_2, b_winner, b_odds, b_drop, b_grad, b_sharpness, 1.0, SOFT, FAST)
            b_acc = _rao_add(b_acc, b_3, b_winner, b_odds, b_drop, b_grad, b_sharpness, 1.0, SOFT, FAST)
        s_left = s_samples % 4
        if s_left > 0:
            b_acc = _rao_some(
                b_acc, s_seed, b_element, s_samples // 4, s_left, b_winner, b_odds, b_drop, b_grad,
                b_sharpness, SOFT, FAST,
            )  # fmt: skip
    return b_acc


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_gap_every", "s_tau_forward_every", "s_samples"])
def forward_kernel(
    p_logits,
    p_seed,
    p_tau,
    p_gap,
    p_tau_forward,
    p_value,
    p_index,
    s_rows,
    s_categories,
    s_stride,
    s_tau_every,
    s_gap_every,
    s_tau_forward_every,
    s_tau,
    s_gap,
    s_tau_forward,
    s_samples,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    TAU_FORWARD_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    SOFT: tl.constexpr,
    DENSE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    b_rows, b_columns, b_row_inside, b_inside = row_block(s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, b_rows, b_columns, s_stride, b_inside, -float("inf")).to(tl.float32)
    b_shifted = _shifted(b_logits)
    b_element = b_rows[:, None] * s_categories + b_columns[None, :]
    s_seed = tl.load(p_seed)
    if (MODE == GUMBEL) or (MODE == DECOUPLED):
        b_tau_forward = level(
            p_tau_forward, s_tau_forward, s_tau_forward_every, b_rows, b_row_inside, TAU_FORWARD_PER_ROW
        )
        b_scores = b_shifted / b_tau_forward[:, None] + gumbel(s_seed, b_element, FAST)
        b_best = tl.max(b_scores, 1)
        b_wins = (b_scores == b_best[:, None]) & (b_shifted > -float("inf"))
        # Minima and maxima pass over a NaN on a GPU, sums do not.
        b_nan = (tl.sum(lawless(b_logits).to(tl.int32), 1) > 0) | (b_tau_forward != b_tau_forward)
    else:
        b_weights = tl.exp(b_shifted)
        b_running = tl.cumsum(b_weights.to(tl.float64), 1)
        b_total = tl.sum(b_weights.to(tl.float64), 1)
        b_u, _ = row_uniforms(s_seed, b_rows)
        b_wins = exceeds(b_running, b_u * b_total, b_weights)
        b_nan = b_total != b_total
    b_index = tl.min(tl.where(b_wins, b_columns[None, :], s_categories), 1)
    b_index = tl.where(b_nan, s_categories + 1, b_index)
    tl.store(p_index + b_rows, b_index, mask=b_row_inside)
    if DENSE:
        b_selected = b_columns[None, :] == b_index[:, None]
        if SOFT:
            b_tau = level(p_tau, s_tau, s_tau_every, b_rows, b_row_inside, TAU_PER_ROW)[:, None]
            if MODE == RAO:
                b_odds, b_rest = _odds(b_shifted, b_selected)
                b_value = _rao(
                    s_seed, b_element, b_odds, b_rest, b_odds, 1.0 / b_tau, s_samples, 1, True, FAST
                )
                b_value = b_value / s_samples
            else:
                b_gap = b_tau
                if MODE == GST:
                    b_gap = _gap(
                        p_gap, s_gap, s_gap_every, b_rows, b_row_inside, b_shifted, b_selected, EXPECTED_GAP,
                        GAP_PER_ROW,
                    )  # fmt: skip
                b_value = _surrogate(s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE, FAST)
            b_value = tl.where((b_index == s_categories)[:, None], 0.0, b_value)
        else:
            b_value = b_selected.to(tl.float32)
        b_value = tl.where(b_nan[:, None], float("nan"), b_value)
        store_rows(p_value, b_rows, b_columns, s_categories, b_inside, b_value)


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_gap_every", "s_samples"])
def backward_kernel(
    p_logits,
    p_index,
    p_grad,
    p_seed,
    p_tau,
    p_gap,
    p_out,
    s_rows,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau_every,
    s_gap_every,
    s_tau,
    s_gap,
    s_samples,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    DETACHED: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """With `SPREAD` a program has copies of one row, to share out its draws."""
    b_rows, b_columns, b_row_inside, b_inside = row_block(
        s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS, SPREAD
    )
    b_logits = load_rows(p_logits, b_rows, b_columns, s_stride, b_inside, -float("inf")).to(tl.float32)
    b_index = tl.load(p_index + b_rows, mask=b_row_inside, other=0).to(tl.int32)
    b_selected = b_columns[None, :] == b_index[:, None]
    if AT_INDEX:
        b_one = tl.load(p_grad + b_rows, mask=b_row_inside, other=0.0).to(tl.float32)
        b_grad = tl.where(b_selected, b_one[:, None], 0.0)
    else:
        b_grad = load_rows(p_grad, b_rows, b_columns, s_grad_stride, b_inside, 0.0).to(tl.float32)
    b_tau = level(p_tau, s_tau, s_tau_every, b_rows, b_row_inside, TAU_PER_ROW)[:, None]
    b_shifted = _shifted(b_logits)
    b_element = b_rows[:, None] * s_categories + b_columns[None, :]
    s_seed = tl.load(p_seed)
    if MODE == RAO:
        b_odds, b_rest = _odds(b_shifted, b_selected)
        b_sum = _rao(
            s_seed, b_element, b_odds, b_rest, b_grad, 1.0 / b_tau, s_samples, BLOCK_ROWS if SPREAD else 1,
            False, FAST,
        )  # fmt: skip
        b_out = b_sum / (b_tau * s_samples)
    elif MODE == REINMAX:
        b_half = (normalised(b_shifted / b_tau) + b_selected.to(tl.float32)) / 2
        b_out = 2 * _through(b_half, b_grad) - _through(normalised(b_shifted), b_grad) / 2
    else:
        b_gap = b_tau
        if MODE == GST:
            b_gap = _gap(
                p_gap, s_gap, s_gap_every, b_rows, b_row_inside, b_shifted, b_selected, EXPECTED_GAP,
                GAP_PER_ROW,
            )  # fmt: skip
        b_point = _surrogate(s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE, FAST)
        b_out = _through(b_point, b_grad) / b_tau
        if not DETACHED:
            # Only logits that are neither raised nor lowered move by themselves, all relative to the largest.
            b_moves = (b_shifted < -b_gap) & (b_index[:, None] != b_columns[None, :])
            b_out = tl.where(b_moves, b_out, 0.0)
            b_largest = (b_shifted == 0).to(tl.float32)
            b_ties = tl.maximum(tl.sum(b_largest, 1), 1.0)
            b_out -= b_largest * (tl.sum(b_out, 1) / b_ties)[:, None]
    b_out = tl.where((b_index == s_categories)[:, None], 0.0, b_out)
    b_out = tl.where((b_index > s_categories)[:, None], float("nan"), b_out)
    if SPREAD:
        b_inside = b_inside & (tl.arange(0, BLOCK_ROWS) == 0)[:, None]
    store_rows(p_out, b_rows, b_columns, s_categories, b_inside, b_out)


@triton.jit
def noise_kernel(
    p_seed,
    p_out,
    s_rows,
    s_categories,
    s_draw,
    KIND: tl.constexpr,
    FINE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The noise of the kernels, written out for tests: Gumbels (0), `FINE` as for long rows or not, or for one
    Gumbel-Rao draw the exponentials of the elements (1), in units of ln 2."""
    b_rows, b_columns, _, b_inside = row_block(s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_element = b_rows[:, None] * s_categories + b_columns[None, :]
    s_seed = tl.load(p_seed)
    if KIND == 0:
        b_noise = gumbel(s_seed, b_element, FAST, FINE)
    else:
        b_0, b_1, b_2, b_3 = rao_bits(s_seed, b_element, s_draw // 4)
        s_lane = s_draw % 4
        b_bits = tl.where(s_lane == 0, b_0, tl.where(s_lane == 1, b_1, tl.where(s_lane == 2, b_2, b_3)))
        b_noise = exponential(b_bits, FAST)
    store_rows(p_out, b_rows, b_columns, s_categories, b_inside, b_noise)
