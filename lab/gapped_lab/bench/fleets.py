"""Seconds that the fleets of recipes take: a few epochs of each, and what all of their epochs would take."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gapped_lab.fleet import Trainer, matmul_precision
from gapped_lab.planning import Fleet, plan
from gapped_lab.recipe import Recipe, find_recipe
from gapped_lab.spec import Entry
from gapped_lab.training import build


def tables() -> list[Recipe]:
    """The paper's ablation and comparison, without GST at 0.1 and 0.01, which it marks as not converging."""
    recipes = [find_recipe(name) for name in ("ablation", "vae")]
    return [replace(each, entries=tuple(filter(_converges, each.entries))) for each in recipes]


def _converges(entry: Entry) -> bool:
    return entry.spec.estimator != "gst" or (entry.spec.tau or 0) >= 0.5


def fleet_lines(
    recipes: Sequence[Recipe], device: torch.device, epochs: int, data_dir: Path | None
) -> Iterator[str]:
    """A line for each fleet of the recipes, then one for all."""
    fleets = plan(recipes)
    total = 0.0
    for fleet in fleets:
        line, seconds = _measure(fleet, device, epochs, data_dir)
        total += seconds
        yield line
    run_epochs = sum(spec.epochs for fleet in fleets for spec in fleet.specs)
    yield f"together {total / 60:.1f} minutes: {run_epochs / total:.0f} run-epochs per second"


def _measure(fleet: Fleet, device: torch.device, epochs: int, data_dir: Path | None) -> tuple[str, float]:
    """What a few epochs of a fleet took, and the seconds that all of its epochs would take."""
    began = time.perf_counter()
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer = build(fleet.specs, device, data_dir, fleet.key)
    for _ in range(min(epochs, trainer.epochs)):
        trainer.train_epoch()
    # The first epoch pays for compiling and recording.
    later = sorted(trainer.seconds[1:] or trainer.seconds)
    epoch, first = later[len(later) // 2], fleet.specs[0]
    start = time.perf_counter() - began - sum(trainer.seconds[1:]) - epoch
    test = 0.0 if trainer.test_every == 1 else _test_seconds(trainer)
    whole = start + first.epochs * epoch + -(-first.epochs // trainer.test_every) * test
    memory = f", {torch.cuda.max_memory_allocated(device) / 1e9:.1f} GB" if device.type == "cuda" else ""
    return (
        f"{first.protocol}: {len(fleet.specs)} runs, {start:.1f} s to start, {epoch:.2f} s an epoch "
        f"({1e3 * epoch / trainer.task.steps:.2f} ms a step), {test:.2f} s a test{memory}; "
        f"{first.epochs} epochs would take {whole:.0f} s"
    ), whole


def _test_seconds(trainer: Trainer) -> float:
    began = time.perf_counter()
    with matmul_precision(trainer.device):
        trainer.evaluate()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - began
