"""How the kernel of MVE's gradient divides its work: all that can be tuned, in one place.

`python benchmarks/bench_blocks.py mve` tries other values on a GPU.
"""

from __future__ import annotations

from typing import Any

from gapped.kernels.partition import power

LONGEST = 128
"""The most categories: a program holds a matrix of their weights in its registers."""
# The most logits and weights of a program of several rows, and the weights of a warp: 128 for each thread. So
# a row of 64 categories belongs to one warp, which waits for no other.
LOGITS, WEIGHTS, PER_WARP = 64, 2048, 4096
# The registers of a thread where a row belongs to one warp: 12 programs fit on a multiprocessor. On an H200,
# 65,536 x 64 take 0.211 ms, and 0.267 with as many as the compiler wants.
ROW_REGISTERS = 168
# The most columns of a matrix that a thread holds. With more it has to read more of a vector at each step,
# with fewer it has more sums to exchange with others.
COLUMNS = 32
# The most steps of conjugate gradients, and the part of the first residual's square at which they end.
STEPS, LEFT = 8, 1e-12


def block_of(rows: int, categories: int) -> tuple[int, dict[str, Any]]:
    """How many programs there are, and the sizes of the launch."""
    columns = power(categories)
    height = max(min(LOGITS // columns, WEIGHTS // columns**2), 1)
    warps = max(height * columns**2 // PER_WARP, 1)
    along = max(columns // COLUMNS, 1)
    down = max(32 * warps // (height * along), 1)
    block: dict[str, Any] = {"BLOCK_ROWS": height, "BLOCK_COLUMNS": columns, "DOWN": down, "ALONG": along}
    block |= {"STEPS": STEPS, "LEFT": LEFT, "num_warps": warps}
    return -(-rows // height), block | ({"maxnreg": ROW_REGISTERS} if columns**2 == PER_WARP else {})
