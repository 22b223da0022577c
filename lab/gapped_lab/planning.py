"""Which runs train together, and which of them are left to train."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gapped.comparison.records import Record, derived_hash
from gapped.errors import GappedError
from gapped.registry import spell
from gapped.score import Score
from gapped_lab.fleet.estimator_groups import is_level
from gapped_lab.recipe import Recipe
from gapped_lab.spec import Entry, RunSpec
from gapped_lab.store import Store, plan_path

_RUNS_PER_FLEET = 400


@dataclass(frozen=True)
class Fleet:
    """Runs of equal shape, in the order of their run axis, with the table entries that they serve."""

    specs: tuple[RunSpec, ...]
    entries: Mapping[str, Sequence[Entry]] = field(compare=False)

    @property
    def key(self) -> str:
        return derived_hash(*(spec.id for spec in self.specs))

    @classmethod
    def of(cls, specs: Sequence[RunSpec], entries: Mapping[str, Sequence[Entry]]) -> Fleet:
        """The fleet of `specs`, with its own of all `entries`."""
        return cls(tuple(specs), {spec.id: entries[spec.id] for spec in specs})

    def label(self, spec: RunSpec) -> str:
        return self.entries[spec.id][0].label


def plan(recipes: Sequence[Recipe], finished: Collection[str] = ()) -> list[Fleet]:
    """Fleets of the runs whose ids are not among the `finished`."""
    entries = _entries_by_run(recipes)
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
        order = sorted(specs.values(), key=_sampling_order)
        count = math.ceil(len(order) / limits[shape])
        size = math.ceil(len(order) / count)
        fleets += [Fleet.of(order[i : i + size], entries) for i in range(0, len(order), size)]
    return fleets


def _entries_by_run(recipes: Sequence[Recipe]) -> dict[str, list[Entry]]:
    """The entries of each run: it may stand in several tables."""
    entries: dict[str, list[Entry]] = {}
    for recipe in recipes:
        for entry in recipe.entries:
            entries.setdefault(entry.spec.id, []).append(entry)
    return entries


def _sampling_order(spec: RunSpec) -> tuple[bool, int, str]:
    """Where a run stands in its fleet: all of one family together, of score-function estimators those that
    evaluate the cost at equally many samples, then by what can be sampled together."""
    own = spec.make_estimator()
    evaluations = own.evaluations if isinstance(own, Score) else None
    options = {k: v for k, v in spec.options.items() if not is_level(k, v)}
    return isinstance(own, Score), evaluations or 0, spell(spec.estimator, options)


@dataclass(frozen=True)
class Work:
    """The work of a command. It depends on the recipes and the folder, not on the engine."""

    entries: tuple[Entry, ...]
    request: str
    """Hash of what was asked for; the plan is kept under it."""
    fleets: tuple[Fleet, ...]


def prepare(recipes: Sequence[Recipe], store: Store) -> Work:
    """Settle what is to be done: copy what other recipes have finished, divide the rest into fleets."""
    entries = tuple(entry for recipe in recipes for entry in recipe.entries)
    _copy_finished(entries, store)
    request = request_hash(recipes)
    return Work(entries, request, tuple(_planned_fleets(recipes, store, request)))


def request_hash(recipes: Sequence[Recipe]) -> str:
    """Hash of what was asked for, a limit on the fleets included."""
    runs = sorted(f"{entry.recipe}/{entry.spec.id}" for recipe in recipes for entry in recipe.entries)
    limits = [f"{recipe.name}/{recipe.runs_per_fleet}" for recipe in recipes if recipe.runs_per_fleet]
    return derived_hash(*runs, *limits)


def remaining(work: Work, store: Store) -> list[Fleet]:
    """The fleets that have an unfinished run."""
    finished = store.finished()
    return [
        fleet
        for fleet in work.fleets
        if any(entry.key not in finished for spec in fleet.specs for entry in fleet.entries[spec.id])
    ]


def conclude(work: Work, store: Store) -> list[Record]:
    """Tidy up after the last fleet, unless one has failed. Returns the records of all entries."""
    by_key = store.records()
    keys = [entry.key for entry in work.entries]
    if lost := sum(key not in by_key for key in keys):
        raise GappedError(
            f"{store.folder}: {lost} of {len(keys)} records were removed while others were trained; "
            "the same command trains them again"
        )
    records = [by_key[key] for key in keys]
    if not any(record.failed for record in records):
        store.tidy()
    return records


def _planned_fleets(recipes: Sequence[Recipe], store: Store, request: str) -> list[Fleet]:
    """The fleets of this request: those of its interrupted predecessor, then those of runs not among them."""
    entries, kept = _entries_by_run(recipes), store.load_plan(request)
    runs = [run for ids in kept.values() for run in ids]
    planned = set(runs)
    # A key is a hash of the runs in their order. In another order they would draw other numbers.
    if not (
        len(planned) == len(runs)
        and planned <= entries.keys()
        and all(key == derived_hash(*ids) for key, ids in kept.items())
    ):
        where = plan_path(store.folder, request)
        raise GappedError(f"{where}: not the plan of this command; remove it to start over")
    fleets = [Fleet.of([entries[run][0].spec for run in ids], entries) for ids in kept.values()]
    new = plan(recipes, planned | {record.id for record in store.finished().values()})
    if new:
        fleets += new
        store.save_plan(request, {fleet.key: [spec.id for spec in fleet.specs] for fleet in fleets})
    return fleets


def _copy_finished(entries: Sequence[Entry], store: Store) -> None:
    """A run that another recipe has finished gets its line in this one's table without being run again."""
    by_id = {record.id: record for record in store.finished().values()}
    store.add(
        replace(by_id[entry.spec.id], recipe=entry.recipe, label=entry.label, quick=entry.quick)
        for entry in entries
        if entry.spec.id in by_id
    )
