"""The lines that a fleet writes when it ends: records, curves, and pictures or trees, one line per run."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import gapped
from gapped.comparison.records import Curve, Record, RunLine, from_json, plain
from gapped.comparison.runs import describe
from gapped.errors import GappedError, one_line
from gapped_lab.fleet import Trainer
from gapped_lab.planning import Fleet
from gapped_lab.spec import Entry, RunSpec

_PACKAGES = (str(Path(gapped.__file__).parent), str(Path(__file__).parent))
# The fields of the spec that a record repeats.
_REPEATED = {each.name for each in fields(RunSpec)} & {each.name for each in fields(Record)}


def result_lines(
    fleet: Fleet, trainer: Trainer, metrics: dict[str, list[float]], device: torch.device
) -> list[RunLine]:
    """All lines of a trained fleet; `metrics` come on top of the last values of the trainer's history."""
    return [*_records(fleet, trainer, metrics, device), *_curves(fleet, trainer), *_examples(fleet, trainer)]


def failure_records(fleet: Fleet, problem: Exception, seconds: float, device: torch.device) -> list[Record]:
    """The records of a fleet that an error has ended: no metrics, and the error in one line."""
    result = {
        "fleet": fleet.key,
        "status": "failed",
        "error": explain(problem),
        "seconds": round(seconds, 3),
        "environment": describe(device),
    }
    return [_record(entry, fleet, result) for spec in fleet.specs for entry in fleet.entries[spec.id]]


def explain(problem: Exception) -> str:
    """An error in one line; one that was not foreseen says where in this package it came up."""
    if isinstance(problem, GappedError):
        return str(problem)
    text = one_line(problem)
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_PACKAGES)]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text


def _record(entry: Entry, fleet: Fleet, result: dict[str, Any]) -> Record:
    """The record of an entry: what is known before training, and the result."""
    repeated = {name: getattr(entry.spec, name) for name in _REPEATED}
    own = {"recipe": entry.recipe, "label": entry.label, "quick": entry.quick}
    return Record(id=entry.spec.id, runs_in_fleet=len(fleet.specs), **{**repeated, **own, **result})


def _records(
    fleet: Fleet, trainer: Trainer, metrics: dict[str, list[float]], device: torch.device
) -> Iterator[Record]:
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    environment = describe(device)
    alive = trainer.alive.tolist()
    latest = {name: values[-1] for name, values in trainer.history.items()} | metrics
    for place, spec in enumerate(fleet.specs):
        result = {
            "data": spec.data if trainer.task.official else f"{spec.data} (generated)",
            "status": "ok" if alive[place] else "diverged",
            "metrics": {name: plain(values[place]) for name, values in latest.items()},
            "seconds": round(sum(trainer.seconds), 3),
            "fleet_gpu_memory_gb": memory,
            "environment": environment,
        }
        for entry in fleet.entries[spec.id]:
            yield _record(entry, fleet, result)


def _curves(fleet: Fleet, trainer: Trainer) -> Iterator[Curve]:
    for place, spec in enumerate(fleet.specs if trainer.history else ()):
        series = {name: [plain(each[place]) for each in values] for name, values in trainer.history.items()}
        yield Curve(id=spec.id, epoch=list(trainer.tested), more={**series})


def _examples(fleet: Fleet, trainer: Trainer) -> Iterator[RunLine]:
    """Examples to look at, of one run per cell, the one with the lowest seed."""
    lowest: dict[tuple[str, float | None], tuple[int, int]] = {}
    for place, spec in enumerate(fleet.specs):
        cell = (fleet.label(spec), spec.tau)
        lowest[cell] = min(lowest.get(cell, (spec.seed, place)), (spec.seed, place))
    places = [place for _, place in lowest.values()]
    kind = fleet.specs[0].kind.examples
    for place, values in zip(places, trainer.show(places), strict=False):
        yield from_json({"id": fleet.specs[place].id, **values}, kind, kind.FILE)
