"""Rows that lie side by side: how they are divided among programs, and all about it that can be tuned.

The sizes are chosen by what the compiler needs for them: so few registers that two or more programs fit on a
multiprocessor. `benchmarks/bench_axis.py` measures others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gapped.kernels.runner import power

# Rows up to this length are held by one program at once, at least 16 of them; longer ones are read in strips.
LONGEST_BLOCK = 64
# Forward: bytes of a strip's width, warps, chunks read at a time, how many times that is read ahead, and the
# registers of a thread. In each chunk a thread has what it can read at once, 16 bytes.
FORWARD_BYTES, FORWARD_WARPS, PIECES, STAGES, FORWARD_REGISTERS = 128, 16, 4, 1, 64
# Forward, strips are wider where a row would have fewer chunks: drawing from the lanes of a strip takes as
# long as reading some chunks, however many rows it has.
FEWEST_CHUNKS = 16
# Backward: bytes of a tile's width and the categories of a segment. Segments are longer where there would be
# more of them: every program that writes adds up the sums of all.
TILE_BYTES, SEGMENT, MOST_SEGMENTS = 128, 256, 64
# By the bytes of an entry: a program's warps, the chunks that it reads at a time, and how many times that is
# read ahead. What is read ahead waits in shared memory, else in registers.
TILES = {4: (8, 4, 1), 2: (4, 1, 4)}
# The registers of a thread for float32 and simple weights: a third program fits on a multiprocessor.
TILE_REGISTERS = 80
# How many more tiles than a strip's are summed before the first is written: about as many as a GPU sums at the
# same time. The cache must hold all of these.
AHEAD = 192
# What the cache is told of a tile that is read for the first and for the last time.
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
    width = _narrowed(width, count, size)
    sizes = {"BLOCK": read // width, "PIECES": PIECES, "STRIP": width, "STAGES": STAGES}
    sizes |= {"CHUNKS": power(-(-categories * width // read)), "num_warps": FORWARD_WARPS}
    return -(-count // width), sizes | {"maxnreg": FORWARD_REGISTERS}


class Partition(NamedTuple):
    """How the rows of a backward pass are divided."""

    programs: int
    lag: int
    """Of tiles that are written after those that are summed (`tile_order`); 0 where rows are held."""
    sizes: dict[str, Any]
    """Constants of the launch."""


def backward_sizes(count: int, categories: int, size: int, mode: str) -> Partition:
    """The partition of `count` rows with entries of `size` bytes, for an estimator."""
    simple = mode in ("gst", "straight-through")
    most, width = HELD_SIMPLE if simple else HELD_OTHERS, TILE_BYTES // size
    while categories * width > most and width * size > HELD_BYTES:
        width //= 2
    hints = {"FIRST_USE": FIRST_USE, "LAST_USE": LAST_USE, "SUMS": 3 if mode == "reinmax" else 2}
    if categories * width <= most:
        width = _narrowed(width, count, size)
        block = HELD_WARPS * 512 // (width * size)
        sizes = {"SEGMENTS": 1, "SLOTS": 2, "TURNS": 1, "PIECES": -(-categories // block)}
        sizes |= {"BLOCK": block, "STRIP": width, "STAGES": 1, "num_warps": HELD_WARPS}
        sizes |= {"maxnreg": HELD_REGISTERS} if simple else {}
        return Partition(-(-count // width), 0, hints | sizes)
    segment = max(min(SEGMENT, power(categories) // 2), power(-(-categories // MOST_SEGMENTS)))
    segments = -(-categories // segment)
    width = _narrowed(TILE_BYTES // size, count * segments, size)
    warps, pieces, stages = TILES[size]
    block = min(warps * 512 // (width * size), segment)
    pieces = min(pieces, segment // block)
    sizes = {"SEGMENTS": segments, "SLOTS": power(segments), "PIECES": pieces}
    sizes |= {"TURNS": segment // (pieces * block), "BLOCK": block, "STRIP": width, "STAGES": stages}
    sizes |= {"num_warps": warps} | ({"maxnreg": TILE_REGISTERS} if simple and size == 4 else {})
    tiles = -(-count // width) * segments
    return Partition(2 * tiles, min(segments + AHEAD, tiles), hints | sizes)


def _narrowed(width: int, count: int, size: int) -> int:
    """`width`, or less where `count` rows would make too few strips."""
    while count < width * FEWEST_STRIPS and width * size > LEAST_BYTES:
        width //= 2
    return width
