"""Times of the fused kernels on a GPU over block sizes and warps: the source of the numbers in
`gapped.kernels.runner` and of the kernels in `gapped.kernels.sampling`.

Usage: python benchmarks/bench_blocks.py [short] [rao] [long]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

import gapped
from gapped.kernels import runner
from gapped.kernels.sampling import launch, long, rao
from gapped.kernels.sampling.fused import Fused
from gapped.simplex import draw_key

SHORT = ((1_048_576, 64), (262_144, 256))
FEW = ((144, 64, 100), (576, 64, 100), (2_000, 64, 100), (6_400, 64, 1000), (120_000, 10, 100))
DRAWS = 10
# Rows, categories, dtype, and the most milliseconds that forward and backward pass should take.
TARGETS = (
    (1_048_576, 64, torch.float32, 0.9),
    (8_192, 32_000, torch.float32, 10),
    (4_096, 128_256, torch.bfloat16, 15),
)
RAO_SHORT = (
    ("BLOCK", "PIECES", "REGISTERS"),
    (
        ((128, 1), 1, 96), ((256, 1), 2, 112), ((256, 1), 2, 128), ((256, 1), 2, 160), ((512, 2), 2, 128),
        ((1024, 4), 2, 128), ((512, 1), 4, 168), ((512, 1), 4, 255), ((1024, 2), 4, 255),
    ),
)  # fmt: skip
RAO_LONG = (
    ("WARPS", "VECTOR", "REGISTERS"),
    ((4, 4, 128), (4, 4, 168), (8, 4, 128), (4, 2, 128), (8, 2, 128), (8, 2, 96), (4, 8, 255), (8, 1, 80)),
)
SEGMENTS = ((8192, 4, 64), (16384, 8, 64), (16384, 8, 80), (16384, 16, 40), (32768, 16, 64), (32768, 32, 32))
LONG = ((8_192, 32_000, torch.float32), (8_192, 128_256, torch.bfloat16))


def milliseconds(logits: Tensor, fused: Fused) -> tuple[float, float]:
    """Median times of the forward and of the backward pass."""
    # Launches are kept, with the blocks that were set when they were made.
    for cached in (launch._forward, launch._backward, launch._rao):
        cached.cache_clear()
    key = draw_key(logits, None)
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
    """The targets with the sizes that are set, and with others; then few rows, whose draws are spread."""
    for rows, categories, dtype, target in TARGETS:
        logits = torch.randn(rows, categories, device="cuda", dtype=dtype)
        shape = f"{rows} x {categories} {str(dtype).removeprefix('torch.')}, {DRAWS} draws"
        for tau in (0.5, 0.7):
            fused = Fused("gumbel-rao", tau, samples=DRAWS)
            forward, backward = milliseconds(logits, fused)
            times = f"{forward:.4f} + {backward:.4f} = {forward + backward:.4f} ms, target {target}"
            yield f"{shape}, tau {tau}: {times}, {memory(logits, fused):.2f} tensors"
        names, values = RAO_SHORT if categories <= runner.LONGEST_BLOCK else RAO_LONG
        for value in values:
            with sizes(rao, dict(zip(names, value, strict=True))):
                _, backward = milliseconds(logits, Fused("gumbel-rao", 0.5, samples=DRAWS))
            settings = ", ".join(f"{name} {each}" for name, each in zip(names, value, strict=True))
            yield f"{shape}, {settings}: {backward:.4f} ms"
        del logits
    for rows, categories, samples in FEW:
        logits = torch.randn(rows, categories, device="cuda")
        for spread in (0, rao.SPREAD_ELEMENTS):
            with sizes(rao, {"SPREAD_ELEMENTS": spread}):
                shares = rao.shares_of(rows, categories)
                _, backward = milliseconds(logits, Fused("gumbel-rao", 0.5, samples=samples))
            yield f"{rows} x {categories}, {samples} draws, {shares} shares: {backward:.4f} ms"


@contextmanager
def sizes(module: ModuleType, changed: dict[str, Any]) -> Iterator[None]:
    """Other values of a module's names for a while."""
    before = {name: getattr(module, name) for name in changed}
    for name, value in changed.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def memory(logits: Tensor, fused: Fused) -> float:
    """The most that forward and backward pass hold beyond logits and incoming gradient, in such tensors."""
    key, grad = draw_key(logits, None), torch.randn_like(logits)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value, index, stats = launch.forward(logits, key, fused)
    gradient = launch.backward(logits, index, stats, key, grad, fused)
    most = torch.cuda.max_memory_allocated() - before
    del value, gradient
    return most / (logits.numel() * logits.element_size())


def time_long() -> Iterator[str]:
    for rows, categories, dtype in LONG:
        logits = torch.randn(rows, categories, device="cuda", dtype=dtype)
        shape = f"{rows} x {categories}"
        long.most_segments = lambda device: 64
        for size, warps, registers in SEGMENTS:
            long.SEGMENT_BYTES, long.SEGMENT_WARPS, long.REGISTERS = size, warps, registers
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            launched = f"segments of {size} bytes, {warps} warps, {registers} registers"
            yield f"{shape}, backward in {launched}: {times}"
        long.most_segments = lambda device: 0
        for block, warps in ((8192, 16), (8192, 32), (16384, 32)):
            long.BACKWARD_CHUNK, long.BACKWARD_WARPS = block, warps
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            yield f"{shape}, backward by reading twice, {block} elements, {warps} warps: {times}"


def step(estimator: gapped.Pathwise, logits: Tensor, dim: int = -1) -> float:
    """The median time of a sample and its gradient, calls on the host included."""
    leaf, grad = logits.detach().requires_grad_(), torch.randn_like(logits)

    def both() -> None:
        torch.autograd.grad(estimator.sample(leaf, dim=dim), leaf, grad)

    milliseconds: float = do_bench(both, return_mode="median", rep=40)
    return milliseconds


def main() -> None:
    cases = {"short": time_short, "rao": time_draws, "long": time_long}
    for name in sys.argv[1:] or cases:
        for line in cases[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
