"""Rows that lie side by side: how they are divided among programs, and all about it that can be tuned."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gapped.kernels.runner import power

# Short rows: elements of a block, and warps that share it. Longer rows are read in strips.
BLOCK = (4096, 16)
LONGEST_BLOCK = 256
# Forward: bytes of a strip's width, elements of a chunk, warps that share it; how many chunks are read ahead.
FORWARD_BYTES, CHUNK, FORWARD_WARPS, STAGES = 64, 4096, 16, 1
# Backward: bytes of a strip's width, bytes of logits that a program holds, and its warps.
BACKWARD_BYTES, SEGMENT_BYTES, WARPS = 64, 32768, 16
# Strips are narrower where there would be fewer of them, or more segments to each, but no narrower than what
# memory delivers at a time.
FEWEST_STRIPS, MOST_SEGMENTS, LEAST_BYTES = 256, 32, 32


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
    width = _width(count, FORWARD_BYTES, size)
    block = min(power(categories), CHUNK // width)
    sizes = {"CHUNKS": power(-(-categories // block)), "BLOCK": block, "STRIP": width, "STAGES": STAGES}
    return -(-count // width), sizes | {"num_warps": FORWARD_WARPS}


def backward_sizes(count: int, categories: int, size: int) -> tuple[int, dict[str, Any]]:
    """The same for the backward pass; `SEGMENTS` is how many programs share a strip."""
    width, held = _width(count, BACKWARD_BYTES, size), SEGMENT_BYTES // size
    while categories * width > held * MOST_SEGMENTS and width * size > LEAST_BYTES:
        width //= 2
    block = min(power(categories), held // width)
    segments = -(-categories // block)
    sizes = {"SEGMENTS": segments, "SLOTS": power(segments), "BLOCK": block, "STRIP": width}
    return -(-count // width), sizes | {"num_warps": WARPS}


def _width(count: int, wide: int, size: int) -> int:
    """How many rows of entries of `size` bytes a strip has that should be so `wide`, in bytes."""
    while count * size < wide * FEWEST_STRIPS and wide > LEAST_BYTES:
        wide //= 2
    return wide // size
