"""How rows are divided among the programs of a kernel. Needs no torch."""

from __future__ import annotations

# Elements of a block and warps that share it: the fastest on an H200 (benchmarks/bench_blocks.py).
BLOCK = (1024, 4)
# So many programs fill the GPU. Where there are fewer rows than that needs, blocks are smaller.
PROGRAMS = 256


def power(count: int) -> int:
    """The next power of two, at least 2."""
    return max(1 << (count - 1).bit_length(), 2)


def partition(rows: int, categories: int, block: tuple[int, int] | None = None) -> tuple[int, dict[str, int]]:
    """The number of programs, and the size of their blocks; `block` stands in for `BLOCK`."""
    elements, warps = block or BLOCK
    columns = power(categories)
    height = max(min(elements // columns, 1 << (-(-rows // PROGRAMS) - 1).bit_length()), 1)
    # A row that is longer than a block has more threads instead.
    warps = min(max(height * columns * warps // elements, 1), 16)
    return -(-rows // height), {"BLOCK_ROWS": height, "BLOCK_COLUMNS": columns, "num_warps": warps}
