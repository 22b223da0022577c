"""Times of the fused kernels on a GPU over block sizes and warps: the source of the numbers in
`gapped.kernels.partition` and of the kernels in `gapped.kernels.sampling`.

Usage: python benchmarks/bench_blocks.py [short] [rao] [long] [mve]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

import gapped
from gapped.kernels import partition
from gapped.kernels.sampling import flow_sizes, launch, long_rows, rao_sizes, split_rows
from gapped.kernels.sampling.launch import Fused
from gapped.pathwise import Draw

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
FLOWS = ((65_536, 64), (240_000, 10), (16_384, 128), (16_384, 256))
# Of MVE's kernel: for how many categories, what is changed in `flow_sizes`, and flags of the launch beside.
FLOW_SIZES = (
    ((10, 64, 128), {}, {}),
    ((64,), {"COLUMNS": 16}, {}),
    ((64,), {"COLUMNS": 64}, {}),
    ((64,), {}, {"maxnreg": 255}),
    ((10,), {"LOGITS": 128}, {}),
    ((10, 64), {"LOGITS": 256, "WEIGHTS": 8192}, {}),
    ((64,), {"LOGITS": 512, "WEIGHTS": 16384}, {}),
    ((64,), {"STEPS": 4}, {}),
)
LONG = ((8_192, 32_000, torch.float32), (8_192, 128_256, torch.bfloat16))


def milliseconds(logits: Tensor, fused: Fused) -> tuple[float, float]:
    """Median times of the forward and of the backward pass."""
    # Launches are kept, with the blocks that were set when they were made.
    for cached in (launch._forward, launch._backward, launch._rao):
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
            partition.BLOCK = (elements, warps)
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
        names, values = RAO_SHORT if categories <= launch.LONGEST_BLOCK else RAO_LONG
        for value in values:
            with sizes(rao_sizes, dict(zip(names, value, strict=True))):
                _, backward = milliseconds(logits, Fused("gumbel-rao", 0.5, samples=DRAWS))
            settings = ", ".join(f"{name} {each}" for name, each in zip(names, value, strict=True))
            yield f"{shape}, {settings}: {backward:.4f} ms"
        del logits
    for rows, categories, samples in FEW:
        logits = torch.randn(rows, categories, device="cuda")
        for spread in (0, rao_sizes.SPREAD_ELEMENTS):
            with sizes(rao_sizes, {"SPREAD_ELEMENTS": spread}):
                shares = rao_sizes.shares_of(rows, categories)
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
    key, grad = launch.draw_key(logits, None), torch.randn_like(logits)
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
        split_rows.most_segments = lambda device: 64
        for size, warps, registers in SEGMENTS:
            split_rows.SEGMENT_BYTES, split_rows.WARPS, split_rows.REGISTERS = size, warps, registers
            forward, backward = milliseconds(logits, Fused("gst", 0.5, gap=1.0))
            times = f"{forward:.4f} + {backward:.4f} ms"
            launched = f"segments of {size} bytes, {warps} warps, {registers} registers"
            yield f"{shape}, backward in {launched}: {times}"
        split_rows.most_segments = lambda device: 0
        for block, warps in ((8192, 16), (8192, 32), (16384, 32)):
            long_rows.BACKWARD_CHUNK, long_rows.BACKWARD_WARPS = block, warps
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


def step_from_idle(estimator: gapped.Pathwise, logits: Tensor) -> float:
    """The median time from the beginning of a sample on an idle GPU to the end of its gradient."""
    leaf, grad, times = logits.detach().requires_grad_(), torch.randn_like(logits), []
    for _ in range(60):
        torch.cuda.synchronize()
        start = perf_counter()
        torch.autograd.grad(estimator.sample(leaf), leaf, grad)
        torch.cuda.synchronize()
        times.append(1e3 * (perf_counter() - start))
    return median(times[10:])


def time_flows() -> Iterator[str]:
    """MVE beside ReinMax, by call and by kernel; then its gradient alone, over sizes of its kernel."""
    for (rows, categories), scale in product(FLOWS, (1.0, 3.0)):
        logits = scale * torch.randn(rows, categories, device="cuda")
        shape = f"{rows} x {categories}, logits of size {scale:g}"
        for estimator in (gapped.MVE(), gapped.MVE(smoothing=0.01), gapped.ReinMax()):
            kernel, how = estimator.kernel(logits), "in torch"
            if kernel is not None:
                forward, backward = milliseconds(logits, kernel)
                how = f"kernels {forward:.4f} + {backward:.4f} ms"
            busy, idle = step(estimator, logits), step_from_idle(estimator, logits)
            yield f"{shape}: {estimator}: a call {busy:.4f} ms, from idle {idle:.4f} ms, {how}"
        for lengths, changed, extra in FLOW_SIZES:
            if categories in lengths:
                how = ", ".join(f"{name} {value}" for name, value in (changed | extra).items())
                yield f"{shape}: gradient, {how or 'sizes as set'}: {_flow_time(logits, changed, extra)}"


def _flow_time(logits: Tensor, changed: dict[str, Any], extra: dict[str, Any]) -> str:
    """The error and the time of MVE's gradient with other sizes, or why there is none."""

    def block_of(rows: int, categories: int) -> tuple[int, dict[str, Any]]:
        programs, flags = usual(rows, categories)
        return programs, flags | extra

    usual = flow_sizes.block_of
    try:
        with sizes(flow_sizes, changed | {"block_of": block_of}):
            launch._backward.cache_clear()
            error = flow_error(logits[:2048])
            _, backward = milliseconds(logits, gapped.MVE().fused())
    except Exception as reason:
        return f"{type(reason).__name__}: {reason}"
    return f"error {error:.1e}, {backward:.4f} ms"


def flow_error(logits: Tensor) -> float:
    """The largest error of MVE's gradient, relative to the largest entry of its row, or to a tenth."""
    estimator, key = gapped.MVE(), launch.draw_key(logits, None)
    grad, fused = torch.randn_like(logits), estimator.fused()
    index = launch.forward(logits, key, fused, dense=False).indices
    gradient = launch.backward(logits, index, None, key, grad, fused)
    rows = logits.double() - logits.double().amax(-1, keepdim=True)
    points, weights, multiply = estimator.points(rows, Draw(index.long()))
    assert multiply is not None
    expected = multiply(grad.double(), points, weights)
    errors = (gradient - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=0.1)
    return float(errors.max())


def main() -> None:
    cases = {"short": time_short, "rao": time_draws, "long": time_long, "mve": time_flows}
    for name in sys.argv[1:] or cases:
        for line in cases[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
