"""CPU speed of the samplers beside torch's own, and the cost of importing the package.

Run with `make bench`, or `python benchmarks/bench_cpu.py [--threads N]`. Both sides are timed in one
process, forward and backward, and compared by ratio: absolute times belong to the machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

import gapped

SHAPES = [(3_000, 10), (65_536, 64)]
TARGET = 0.7

SAMPLERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch F.gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5, hard=True),
    "gapped.gst": lambda x: gapped.gst(x, tau=0.5, hard=True),
    "gapped.straight_through": lambda x: gapped.straight_through(x, tau=0.5, hard=True),
    "gapped.gumbel_softmax": lambda x: gapped.gumbel_softmax(x, tau=0.5, hard=True),
    "gapped.reinmax": lambda x: gapped.reinmax(x),
    "gapped.gumbel_rao, 10 draws": lambda x: gapped.gumbel_rao(x, tau=0.5, hard=True, samples=10),
}


def forward_backward(
    sampler: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, g: torch.Tensor
) -> None:
    torch.autograd.grad(sampler(x), x, g)


def measure(rows: int, categories: int, threads: int) -> dict[str, float]:
    """Median seconds of forward and backward for each sampler."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, categories, generator=generator, requires_grad=True)
    g = torch.randn(rows, categories, generator=generator)
    times = {}
    for name, sampler in SAMPLERS.items():
        names = {"f": forward_backward, "sampler": sampler, "x": x, "g": g}
        timer = Timer("f(sampler, x, g)", globals=names, num_threads=threads)
        times[name] = timer.blocked_autorange(min_run_time=1.5).median
    return times


def import_cost(statement: str, repeats: int = 9) -> float:
    """Milliseconds that `statement` takes after `import torch`: median over fresh processes."""
    code = f"import torch, time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(repeats)]
    return 1e3 * sorted(float(run.stdout) for run in runs)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    print(f"torch {torch.__version__}, {threads} threads, forward + backward, float32, hard")
    for rows, categories in SHAPES:
        times = measure(rows, categories, threads)
        reference = times["torch F.gumbel_softmax"]
        print(f"\n{rows:,} x {categories}")
        for name, seconds in times.items():
            print(f"  {name:30s} {1e3 * seconds:9.3f} ms   {seconds / reference:5.2f} x torch")
        print(f"  target for gapped.gst: at most {TARGET} x torch")
    # Names load on first use: the package alone, one estimator, and everything.
    alone, one = import_cost("import gapped"), import_cost("import gapped; gapped.gst")
    every = import_cost("import gapped; [getattr(gapped, name) for name in gapped.__all__]")
    print(
        f"\nafter import torch: import gapped {alone:.0f} ms, with gst {one:.0f} ms, with all {every:.0f} ms"
    )
    print("target for import gapped: at most 60 ms")


if __name__ == "__main__":
    main()
