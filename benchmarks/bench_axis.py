"""Rows side by side, as of (B, K, S) at dim=1, on a GPU: times over the sizes in `strips`.

Every variant of the backward pass is compared with that of a transposed copy before it is timed. One that
fails is named, and the others go on; after a minute no more are begun. The table has the median time, how
many passes over memory take as long, the difference from the copy relative to the largest entry, and the
registers and spilled registers of a thread.

Usage: python benchmarks/bench_axis.py [backward] [forward] [whole]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bench_blocks import memory, sizes, step
from torch import Tensor
from triton.testing import do_bench

import gapped
from gapped.kernels.runner import Launch
from gapped.kernels.sampling import launch, strips
from gapped.kernels.sampling.fused import Fused
from gapped.simplex import draw_key

SECONDS = 60
SHAPE = (64, 8192, 1024)
ALL_AT_ONCE = 1 << 30
SET: dict[str, Any] = {}
# Each by its difference from what is set; the first ones decide most.
FLOAT32: dict[str, dict[str, Any]] = {
    "as set": SET,
    "no hints to the cache": {"FIRST_USE": "", "LAST_USE": ""},
    "all sums, then all writes": {"AHEAD": ALL_AT_ONCE},
    "read ahead: 4 warps, 2 chunks, 3 stages": {"TILES": {4: (4, 2, 3)}},
    "4 warps, 128 registers": {"TILES": {4: (4, 4, 1)}, "TILE_REGISTERS": 128},
    "128 registers": {"TILE_REGISTERS": 128},
    "96 tiles ahead": {"AHEAD": 96},
    "384 tiles ahead": {"AHEAD": 384},
    "tiles of 32 x 128, 384 ahead": {"SEGMENT": 128, "AHEAD": 384},
    "tiles of 32 x 512, 96 ahead": {"SEGMENT": 512, "AHEAD": 96, "TILE_REGISTERS": 96},
    "tiles of 64 x 128": {"TILE_BYTES": 256, "SEGMENT": 128},
    "tiles of 16 x 512": {"TILE_BYTES": 64, "SEGMENT": 512},
    "8 chunks, 128 registers": {"TILES": {4: (8, 8, 1)}, "TILE_REGISTERS": 128},
    "read ahead: 8 warps, 1 chunk, 4 stages": {"TILES": {4: (8, 1, 4)}},
}
BFLOAT16: dict[str, dict[str, Any]] = {
    "as set": SET,
    "no reading ahead: 8 warps, 2 chunks": {"TILES": {2: (8, 2, 1)}},
    "no reading ahead: 4 warps, 4 chunks": {"TILES": {2: (4, 4, 1)}},
    "read ahead: 4 warps, 2 chunks, 3 stages": {"TILES": {2: (4, 2, 3)}},
}
ONE: dict[str, dict[str, Any]] = {"as set": SET}
SHORTER = ONE | {"not held": {"HELD_SIMPLE": 0}}
CASES = (
    (SHAPE, torch.float32, "gst", FLOAT32),
    (SHAPE, torch.bfloat16, "gst", BFLOAT16),
    (SHAPE, torch.float32, "gumbel-softmax", ONE),
    (SHAPE, torch.float32, "reinmax", ONE),
    ((64, 512, 1024), torch.float32, "gst", SHORTER),
    ((64, 100, 1024), torch.float32, "gst", SHORTER),
    (SHAPE, torch.float32, "gst-auto", ONE),
)
FORWARD = (
    ("FORWARD_BYTES", "FORWARD_WARPS", "PIECES", "STAGES", "FORWARD_REGISTERS"),
    ((128, 16, 4, 1, 64), (64, 16, 4, 1, 64), (128, 16, 2, 1, 64), (128, 8, 4, 1, 128), (256, 16, 4, 1, 64)),
)
HEADER = f"{'backward':42}{'ms':>8}{'passes':>8}{'differs':>10}{'registers':>11}{'spilled':>9}"


def median(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    result: float = do_bench(call, return_mode="median", warmup=10, rep=30)
    return result


def stored(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, float]:
    """Logits as they lie in memory, and the milliseconds of one pass over them: half of a copy."""
    logits = torch.randn(shape, device="cuda", dtype=dtype)
    target = torch.empty_like(logits)
    return logits, median(partial(target.copy_, logits)) / 2


def compiled(call: Callable[[], Tensor]) -> tuple[Tensor, Any]:
    """What a backward pass returns, and the compiled kernel that it launched."""
    codes: list[Any] = []

    def run(kernel: Any, programs: int, tensors: Any, numbers: Any, levels: Any, flags: Any) -> None:
        one = Launch(kernel, programs, numbers, flags)
        one(tensors, levels)
        codes.extend(code for code, _ in one._compiled.values())

    with sizes(launch, {"run": run}):
        result = call()
    return result, codes[-1]


def time_backward() -> Iterator[str]:
    begun = time.perf_counter()
    for shape, dtype, mode, variants in CASES:
        tensor, one_pass = stored(shape, dtype)
        logits, grad = tensor.movedim(1, -1), torch.randn_like(tensor).movedim(1, -1)
        fused, key = Fused(mode, 0.5, gap=1.0), draw_key(tensor, None)
        _, index, stats = launch.forward(logits, key, fused, dense=False)
        copied = launch.backward(logits.contiguous(), index, stats, key, grad.contiguous(), fused)
        name = f"{shape} {str(dtype).removeprefix('torch.')}, {mode}"
        yield f"\n{name}: copy {2 * one_pass:.3f} ms, three passes {3 * one_pass:.3f} ms\n{HEADER}"
        call = partial(launch.backward, logits, index, stats, key, grad, fused)
        for what, changes in variants.items():
            if time.perf_counter() - begun > SECONDS:
                yield f"{what:42}  not begun"
                continue
            try:
                yield f"{what:42}" + measured(call, copied, changes, one_pass)
            except Exception as error:
                yield f"{what:42}  FAILED: {type(error).__name__}: {str(error).strip()[:200]}"
        del tensor, logits, grad, copied, call


def measured(call: Callable[[], Tensor], copied: Tensor, changes: dict[str, Any], one_pass: float) -> str:
    """One variant: whether it is right, how long it takes, what it compiles to."""
    if "TILES" in changes:
        changes = changes | {"TILES": strips.TILES | changes["TILES"]}
    with sizes(strips, changes):
        result, code = compiled(call)
        differs = float((result - copied).abs().max() / copied.abs().max())
        same = torch.equal(call(), result)
        del result
        milliseconds = median(call)
    # The sums come in another order; half precision rounds each result once.
    right = differs <= (1e-5 if copied.dtype == torch.float32 else 1 / 128)
    verdict = ("" if right else "  WRONG") + ("" if same else "  NOT THE SAME BITS")
    passes = milliseconds / one_pass
    return f"{milliseconds:8.3f}{passes:8.2f}{differs:10.1e}{code.n_regs:11}{code.n_spills:9}{verdict}"


def time_forward() -> Iterator[str]:
    for dtype in (torch.float32, torch.bfloat16):
        tensor, one_pass = stored(SHAPE, dtype)
        logits, fused, key = tensor.movedim(1, -1), Fused("gst", 0.5, gap=1.0), draw_key(tensor, None)
        yield f"\n{SHAPE} {str(dtype).removeprefix('torch.')}, forward: two passes {2 * one_pass:.3f} ms"
        names, values = FORWARD
        for value in values:
            with sizes(strips, dict(zip(names, value, strict=True))):
                milliseconds = median(partial(launch.forward, logits, key, fused))
            how = ", ".join(f"{name} {each}" for name, each in zip(names, value, strict=True))
            yield f"{how}: {milliseconds:.3f} ms"
        del tensor, logits


def time_whole() -> Iterator[str]:
    """A call as users make it, forward and backward, and the memory beyond logits and incoming gradient."""
    cases = ((SHAPE, torch.float32), (SHAPE, torch.bfloat16), ((64, 512, 1024), torch.float32))
    for shape, dtype in (*cases, ((256, 10, 784), torch.float32)):
        tensor, one_pass = stored(shape, dtype)
        both, held = (
            step(gapped.GST(1.0), tensor, 1),
            memory(tensor.movedim(1, -1), Fused("gst", 1.0, gap=1.0)),
        )
        times = f"{both:.3f} ms, floor {5 * one_pass:.3f} ms"
        yield f"{shape} {str(dtype).removeprefix('torch.')}, gapped.gst: {times}, {held:.3f} tensors"
        del tensor


def main() -> None:
    cases = {"whole": time_whole, "backward": time_backward, "forward": time_forward}
    for name in sys.argv[1:] or cases:
        for line in cases[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
