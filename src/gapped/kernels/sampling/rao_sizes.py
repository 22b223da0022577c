"""How the kernels of Gumbel-Rao divide their work: all that can be tuned, in one place.

`python benchmarks/bench_blocks.py rao` tries other values on a GPU.
"""

from __future__ import annotations

from typing import Any

from gapped.kernels.partition import partition, power

# Rows in one block: elements and warps of a program, and into how many pieces a row of float32 is cut. A
# thread holds neighbours of every piece, so with more pieces fewer threads share a row and exchange its sums.
BLOCK, PIECES = (256, 1), 2
# Registers of a thread, for these and longer rows: four of its kind then share a scheduler.
REGISTERS = 128
# So many elements fill the GPU. Where there are fewer, a row's draws are shared out in a block of so many.
SPREAD_ELEMENTS, SPREAD_BLOCK = 1 << 17, 512
# Longer rows: warps of a program, elements of a chunk for each thread, and the most draws for one reading of
# the row.
WARPS, VECTOR, DRAWS = 4, 4, 12


def shares_of(rows: int, categories: int) -> int:
    """Over how many copies of a row its conditional draws are spread.

    Where rows are few, a program with one row would take long for all draws while most of the GPU is idle.
    """
    columns = power(categories)
    free = min(SPREAD_ELEMENTS // max(rows * columns, 1), SPREAD_BLOCK // columns, 8)
    return 1 << max(free.bit_length() - 1, 0)


def block_of(rows: int, categories: int, size: int) -> tuple[int, dict[str, Any]]:
    """How many programs there are for rows that fit into a block, and the sizes of the launch.

    `size` is that of an element in bytes.
    """
    programs, sizes = partition(rows, categories, BLOCK)
    columns = sizes.pop("BLOCK_COLUMNS")
    # A thread reads 16 bytes at a time, whatever they hold.
    pieces = min(max(PIECES * size // 4, 1), columns)
    flags = {**sizes, "PIECES": pieces, "WIDTH": columns // pieces}
    shares = shares_of(rows, categories)
    if shares > 1:
        # One warp: sums over a row stay within it, and the shares hide each other's waiting.
        return rows, flags | {"BLOCK_ROWS": shares, "SPREAD": True, "num_warps": 1}
    return programs, flags | {"SPREAD": False, "maxnreg": REGISTERS}


def batches_of(samples: int) -> tuple[int, dict[str, Any]]:
    """How many times a long row is read for the sums of its draws, and the sizes of the launch."""
    batches = -(-samples // DRAWS)
    # Bits come for four draws at a time.
    batch = samples if batches == 1 else -(-samples // (4 * batches)) * 4
    block = 32 * WARPS * VECTOR
    flags = {"BATCH": batch, "VECTOR": VECTOR, "BLOCK": block}
    return batches, flags | {"num_warps": WARPS, "maxnreg": REGISTERS}
