"""Gumbel-Rao and ReinMax-Rao given the drawn category, for rows that fit into a block.

With the weights w of `rao_weights`, the point of draw s is q_s = w_s / sum w_s, and m_s the mean of the incoming
gradient g under it. The soft sample is the mean of the points, and the gradient of the logits is
sum_s q_s (g - m_s) / (samples tau). There g is relative to its entry at the selected category, so that nothing
is lost where all mass is on that one.

ReinMax-Rao has the draws of Gumbel-Rao at (p + D)/2 with the one-hot D, and the gradient
2 sum_s q_s (g - m_s) / (samples tau) - p (g - <p, g>) / 2. The weights of a draw, relative to the selected
category's, depend on 1/p of the others alone, and (p + D)/2 doubles those: all else is as for Gumbel-Rao.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import LOG2_E, existing, exp2, load_key, log2, reciprocal
from gapped.kernels.sampling.rao_weights import rao_bits, rao_odds, rao_weight, rao_winner
from gapped.kernels.sampling.surrogates import level


class Given(NamedTuple):
    """What all draws have in common. A block's axes are pieces of a row, rows, and elements of a piece."""

    seed: tl.tensor
    rows: tl.tensor
    columns: tl.tensor
    index: tl.tensor
    """The selected category of each row."""
    odds: tl.tensor
    drop: tl.tensor
    slope: tl.tensor
    grad: tl.tensor


@triton.jit
def _total(b_x):
    """Sums of the rows, first over what a thread has of them."""
    return tl.sum(tl.sum(b_x, 0), 1)[None, :, None]


@triton.jit
def _add_draws(
    b_sum, given, b_block, b_left, DRAWS: tl.constexpr, MASKED: tl.constexpr, SOFT: tl.constexpr,
    POWER: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add q (g - m), or q alone, of up to four draws; with `MASKED` only of those that are left."""
    b_bits = rao_bits(given.seed, given.rows, given.columns, b_block, FAST)
    b_own_bits = rao_bits(given.seed, given.rows, given.index, b_block, FAST)
    for s_draw in tl.static_range(DRAWS):
        b_winner = rao_winner(b_own_bits[s_draw], POWER, FAST)
        b_weight = rao_weight(b_bits[s_draw], b_winner, given.odds, given.drop, given.slope, POWER, FAST)
        b_norm = reciprocal(_total(b_weight), FAST)
        b_share = tl.where(b_left > s_draw, b_norm, 0.0) if MASKED else b_norm
        if SOFT:
            b_sum += b_weight * b_share
        else:
            b_mean = _total(b_weight * given.grad) * b_norm
            b_sum += b_weight * (given.grad * b_share - b_mean * b_share)
    return b_sum


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_samples"])
def rao_kernel(
    p_logits,
    p_index,
    p_grad,
    p_seed,
    p_tau,
    p_out,
    s_rows,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau_every,
    s_tau,
    s_samples,
    TAU_PER_ROW: tl.constexpr,
    POWER: tl.constexpr,
    LEFT: tl.constexpr,
    SOFT: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    REINMAX: tl.constexpr,
    SPREAD: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`LEFT` is the remainder of the samples by four. A `SOFT` sample has no use for `p_grad`.

    `REINMAX` says that it is ReinMax-Rao, which has no soft sample.
    With `SPREAD` a program has copies of one row instead of rows, each with its share of the draws.
    """
    b_copy = tl.arange(0, BLOCK_ROWS)
    if SPREAD:
        b_row = tl.program_id(0).to(tl.int64) + b_copy * 0
    else:
        b_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + b_copy
    b_exists = b_row < s_rows
    b_index = tl.load(p_index + b_row, mask=b_exists, other=s_categories).to(tl.int32)[None, :, None]
    b_tau = level((p_tau, s_tau, s_tau_every), b_row, b_exists, TAU_PER_ROW)[None, :, None]
    b_row, b_exists = b_row[None, :, None], b_exists[None, :, None]
    b_columns = (tl.arange(0, PIECES) * WIDTH)[:, None, None] + tl.arange(0, WIDTH)[None, None, :]
    b_inside = b_exists & (b_columns < s_categories)
    b_drawn = b_exists & (b_index < s_categories)
    b_selected = b_columns == b_index
    b_logits = tl.load(p_logits + b_row * s_stride + b_columns, mask=b_inside, other=-float("inf"))
    # Rows without a sample are computed with other numbers, and their result replaced.
    b_logits = tl.where(b_drawn, b_logits.to(tl.float32), 0.0)
    b_grad = b_logits
    if AT_INDEX:
        b_one = tl.load(p_grad + b_row, mask=b_drawn, other=0.0).to(tl.float32)
        b_grad = tl.where(b_selected, 0.0, -b_one)
    elif not SOFT:
        p_row = p_grad + b_row * s_grad_stride
        b_one = tl.load(p_row + b_index, mask=b_drawn, other=0.0).to(tl.float32)
        b_grad = tl.load(p_row + b_columns, mask=b_inside & b_drawn, other=0.0).to(tl.float32) - b_one
    b_grad = existing(b_grad, b_logits)
    b_shifted = (b_logits - tl.max(tl.max(b_logits, 0), 1)[None, :, None]) * LOG2_E
    b_log2_odds = log2(_total(exp2(b_shifted, FAST)), FAST) - b_shifted
    b_slope = -1.0 / b_tau
    b_halved = b_log2_odds + 1.0 if REINMAX else b_log2_odds
    b_odds, b_drop = rao_odds(b_halved, b_selected, b_slope, POWER, FAST)
    given = Given(load_key(p_seed), b_row, b_columns, b_index, b_odds, b_drop, b_slope, b_grad)
    b_sum = tl.zeros_like(b_odds)
    b_block = b_index * 0
    if SPREAD:
        b_block += b_copy[None, :, None]
        for _ in range(0, (s_samples + 4 * BLOCK_ROWS - 1) // (4 * BLOCK_ROWS)):
            b_left = s_samples - 4 * b_block
            b_sum = _add_draws(b_sum, given, b_block, b_left, 4, True, SOFT, POWER, FAST)
            b_block += BLOCK_ROWS
    else:
        for _ in range(0, s_samples // 4):
            b_sum = _add_draws(b_sum, given, b_block, 4, 4, False, SOFT, POWER, FAST)
            b_block += 1
        if LEFT > 0:
            b_sum = _add_draws(b_sum, given, b_block, LEFT, LEFT, False, SOFT, POWER, FAST)
    b_unit = 1.0 / s_samples if SOFT else b_slope / -s_samples
    if REINMAX:
        b_unit *= 2.0
    b_unit = tl.where(b_index < s_categories, b_unit, tl.where(b_index > s_categories, float("nan"), 0.0))
    b_out = b_sum * b_unit
    if SPREAD:
        b_out = tl.broadcast_to(tl.sum(b_out, 1)[:, None, :], b_out.shape)
        b_inside &= (b_copy == 0)[None, :, None]
    if REINMAX:
        # Once the copies are added up. In rows without a sample g is 0, and so is this.
        b_p = exp2(-b_log2_odds, FAST)
        b_out -= 0.5 * b_p * (b_grad - _total(b_p * b_grad))
    p_to = p_out + b_row * s_categories + b_columns
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=b_inside)
