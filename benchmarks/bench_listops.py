"""Speed of a ListOps fleet: time of a step in each length bucket, and what an epoch takes, beside the
350 to 520 s that the authors' script takes for one run on one H200.

Usage: python benchmarks/bench_listops.py [--recipe R] [--runs N] [--steps N] [--length M] [--device D]
N runs of the recipe are trained; --length times the bucket that holds it, alone.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from gapped.comparison.runs import describe
from gapped_lab.environment import pick_device
from gapped_lab.fleet import Trainer, matmul_precision
from gapped_lab.planning import plan
from gapped_lab.recipe import find_recipe
from gapped_lab.training import build

AUTHORS = "350 to 520 s"


def steps_of(trainer: Trainer) -> dict[int, list[int]]:
    """The steps of the epoch by bucket."""
    trainer.task.start_epoch(0)
    by_bucket: dict[int, list[int]] = {}
    for step in range(trainer.task.steps):
        by_bucket.setdefault(trainer.task.program(step), []).append(step)
    return dict(sorted(by_bucket.items()))


def seconds_per_step(trainer: Trainer, steps: list[int]) -> tuple[float, float]:
    """Recording (the first step), and the median of the others."""

    def once(step: int) -> float:
        began = time.perf_counter()
        trainer.task.load_batch(step)
        trainer._step(trainer.task.program(step))
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first, *rest = [once(step) for step in steps]
    return first, sorted(rest)[len(rest) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=54)
    parser.add_argument("--steps", type=int, default=10, help="steps timed in each bucket")
    parser.add_argument("--length", type=int, help="only the bucket for this number of tokens")
    parser.add_argument("--recipe", default="listops")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    (fleet, *_) = plan([find_recipe(arguments.recipe)], {})
    specs = fleet.specs[:: max(len(fleet.specs) // arguments.runs, 1)][: arguments.runs]
    trainer = build(specs, device, arguments.data_dir, "bench")
    task = trainer.task
    print(describe(device))
    print(f"{len(specs)} runs, {task.steps} steps an epoch, {len(task.buckets)} buckets")
    trainer._set_rates()
    total = 0.0
    with matmul_precision(device):
        for bucket, steps in steps_of(trainer).items():
            size, length = task.buckets[bucket].tokens.shape
            if arguments.length is not None and bucket != holding(task.buckets, arguments.length):
                continue
            first, typical = seconds_per_step(trainer, steps[: arguments.steps + 1])
            total += len(steps) * typical
            memory = (
                f", peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if device.type == "cuda" else ""
            )
            print(
                f"up to {length:3} tokens, {size:6} expressions: {1e3 * typical:8.2f} ms a step, "
                f"{len(steps):5} steps, first {first:.1f} s{memory}",
                flush=True,
            )
        began = time.perf_counter()
        task.valid_accuracy(trainer.sampler)
        validation = time.perf_counter() - began
    print(f"validation: {validation:.2f} s, {task.protocol.validations} an epoch")
    epoch = total + task.protocol.validations * validation
    if arguments.length is None:
        print(f"an epoch: {epoch:.1f} s, {epoch / len(specs):.2f} s per run; the authors' script: {AUTHORS}")


def holding(buckets: list, length: int) -> int:
    """The bucket that an expression of `length` tokens is in."""
    return next((i for i, each in enumerate(buckets) if each.tokens.shape[1] >= length), len(buckets) - 1)


if __name__ == "__main__":
    main()
