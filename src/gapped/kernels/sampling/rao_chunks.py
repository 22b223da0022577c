"""Gumbel-Rao given the drawn category, for rows too long for a block: a soft sample, or the gradient.

The mathematics is that of `rao_rows`. A program reads its row in chunks: once for the sums of every batch of
draws, which its threads add up apart, and once more for the result of all draws, which is written as it is
computed, in its own dtype. So noise is drawn twice, and of each draw three numbers are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import LOG2_E, safe_reciprocal
from gapped.kernels.sampling.long_rows import chunk, fill, gradient_chunk, row_of_sample, write
from gapped.kernels.sampling.rao_weights import rao_bits, rao_odds, rao_weight, rao_winner


@triton.jit
def _bits(row, b_columns, s_batch, BATCH: tl.constexpr, FAST: tl.constexpr):
    """Bits of each draw of a batch."""
    BLOCKS: tl.constexpr = (BATCH + 3) // 4
    b_block = b_columns * 0 + s_batch * BLOCKS
    b_bits = ()
    for s_block in tl.static_range(BLOCKS):
        b_bits = b_bits + rao_bits(row.seed, row.number, b_columns, b_block + s_block, FAST)
    return b_bits


@triton.jit
def _chunk_odds(p_logits, s_start, row, POWER: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """Columns and logits of a chunk, and what `rao_odds` says of them."""
    b_columns, b_logits = chunk(p_logits, s_start, row.categories, -float("inf"), BLOCK)
    b_log2_odds = tl.log2(row.second) - (b_logits - row.shift) * LOG2_E
    b_odds, b_drop = rao_odds(b_log2_odds, b_columns == row.index, -1.0 / row.tau, POWER, FAST)
    return b_columns, b_logits, b_odds, b_drop


@triton.jit
def _within_threads(b_x, VECTOR: tl.constexpr):
    """Sums of neighbours, which one thread has."""
    return tl.sum(tl.reshape(b_x, [b_x.shape[0] // VECTOR, VECTOR]), 1)


@triton.jit
def _sums(
    p_logits, p_grad, s_one, s_winners, row, s_batch, SOFT: tl.constexpr, AT_INDEX: tl.constexpr,
    POWER: tl.constexpr, BATCH: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sums of the weights in each draw of a batch, and of weights times gradient."""
    b_zero = tl.zeros([BLOCK // VECTOR], tl.float32)
    b_sums = (b_zero,) * BATCH
    b_dots = (b_zero,) * BATCH
    for s_start in range(0, row.categories, BLOCK):
        b_columns, b_logits, b_odds, b_drop = _chunk_odds(p_logits, s_start, row, POWER, BLOCK, FAST)
        b_bits = _bits(row, b_columns, s_batch, BATCH, FAST)
        b_grad = b_odds
        if not SOFT:
            b_grad = gradient_chunk(p_grad, b_logits, s_start, row, AT_INDEX, BLOCK) - s_one
        b_new_sums = ()
        b_new_dots = ()
        for i in tl.static_range(BATCH):
            b_weight = rao_weight(b_bits[i], s_winners[i], b_odds, b_drop, -1.0 / row.tau, POWER, FAST)
            b_new_sums = b_new_sums + (b_sums[i] + _within_threads(b_weight, VECTOR),)
            b_dot = b_zero if SOFT else _within_threads(b_weight * b_grad, VECTOR)
            b_new_dots = b_new_dots + (b_dots[i] + b_dot,)
        b_sums = b_new_sums
        b_dots = b_new_dots
    return b_sums, b_dots


@triton.jit(do_not_specialize=["s_tau_every", "s_samples", "s_first"])
def streamed_rao_kernel(
    p_logits,
    p_index,
    p_stats,
    p_grad,
    p_seed,
    p_tau,
    p_draws,
    p_out,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau_every,
    s_tau,
    s_samples,
    s_first,
    TAU_PER_ROW: tl.constexpr,
    POWER: tl.constexpr,
    SOFT: tl.constexpr,
    AT_INDEX: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FAST: tl.constexpr,
    BATCH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`p_draws` has room for three numbers of every draw: the winner's noise, its share of Z, m times that.

    A `SOFT` sample has no use for `p_grad`. `IN_PLACE` says that the result takes the place of the logits.
    """
    s_row = tl.program_id(0).to(tl.int64)
    s_batches = (s_samples + BATCH - 1) // BATCH
    p_logits += s_row * s_stride
    p_grad += s_row * s_grad_stride
    p_draws += s_row * (3 * BATCH * s_batches)
    p_out += s_row * s_categories
    s_index = tl.load(p_index + s_row).to(tl.int32)
    row = row_of_sample(
        s_row, s_first, s_categories, s_index, p_stats, p_seed, (p_tau, s_tau, s_tau_every), TAU_PER_ROW
    )
    if s_index >= s_categories:
        fill(p_out, tl.where(s_index > s_categories, float("nan"), 0.0), s_categories, BLOCK)
    else:
        s_unit = 1.0 / s_samples
        s_one = s_unit
        if not SOFT:
            s_unit = s_unit / row.tau
            s_one = tl.load(p_grad + (0 if AT_INDEX else s_index)).to(tl.float32)
        for s_batch in range(s_batches):
            s_bits = _bits(row, s_index, s_batch, BATCH, FAST)
            s_winners = [rao_winner(s_word, POWER, FAST) for s_word in s_bits]
            b_sums, b_dots = _sums(
                p_logits, p_grad, s_one, s_winners, row, s_batch, SOFT, AT_INDEX, POWER, BATCH, VECTOR, BLOCK,
                FAST,
            )  # fmt: skip
            for i in tl.static_range(BATCH):
                s_draw = s_batch * BATCH + i
                s_norm = safe_reciprocal(tl.sum(b_sums[i], 0))
                s_share = tl.where(s_draw < s_samples, s_norm * s_unit, 0.0)
                tl.store(p_draws + 3 * s_draw, s_winners[i])
                tl.store(p_draws + 3 * s_draw + 1, s_share)
                if not SOFT:
                    tl.store(p_draws + 3 * s_draw + 2, tl.sum(b_dots[i], 0) * s_norm * s_share)
        # One thread has written these numbers, all are going to read them.
        tl.debug_barrier()
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits, b_odds, b_drop = _chunk_odds(p_logits, s_start, row, POWER, BLOCK, FAST)
            b_grad = b_odds
            if not SOFT:
                b_grad = gradient_chunk(p_grad, b_logits, s_start, row, AT_INDEX, BLOCK) - s_one
            b_sum = tl.zeros([BLOCK], tl.float32)
            for s_batch in range(s_batches):
                b_bits = _bits(row, b_columns, s_batch, BATCH, FAST)
                p_draw = p_draws + 3 * BATCH * s_batch
                for i in tl.static_range(BATCH):
                    s_winner = tl.load(p_draw + 3 * i)
                    b_weight = rao_weight(b_bits[i], s_winner, b_odds, b_drop, -1.0 / row.tau, POWER, FAST)
                    b_share = tl.load(p_draw + 3 * i + 1)
                    if not SOFT:
                        b_share = b_grad * b_share - tl.load(p_draw + 3 * i + 2)
                    b_sum += b_weight * b_share
            if IN_PLACE:
                # Nothing of this chunk is written before every thread has read its part.
                tl.debug_barrier()
            write(p_out, b_columns, b_sum, s_categories)
