"""The order in which the tiles of strips are summed and written, and the exchange of their sums.

A strip of neighbouring rows is cut into tiles, a segment of the categories each. A tile has two programs: one
that sums it, and one that writes its gradient, which takes the sums of all tiles of the strip. With `T` tiles
and a lag of `L`, programs are numbered

    sum 0, ..., sum L-1,   sum L, write 0, sum L+1, write 1, ..., sum T-1, write T-L-1,   ..., write T-1,

so that a tile is written while the cache can still hold it. A program that writes waits for those that sum
its strip. The lag is so long that all of these have lower numbers, a GPU starts programs in the order of
their numbers (as `split_rows` relies on, too), and a program that sums never waits. So one that waits does so for
programs that run already or have ended: a strip may have any number of tiles, and none of them need to be on
the GPU at the same time.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    # What the other threads have stored is released by the one that counts.
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
