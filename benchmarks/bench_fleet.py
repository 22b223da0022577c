"""Seconds that the fleets of recipes take: a few epochs of each, and what all of their epochs would take.

Without names, on a GPU the 24 cells x 10 seeds of the paper's ablation and comparison tables, beside the
4.6 s that the authors' script takes for one epoch of one run; on a CPU the default `gapped compare`.
--backend torch does without the fused kernels, --profile also shows what a step consists of. Usage:
python benchmarks/bench_fleet.py [NAME ...] [--epochs N] [--device D] [--data-dir DIR] [--backend B]
    [--profile]
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from pathlib import Path

import torch
from bench_coupled import print_profile

from gapped.comparison.runs import describe
from gapped.diagnostics.gradients import synchronize
from gapped_lab.cli.demo import default_recipe
from gapped_lab.cli.reproduce import find_recipes
from gapped_lab.environment import pick_device
from gapped_lab.fleet import Trainer, matmul_precision
from gapped_lab.planning import Fleet, plan
from gapped_lab.recipe import Recipe, find_recipe
from gapped_lab.training import build

AUTHORS_SECONDS = 4.6
TABLES = ("ablation", "vae")


def published(recipe: Recipe) -> Recipe:
    """The cells that the paper gives numbers for: GST at 0.1 and 0.01 is marked as not converging."""
    entries = [e for e in recipe.entries if not (e.spec.estimator == "gst" and e.spec.tau < 0.5)]
    return Recipe(recipe.name, recipe.title, tuple(entries), recipe.runs_per_fleet)


def chosen(names: list[str], device: torch.device) -> list[Recipe]:
    if names:
        return find_recipes(names)[0]
    return [published(find_recipe(name)) for name in TABLES] if device.type == "cuda" else [default_recipe()]


def measure(fleet: Fleet, device: torch.device, arguments: argparse.Namespace) -> float:
    """Train a fleet for a few epochs; the seconds that all of its epochs would take."""
    began = time.perf_counter()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    specs = fleet.specs
    if arguments.backend != "auto":
        specs = [replace(s, options={**s.options, "backend": arguments.backend}) for s in specs]
    trainer = build(specs, device, arguments.data_dir, fleet.key)
    for _ in range(arguments.epochs):
        trainer.train_epoch()
    # The first epoch pays for compiling and recording.
    later = sorted(trainer.seconds[1:] or trainer.seconds)
    epoch, runs, first = later[len(later) // 2], len(specs), specs[0]
    start = time.perf_counter() - began - sum(trainer.seconds[1:]) - epoch
    test = 0.0 if trainer.test_every == 1 else test_seconds(trainer)
    tests = -(-first.epochs // trainer.test_every)
    whole = start + first.epochs * epoch + tests * test
    print(
        f"{first.protocol}: {runs} runs, {start:.1f} s to start, {epoch:.2f} s an epoch, "
        f"{test:.2f} s a test; {first.epochs} epochs would take {whole:.0f} s",
        flush=True,
    )
    if arguments.profile:
        print_profile(trainer)
    return whole


def test_seconds(trainer: Trainer) -> float:
    began = time.perf_counter()
    with matmul_precision(trainer.device):
        trainer.evaluate()
    synchronize(trainer.device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    print(describe(device), flush=True)
    fleets = plan(chosen(arguments.names, device))
    total = sum(measure(fleet, device, arguments) for fleet in fleets)
    run_epochs = sum(spec.epochs for fleet in fleets for spec in fleet.specs)
    print(
        f"together {total:.0f} s, or {total / 60:.1f} minutes: {run_epochs / total:.0f} run-epochs per second"
    )
    if not arguments.names:
        print(f"the authors' script: {1 / AUTHORS_SECONDS:.2f} run-epochs per second on one H200")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
