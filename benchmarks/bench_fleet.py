"""Speed of fleets: run-epochs per second, beside the 4.6 s that the authors' script takes for one.

On a GPU, the 24 cells x 10 seeds of the paper's ablation and comparison tables train together; on a CPU,
the default `gapped compare`. --backend torch does without the fused kernels. Usage:
python benchmarks/bench_fleet.py [--epochs N] [--device D] [--backend B] [--profile]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch

from gapped.lab.cli.compare import default_recipe
from gapped.lab.environment import describe, pick_device
from gapped.lab.planning import plan
from gapped.lab.recipe import Recipe, find_recipe
from gapped.lab.training import build

AUTHORS_SECONDS = 4.6
TABLES = ("ablation", "vae")


def published(recipe: Recipe) -> Recipe:
    """The cells that the paper gives numbers for: GST at 0.1 and 0.01 is marked as not converging."""
    entries = [e for e in recipe.entries if not (e.spec.estimator == "gst" and e.spec.tau < 0.5)]
    return Recipe(recipe.name, recipe.title, tuple(entries), recipe.runs_per_fleet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    if device.type == "cuda":
        recipes = [published(find_recipe(name)) for name in TABLES]
    else:
        recipes = [default_recipe()]
    (fleet,) = plan(recipes, {})
    specs = [replace(s, options={**s.options, "backend": arguments.backend}) for s in fleet.specs]
    trainer = build(specs, device, arguments.data_dir, fleet.key)
    print(describe(device))
    began = time.perf_counter()
    for _ in range(arguments.epochs):
        trainer.train_epoch()
        print(f"epoch {trainer.epoch}: {trainer.seconds[-1]:.2f} s", flush=True)
    total = time.perf_counter() - began
    # The first epoch pays for compiling and recording.
    steady = sorted(trainer.seconds[1:] or trainer.seconds)[len(trainer.seconds[1:]) // 2]
    runs = len(fleet.specs)
    print(f"{runs} runs: {steady:.2f} s per epoch, {runs / steady:.0f} run-epochs per second")
    print(f"the authors' script: {1 / AUTHORS_SECONDS:.2f} run-epochs per second on one H200")
    whole = trainer.seconds[0] + 39 * steady
    print(f"{arguments.epochs} epochs took {total:.1f} s; 40 would take {whole:.0f} s")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    if arguments.profile:
        profile(trainer)


def profile(trainer: object) -> None:
    from torch.profiler import ProfilerActivity, profile

    trainer.task.load_batch(0)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            trainer._step()
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    main()
