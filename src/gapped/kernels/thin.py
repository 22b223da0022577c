"""Products of a few rows with their own run's weight: most of their time is that of reading the weights.

A program has all rows of a run and some columns of its weight, so that weights are read once.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapped.kernels.blocks import power
from gapped.kernels.parts import tf32
from gapped.kernels.runner import run

# Rows that one program can hold. With more there is enough to compute, and cuBLAS is good at that.
MOST_ROWS = 32
# The columns of a program, how many rows of the weight it takes at a time, and how many if there are at least
# so many; the loads under way, and the warps: the fastest on an H200, or nearly (benchmarks/bench_blocks.py).
COLUMNS, DEPTH, LONG_DEPTH, LONG = 64, 64, 128, 1500
STAGES, WARPS = 3, 2
# Elements that a program rounds.
ROUNDED = 2048


@triton.jit(do_not_specialize=["s_rows", "s_x_run", "s_x_row", "s_out_run", "s_out_row"])  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    p_x,
    p_weight,
    p_out,
    s_rows,
    s_x_run,
    s_x_row,
    s_out_run,
    s_out_row,
    K: tl.constexpr,
    N: tl.constexpr,
    PIECES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    X_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    TF32: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Runs and rows are so many units apart; a unit of four elements lets them be read four at a time."""
    TILES: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    s_piece = tl.program_id(0) // TILES
    s_run = (s_piece // PIECES).to(tl.int64)
    b_row = tl.arange(0, ROWS).to(tl.int64)
    b_column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    b_row_inside, b_column_inside = b_row < s_rows, b_column < N
    p_rows = p_x + s_run * s_x_run * X_UNIT + (b_row * s_x_row * X_UNIT)[:, None]
    p_weight += s_piece.to(tl.int64) * (K * N)
    b_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for s_start in tl.range(0, K, DEPTH, num_stages=STAGES):
        b_k = s_start + tl.arange(0, DEPTH)
        b_inside = b_k < K
        b_x = tl.load(p_rows + b_k[None, :], mask=b_row_inside[:, None] & b_inside[None, :], other=0.0)
        if TRANSPOSED:
            p_part = p_weight + b_column[:, None] * K + b_k[None, :]
            b_w = tl.load(p_part, mask=b_column_inside[:, None] & b_inside[None, :], other=0.0).T
        else:
            p_part = p_weight + b_k[:, None] * N + b_column[None, :]
            b_w = tl.load(p_part, mask=b_inside[:, None] & b_column_inside[None, :], other=0.0)
        if TF32:
            b_sum = tl.dot(tf32(b_x), b_w, b_sum, input_precision="tf32")
        else:
            b_sum = tl.dot(b_x, b_w, b_sum, input_precision="ieee")
    p_to = p_out + s_run * s_out_run * OUT_UNIT + (b_row * s_out_row * OUT_UNIT)[:, None]
    p_to += (s_piece % PIECES * N + b_column)[None, :]
    tl.store(p_to, b_sum, mask=b_row_inside[:, None] & b_column_inside[None, :])


@triton.jit(do_not_specialize=["s_elements"])  # type: ignore[untyped-decorator]
def round_kernel(p_x, p_out, s_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    b_at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_inside = b_at < s_elements
    tl.store(p_out + b_at, tf32(tl.load(p_x + b_at, mask=b_inside, other=0.0)), mask=b_inside)


def _steps(x: Tensor) -> tuple[int, tuple[int, int]]:
    """A unit of at most four elements, and how many of them runs and rows are apart."""
    runs, rows, _ = x.stride()
    unit = math.gcd(runs, rows, 4)
    return unit, (runs // unit, rows // unit)


def _in_tf32(device: torch.device) -> bool:
    """Whether torch's own products would round their factors now."""
    return torch.get_float32_matmul_precision() != "highest" and _has_tf32(device)


@cache
def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def rounded(weight: Tensor) -> Tensor:
    """A weight, contiguous, as `product` takes it: in TF32 where products are.

    It is used many times, and rounding it each time would take longer than reading it.
    """
    weight = weight.contiguous()
    if not _in_tf32(weight.device):
        return weight
    out = torch.empty_like(weight)
    count = weight.numel()
    flags = {"BLOCK": ROUNDED, "num_warps": 4}
    run(round_kernel, -(-count // ROUNDED), (weight, out), (count,), (), flags)
    return out


def product(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool = False) -> None:
    """Write the products of up to `MOST_ROWS` rows ``(R, B, K)`` with each run's weight to `out`, in float32.

    The weight ``(R, P * K, N)``, which `rounded` made, has P pieces, one below the other; their products are
    side by side in `out`, ``(R, B, P * N)``. If `transposed`, it is ``(R, N, K)`` and one piece. Rows of `x`
    and `out` can be anywhere, the elements of a row are adjacent. Rows are rounded to TF32 where torch would.
    """
    runs, rows, depth = x.shape
    columns = weight.shape[1 if transposed else 2]
    pieces = out.shape[2] // columns
    x_unit, x_steps = _steps(x)
    out_unit, out_steps = _steps(out)
    flags = {
        "K": depth,
        "N": columns,
        "PIECES": pieces,
        "TRANSPOSED": transposed,
        "X_UNIT": x_unit,
        "OUT_UNIT": out_unit,
        "TF32": _in_tf32(x.device),
        "ROWS": max(power(rows), 16),
        "COLUMNS": COLUMNS,
        "DEPTH": LONG_DEPTH if depth >= LONG else DEPTH,
        "STAGES": STAGES,
        "num_warps": WARPS,
    }
    programs = runs * pieces * -(-columns // COLUMNS)
    run(product_kernel, programs, (x, weight, out), (rows, *x_steps, *out_steps), (), flags)
