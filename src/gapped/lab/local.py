"""The local engine: fleets one after the other, in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from gapped.fleet.trainer import Trainer, derived_hash
from gapped.lab.fleets import Fleet, build, entries_by_run, plan
from gapped.lab.lines import curve_lines, record_lines, shown_lines
from gapped.lab.measure import alone, entropy, variance
from gapped.lab.recipe import Recipe
from gapped.lab.spec import Entry, RunSpec
from gapped.lab.store import Store
from gapped.records import Line

__all__ = ["Interrupted", "Nobody", "Watch", "run"]


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
    entries = entries_by_run(recipes)
    return [Fleet(tuple(entries[each][0].spec for each in ids), entries) for ids in kept]


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
        extra["surrogate_entropy"] = entropy(trainer, spec.entropy_steps)
    saved = time.monotonic()
    while trainer.epoch < spec.epochs and not spec.entropy_steps:
        trainer.train_epoch()
        if spec.variance_samples and spec.variance_every_epoch and trainer.tested[-1:] == [trainer.epoch]:
            began = time.perf_counter()
            trainer.history.setdefault("gradient_variance", []).append(variance(trainer, spec))
            trainer.seconds[-1] += time.perf_counter() - began
        watch.epoch(fleet, trainer)
        stop = watch.wants_stop()
        if stop or time.monotonic() - saved >= checkpoint_seconds:
            store.save_checkpoint(fleet.key, trainer.state_dict())
            saved = time.monotonic()
        if stop:
            raise Interrupted
    if spec.variance_samples and not spec.variance_every_epoch:
        extra["gradient_variance"] = variance(trainer, spec)
    if len(fleet.specs) == 1:
        extra |= alone(trainer, device)
    extra |= trainer.test()
    beside = {"curves": curve_lines(fleet, trainer), spec.kind.shown: shown_lines(fleet, trainer)}
    store.add(record_lines(fleet, trainer, extra, device), **beside)
    store.drop_checkpoint(fleet.key)


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
