"""The local engine: fleets one after the other, in this process. Other engines share its steps."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gapped.errors import GappedError, MissingExtra
from gapped.lab.data import source
from gapped.lab.environment import current
from gapped.lab.fleet.trainer import derived_hash
from gapped.lab.fleets import Fleet, build, entries_by_run, plan
from gapped.lab.lines import curve_lines, failure_lines, record_lines, shown_lines
from gapped.lab.measure import alone, entropy, variance
from gapped.lab.recipe import Recipe
from gapped.lab.records import Line, has_failed
from gapped.lab.spec import Entry, RunSpec
from gapped.lab.store import Store, plan_path

CHECKPOINT_SECONDS = 180.0


class Interrupted(Exception):
    """Stopped on request, after a checkpoint if one could be written."""


class Standing(Protocol):
    """How far a fleet has come: its trainer, or what a trainer in another process says of itself."""

    epoch: int
    epochs: int
    history: dict[str, list[list[float]]]
    """By metric, one row per epoch; the last row at the least."""
    alive: Tensor


class Watch(Protocol):
    """Somebody who looks on: the command line's progress display, or nobody."""

    def start(self, fleets: Sequence[Fleet]) -> None: ...

    def epoch(self, fleet: Fleet, standing: Standing) -> None: ...

    def done(self, fleet: Fleet) -> None: ...

    def wants_stop(self) -> bool: ...


class Nobody:
    """A watch that does not look."""

    def start(self, fleets: Sequence[Fleet]) -> None:
        pass

    def epoch(self, fleet: Fleet, standing: Standing) -> None:
        pass

    def done(self, fleet: Fleet) -> None:
        pass

    def wants_stop(self) -> bool:
        return False


@dataclass(frozen=True)
class Work:
    """What a command comes down to. It depends on the recipes and the folder, not on who does it."""

    entries: tuple[Entry, ...]
    request: str
    """Hash of what was asked for; the plan is kept under it."""
    fleets: tuple[Fleet, ...]


class Made(NamedTuple):
    """The lines of a fleet that is finished, or has failed."""

    records: list[Line]
    beside: dict[str, list[Line]]
    """What goes into other files, by their names without the ending."""


def run(
    recipes: Sequence[Recipe],
    store: Store,
    device: torch.device,
    *,
    data_dir: Path | None = None,
    watch: Watch | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> list[Line]:
    """Train what is not finished yet, and return the records of all entries of `recipes`.

    A fleet that fails does not keep the others from being trained: its runs' records have the status `failed`
    and the error. They do not count as finished, so that a repeated command tries them again.

    Which runs form a fleet is settled, and kept, before the first step: a repeated command continues where
    an interrupted one stopped and ends with the same numbers.
    """
    watch = watch or Nobody()
    with store.occupied(), current(device):
        work = prepare(recipes, store)
        pending = remaining(work, store)
        check_data(pending, data_dir)
        watch.start(pending)
        for fleet in pending:
            store.keep(fleet.key, *attempt(fleet, device, store, data_dir, watch, checkpoint_seconds))
            watch.done(fleet)
        return conclude(work, store)


def prepare(recipes: Sequence[Recipe], store: Store) -> Work:
    """Settle what is to be done: copy what other recipes have finished, divide the rest into fleets."""
    entries = tuple(entry for recipe in recipes for entry in recipe.entries)
    _copy_finished(entries, store)
    request = request_of(recipes)
    return Work(entries, request, tuple(_planned(recipes, store, request)))


def request_of(recipes: Sequence[Recipe]) -> str:
    """Hash of what was asked for, a limit on the fleets included."""
    asked = sorted(f"{entry.recipe}/{entry.spec.id}" for recipe in recipes for entry in recipe.entries)
    limits = [f"{recipe.name}/{recipe.runs_per_fleet}" for recipe in recipes if recipe.runs_per_fleet]
    return derived_hash(*asked, *limits)


def remaining(work: Work, store: Store) -> list[Fleet]:
    """The fleets that have an unfinished run."""
    done = store.done()
    return [f for f in work.fleets if any(not _is_done(f, spec, done) for spec in f.specs)]


def check_data(fleets: Iterable[Fleet], data_dir: Path | None) -> None:
    """Refuse, before the first fleet trains, what a later one would lack a package for."""
    for name in dict.fromkeys(fleet.specs[0].data for fleet in fleets):
        source(name).check(data_dir)


def conclude(work: Work, store: Store) -> list[Line]:
    """Tidy up after the last fleet, unless one has failed. Returns the records of all entries."""
    lines = store.lines()
    keys = [(entry.recipe, entry.spec.id) for entry in work.entries]
    if lost := sum(key not in lines for key in keys):
        raise GappedError(
            f"{store.folder}: {lost} of {len(keys)} records were removed while others were trained; "
            "the same command trains them again"
        )
    made = [lines[key] for key in keys]
    if not any(map(has_failed, made)):
        store.finish()
    return made


def _planned(recipes: Sequence[Recipe], store: Store, request: str) -> list[Fleet]:
    """The fleets of this request: those of its interrupted predecessor, then those of runs not among them."""
    entries = entries_by_run(recipes)
    kept = store.load_plan(request)
    try:
        fleets = [Fleet(tuple(entries[each][0].spec for each in ids), entries) for ids in kept]
    except KeyError:
        where = plan_path(store.folder, request)
        raise GappedError(f"{where}: not the plan of this command; remove it to start over") from None
    planned = {spec.id for fleet in fleets for spec in fleet.specs}
    new = plan(recipes, planned | {run_id for _, run_id in store.done()})
    if new:
        fleets += new
        store.save_plan(request, {fleet.key: [spec.id for spec in fleet.specs] for fleet in fleets})
    return fleets


def attempt(
    fleet: Fleet,
    device: torch.device,
    checkpoints: Store | None,
    data_dir: Path | None,
    watch: Watch,
    checkpoint_seconds: float,
) -> Made:
    """`train` a fleet; if that fails, the lines that say so. A package that is missing ends the command."""
    began = time.monotonic()
    try:
        return train(fleet, device, checkpoints, data_dir, watch, checkpoint_seconds)
    except (Interrupted, MissingExtra):
        raise
    except Exception as problem:
        return Made(list(failure_lines(fleet, problem, time.monotonic() - began, device)), {})


def train(
    fleet: Fleet,
    device: torch.device,
    checkpoints: Store | None,
    data_dir: Path | None,
    watch: Watch,
    checkpoint_seconds: float,
) -> Made:
    """Train a fleet from its checkpoint, or from the beginning, and return its lines."""
    spec = fleet.specs[0]
    if device.type == "cuda":
        # What an earlier fleet left behind must neither be kept nor counted; compiled code holds its model.
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer = build(fleet.specs, device, data_dir, fleet.key)
    state = None if checkpoints is None else checkpoints.load_checkpoint(fleet.key, device)
    if checkpoints is not None and state is not None:
        try:
            trainer.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError):
            checkpoints.pass_over(fleet.key, "not the state of this fleet")
            trainer = build(fleet.specs, device, data_dir, fleet.key)
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
        if checkpoints is not None and (stop or time.monotonic() - saved >= checkpoint_seconds):
            try:
                checkpoints.save_checkpoint(fleet.key, trainer.state_dict())
            except OSError as problem:
                said = f"{problem.filename}: no checkpoint could be written ({problem.strerror})"
                kept = "the last one" if checkpoints.has_checkpoint(fleet.key) else "nothing"
                then = f"{kept} is kept of its fleet" if stop else "training goes on"
                warnings.warn(f"{said}; {then}", stacklevel=2)
            saved = time.monotonic()
        if stop:
            raise Interrupted
    if spec.variance_samples and not spec.variance_every_epoch:
        extra["gradient_variance"] = variance(trainer, spec)
    if len(fleet.specs) == 1:
        extra |= alone(trainer, device)
    extra |= trainer.test()
    beside = {"curves": curve_lines(fleet, trainer), spec.kind.shown: shown_lines(fleet, trainer)}
    return Made(
        list(record_lines(fleet, trainer, extra, device)),
        {name: list(lines) for name, lines in beside.items()},
    )


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
