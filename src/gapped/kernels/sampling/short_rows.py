"""Samples in one pass forward and one pass backward, for rows that fit into a block.

The forward pass reads the logits and writes the sample and its index. The backward pass reads logits,
index and incoming gradient and writes the gradient. Arithmetic is in float32 whatever the dtype of the
logits, running sums in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import (
    LN_2,
    LOG2_E,
    RowBlock,
    exceeds,
    exponential,
    gumbel,
    load_rows,
    normalise,
    rao_bits,
    reciprocal,
    row_block,
    row_uniforms,
    store_rows,
)
from gapped.kernels.runner import power
from gapped.kernels.sampling.surrogates import (
    DECOUPLED,
    GST,
    GST_AUTO,
    GUMBEL,
    RAO,
    REINMAX,
    lawless,
    level,
    log2_odds,
    rao_odds,
    rao_weight,
    selected_gap,
)

# So many elements fill the GPU with conditional draws. Where there are fewer, a row's draws are shared out in
# a block of so many: more would not fit into the registers of a warp.
SPREAD_ELEMENTS, SPREAD_BLOCK = 1 << 17, 512


def shares_of(rows: int, categories: int) -> int:
    """Over how many copies of a row its conditional draws are spread.

    Where rows are few, a program with one row would take long for all draws while most of the GPU is idle.
    """
    columns = power(categories)
    free = min(SPREAD_ELEMENTS // max(rows * columns, 1), SPREAD_BLOCK // columns, 8)
    return 1 << max(free.bit_length() - 1, 0)


@triton.jit
def _shift(b_logits):
    """Logits relative to the largest of their row; a row without categories stays -inf."""
    b_top = tl.max(b_logits, 1)
    return b_logits - tl.where(b_top == -float("inf"), 0.0, b_top)[:, None]


@triton.jit
def _jacobian_product(b_point, b_grad):
    """J(q) g."""
    return b_point * (b_grad - tl.sum(b_point * b_grad, 1)[:, None])


@triton.jit
def _log2_p(b_shifted):
    """Base-2 logarithms of the probabilities."""
    b_total = tl.sum(tl.exp(b_shifted), 1)
    return b_shifted * LOG2_E - tl.log2(tl.where(b_total == 0, 1.0, b_total))[:, None]


@triton.jit
def _gap(source, block, b_shifted, b_selected, EXPECTED: tl.constexpr, PER_ROW: tl.constexpr):
    """The gap of GST in each row."""
    if EXPECTED:
        b_gap = selected_gap(tl.sum(tl.where(b_selected, normalise(b_shifted), 0.0), 1))
    else:
        b_gap = level(source, block.rows, block.row_inside, PER_ROW)
    return b_gap[:, None]


@triton.jit
def _surrogate(
    s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE: tl.constexpr, FAST: tl.constexpr
):
    """The point of the simplex that carries the gradient, for the estimators that have just one."""
    if MODE == GST:
        b_scores = tl.where(b_selected, 0.0, tl.minimum(b_shifted, -b_gap)) / b_tau
    elif MODE == GST_AUTO:
        b_scores = tl.where(b_selected, 0.0, log2_odds(_log2_p(b_shifted), FAST) * LN_2) / b_tau
    elif MODE == GUMBEL:
        b_scores = _shift(b_shifted + gumbel(s_seed, b_element, FAST)) / b_tau
    elif MODE == DECOUPLED:
        b_scores = _shift(b_shifted / b_tau + gumbel(s_seed, b_element, FAST))
    else:
        b_scores = b_shifted / b_tau
    return normalise(b_scores)


class Conditions(NamedTuple):
    """What all conditional draws of Gumbel-Rao have in common; see `rao_odds` and `rao_weight`."""

    winner: tl.tensor
    """1 at the selected category, 0 elsewhere."""
    odds: tl.tensor
    drop: tl.tensor
    sharpness: tl.tensor
    """1 / tau."""
    grad: tl.tensor
    """The incoming gradient; unused for a soft sample."""


@triton.jit
def _conditions(b_shifted, b_selected, b_grad, b_tau):
    b_odds, b_rest = rao_odds(_log2_p(b_shifted), b_selected)
    b_sharpness = 1.0 / b_tau
    return Conditions((b_odds == 0).to(tl.float32), b_odds, b_rest * b_sharpness, b_sharpness, b_grad)


@triton.jit
def _rao_add(b_sum, b_bits, b_share, given, SOFT: tl.constexpr, FAST: tl.constexpr):
    """Add one conditional draw: its point to a soft sample, or its J(q) g to a gradient."""
    b_noise = exponential(b_bits, FAST)
    # Both sums are positive, but in rows without categories, whose result is overwritten.
    b_scale = reciprocal(tl.sum(b_noise * given.winner, 1), FAST)[:, None]
    b_weight = rao_weight(b_noise, given.odds, given.drop, b_scale, given.sharpness, FAST)
    b_norm = reciprocal(tl.sum(b_weight, 1), FAST)[:, None]
    if SOFT:
        return b_sum + b_share * (b_weight * b_norm)
    else:
        # The two sums do not wait for each other.
        b_mean = tl.sum(b_weight * given.grad, 1)[:, None] * b_norm
        return b_sum + b_share * (b_weight * b_norm * (given.grad - b_mean))


@triton.jit
def _rao_add_four(
    b_sum,
    s_seed,
    b_element,
    b_block,
    b_left,
    given,
    ALL: tl.constexpr,
    SOFT: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add four conditional draws; unless `ALL`, only as many as are left."""
    b_bits = rao_bits(s_seed, b_element, b_block)
    for s_draw in tl.static_range(4):
        b_share = 1.0 if ALL else (b_left > s_draw).to(tl.float32)
        b_sum = _rao_add(b_sum, b_bits[s_draw], b_share, given, SOFT, FAST)
    return b_sum


@triton.jit
def _rao(s_seed, b_element, given, s_samples, SHARES: tl.constexpr, SOFT: tl.constexpr, FAST: tl.constexpr):
    """The sum over all conditional draws. The winner's noise is that of its own element.

    With more than one of `SHARES`, the rows of the block are so many copies of one, each with its share.
    """
    b_sum = tl.zeros_like(given.odds)
    # This ties the numbers to the threads that hold the loaded values: otherwise the noise of every draw would
    # go from thread to thread through shared memory.
    b_element = tl.where(given.odds >= 0, b_element, 0)
    if SHARES > 1:
        b_share = tl.arange(0, SHARES)[:, None]
        for s_turn in range(0, (s_samples + 4 * SHARES - 1) // (4 * SHARES)):
            b_block = s_turn * SHARES + b_share
            b_left = s_samples - 4 * b_block
            b_sum = _rao_add_four(b_sum, s_seed, b_element, b_block, b_left, given, False, SOFT, FAST)
        b_sum = tl.broadcast_to(tl.sum(b_sum, 0)[None, :], b_sum.shape)
    else:
        for s_block in range(0, s_samples // 4):
            b_sum = _rao_add_four(b_sum, s_seed, b_element, s_block, 4, given, True, SOFT, FAST)
        s_left = s_samples % 4
        if s_left > 0:
            b_sum = _rao_add_four(b_sum, s_seed, b_element, s_samples // 4, s_left, given, False, SOFT, FAST)
    return b_sum


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
    block = row_block(s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, block, s_stride, -float("inf")).to(tl.float32)
    b_shifted = _shift(b_logits)
    b_element = block.rows[:, None] * s_categories + block.columns[None, :]
    s_seed = tl.load(p_seed)
    if (MODE == GUMBEL) or (MODE == DECOUPLED):
        tau_forward = (p_tau_forward, s_tau_forward, s_tau_forward_every)
        b_tau_forward = level(tau_forward, block.rows, block.row_inside, TAU_FORWARD_PER_ROW)
        b_scores = b_shifted / b_tau_forward[:, None] + gumbel(s_seed, b_element, FAST)
        b_best = tl.max(b_scores, 1)
        b_wins = (b_scores == b_best[:, None]) & (b_shifted > -float("inf"))
        # Minima and maxima pass over a NaN on a GPU, sums do not.
        b_nan = (tl.sum(lawless(b_logits).to(tl.int32), 1) > 0) | (b_tau_forward != b_tau_forward)
    else:
        b_weights = tl.exp(b_shifted)
        b_running = tl.cumsum(b_weights.to(tl.float64), 1)
        b_total = tl.sum(b_weights.to(tl.float64), 1)
        b_u, _ = row_uniforms(s_seed, block.rows)
        b_wins = exceeds(b_running, b_u * b_total, b_weights)
        b_nan = b_total != b_total
    b_index = tl.min(tl.where(b_wins, block.columns[None, :], s_categories), 1)
    b_index = tl.where(b_nan, s_categories + 1, b_index)
    tl.store(p_index + block.rows, b_index, mask=block.row_inside)
    if DENSE:
        b_selected = block.columns[None, :] == b_index[:, None]
        if SOFT:
            b_tau = level((p_tau, s_tau, s_tau_every), block.rows, block.row_inside, TAU_PER_ROW)[:, None]
            if MODE == RAO:
                given = _conditions(b_shifted, b_selected, b_shifted, b_tau)
                b_value = _rao(s_seed, b_element, given, s_samples, 1, True, FAST) / s_samples
            else:
                b_gap = b_tau
                if MODE == GST:
                    gap = (p_gap, s_gap, s_gap_every)
                    b_gap = _gap(gap, block, b_shifted, b_selected, EXPECTED_GAP, GAP_PER_ROW)
                b_value = _surrogate(s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE, FAST)
            b_value = tl.where((b_index == s_categories)[:, None], 0.0, b_value)
        else:
            b_value = b_selected.to(tl.float32)
        b_value = tl.where(b_nan[:, None], float("nan"), b_value)
        store_rows(p_value, block, s_categories, b_value)


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
    block = row_block(s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS, SPREAD)
    b_logits = load_rows(p_logits, block, s_stride, -float("inf")).to(tl.float32)
    b_index = tl.load(p_index + block.rows, mask=block.row_inside, other=0).to(tl.int32)
    b_selected = block.columns[None, :] == b_index[:, None]
    if AT_INDEX:
        b_one = tl.load(p_grad + block.rows, mask=block.row_inside, other=0.0).to(tl.float32)
        b_grad = tl.where(b_selected, b_one[:, None], 0.0)
    else:
        b_grad = load_rows(p_grad, block, s_grad_stride, 0.0).to(tl.float32)
    b_tau = level((p_tau, s_tau, s_tau_every), block.rows, block.row_inside, TAU_PER_ROW)[:, None]
    b_shifted = _shift(b_logits)
    b_element = block.rows[:, None] * s_categories + block.columns[None, :]
    s_seed = tl.load(p_seed)
    if MODE == RAO:
        given = _conditions(b_shifted, b_selected, b_grad, b_tau)
        b_sum = _rao(s_seed, b_element, given, s_samples, BLOCK_ROWS if SPREAD else 1, False, FAST)
        b_out = b_sum / (b_tau * s_samples)
    elif MODE == REINMAX:
        b_half = (normalise(b_shifted / b_tau) + b_selected.to(tl.float32)) / 2
        b_out = 2 * _jacobian_product(b_half, b_grad) - _jacobian_product(normalise(b_shifted), b_grad) / 2
    else:
        b_gap = b_tau
        if MODE == GST:
            gap = (p_gap, s_gap, s_gap_every)
            b_gap = _gap(gap, block, b_shifted, b_selected, EXPECTED_GAP, GAP_PER_ROW)
        b_point = _surrogate(s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE, FAST)
        b_out = _jacobian_product(b_point, b_grad) / b_tau
        if not DETACHED:
            # Only logits that are neither raised nor lowered move by themselves, all relative to the largest.
            b_moves = (b_shifted < -b_gap) & (b_index[:, None] != block.columns[None, :])
            b_out = tl.where(b_moves, b_out, 0.0)
            b_largest = (b_shifted == 0).to(tl.float32)
            b_ties = tl.maximum(tl.sum(b_largest, 1), 1.0)
            b_out -= b_largest * (tl.sum(b_out, 1) / b_ties)[:, None]
    b_out = tl.where((b_index == s_categories)[:, None], 0.0, b_out)
    b_out = tl.where((b_index > s_categories)[:, None], float("nan"), b_out)
    if SPREAD:
        b_first = block.inside & (tl.arange(0, BLOCK_ROWS) == 0)[:, None]
        block = RowBlock(block.rows, block.columns, block.row_inside, b_first)
    store_rows(p_out, block, s_categories, b_out)
