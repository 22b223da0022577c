"""What a finished fleet writes: records, curves, and pictures or trees, one line per run."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

from gapped.errors import GappedError
from gapped.lab import records
from gapped.lab.environment import describe
from gapped.lab.fleet.trainer import Trainer
from gapped.lab.fleets import Fleet
from gapped.lab.records import Line
from gapped.lab.spec import Entry

_PACKAGE = str(Path(__file__).parents[1])


def record_lines(
    fleet: Fleet, trainer: Trainer, extra: dict[str, list[float]], device: torch.device
) -> Iterable[Line]:
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    environment = describe(device)
    alive = trainer.alive.tolist()
    for place, spec in enumerate(fleet.specs):
        final = {name: rows[-1][place] for name, rows in trainer.history.items()}
        final |= {name: values[place] for name, values in extra.items()}
        for entry in fleet.entries[spec.id]:
            yield {
                **_description(entry, len(fleet.specs)),
                "data": spec.data if trainer.task.official else f"{spec.data} (generated)",
                "status": "ok" if alive[place] else "diverged",
                "metrics": {name: _finite(value) for name, value in final.items()},
                "seconds": round(sum(trainer.seconds), 3),
                "fleet_gpu_memory_gb": memory,
                "environment": environment,
            }


def failure_lines(fleet: Fleet, problem: Exception, seconds: float, device: torch.device) -> Iterable[Line]:
    """The records of a fleet that an error has ended: no metrics, and the error in one line."""
    environment, error = describe(device), explain(problem)
    for spec in fleet.specs:
        for entry in fleet.entries[spec.id]:
            yield {
                **_description(entry, len(fleet.specs)),
                "fleet": fleet.key,
                "status": "failed",
                "error": error,
                "metrics": {},
                "seconds": round(seconds, 3),
                "environment": environment,
            }


def explain(problem: Exception) -> str:
    """An error in one line; one that was not foreseen says where in this package it came up."""
    if isinstance(problem, GappedError):
        return str(problem)
    text = " ".join(f"{type(problem).__name__}: {problem}".split())
    own = [frame for frame in traceback.extract_tb(problem.__traceback__) if _PACKAGE in frame.filename]
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else text


def _description(entry: Entry, runs: int) -> Line:
    """What a record says of a run before it is trained."""
    spec = entry.spec
    return {
        "schema": records.SCHEMA,
        "id": spec.id,
        "recipe": entry.recipe,
        "label": entry.label,
        "quick": entry.quick,
        "task": spec.task,
        "data": spec.data,
        "protocol": spec.protocol,
        "estimator": spec.estimator,
        "options": spec.options,
        "tau": spec.tau,
        "schedule": spec.schedule,
        "learning_rate": spec.learning_rate,
        "rate_decay": spec.rate_decay,
        "split": spec.split,
        "seed": spec.seed,
        "epochs": spec.epochs,
        "runs_in_fleet": runs,
    }


def curve_lines(fleet: Fleet, trainer: Trainer) -> Iterable[Line]:
    for place, spec in enumerate(fleet.specs):
        series = {name: [_finite(row[place]) for row in rows] for name, rows in trainer.history.items()}
        if series:
            yield {"id": spec.id, "epoch": trainer.tested, **series}


def shown_lines(fleet: Fleet, trainer: Trainer) -> Iterable[Line]:
    """Something to look at of one run per cell, the one with the lowest seed."""
    shown: dict[tuple[str, float | None], tuple[int, int]] = {}
    for place, spec in enumerate(fleet.specs):
        cell = (fleet.label(spec), spec.tau)
        shown[cell] = min(shown.get(cell, (spec.seed, place)), (spec.seed, place))
    places = [place for _, place in shown.values()]
    for place, line in zip(places, trainer.show(places), strict=False):
        yield {"id": fleet.specs[place].id, **line}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
