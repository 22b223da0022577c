"""Step times of the coupled comparison: RLOO-2, DisARM-Tree, and all of its 35 runs as one fleet.

A fleet of five runs each of RLOO-2 and DisARM-Tree, then the whole table; with --whole only that, with
--profile also what its steps consist of. Usage:
python benchmarks/bench_coupled.py [--whole] [--profile] [--steps N] [--device D] [--data-dir DIR] [--seeds N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gapped.comparison.runs import describe
from gapped.diagnostics.gradients import synchronize
from gapped_lab.environment import pick_device
from gapped_lab.fleet import Trainer, matmul_precision
from gapped_lab.planning import plan
from gapped_lab.recipe import Recipe, find_recipe
from gapped_lab.training import build

STEPS = 500_000
TARGET_MINUTES = 15
TARGET_RATIO = 1.5


def only(recipe: Recipe, keep: Callable[[str], bool]) -> Recipe:
    entries = tuple(entry for entry in recipe.entries if keep(entry.label))
    return Recipe(recipe.name, recipe.title, entries, recipe.runs_per_fleet)


def first_steps(trainer: Trainer, steps: int) -> None:
    """So many steps from the beginning of the epoch, again if it was begun before."""
    trainer.step = 0
    trainer.train_steps(steps)


def milliseconds(trainer: Trainer, steps: int) -> float:
    """Time of a training step once it has been compiled and recorded."""
    with matmul_precision(trainer.device):
        first_steps(trainer, 5)
        synchronize(trainer.device)
        began = time.perf_counter()
        for count in range(0, steps, trainer.task.steps):
            first_steps(trainer, min(trainer.task.steps, steps - count))
        synchronize(trainer.device)
    return 1e3 * (time.perf_counter() - began) / steps


def print_profile(trainer: Trainer, steps: int = 5, rows: int = 40) -> None:
    """Where the time of a step goes, kernel by kernel on a GPU, operator by operator elsewhere."""
    gpu = trainer.device.type == "cuda"
    with (
        matmul_precision(trainer.device),
        profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as profiler,
    ):
        first_steps(trainer, steps)
        synchronize(trainer.device)
    spent = [
        (each.self_device_time_total if gpu else each.self_cpu_time_total, each.count, each.key)
        for each in profiler.key_averages()
    ]
    print(f"profile: {sum(time for time, _, _ in spent) / steps / 1e3:.3f} ms a step")
    for time_, count, name in sorted(spent, reverse=True)[:rows]:
        print(f"{time_ / steps / 1e3:8.4f} ms {count / steps:6.1f} x {name[:90]}")


def measure(
    recipe: Recipe, device: torch.device, data_dir: Path | None, steps: int, profiled: bool = False
) -> tuple[int, float]:
    torch.compiler.reset()
    (fleet,) = plan([recipe], {})
    trainer = build(fleet.specs, device, data_dir, fleet.key)
    spent = milliseconds(trainer, steps)
    if profiled:
        print_profile(trainer)
    return len(fleet.specs), spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--whole", action="store_true", help="only all runs together")
    parser.add_argument("--profile", action="store_true", help="also where the time of their steps goes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    print(describe(device))
    recipe = find_recipe("coupled", seeds=arguments.seeds)
    times = {}
    for label in () if arguments.whole else ("RLOO", "DisARM-Tree"):
        runs, times[label] = measure(
            only(recipe, lambda name, label=label: name == label), device, arguments.data_dir, arguments.steps
        )
        print(f"{label:12} {runs:3d} runs: {times[label]:.3f} ms per step", flush=True)
    if times:
        ratio = times["DisARM-Tree"] / times["RLOO"]
        print(f"DisARM-Tree / RLOO-2: {ratio:.2f} (target at most {TARGET_RATIO})")
    runs, whole = measure(recipe, device, arguments.data_dir, arguments.steps, arguments.profile)
    minutes = whole * STEPS / 60_000
    print(f"all          {runs:3d} runs: {whole:.3f} ms per step")
    print(f"{STEPS:,} steps would take {minutes:.1f} minutes (target at most {TARGET_MINUTES})")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
