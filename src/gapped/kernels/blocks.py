"""How rows are divided among programs, and how much of them a program holds."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

# Elements of a block and warps that share it: the fastest on an H200 (benchmarks/bench_blocks.py).
BLOCK = (1024, 4)
RAO_BLOCK = (256, 2)
# So many programs fill the GPU. Where there are fewer rows than that needs, blocks are smaller.
PROGRAMS = 256
# So many elements fill the GPU with conditional draws. Where there are fewer, a row's draws are shared out in
# a block of so many: more would not fit into the registers of a warp.
SPREAD_ELEMENTS, SPREAD_BLOCK = 1 << 17, 512
# Backward a row is split over programs that hold so many bytes of its logits each. With so few registers one
# program more fits on a multiprocessor; only simple weights of half precision need no more.
PART_BYTES, PART_WARPS, PART_REGISTERS = 16384, 8, 64
# Into no more of them, so that on a large GPU several rows are under way.
MOST_PARTS = 32


def power(count: int) -> int:
    """The next power of two, at least 2."""
    return max(1 << (count - 1).bit_length(), 2)


def partition(rows: int, categories: int, *, loops: bool = False) -> tuple[int, dict[str, int]]:
    """The number of programs, and the size of their blocks; `loops` if they loop over draws."""
    elements, warps = RAO_BLOCK if loops else BLOCK
    columns = power(categories)
    height = max(min(elements // columns, 1 << (-(-rows // PROGRAMS) - 1).bit_length()), 1)
    # A row that is longer than a block has more threads instead.
    warps = min(max(height * columns * warps // elements, 1), 16)
    return -(-rows // height), {"BLOCK_ROWS": height, "BLOCK_COLUMNS": columns, "num_warps": warps}


def shares_of(rows: int, categories: int) -> int:
    """Over how many copies of a row its draws are spread.

    A program with one row would take long for them and, where rows are few, leave most of the GPU idle.
    """
    columns = power(categories)
    free = min(SPREAD_ELEMENTS // max(rows * columns, 1), SPREAD_BLOCK // columns, 8)
    return 1 << max(free.bit_length() - 1, 0)


@cache
def most_parts(device: torch.device) -> int:
    """Over how many programs a row may be split on this device.

    A row's programs wait for each other, so there must be places for all of them. Every multiprocessor has
    two at the least; half of that leaves room for other streams.
    """
    if device.type != "cuda":
        return MOST_PARTS
    return min(MOST_PARTS, torch.cuda.get_device_properties(device).multi_processor_count)


def parts_of(logits: Tensor, mode: str) -> tuple[int, dict[str, Any]]:
    """Over how many programs a row is split in the backward pass, and how much of it each one holds."""
    categories, size = logits.shape[-1], logits.element_size()
    block = min(power(categories), PART_BYTES // size)
    parts = -(-categories // block)
    simple = size == 2 and mode in ("gst", "straight-through")
    flags = {"PARTS": parts, "LANES": power(parts), "BLOCK": block, "num_warps": PART_WARPS}
    return parts, flags | ({"maxnreg": PART_REGISTERS} if simple else {})
