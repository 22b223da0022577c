"""Samples of rows that lie side by side in memory, as those of a category axis that is not the last.

A program has a strip of neighbouring rows, wide enough that what it reads of one category is a whole piece of
memory. Blocks have rows on the first axis and categories on the second, as in `short_rows`, which reads rows
that are short enough for a block, side by side or not; the mathematics is that of `long_rows`. A strip is read
once, in chunks, and every row has lanes of its own. `strip_tiles` has the backward pass. Results are written
in the order of the logits, without anything between their rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import gumbel, row_starts, row_uniforms, safe_reciprocal
from gapped.kernels.sampling.long_rows import LOWEST, NORMAL, Row, add_scores, add_weights, row_gap, weights
from gapped.kernels.sampling.surrogates import DECOUPLED, GUMBEL, lawless, level


class Strip(NamedTuple):
    """Rows that a program has."""

    rows: tl.tensor
    """Their numbers, ``(rows,)``."""
    inside: tl.tensor
    """Which of them exist, ``(rows, 1)``."""
    number: tl.tensor
    """Their numbers again, ``(rows, 1)``; in the place of one that does not exist, the last one's."""


@triton.jit
def strip_of(s_strip, s_rows, STRIP: tl.constexpr):
    """Strip number `s_strip`."""
    b_rows = s_strip * STRIP + tl.arange(0, STRIP)
    return Strip(b_rows, (b_rows < s_rows)[:, None], tl.minimum(b_rows, s_rows - 1).to(tl.int64)[:, None])


@triton.jit
def _chunk(
    p_rows, s_start, s_categories, s_step, strip, other, BLOCK: tl.constexpr, EVICTION: tl.constexpr = NORMAL
):
    """Columns and float32 values of one chunk of a strip, whose rows begin at `p_rows`.

    `EVICTION` tells the cache whether to keep them.
    """
    b_columns = s_start + tl.arange(0, BLOCK)[None, :]
    b_inside = strip.inside & (b_columns < s_categories)
    b_values = tl.load(p_rows + b_columns * s_step, mask=b_inside, other=other, eviction_policy=EVICTION)
    return b_columns, b_values.to(tl.float32)


@triton.jit
def chunks(
    p_rows, s_start, s_categories, s_step, strip, other, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    EVICTION: tl.constexpr = NORMAL,
):  # fmt: skip
    """So many chunks, all of them read before the first is used."""
    read = ()
    for s_piece in tl.static_range(PIECES):
        s_from = s_start + s_piece * BLOCK
        read = read + (_chunk(p_rows, s_from, s_categories, s_step, strip, other, BLOCK, EVICTION),)
    return read


@triton.jit
def write_strip(p_rows, b_columns, b_values, s_categories, s_step, b_row_inside):
    """Store one chunk of the rows that are inside, bypassing the cache: nothing reads the output again."""
    b_inside = b_row_inside & (b_columns < s_categories)
    b_values = b_values.to(p_rows.dtype.element_ty)
    tl.store(p_rows + b_columns * s_step, b_values, mask=b_inside, cache_modifier=".cs")


@triton.jit
def _drawn(p_logits, s_seed, strip, b_share, s_categories, s_step, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of weights and drawn categories: first a lane by its share of its row, then one of its elements."""
    b_lanes = tl.arange(0, BLOCK)[None, :]
    b_running = tl.cumsum(b_share.to(tl.float64), 1)
    b_total = tl.max(b_running, 1)[:, None]
    b_u, b_v = row_uniforms(s_seed, strip.rows.to(tl.int64))
    b_wins = (b_running > b_u[:, None] * b_total) & (b_share > 0)
    b_lane = tl.min(tl.where(b_wins, b_lanes, BLOCK), 1)[:, None]
    b_columns = b_lane + tl.arange(0, CHUNKS)[None, :] * BLOCK
    b_inside = strip.inside & (b_columns < s_categories) & (b_lane < BLOCK)
    b_logits = tl.load(p_logits + b_columns * s_step, mask=b_inside, other=-float("inf")).to(tl.float32)
    # Relative to the lane's largest; lower than any where the row has none.
    b_weight = tl.exp(b_logits - tl.maximum(tl.max(b_logits, 1), LOWEST)[:, None])
    b_running = tl.cumsum(b_weight.to(tl.float64), 1)
    b_wins = (b_running > b_v[:, None] * tl.max(b_running, 1)[:, None]) & (b_weight > 0)
    b_index = tl.min(tl.where(b_wins, b_columns, s_categories), 1)[:, None]
    return b_total.to(tl.float32), b_index


@triton.jit
def lawful(b_values, b_index, s_categories):
    """`b_values`, but zero where a row has no category, and NaN where it has no law."""
    b_values = tl.where(b_index == s_categories, 0.0, b_values)
    return tl.where(b_index > s_categories, float("nan"), b_values)


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every", "s_tau_forward_every"])
def strip_forward_kernel(
    p_logits,
    p_seed,
    p_tau,
    p_gap,
    p_tau_forward,
    p_value,
    p_index,
    p_stats,
    s_rows,
    s_categories,
    s_inner,
    s_stride,
    s_step,
    s_tau_every,
    s_gap_every,
    s_tau_forward_every,
    s_tau,
    s_gap,
    s_tau_forward,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    TAU_FORWARD_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    ARGMAX: tl.constexpr,
    SOFT: tl.constexpr,
    DENSE: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
):
    strip = strip_of(tl.program_id(0), s_rows, STRIP)
    # Offsets of categories may need 64 bits.
    s_step = tl.cast(s_step, tl.int64)
    s_out = tl.cast(s_inner, tl.int64)
    p_logits = row_starts(p_logits, strip.rows, s_stride, s_inner)
    p_value = row_starts(p_value, strip.rows, s_out * s_categories, s_inner)
    s_seed = tl.load(p_seed)
    b_zero = tl.zeros([STRIP, BLOCK], tl.float32)
    b_max = b_zero + LOWEST
    b_where = tl.zeros([STRIP, BLOCK], tl.int32) + s_categories
    if (MODE == GUMBEL) or (MODE == DECOUPLED):
        tau_forward = (p_tau_forward, s_tau_forward, s_tau_forward_every)
        b_tau_forward = level(tau_forward, strip.number, strip.inside, TAU_FORWARD_PER_ROW)
        b_best = b_zero - float("inf")
        b_broken = b_where * 0
        for s_start in tl.range(0, s_categories, BLOCK * PIECES, num_stages=STAGES):
            read = chunks(p_logits, s_start, s_categories, s_step, strip, -float("inf"), BLOCK, PIECES)
            for s_piece in tl.static_range(PIECES):
                b_columns, b_logits = read[s_piece]
                b_broken |= lawless(b_logits).to(tl.int32)
                b_noise = gumbel(s_seed, strip.number * s_categories + b_columns, FAST, True)
                b_max, b_best, b_where = add_scores(
                    b_max, b_best, b_where, b_logits, b_noise * b_tau_forward, b_columns
                )
                if DENSE and not SOFT:
                    write_strip(p_value, b_columns, b_zero, s_categories, s_out, strip.inside)
        b_shift = tl.max(b_max, 1)[:, None]
        b_best += b_max - b_shift
        b_second = tl.max(b_best, 1)[:, None]
        b_index = tl.min(tl.where(b_best == b_second, b_where, s_categories), 1)[:, None]
        b_broken |= (b_tau_forward != b_tau_forward).to(tl.int32)
        b_lawless = (tl.max(b_broken, 1) > 0)[:, None]
    else:
        b_sum = b_zero
        for s_start in tl.range(0, s_categories, BLOCK * PIECES, num_stages=STAGES):
            read = chunks(p_logits, s_start, s_categories, s_step, strip, -float("inf"), BLOCK, PIECES)
            for s_piece in tl.static_range(PIECES):
                b_columns, b_logits = read[s_piece]
                b_max, b_sum, b_where = add_weights(b_max, b_sum, b_where, b_logits, b_columns, ARGMAX)
                if DENSE and not SOFT:
                    write_strip(p_value, b_columns, b_zero, s_categories, s_out, strip.inside)
        # A NaN stays in the sum of its lane.
        b_shift = tl.max(tl.where(b_sum == b_sum, b_max, float("inf")), 1)[:, None]
        b_lawless = b_shift == float("inf")
        b_share = tl.where(b_sum > 0, b_sum * tl.exp(b_max - b_shift), 0.0)
        if ARGMAX:
            b_second = tl.sum(b_share, 1)[:, None]
            b_index = tl.min(tl.where(b_max == b_shift, b_where, s_categories), 1)[:, None]
        else:
            b_second, b_index = _drawn(p_logits, s_seed, strip, b_share, s_categories, s_step, CHUNKS, BLOCK)
    b_index = tl.where(b_lawless, s_categories + 1, b_index)
    tl.store(p_index + strip.number, b_index, mask=strip.inside)
    tl.store(p_stats + 2 * strip.number, b_shift, mask=strip.inside)
    tl.store(p_stats + 2 * strip.number + 1, b_second, mask=strip.inside)
    b_tau = level((p_tau, s_tau, s_tau_every), strip.number, strip.inside, TAU_PER_ROW)
    if DENSE and SOFT:
        row = Row(strip.number, strip.number, s_categories, s_seed, b_index, b_shift, b_second, b_tau)
        gap = (p_gap, s_gap, s_gap_every)
        b_gap = row_gap(gap, p_logits, row, MODE, EXPECTED_GAP, GAP_PER_ROW, s_step)
        b_sum = b_zero
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = _chunk(p_logits, s_start, s_categories, s_step, strip, -float("inf"), BLOCK)
            b_sum += weights(b_logits - b_shift, b_columns, row, b_gap, MODE, FAST)
        b_scale = safe_reciprocal(tl.sum(b_sum, 1))[:, None]
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = _chunk(p_logits, s_start, s_categories, s_step, strip, -float("inf"), BLOCK)
            b_weight = weights(b_logits - b_shift, b_columns, row, b_gap, MODE, FAST)
            b_value = lawful(b_weight * b_scale, b_index, s_categories)
            write_strip(p_value, b_columns, b_value, s_categories, s_out, strip.inside)
    elif DENSE:
        # The zeros at these places were written by other threads.
        tl.debug_barrier()
        b_one = (b_tau * 0 + 1.0).to(p_value.dtype.element_ty)
        tl.store(p_value + b_index * s_out, b_one, mask=strip.inside & (b_index < s_categories))
        if tl.max(b_index) > s_categories:
            b_nan = b_zero + float("nan")
            for s_start in range(0, s_categories, BLOCK):
                b_columns = s_start + tl.arange(0, BLOCK)[None, :]
                write_strip(
                    p_value, b_columns, b_nan, s_categories, s_out, strip.inside & (b_index > s_categories)
                )
