"""Times of the fused kernels on a GPU over block sizes and warps: the source of the numbers in
`gapped.kernels.blocks` and `gapped.kernels.launch`.

Usage: python benchmarks/bench_blocks.py [short] [rao] [long]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.testing import do_bench

from gapped.kernels import blocks, launch
from gapped.kernels.launch import Fused

SHORT = ((1_048_576, 64), (262_144, 256))
FEW = ((144, 64, 100), (576, 64, 100), (2_000, 64, 100))
RAO = ((6_400, 64, 1000), (32_000, 64, 100), (120_000, 10, 100))
PARTS = ((8192, 4, 64), (16384, 8, 64), (16384, 8, 80), (16384, 16, 40), (32768, 16, 64), (32768, 32, 32))
LONG = ((8_192, 32_000, torch.float32), (8_192, 128_256, torch.bfloat16))


def milliseconds(logits: Tensor, fused: Fused) -> tuple[float, float]:
    """Median times of the forward and of the backward pass."""
    # Launches are kept, with the blocks that were set when they were made.
    for kept in (launch._forward, launch._backward):
        kept.cache_clear()
    key = launch.draw_key(logits, None)
    grad = torch.randn_like(logits)
    _, index, stats = launch.forward(logits, key, fused)

    def backward() -> Tensor:
        return launch.backward(logits, index, stats, key, grad, fused)

    forward = do_bench(lambda: launch.forward(logits, key, fused), return_mode="median", rep=40)
    return forward, do_bench(backward, return_mode="median", rep=40)


def short_rows() -> Iterator[str]:
    for rows, categories in SHORT:
        logits = torch.randn(rows, categories, device="cuda")
        for elements, warps in ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8)):
            blocks.BLOCK = (elements, warps)
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            yield f"{rows} x {categories}, {elements} elements, {warps} warps: {times}"


def conditional_draws() -> Iterator[str]:
    block, spread = blocks.RAO_BLOCK, blocks.SPREAD_ELEMENTS
    for rows, categories, samples in RAO:
        logits = torch.randn(rows, categories, device="cuda")
        for elements, warps in ((128, 1), (256, 2), (512, 4), (1024, 4)):
            blocks.RAO_BLOCK = (elements, warps)
            _, backward = milliseconds(logits, Fused("gumbel-rao", 0.5, samples=samples))
            what = f"{rows} x {categories}, {samples} draws, {elements} elements, {warps} warps"
            yield f"{what}: {backward:.4f} ms"
    blocks.RAO_BLOCK = block
    for rows, categories, samples in FEW:
        logits = torch.randn(rows, categories, device="cuda")
        for blocks.SPREAD_ELEMENTS in (0, spread):
            _, backward = milliseconds(logits, Fused("gumbel-rao", 0.5, samples=samples))
            what = f"{rows} x {categories}, {samples} draws, {blocks.shares_of(rows, categories)} shares"
            yield f"{what}: {backward:.4f} ms"


def long_rows() -> Iterator[str]:
    for rows, categories, dtype in LONG:
        logits = torch.randn(rows, categories, device="cuda", dtype=dtype)
        shape = f"{rows} x {categories}"
        blocks.most_parts = lambda device: 64
        for part, warps, registers in PARTS:
            blocks.PART_BYTES, blocks.PART_WARPS, blocks.PART_REGISTERS = part, warps, registers
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            # Registers are limited in half precision only.
            limit = f", {registers} registers" if logits.element_size() == 2 else ""
            yield f"{shape}, backward parts of {part} bytes, {warps} warps{limit}: {times}"
        blocks.most_parts = lambda device: 0
        for block, warps in ((8192, 16), (8192, 32), (16384, 32)):
            launch._STREAM_BACK, launch._STREAM_BACK_WARPS = block, warps
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            yield f"{shape}, backward twice {block} elements, {warps} warps: {times}"


def main() -> None:
    parts = {"short": short_rows, "rao": conditional_draws, "long": long_rows}
    for name in sys.argv[1:] or parts:
        for line in parts[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
