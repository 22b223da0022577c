"""Rows that lie side by side in memory, since the category axis is not the last: sizes and kernels.

A program has a strip of neighbouring rows, wide enough that it reads one category of them as a whole piece of
memory. Blocks have rows on the first axis and categories on the second, as in `short`, which reads rows that
are short enough for a block, side by side or not; the mathematics is in `long`. Forward, a program reads its
strip once, in chunks, and no two rows share a lane. Results are written in the order of the logits, without
anything between their rows.

Backward, a strip is cut into tiles, a segment of the categories each. One program reads a tile and publishes
its sums. Another one adds up the sums of all tiles of these rows, always in the same order, reads the tile
again and writes the gradient. Several programs share a multiprocessor, and some read memory while others
write or wait. With `T` tiles and a lag of `L`, programs are numbered

    sum 0, ..., sum L-1,   sum L, write 0, sum L+1, write 1, ..., sum T-1, write T-L-1,   ..., write T-1,

so that a tile is written while the cache can still hold it, and memory need not be read twice. A program that
writes waits for those that sum its strip. The lag is so long that all of these have lower numbers, a GPU
starts programs in the order of their numbers (as in `long`), and a program that sums never waits. So one that
waits does so for programs that run already or have ended: a strip may have any number of tiles, and none of
them need to be on the GPU at the same time. Rows that a program can hold are a single tile, which it reads
once.

On an H200, GST of (64, 8192, 1024) logits in float32 with `dim=1` takes 1.32 ms forward and 1.98 backward
(docs/performance.md). The simplest form in this package is `long` between two transposed copies of 1.01 ms
each; its 4.5 to 5.5 ms are an estimate, not a measurement.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import (
    drop_absent,
    gumbel,
    row_starts,
    row_uniforms,
    safe_reciprocal,
)
from gapped.kernels.runner import power
from gapped.kernels.sampling.long import (
    LOWEST,
    NORMAL,
    Row,
    add_scores,
    add_weights,
    centres,
    gradient,
    halves,
    row_gap,
    row_of_sample,
    weights,
)
from gapped.kernels.sampling.surrogates import (
    DECOUPLED,
    GUMBEL,
    SECOND_ORDER,
    SIMPLE,
    TWO_POINTS,
    lawless,
    level,
)

# Sizes leave a program so few registers that two or more programs fit on a multiprocessor.
# `gapped bench --constant` measures others.
# Rows up to this length are held by one program at once, at least 16 of them; longer ones are read in strips.
LONGEST_HELD = 64
# Forward: bytes of a strip's width, warps, chunks read at a time, how many times that is read ahead, and the
# registers of a thread. In each chunk a thread has 16 bytes, the most that it reads at once.
FORWARD_BYTES, FORWARD_WARPS, PIECES, STAGES, FORWARD_REGISTERS = 128, 16, 4, 1, 64
# Forward, strips are wider where a row would have fewer chunks: drawing from the lanes of a strip takes as
# long as reading some chunks, however many rows it has.
FEWEST_CHUNKS = 16
# Backward: bytes of a tile's width and the categories of a segment. Segments are longer where there would be
# more of them: every program that writes adds up the sums of all.
TILE_BYTES, SEGMENT, MOST_SEGMENTS = 128, 256, 64
# By the bytes of an entry: a program's warps, the chunks that it reads at a time, and how many times that is
# read ahead. Chunks read ahead wait in shared memory, others in registers.
TILES = {4: (8, 4, 1), 2: (4, 1, 4)}
# The registers of a thread for float32 and simple weights: a third program fits on a multiprocessor.
TILE_REGISTERS = 80
# How many more tiles than a strip's are summed before the first is written: about as many as a GPU sums at
# the same time. The cache must hold all of these.
AHEAD = 192
# Hints to the cache for the first and for the last reading of a tile.
FIRST_USE, LAST_USE = "evict_last", "evict_first"
# Of shorter rows: elements that a program holds, with simple weights and with others; its warps; registers
# of a thread, for simple weights; the least width of its strip in bytes.
HELD_SIMPLE, HELD_OTHERS, HELD_WARPS, HELD_REGISTERS, HELD_BYTES = 8192, 4096, 8, 128, 64
# Strips are narrower where there would be too few programs, but no narrower than what memory delivers at a
# time. Forward, those of short rows are no wider than that, in bytes.
FEWEST_STRIPS, LEAST_BYTES, MOST_BYTES = 256, 32, 256


def forward_sizes(count: int, categories: int, size: int) -> tuple[int, dict[str, Any]]:
    """The number of strips of `count` rows with entries of `size` bytes, and the sizes of the launch."""
    width, read = FORWARD_BYTES // size, FORWARD_WARPS * 512 // size
    while categories * width < FEWEST_CHUNKS * read and width * size < MOST_BYTES:
        width *= 2
    width = _narrow(width, count, size)
    sizes = {"BLOCK": read // width, "PIECES": PIECES, "STRIP": width, "STAGES": STAGES}
    sizes |= {"CHUNKS": power(-(-categories * width // read)), "num_warps": FORWARD_WARPS}
    return -(-count // width), sizes | {"maxnreg": FORWARD_REGISTERS}


class Partition(NamedTuple):
    """How the rows of a backward pass are divided."""

    programs: int
    lag: int
    """Of tiles that are written after those that are summed (`task_of`); 0 where rows are held."""
    sizes: dict[str, Any]
    """Constants of the launch."""


def backward_sizes(count: int, categories: int, size: int, mode: str) -> Partition:
    """The partition of `count` rows with entries of `size` bytes, for an estimator."""
    simple = mode in SIMPLE
    most, width = HELD_SIMPLE if simple else HELD_OTHERS, TILE_BYTES // size
    while categories * width > most and width * size > HELD_BYTES:
        width //= 2
    hints = {"FIRST_USE": FIRST_USE, "LAST_USE": LAST_USE, "SUMS": 3 if mode in SECOND_ORDER else 2}
    if categories * width <= most:
        width = _narrow(width, count, size)
        block = HELD_WARPS * 512 // (width * size)
        sizes = {"SEGMENTS": 1, "SLOTS": 2, "TURNS": 1, "PIECES": -(-categories // block)}
        sizes |= {"BLOCK": block, "STRIP": width, "STAGES": 1, "num_warps": HELD_WARPS}
        sizes |= {"maxnreg": HELD_REGISTERS} if simple else {}
        return Partition(-(-count // width), 0, hints | sizes)
    segment = max(min(SEGMENT, power(categories) // 2), power(-(-categories // MOST_SEGMENTS)))
    segments = -(-categories // segment)
    width = _narrow(TILE_BYTES // size, count * segments, size)
    warps, pieces, stages = TILES[size]
    block = min(warps * 512 // (width * size), segment)
    pieces = min(pieces, segment // block)
    sizes = {"SEGMENTS": segments, "SLOTS": power(segments), "PIECES": pieces}
    sizes |= {"TURNS": segment // (pieces * block), "BLOCK": block, "STRIP": width, "STAGES": stages}
    sizes |= {"num_warps": warps} | ({"maxnreg": TILE_REGISTERS} if simple and size == 4 else {})
    tiles = -(-count // width) * segments
    return Partition(2 * tiles, min(segments + AHEAD, tiles), hints | sizes)


def _narrow(width: int, count: int, size: int) -> int:
    """`width`, or less where `count` rows would make too few strips."""
    while count < width * FEWEST_STRIPS and width * size > LEAST_BYTES:
        width //= 2
    return width


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
    """`PIECES` chunks, all of them read before the first is used."""
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
def _draw(p_logits, s_seed, strip, b_share, s_categories, s_step, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of weights and drawn categories: first a lane by its share of the row, then an element."""
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
def _mark_lawless(b_values, b_index, s_categories):
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
            b_second, b_index = _draw(p_logits, s_seed, strip, b_share, s_categories, s_step, CHUNKS, BLOCK)
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
            b_value = _mark_lawless(b_weight * b_scale, b_index, s_categories)
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


@triton.jit
def task_of(s_program, s_tiles, s_lag):
    """The tile of a program, and whether it is the second one of the tile."""
    s_turn = s_program - s_lag
    s_turns = 2 * (s_tiles - s_lag)
    s_writes = (s_turn >= 0) & ((s_turn % 2 == 1) | (s_turn >= s_turns))
    s_summed = tl.minimum(s_program, s_lag + s_turn // 2)
    s_written = tl.maximum(s_turn // 2, s_turn - s_turns // 2)
    return tl.where(s_writes, s_written, s_summed), s_writes


@triton.jit
def publish_tile(p_sums, p_done, sums, SUMS: tl.constexpr, STRIP: tl.constexpr):
    """Store the sums of a tile, and count it once they can be seen."""
    for s_sum in tl.static_range(SUMS):
        tl.store(p_sums + s_sum * STRIP + tl.arange(0, STRIP), tl.sum(sums[s_sum], 1))
    # The thread that counts releases the sums that the other threads have stored.
    tl.debug_barrier()
    tl.atomic_add(p_done, 1, sem="release")


@triton.jit
def collect_strip(
    p_sums, p_done, SEGMENTS: tl.constexpr, SLOTS: tl.constexpr, SUMS: tl.constexpr, STRIP: tl.constexpr
):
    """Wait for the sums of all tiles of the strip, and add them up in the order of the segments."""
    s_done = tl.atomic_add(p_done, 0, sem="acquire")
    while s_done < SEGMENTS:
        s_done = tl.atomic_add(p_done, 0, sem="acquire")
    b_segments = tl.arange(0, SLOTS)[None, :]
    p_sums += b_segments * (SUMS * STRIP) + tl.arange(0, STRIP)[:, None]
    parts = ()
    for s_sum in tl.static_range(SUMS):
        b_part = tl.load(p_sums + s_sum * STRIP, mask=b_segments < SEGMENTS, other=0.0, cache_modifier=".cg")
        parts = parts + (b_part,)
    sums = ()
    for s_sum in tl.static_range(SUMS):
        sums = sums + (tl.sum(parts[s_sum], 1)[:, None],)
    return sums


class Given(NamedTuple):
    """Where a program reads: rows of logits and of the incoming gradient."""

    logits: tl.tensor
    """The first categories of the rows, ``(rows, 1)``."""
    step: tl.tensor
    """From one category to the next."""
    grads: tl.tensor
    grad_step: tl.tensor


class Known(NamedTuple):
    """The rows of a program once the sample is drawn."""

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
        b_grad = drop_absent(b_grad, b_logits)
    return b_columns, b_logits - known.row.shift, b_grad


@triton.jit
def _add(
    sums, pieces, known, MODE: tl.constexpr, AT_INDEX: tl.constexpr, FAST: tl.constexpr, PIECES: tl.constexpr
):
    """Add some chunks to the sums of lanes: weights, weights times gradient, halves times gradient."""
    b_sum, b_dot, b_half_dot = sums
    for s_piece in tl.static_range(PIECES):
        b_columns, b_shifted, b_grad = _piece(pieces, known, s_piece, AT_INDEX)
        b_weight = weights(b_shifted, b_columns, known.row, known.gap, MODE, FAST)
        b_sum += b_weight
        b_dot += b_weight * b_grad
        if MODE >= TWO_POINTS:
            b_half_dot += halves(b_shifted, known.row, FAST) * b_grad
    return b_sum, b_dot, b_half_dot


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
    """Overwrite rows without a sample: by zeros if they have no category, else by NaN."""
    if tl.max(b_index) >= s_categories:
        # Other threads may have written it.
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
    `LAST_USE` are hints to the cache.
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
        # Issue all loads of the tile before any other, or the compiler would wait in between.
        tl.debug_barrier()
    # Rows out of range read the last row again, and rows without a sample some category. Their results are
    # masked, or overwritten below.
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
    b_half_dot = b_sum
    if SEGMENTS == 1:
        sums = _add((b_sum, b_dot, b_half_dot), pieces, known, MODE, AT_INDEX, FAST, PIECES)
        b_sum, b_dot, b_half_dot = tl.sum(sums[0], 1), tl.sum(sums[1], 1), tl.sum(sums[2], 1)
        b_centres = centres(
            row, b_sum[:, None], b_dot[:, None], b_half_dot[:, None], p_selected, MODE, AT_INDEX, s_grad_step
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
                b_sum, b_dot, b_half_dot = _add(
                    (b_sum, b_dot, b_half_dot), pieces, known, MODE, AT_INDEX, FAST, PIECES
                )
            sums = (b_sum, b_dot, b_half_dot)
            publish_tile(p_sums + s_segment * (SUMS * STRIP), p_done, sums, SUMS, STRIP)
