"""Rows that lie side by side: how they are divided among programs, and all about it that can be tuned.

The sizes are chosen by what the compiler needs for them: so many registers that two programs fit on a
multiprocessor. `benchmarks/bench_blocks.py axis` measures others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gapped.kernels.runner import power

# Rows up to this length are held by one program at once, at least 16 of them; longer ones are read in strips.
LONGEST_BLOCK = 64
# Forward: bytes of a strip's width, warps, chunks read at a time, how many times that is read ahead, and the
# registers of a thread. In each chunk a thread has what it can read at once, 16 bytes.
FORWARD_BYTES, FORWARD_WARPS, PIECES, STAGES, FORWARD_REGISTERS = 128, 16, 4, 1, 64
# Forward, strips are wider where a row would have fewer chunks: drawing from the lanes of a strip takes as
# long as reading some chunks, however many rows it has.
FEWEST_CHUNKS = 16
# Backward: rows of a strip; elements that a program holds, its warps and the registers of a thread, for
# estimators with simple weights and for the others.
ROWS, SIMPLE, OTHERS = 16, (8192, 16, 64), (4096, 8, 128)
# Strips are narrower where there would be fewer of them, or more segments to each; but no narrower than what
# memory delivers at a time. Those of short rows are no wider than that, in bytes.
FEWEST_STRIPS, MOST_SEGMENTS, LEAST_BYTES, MOST_BYTES = 256, 32, 32, 256


@cache
def most_segments(device: torch.device) -> int:
    """Into how many segments a strip can be split on this device.

    Its programs wait for each other, so all of them must fit. Every multiprocessor has room for at least one;
    half of that leaves room for other streams.
    """
    if device.type != "cuda":
        return MOST_SEGMENTS
    return torch.cuda.get_device_properties(device).multi_processor_count // 2


def forward_sizes(count: int, categories: int, size: int) -> tuple[int, dict[str, Any]]:
    """The number of strips of `count` rows with entries of `size` bytes, and the sizes of the launch."""
    width, read = FORWARD_BYTES // size, FORWARD_WARPS * 512 // size
    while categories * width < FEWEST_CHUNKS * read and width * size < MOST_BYTES:
        width *= 2
    width = _narrowed(width, count, size)
    sizes = {"BLOCK": read // width, "PIECES": PIECES, "STRIP": width, "STAGES": STAGES}
    sizes |= {"CHUNKS": power(-(-categories * width // read)), "num_warps": FORWARD_WARPS}
    return -(-count // width), sizes | {"maxnreg": FORWARD_REGISTERS}


def backward_sizes(count: int, categories: int, size: int, mode: str) -> tuple[int, dict[str, Any]]:
    """The same for the backward pass of an estimator; `SEGMENTS` is how many programs share a strip."""
    held, warps, registers = SIMPLE if mode in ("gst", "straight-through") else OTHERS
    width = ROWS
    while 2 * power(categories) * width <= held and width * size < MOST_BYTES:
        width *= 2
    width = _narrowed(width, count, size)
    while categories * width > held * MOST_SEGMENTS and width * size > LEAST_BYTES:
        width //= 2
    block = min(power(categories), held // width)
    segments = -(-categories // block)
    sizes = {"SEGMENTS": segments, "SLOTS": power(segments), "BLOCK": block, "STRIP": width}
    return -(-count // width), sizes | {"num_warps": warps, "maxnreg": registers}


def _narrowed(width: int, count: int, size: int) -> int:
    """`width`, or less where `count` rows would make too few strips."""
    while count < width * FEWEST_STRIPS and width * size > LEAST_BYTES:
        width //= 2
    return width
