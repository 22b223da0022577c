"""The backward pass of long rows side by side: tiles that are read twice, the second time from the cache.

Nothing of a row can be written before its sums are known. One program reads a tile, a segment of the
categories of neighbouring rows, and publishes its sums. Another one adds up the sums of all tiles of these
rows, always in the same order, reads the tile again and writes the gradient. It comes soon after the first
(`tile_order`), while the cache can hold the tile, so that memory need not be read twice. Programs hold
little, so several of them share a multiprocessor, and some read memory while others write or wait.

Rows that a program can hold are a single tile, which it reads once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import LOG2_E, existing, exp2, row_starts
from gapped.kernels.sampling.long_rows import Row, centres, gradient, row_gap, row_of_sample, weights
from gapped.kernels.sampling.strips import chunks, strip_of, write_strip
from gapped.kernels.sampling.surrogates import REINMAX
from gapped.kernels.sampling.tile_order import collect_strip, publish_tile, task_of


class Given(NamedTuple):
    """Where a program reads: rows of logits and of the incoming gradient."""

    logits: tl.tensor
    """The first categories of the rows, ``(rows, 1)``."""
    step: tl.tensor
    """From one category to the next."""
    grads: tl.tensor
    grad_step: tl.tensor


class Known(NamedTuple):
    """What a program knows of its rows."""

    row: Row
    gap: tl.tensor
    selected: tl.tensor
    """The gradient at the selected category, if only that is given."""


class Output(NamedTuple):
    """Where a program writes."""

    rows: tl.tensor
    step: tl.tensor
    inside: tl.tensor
    """Which rows exist, ``(rows, 1)``."""


@triton.jit
def _read(
    given, s_start, s_categories, strip, AT_INDEX: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """Chunks of logits and gradients, all of them read before the first is used.

    Those of the gradients are empty if they are given at the selected categories alone.
    """
    logits = chunks(
        given.logits, s_start, s_categories, given.step, strip, -float("inf"), BLOCK, PIECES, EVICTION
    )
    grads = ()
    if not AT_INDEX:
        grads = chunks(
            given.grads, s_start, s_categories, given.grad_step, strip, 0.0, BLOCK, PIECES, EVICTION
        )
    return logits, grads


@triton.jit
def _piece(pieces, known, NUMBER: tl.constexpr, AT_INDEX: tl.constexpr):
    """Columns, logits relative to the row's largest, and gradients of one of the chunks."""
    logits, grads = pieces
    b_columns, b_logits = logits[NUMBER]
    if AT_INDEX:
        b_grad = tl.where(b_columns == known.row.index, known.selected, 0.0)
    else:
        _, b_grad = grads[NUMBER]
        b_grad = existing(b_grad, b_logits)
    return b_columns, b_logits - known.row.shift, b_grad


@triton.jit
def _add(
    sums, pieces, known, MODE: tl.constexpr, AT_INDEX: tl.constexpr, FAST: tl.constexpr, PIECES: tl.constexpr
):
    """Sums of lanes, with those of some chunks: weights, weights times gradient, that of plain softmax."""
    b_sum, b_dot, b_plain_dot = sums
    for s_piece in tl.static_range(PIECES):
        b_columns, b_shifted, b_grad = _piece(pieces, known, s_piece, AT_INDEX)
        b_weight = weights(b_shifted, b_columns, known.row, known.gap, MODE, FAST)
        b_sum += b_weight
        b_dot += b_weight * b_grad
        if MODE == REINMAX:
            b_plain_dot += exp2(b_shifted * LOG2_E, FAST) * b_grad
    return b_sum, b_dot, b_plain_dot


@triton.jit
def _write(
    out, pieces, known, b_centres, MODE: tl.constexpr, AT_INDEX: tl.constexpr, FAST: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of some chunks."""
    row = known.row
    for s_piece in tl.static_range(PIECES):
        b_columns, b_shifted, b_grad = _piece(pieces, known, s_piece, AT_INDEX)
        b_weight = weights(b_shifted, b_columns, row, known.gap, MODE, FAST)
        b_out = gradient(b_weight, b_shifted, b_grad, b_columns, row, b_centres, MODE, FAST)
        write_strip(out.rows, b_columns, b_out, row.categories, out.step, out.inside)


@triton.jit
def _write_lawless(out, s_start, s_categories, b_index, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Overwrite what was written of rows without a sample: zeros if they have no category, else NaN."""
    if tl.max(b_index) >= s_categories:
        # Perhaps other threads wrote it.
        tl.debug_barrier()
        b_lawless = out.inside & (b_index >= s_categories)
        b_nothing = tl.where(b_index > s_categories, float("nan"), 0.0)
        for s_from in range(s_start, s_start + LENGTH, BLOCK):
            b_columns = s_from + tl.arange(0, BLOCK)[None, :]
            b_values = b_nothing + tl.zeros([1, BLOCK], tl.float32)
            write_strip(out.rows, b_columns, b_values, s_categories, out.step, b_lawless)


@triton.jit(do_not_specialize=["s_lag", "s_tau_every", "s_gap_every"])
def tile_backward_kernel(
    p_logits,
    p_index,
    p_stats,
    p_grad,
    p_seed,
    p_tau,
    p_gap,
    p_out,
    p_sums,
    p_done,
    s_rows,
    s_categories,
    s_inner,
    s_stride,
    s_step,
    s_grad_stride,
    s_grad_step,
    s_lag,
    s_tau_every,
    s_gap_every,
    s_tau,
    s_gap,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SUMS: tl.constexpr,
    TURNS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST_USE: tl.constexpr,
    LAST_USE: tl.constexpr,
):
    """One program for each strip that is a single tile; else two for each tile, with a lag of `s_lag` tiles.

    A segment has `TURNS * PIECES * BLOCK` categories, of which `PIECES * BLOCK` are read at a time. `p_sums`
    has room for `SUMS` numbers of each row in each segment, `p_done` a zero for each strip. `FIRST_USE` and
    `LAST_USE` tell the cache what to keep.
    """
    s_strip, s_segment, s_writes = tl.program_id(0), 0, False
    if SEGMENTS > 1:
        s_strips = (s_rows + STRIP - 1) // STRIP
        s_tile, s_writes = task_of(tl.program_id(0), s_strips * SEGMENTS, s_lag)
        s_strip, s_segment = s_tile // SEGMENTS, s_tile % SEGMENTS
    strip = strip_of(s_strip, s_rows, STRIP)
    # Offsets of categories may need 64 bits.
    s_step = tl.cast(s_step, tl.int64)
    s_grad_step = tl.cast(s_grad_step, tl.int64)
    s_out = tl.cast(s_inner, tl.int64)
    p_rows = row_starts(p_logits, strip.rows, s_stride, s_inner)
    given = Given(p_rows, s_step, row_starts(p_grad, strip.rows, s_grad_stride, s_inner), s_grad_step)
    out = Output(row_starts(p_out, strip.rows, s_out * s_categories, s_inner), s_out, strip.inside)
    LENGTH: tl.constexpr = TURNS * PIECES * BLOCK
    s_start = s_segment * LENGTH
    if SEGMENTS == 1:
        pieces = _read(given, 0, s_categories, strip, AT_INDEX, BLOCK, PIECES, LAST_USE)
        # What is needed to use some of it is read after all of it, or the compiler would wait in between.
        tl.debug_barrier()
    # What is read of single rows must be there: a row that does not exist is the last one again, and one
    # without a sample has some category. What comes of it is overwritten.
    b_number = tl.reshape(strip.number, [STRIP])
    b_index = tl.load(p_index + strip.number).to(tl.int32)
    row = row_of_sample(
        strip.number, 0, s_categories, tl.minimum(b_index, s_categories - 1), p_stats, p_seed,
        (p_tau, s_tau, s_tau_every), TAU_PER_ROW,
    )  # fmt: skip
    p_first = row_starts(p_logits, b_number, s_stride, s_inner)
    b_gap = row_gap((p_gap, s_gap, s_gap_every), p_first, row, MODE, EXPECTED_GAP, GAP_PER_ROW, s_step)
    if AT_INDEX:
        p_selected = p_grad + strip.number
        known = Known(row, b_gap, tl.load(p_selected).to(tl.float32))
    else:
        p_selected = row_starts(p_grad, b_number, s_grad_stride, s_inner)
        known = Known(row, b_gap, b_gap)
    b_sum = tl.zeros([STRIP, BLOCK], tl.float32)
    b_dot = b_sum
    b_plain_dot = b_sum
    if SEGMENTS == 1:
        sums = _add((b_sum, b_dot, b_plain_dot), pieces, known, MODE, AT_INDEX, FAST, PIECES)
        b_sum, b_dot, b_plain_dot = tl.sum(sums[0], 1), tl.sum(sums[1], 1), tl.sum(sums[2], 1)
        b_centres = centres(
            row, b_sum[:, None], b_dot[:, None], b_plain_dot[:, None], p_selected, MODE, AT_INDEX, s_grad_step
        )
        _write(out, pieces, known, b_centres, MODE, AT_INDEX, FAST, PIECES)
        _write_lawless(out, s_start, s_categories, b_index, LENGTH, BLOCK)
    else:
        p_done += s_strip
        p_sums += tl.cast(s_strip, tl.int64) * (SEGMENTS * SUMS * STRIP)
        if s_writes:
            # The first chunks are read before it waits.
            pieces = _read(given, s_start, s_categories, strip, AT_INDEX, BLOCK, PIECES, LAST_USE)
            totals = collect_strip(p_sums, p_done, SEGMENTS, SLOTS, SUMS, STRIP)
            b_centres = centres(
                row, totals[0], totals[1], totals[SUMS - 1], p_selected, MODE, AT_INDEX, s_grad_step
            )
            _write(out, pieces, known, b_centres, MODE, AT_INDEX, FAST, PIECES)
            for s_turn in tl.range(1, TURNS, num_stages=STAGES):
                s_from = s_start + s_turn * (PIECES * BLOCK)
                pieces = _read(given, s_from, s_categories, strip, AT_INDEX, BLOCK, PIECES, LAST_USE)
                _write(out, pieces, known, b_centres, MODE, AT_INDEX, FAST, PIECES)
            _write_lawless(out, s_start, s_categories, b_index, LENGTH, BLOCK)
        else:
            for s_turn in tl.range(TURNS, num_stages=STAGES):
                s_from = s_start + s_turn * (PIECES * BLOCK)
                pieces = _read(given, s_from, s_categories, strip, AT_INDEX, BLOCK, PIECES, FIRST_USE)
                b_sum, b_dot, b_plain_dot = _add(
                    (b_sum, b_dot, b_plain_dot), pieces, known, MODE, AT_INDEX, FAST, PIECES
                )
            sums = (b_sum, b_dot, b_plain_dot)
            publish_tile(p_sums + s_segment * (SUMS * STRIP), p_done, sums, SUMS, STRIP)
