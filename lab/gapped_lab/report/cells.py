"""Records of runs, gathered into cells, the runs that differ in nothing but their seed; and cells, ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median

import numpy as np

from gapped.errors import GappedError, listing
from gapped_lab.records import Record, read
from gapped_lab.report.statistics import Floats, Summary, advice, summary, verdict

# The first of these that a group of records carries is the one it is judged by.
PRIMARY = (
    "test_accuracy",
    "test_negative_elbo",
    "test_cross_entropy",
    "validation_negative_elbo",
    "surrogate_entropy",
)

QUICK = "A quick run is too short to rank anything: run it without --quick."

# Recipes that measure without a contest: what is said in place of a verdict.
MEASURED = {
    "entropy": "Entropy describes a surrogate, it does not score it: nobody wins here.",
    "efficiency": "One short run of each estimator: only memory and time are compared.",
}

_LARGEST = float(np.finfo(np.float32).max)

# How many labels a sentence on failed runs names.
_NAMED = 8

# What a protocol is for: with one of these, its name says enough.
_USUAL = ("", "mnist", "digits", "listops", "none")
_USUAL_FASHION = (*_USUAL, "fashion-mnist")


@dataclass(frozen=True)
class Cell:
    """All runs of one estimator at one temperature under one protocol, on the same data."""

    recipe: str
    protocol: str
    label: str
    tau: float | None
    records: tuple[Record, ...]

    def values(self, metric: str) -> Floats:
        """One value a run, NaN where the run diverged; runs that failed have none."""
        return np.array([_value(r, metric) for r in self.records if not r.failed], dtype=np.float64)

    def name(self, with_tau: bool) -> str:
        """The label, with the temperature where cells differ in it."""
        return self.label if self.tau is None or not with_tau else f"{self.label} (τ={self.tau:g})"

    @property
    def metrics(self) -> set[str]:
        """The names of what its runs measured."""
        return {name for record in self.records for name in record.metrics}

    @property
    def gap(self) -> float | None:
        """The gap of a GST run, if it is a number."""
        gap = self.records[0].options.get("gap") if self.records[0].estimator == "gst" else None
        return float(gap) if isinstance(gap, int | float) else None


@dataclass(frozen=True)
class Row:
    """One cell, summarised; `name` tells it from the cells it is compared with."""

    cell: Cell
    name: str
    metric: str
    value: Summary
    diverged: int
    seconds_per_epoch: float | None
    gradient_variance: float | None
    higher: bool = False
    """Whether a higher value is better."""
    failed: int = 0
    seconds: float | None = None
    """The median over runs that a function of the user trained: the first one of a process warms it up."""

    @property
    def own(self) -> bool:
        """Whether a function of the user trained the runs."""
        return bool(self.cell.records[0].metric)

    @property
    def label(self) -> str:
        return self.cell.label

    @property
    def tau(self) -> float | None:
        return self.cell.tau


def finished_runs(folder: Path) -> list[Record]:
    """The records of a folder, without runs that failed; none at all is an error: nothing to report."""
    path = folder / Record.FILE
    if not path.is_file():
        if (folder / "checkpoints").is_dir():
            raise GappedError(f"{folder}: no run in it is finished; repeat the command that trains there")
        raise GappedError(f"{folder}: no records.jsonl in it, expected a folder that a gapped run wrote")
    records = read(folder, Record)
    finished = [record for record in records if not record.failed]
    if not finished:
        why = "; ".join([*failures(records), "nothing to report"])
        raise GappedError(f"{path}: holds no finished run yet, {why}")
    return finished


def failures(records: Iterable[Record]) -> list[str]:
    """A sentence for each error that ended runs which no later attempt has finished."""
    last = {record.key: record for record in records}
    lost: dict[tuple[str, str], list[str]] = {}
    for r in last.values():
        if r.failed:
            lost.setdefault((r.recipe, r.error), []).append(r.label)
    return [
        f"{recipe}: {len(runs)} run{'s' * (len(runs) != 1)} of {listing(dict.fromkeys(runs), _NAMED)} "
        f"failed: {error}"
        for (recipe, error), runs in lost.items()
    ]


def cells(records: Iterable[Record]) -> list[Cell]:
    """Cells in order of first appearance, runs in order of their seeds.

    One run may stand in several recipes' tables; within one, the last line with its id counts. Where runs
    of a table were trained for different numbers of epochs, only the longest are comparable and count. A
    label that a user gave to several estimators is followed by the estimator.
    """
    unique = {record.key: record for record in records}
    longest: dict[tuple[str, str], int] = {}
    members: dict[tuple[str, str], set[str]] = {}
    for r in unique.values():
        longest[_table(r)] = max(longest.get(_table(r), 0), r.epochs)
        if r.metric:
            members.setdefault((r.recipe, r.label), set()).add(r.estimator)
    by_cell: dict[tuple[str, str, str, float | None], list[Record]] = {}
    for r in unique.values():
        if r.epochs == longest[_table(r)]:
            shared = len(members.get((r.recipe, r.label), ())) > 1
            label = f"{r.label} ({r.estimator})" if shared else r.label
            by_cell.setdefault((*_table(r), label, r.tau), []).append(r)
    return [Cell(*key, tuple(sorted(runs, key=lambda r: r.seed))) for key, runs in by_cell.items()]


def _table(record: Record) -> tuple[str, str]:
    """Recipe and protocol; the latter says which data these are, unless it is the usual set."""
    usual = _USUAL_FASHION if record.protocol.startswith(("codes-", "binary-fashion-")) else _USUAL
    other = "" if record.data in usual else f" on {record.data}"
    return record.recipe, record.protocol + other


def groups(records: Iterable[Record]) -> dict[tuple[str, str], list[Cell]]:
    """Cells by (recipe, protocol): only these are ever compared with each other."""
    by_table: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells(records):
        by_table.setdefault((cell.recipe, cell.protocol), []).append(cell)
    return by_table


def rows_of(group: Sequence[Cell], metric: str | None = None) -> list[Row]:
    """A row for every cell, best mean first, cells without a single finished run last."""
    metric = metric or primary(group)
    higher = _higher(group, metric)
    sign = -1 if higher else 1
    named = _has_temperatures(group)
    rows = [_row(cell, metric, named, higher) for cell in group]
    return sorted(
        rows, key=lambda r: (r.value.count == 0, sign * r.value.mean if r.value.count else 0.0, r.name)
    )


def verdict_of(group: Sequence[Cell]) -> str:
    """The verdict on cells that share recipe and protocol."""
    if group[0].recipe in MEASURED:
        return MEASURED[group[0].recipe]
    metric = primary(group)
    named = _has_temperatures(group)
    values = {cell.name(named): cell.values(metric) for cell in group}
    higher = _higher(group, metric)
    if not _own_metric(group):
        quick = any(record.quick for cell in group for record in cell.records)
        return " ".join([verdict(values, higher, metric_name(metric), digits(metric)), *[QUICK] * quick])
    seconds = {
        cell.name(named): [r.seconds for r in cell.records if r.metric and not r.failed] for cell in group
    }
    failed = {cell.name(named): sum(r.failed for r in cell.records) for cell in group}
    sentence = verdict(values, higher, metric_name(metric), None, failed)
    return " ".join([sentence, *advice(values, higher, seconds)])


def primary(group: Iterable[Cell]) -> str:
    """The metric that decides."""
    group = list(group)
    if metric := _own_metric(group):
        return metric
    names = sorted({name for cell in group for name in cell.metrics})
    known = [name for name in PRIMARY if name in names]
    test = [name for name in names if name.startswith("test_")]
    return next(iter(known + test + names), PRIMARY[1])


def higher_is_better(metric: str) -> bool:
    """True of accuracies; everything else that runs record is a loss, a variance or a cost."""
    return metric.endswith("accuracy")


def digits(metric: str) -> int:
    """To how many decimals a metric is shown."""
    if metric.endswith("cost"):
        return 5
    return 3 if metric.endswith("accuracy") else 2


def metric_name(metric: str) -> str:
    """A metric's name for readers.

    >>> metric_name("test_negative_elbo")
    'test negative ELBO'
    """
    return metric.replace("_", " ").replace("elbo", "ELBO").replace(" gb", " (GB)").replace("gpu", "GPU")


def finite(value: float | None) -> float:
    """A logged number, NaN where a run had none. Beyond float32, in which runs train, is no number either."""
    return float(value) if value is not None and abs(value) <= _LARGEST else nan


def seconds_per_epoch(record: Record) -> float:
    """Of a run that trained alone; NaN in a fleet, whose runs share their time, whatever their estimators.

    Where the run has measured its epochs, without the first, which compiles, that is the number.
    """
    if record.runs_in_fleet != 1 or not (record.seconds and record.epochs):
        return nan
    return finite(record.metrics.get("seconds_per_epoch", record.seconds / record.epochs))


def _own_metric(group: Iterable[Cell]) -> str:
    """The metric that the records themselves name; else an empty text."""
    records = [r for cell in group for r in cell.records if r.metric]
    return min(records, key=lambda r: r.failed).metric if records else ""


def _higher(group: Sequence[Cell], metric: str) -> bool:
    if metric == _own_metric(group):
        return any(r.maximize for cell in group for r in cell.records)
    return higher_is_better(metric)


def _value(record: Record, metric: str) -> float:
    return nan if record.status == "diverged" else finite(record.metrics.get(metric))


def _has_temperatures(group: Iterable[Cell]) -> bool:
    """Whether a name must say which temperature it means."""
    return len({cell.tau for cell in group}) > 1


def _row(cell: Cell, metric: str, named: bool, higher: bool) -> Row:
    values = cell.values(metric)
    own = [r.seconds for r in cell.records if r.metric and not r.failed]
    pace = summary([seconds_per_epoch(r) for r in cell.records])
    variance = summary(cell.values("gradient_variance"))
    return Row(
        cell=cell,
        name=cell.name(named),
        metric=metric,
        value=summary(values),
        diverged=int((~np.isfinite(values)).sum()),
        seconds_per_epoch=pace.mean if pace.count else None,
        gradient_variance=variance.mean if variance.count else None,
        higher=higher,
        failed=sum(r.failed for r in cell.records),
        seconds=median(own) if own else None,
    )
