"""Which runs train together, and the trainer that trains them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gapped.lab.fleet.estimator_groups import is_level
from gapped.lab.fleet.trainer import Run, Trainer, derived_hash, derived_seed
from gapped.lab.recipe import Recipe
from gapped.lab.spec import Entry, RunSpec
from gapped.lab.text import show
from gapped.registry import estimators

_RUNS_PER_FLEET = 400


@dataclass(frozen=True)
class Fleet:
    """Runs of equal shape, in the order of their run axis, with the table entries that they serve."""

    specs: tuple[RunSpec, ...]
    entries: dict[str, list[Entry]] = field(compare=False)

    @property
    def key(self) -> str:
        return derived_hash(*(spec.id for spec in self.specs))

    def label(self, spec: RunSpec) -> str:
        return self.entries[spec.id][0].label


def plan(recipes: Sequence[Recipe], finished: Collection[str]) -> list[Fleet]:
    """Fleets of the runs whose ids are not among the `finished`."""
    entries = entries_by_run(recipes)
    shapes: dict[str, dict[str, RunSpec]] = {}
    limits: dict[str, int] = {}
    for recipe in recipes:
        limit = recipe.runs_per_fleet or _RUNS_PER_FLEET
        for spec in (entry.spec for entry in recipe.entries if entry.spec.id not in finished):
            shapes.setdefault(spec.shape, {}).setdefault(spec.id, spec)
            limits[spec.shape] = min(limits.get(spec.shape, limit), limit)
    fleets = []
    for shape, specs in shapes.items():
        # Estimators that differ only in numbers become neighbours, to be sampled together.
        order = sorted(specs.values(), key=_kind)
        count = math.ceil(len(order) / limits[shape])
        size = math.ceil(len(order) / count)
        fleets += [Fleet(tuple(order[i : i + size]), entries) for i in range(0, len(order), size)]
    return fleets


def entries_by_run(recipes: Sequence[Recipe]) -> dict[str, list[Entry]]:
    """The entries of each run: it may stand in several tables."""
    entries: dict[str, list[Entry]] = {}
    for recipe in recipes:
        for entry in recipe.entries:
            entries.setdefault(entry.spec.id, []).append(entry)
    return entries


def _kind(spec: RunSpec) -> tuple[bool, str]:
    """Where a run stands in its fleet: all of one family together, then by what can be sampled together."""
    options = {k: v for k, v in spec.options.items() if not is_level(k, v)}
    return spec.estimator in estimators("score"), show(spec.estimator, options)


def build(specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, key: str) -> Trainer:
    """The trainer of a fleet, before its first step."""
    first = specs[0]
    rules = first.kind.rules(first.protocol)
    compiled = device.type == "cuda"
    task = first.kind.task(specs, device, data_dir, compiled)
    runs = [
        Run(
            spec.make_estimator(),
            spec.learning_rate or rules.learning_rate,
            spec.make_schedule(),
            decays=spec.rate_decay == "cosine",
        )
        for spec in specs
    ]
    return Trainer(
        task,
        runs,
        first.epochs,
        derived_seed(key),
        device,
        compiled=compiled,
        test_every=first.test_every,
    )
