"""What a finished fleet writes: records, curves, and pictures or trees, one line per run."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gapped import records
from gapped.fleet.trainer import Trainer
from gapped.lab.environment import describe
from gapped.lab.fleets import Fleet
from gapped.records import Line

__all__ = ["curve_lines", "record_lines", "shown_lines"]


def record_lines(
    fleet: Fleet, trainer: Trainer, extra: dict[str, list[float]], device: torch.device
) -> Iterable[Line]:
    environment = describe(device)
    memory = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    alive = trainer.alive.tolist()
    for place, spec in enumerate(fleet.specs):
        final = {name: rows[-1][place] for name, rows in trainer.history.items()}
        final |= {name: values[place] for name, values in extra.items()}
        for entry in fleet.entries[spec.id]:
            yield {
                "schema": records.SCHEMA,
                "id": spec.id,
                "recipe": entry.recipe,
                "label": entry.label,
                "quick": entry.quick,
                "task": spec.task,
                "data": spec.kind.source(spec, trainer.task),
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
                "status": "ok" if alive[place] else "diverged",
                "metrics": {name: _finite(value) for name, value in final.items()},
                "seconds": round(sum(trainer.seconds), 3),
                "runs_in_fleet": len(fleet.specs),
                "fleet_gpu_memory_gb": memory,
                "environment": environment,
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
    for place, line in zip(places, fleet.specs[0].kind.show(trainer, places), strict=True):
        yield {"id": fleet.specs[place].id, **line}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
