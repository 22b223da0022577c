"""The local engine: fleets one after the other, in this process."""

from __future__ import annotations

import base64
import gc
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from gapped import data as data_sets
from gapped import records
from gapped.errors import GappedError
from gapped.fleet.grouping import group_key
from gapped.fleet.trainer import Run, Trainer, derived_hash, derived_seed, matmul_precision
from gapped.lab.environment import describe
from gapped.lab.recipe import Recipe
from gapped.lab.spec import Entry, RunSpec
from gapped.lab.store import Store
from gapped.records import Line
from gapped.tasks.vae.protocol import protocol
from gapped.tasks.vae.task import VAETask

__all__ = ["Fleet", "Interrupted", "Watch", "plan", "run"]

_PICTURES = 10
_RUNS_PER_FLEET = 400


class Interrupted(Exception):
    """Stopped on request, after a checkpoint."""


class Watch(Protocol):
    """Somebody who looks on: the command line's progress display, or nobody."""

    def start(self, fleets: Sequence[Fleet]) -> None: ...

    def epoch(self, fleet: Fleet, trainer: Trainer) -> None: ...

    def done(self, fleet: Fleet) -> None: ...

    def wants_stop(self) -> bool: ...


class Nobody:
    """A watch that does not look."""

    def start(self, fleets: Sequence[Fleet]) -> None:
        pass

    def epoch(self, fleet: Fleet, trainer: Trainer) -> None:
        pass

    def done(self, fleet: Fleet) -> None:
        pass

    def wants_stop(self) -> bool:
        return False


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


def run(
    recipes: Sequence[Recipe],
    store: Store,
    device: torch.device,
    *,
    data_dir: Path | None = None,
    watch: Watch | None = None,
    checkpoint_seconds: float = 180.0,
) -> list[Line]:
    """Train what is not finished yet, and return the records of all entries of `recipes`.

    Which runs form a fleet is settled, and kept, before the first step: a repeated command continues where
    an interrupted one stopped and ends with the same numbers.
    """
    watch = watch or Nobody()
    entries = [entry for recipe in recipes for entry in recipe.entries]
    _copy_finished(entries, store)
    request = derived_hash(*sorted(f"{entry.recipe}/{entry.spec.id}" for entry in entries))
    fleets = _planned(recipes, store, request)
    done = store.done()
    pending = [f for f in fleets if any(not _is_done(f, spec, done) for spec in f.specs)]
    watch.start(pending)
    for fleet in pending:
        _train(fleet, store, device, data_dir, watch, checkpoint_seconds)
        watch.done(fleet)
    store.finish(request, [fleet.key for fleet in fleets])
    done = store.done()
    return [done[entry.recipe, entry.spec.id] for entry in entries]


def _planned(recipes: Sequence[Recipe], store: Store, request: str) -> list[Fleet]:
    """The fleets of this request: those of its interrupted predecessor, or new ones."""
    kept = store.load_plan(request)
    if kept is None:
        fleets = plan(recipes, store.done())
        if fleets:
            store.save_plan(request, [[spec.id for spec in fleet.specs] for fleet in fleets])
        return fleets
    entries = _by_run(recipes)
    return [Fleet(tuple(entries[each][0].spec for each in ids), entries) for ids in kept]


def plan(recipes: Sequence[Recipe], done: dict[tuple[str, str], Line]) -> list[Fleet]:
    """Fleets of the runs that no record in `done` has finished."""
    finished = {run_id for _, run_id in done}
    entries = _by_run(recipes)
    shapes: dict[str, dict[str, RunSpec]] = {}
    limits: dict[str, int] = {}
    for recipe in recipes:
        limit = recipe.runs_per_fleet or _RUNS_PER_FLEET
        for spec in (entry.spec for entry in recipe.entries if entry.spec.id not in finished):
            shapes.setdefault(spec.shape, {}).setdefault(spec.id, spec)
            limits[spec.shape] = min(limits.get(spec.shape, limit), limit)
    fleets = []
    for shape, specs in shapes.items():
        # Equal estimators become neighbours, to be sampled together.
        order = sorted(specs.values(), key=lambda spec: repr(group_key(spec.make_estimator())))
        count = math.ceil(len(order) / limits[shape])
        size = math.ceil(len(order) / count)
        fleets += [Fleet(tuple(order[i : i + size]), entries) for i in range(0, len(order), size)]
    return fleets


def _by_run(recipes: Sequence[Recipe]) -> dict[str, list[Entry]]:
    """The entries of each run: it may stand in several tables."""
    entries: dict[str, list[Entry]] = {}
    for recipe in recipes:
        for entry in recipe.entries:
            entries.setdefault(entry.spec.id, []).append(entry)
    return entries


def build(specs: Sequence[RunSpec], device: torch.device, data_dir: Path | None, key: str) -> Trainer:
    """The trainer of a fleet, before its first step."""
    first = specs[0]
    rules = protocol(first.protocol)
    data = data_sets.load(first.data, data_dir).limited(
        first.train_images or rules.train_images, first.test_images, validation=first.split == "validation"
    )
    compiled = device.type == "cuda"
    task = VAETask(rules, data, [spec.seed for spec in specs], device, compiled=compiled, split=first.split)
    runs = [
        Run(
            spec.make_estimator(),
            spec.learning_rate or rules.learning_rate,
            spec.make_schedule(),
            decays=spec.rate_decay == "cosine",
        )
        for spec in specs
    ]
    return Trainer(task, runs, first.epochs, derived_seed(key), device, compiled=compiled)


def _train(
    fleet: Fleet,
    store: Store,
    device: torch.device,
    data_dir: Path | None,
    watch: Watch,
    checkpoint_seconds: float,
) -> None:
    spec = fleet.specs[0]
    if device.type == "cuda":
        # What an earlier fleet left behind must neither be kept nor counted; compiled code holds its model.
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer = build(fleet.specs, device, data_dir, fleet.key)
    state = store.load_checkpoint(fleet.key, device)
    if state is not None:
        try:
            trainer.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError):
            raise store.unreadable(fleet.key) from None
    extra: dict[str, list[float]] = {}
    if spec.entropy_steps:
        extra["surrogate_entropy"] = _entropy(trainer, spec.entropy_steps)
    saved = time.monotonic()
    while trainer.epoch < spec.epochs and not spec.entropy_steps:
        trainer.train_epoch()
        if spec.variance_samples and spec.variance_every_epoch:
            trainer.history.setdefault("gradient_variance", []).append(_variance(trainer, spec))
        watch.epoch(fleet, trainer)
        stop = watch.wants_stop()
        if stop or time.monotonic() - saved >= checkpoint_seconds:
            store.save_checkpoint(fleet.key, trainer.state_dict())
            saved = time.monotonic()
        if stop:
            raise Interrupted
    if spec.variance_samples and not spec.variance_every_epoch:
        extra["gradient_variance"] = _variance(trainer, spec)
    if len(fleet.specs) == 1:
        extra |= _alone(trainer, device)
    store.add(_records(fleet, trainer, extra, device), _curves(fleet, trainer), _images(fleet, trainer))
    store.drop_checkpoint(fleet.key)


def _variance(trainer: Trainer, spec: RunSpec) -> list[float]:
    trainer.generator.manual_seed(derived_seed(trainer.seed, "variance", trainer.epoch))
    with matmul_precision(trainer.device):
        measured = trainer.task.gradient_variance(  # type: ignore[attr-defined]
            trainer.sampler, trainer.generator, spec.variance_samples, spec.variance_images
        )
    values: list[float] = measured.tolist()
    return values


def _entropy(trainer: Trainer, steps: int) -> list[float]:
    """Mean entropy of the surrogates over the first steps of training."""
    if steps > trainer.task.steps:
        raise GappedError(f"entropy_steps: got {steps}, expected at most {trainer.task.steps}, one epoch")
    soft, noise = trainer.sampler.soft(), torch.Generator(trainer.device)
    noise.manual_seed(derived_seed(trainer.seed, "entropy"))
    total = torch.zeros(len(trainer.runs), dtype=torch.float64, device=trainer.device)

    def look() -> None:
        total.add_(trainer.task.surrogate_entropy(soft, noise))  # type: ignore[attr-defined]

    with matmul_precision(trainer.device):
        trainer.train_steps(steps, look)
    values: list[float] = (total / steps).tolist()
    return values


def _alone(trainer: Trainer, device: torch.device) -> dict[str, list[float]]:
    """What can only be said of a run that had the device to itself."""
    # The first epoch pays for compiling and recording.
    typical = sorted(trainer.seconds[1:] or trainer.seconds or [math.nan])
    found = {"seconds_per_epoch": [typical[len(typical) // 2]]}
    if device.type == "cuda":
        found["gpu_memory_gb"] = [torch.cuda.max_memory_allocated(device) / 1e9]
    return found


def _records(
    fleet: Fleet, trainer: Trainer, extra: dict[str, list[float]], device: torch.device
) -> Iterable[Line]:
    environment = describe(device)
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
                "status": "ok" if alive[place] else "diverged",
                "metrics": {name: _finite(value) for name, value in final.items()},
                "seconds": round(sum(trainer.seconds), 3),
                "runs_in_fleet": len(fleet.specs),
                "environment": environment,
            }


def _curves(fleet: Fleet, trainer: Trainer) -> Iterable[Line]:
    for place, spec in enumerate(fleet.specs):
        series = {name: [_finite(row[place]) for row in rows] for name, rows in trainer.history.items()}
        if series:
            yield {"id": spec.id, "epoch": list(range(1, trainer.epoch + 1)), **series}


def _images(fleet: Fleet, trainer: Trainer) -> Iterable[Line]:
    """Pictures of one run per cell, the one with the lowest seed."""
    shown: dict[tuple[str, float], tuple[int, int]] = {}
    for place, spec in enumerate(fleet.specs):
        cell = (fleet.label(spec), spec.tau)
        shown[cell] = min(shown.get(cell, (spec.seed, place)), (spec.seed, place))
    trainer.generator.manual_seed(derived_seed(trainer.seed, "pictures"))
    task = trainer.task
    assert isinstance(task, VAETask)
    pictures = task.pictures(trainer.sampler, trainer.generator, _PICTURES)
    for _, place in shown.values():
        encoded = {
            name: base64.b64encode(bytes(each[place].flatten().tolist())).decode()
            for name, each in pictures.items()
        }
        size = {"height": task.height, "width": task.width, "count": _PICTURES}
        yield {"id": fleet.specs[place].id, **size, **encoded}


def _copy_finished(entries: Iterable[Entry], store: Store) -> None:
    """A run that another recipe has finished gets its line in this one's table without being run again."""
    by_id = {run_id: line for (_, run_id), line in store.done().items()}
    copies = [
        {**by_id[entry.spec.id], "recipe": entry.recipe, "label": entry.label, "quick": entry.quick}
        for entry in entries
        if entry.spec.id in by_id
    ]
    store.add(copies)


def _is_done(fleet: Fleet, spec: RunSpec, done: dict[tuple[str, str], Line]) -> bool:
    return all((entry.recipe, spec.id) in done for entry in fleet.entries[spec.id])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
