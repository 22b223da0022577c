"""Times of the fused kernels on a GPU over block sizes and warps: the source of the numbers in
`gapped.kernels.runner` and of the kernels in `gapped.kernels.sampling`.

Usage: python benchmarks/bench_blocks.py [short] [rao] [long]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.testing import do_bench

from gapped.kernels import runner
from gapped.kernels.sampling import launch, long_rows, short_rows, split_rows
from gapped.kernels.sampling.launch import Fused

SHORT = ((1_048_576, 64), (262_144, 256))
FEW = ((144, 64, 100), (576, 64, 100), (2_000, 64, 100))
RAO = ((6_400, 64, 1000), (32_000, 64, 100), (120_000, 10, 100))
SEGMENTS = ((8192, 4, 64), (16384, 8, 64), (16384, 8, 80), (16384, 16, 40), (32768, 16, 64), (32768, 32, 32))
LONG = ((8_192, 32_000, torch.float32), (8_192, 128_256, torch.bfloat16))


def milliseconds(logits: Tensor, fused: Fused) -> tuple[float, float]:
    """Median times of the forward and of the backward pass."""
    # Launches are kept, with the blocks that were set when they were made.
    for cached in (launch._forward, launch._backward):
        cached.cache_clear()
    key = launch.draw_key(logits, None)
    grad = torch.randn_like(logits)
    _, index, stats = launch.forward(logits, key, fused)

    def backward() -> Tensor:
        return launch.backward(logits, index, stats, key, grad, fused)

    forward = do_bench(lambda: launch.forward(logits, key, fused), return_mode="median", rep=40)
    return forward, do_bench(backward, return_mode="median", rep=40)


def time_short() -> Iterator[str]:
    for rows, categories in SHORT:
        logits = torch.randn(rows, categories, device="cuda")
        for elements, warps in ((512, 2), (1024, 2), (1024, 4), (2048, 4), (2048, 8)):
            runner.BLOCK = (elements, warps)
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            yield f"{rows} x {categories}, {elements} elements, {warps} warps: {times}"


def time_draws() -> Iterator[str]:
    block, spread = runner.LOOP_BLOCK, short_rows.SPREAD_ELEMENTS
    for rows, categories, samples in RAO:
        logits = torch.randn(rows, categories, device="cuda")
        for elements, warps in ((128, 1), (256, 2), (512, 4), (1024, 4)):
            runner.LOOP_BLOCK = (elements, warps)
            _, backward = milliseconds(logits, Fused("gumbel-rao", 0.5, samples=samples))
            what = f"{rows} x {categories}, {samples} draws, {elements} elements, {warps} warps"
            yield f"{what}: {backward:.4f} ms"
    runner.LOOP_BLOCK = block
    for rows, categories, samples in FEW:
        logits = torch.randn(rows, categories, device="cuda")
        for short_rows.SPREAD_ELEMENTS in (0, spread):
            _, backward = milliseconds(logits, Fused("gumbel-rao", 0.5, samples=samples))
            what = f"{rows} x {categories}, {samples} draws, {short_rows.shares_of(rows, categories)} shares"
            yield f"{what}: {backward:.4f} ms"


def time_long() -> Iterator[str]:
    for rows, categories, dtype in LONG:
        logits = torch.randn(rows, categories, device="cuda", dtype=dtype)
        shape = f"{rows} x {categories}"
        split_rows.most_segments = lambda device: 64
        for size, warps, registers in SEGMENTS:
            split_rows.SEGMENT_BYTES, split_rows.WARPS, split_rows.REGISTERS = size, warps, registers
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            # Registers are limited in half precision only.
            limit = f", {registers} registers" if logits.element_size() == 2 else ""
            yield f"{shape}, backward in segments of {size} bytes, {warps} warps{limit}: {times}"
        split_rows.most_segments = lambda device: 0
        for block, warps in ((8192, 16), (8192, 32), (16384, 32)):
            long_rows.BACKWARD_CHUNK, long_rows.BACKWARD_WARPS = block, warps
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            yield f"{shape}, backward by reading twice, {block} elements, {warps} warps: {times}"


def main() -> None:
    cases = {"short": time_short, "rao": time_draws, "long": time_long}
    for name in sys.argv[1:] or cases:
        for line in cases[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
