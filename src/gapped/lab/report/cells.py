"""Records of runs, gathered into cells: the runs that differ in nothing but their seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from gapped.errors import GappedError, listing
from gapped.lab.records import has_failed, load
from gapped.lab.report.statistics import Floats

Record = dict[str, Any]

# The first of these that a group of records carries is the one it is judged by.
PRIMARY = ("test_accuracy", "test_negative_elbo", "validation_negative_elbo", "surrogate_entropy")


_LARGEST = float(np.finfo(np.float32).max)

# How many labels a sentence on failed runs names.
_NAMED = 8

# What a protocol is for: with one of these, its name says enough.
_USUAL = ("mnist", "digits", "listops")


@dataclass(frozen=True)
class Cell:
    """All runs of one estimator at one temperature under one protocol, on the same data."""

    recipe: str
    protocol: str
    label: str
    tau: float | None
    records: tuple[Record, ...]

    def values(self, metric: str) -> Floats:
        """One value a run, NaN where the run diverged."""
        return np.array([_value(r, metric) for r in self.records], dtype=np.float64)

    def count(self, status: str) -> int:
        """How many runs ended this way."""
        return sum(r.get("status", "ok") == status for r in self.records)

    def name(self, with_tau: bool) -> str:
        """The label, with the temperature where cells differ in it."""
        return self.label if self.tau is None or not with_tau else f"{self.label} (τ={self.tau:g})"

    @property
    def gap(self) -> float | None:
        """The gap of a GST run, if it is a number."""
        gap = (self.records[0].get("options") or {}).get("gap")
        return (
            float(gap) if isinstance(gap, int | float) and self.records[0].get("estimator") == "gst" else None
        )


def read(folder: Path) -> list[Record]:
    """The records of a folder, without runs that failed; none at all is an error: nothing to report."""
    path = folder / "records.jsonl"
    if not path.is_file():
        raise GappedError(f"{folder}: no records.jsonl in it, expected a folder that a gapped run wrote")
    lines = load(path)
    records = [record for record in lines if not has_failed(record)]
    if not records:
        why = "; ".join([*failures(lines), "nothing to report"])
        raise GappedError(f"{path}: holds no finished run yet, {why}")
    return records


def failures(lines: Iterable[Record]) -> list[str]:
    """A sentence for each error that ended runs which no later attempt has finished."""
    last = {(r.get("recipe"), r.get("id")): r for r in lines}
    lost: dict[tuple[str, str], list[str]] = {}
    for r in filter(has_failed, last.values()):
        lost.setdefault((str(r.get("recipe")), str(r.get("error"))), []).append(label(r))
    return [
        f"{recipe}: {len(runs)} run{'s' * (len(runs) != 1)} of {listing(dict.fromkeys(runs), _NAMED)} "
        f"failed: {error}"
        for (recipe, error), runs in lost.items()
    ]


def label(record: Record) -> str:
    """The record's own label, or one in the spelling of the command line.

    >>> label({"estimator": "gst", "options": {"gap": 1.2}})
    'gst:gap=1.2'
    """
    if record.get("label"):
        return str(record["label"])
    options = ",".join(f"{key}={value}" for key, value in sorted((record.get("options") or {}).items()))
    kind = (record.get("schedule") or {}).get("kind", "constant")
    suffix = "" if kind in ("constant", "mixed") else f" ({kind})"
    return ":".join(filter(None, [str(record.get("estimator", "unnamed")), options])) + suffix


def temperature(record: Record) -> float | None:
    """The temperature a cell goes by: the one that it is tested at."""
    tau = record.get("tau")
    return None if tau is None else float(tau)


def cells(records: Iterable[Record]) -> list[Cell]:
    """Cells in order of first appearance, runs in order of their seeds.

    One run may stand in several recipes' tables; within one, the last line with its id counts. Where runs
    of a table were trained for different numbers of epochs, only the longest are comparable and count.
    """
    unique = {(r.get("recipe"), r.get("id") or f"line {n}"): r for n, r in enumerate(records)}
    longest: dict[tuple[str, str], int] = {}
    for r in unique.values():
        longest[_table(r)] = max(longest.get(_table(r), 0), int(r.get("epochs") or 0))
    gathered: dict[tuple[str, str, str, float | None], list[Record]] = {}
    for r in unique.values():
        if int(r.get("epochs") or 0) == longest[_table(r)]:
            gathered.setdefault((*_table(r), label(r), temperature(r)), []).append(r)
    by_seed = [(key, tuple(sorted(rs, key=lambda r: r.get("seed") or 0))) for key, rs in gathered.items()]
    return [Cell(*key, runs) for key, runs in by_seed]


def _table(record: Record) -> tuple[str, str]:
    """Recipe and protocol; the latter says which data these are, unless it is the usual set."""
    data, protocol = record.get("data"), str(record.get("protocol") or "")
    if data is not None and data not in _USUAL:
        protocol = f"{protocol} on {data}"
    return str(record.get("recipe", "runs")), protocol


def groups(records: Iterable[Record]) -> dict[tuple[str, str], list[Cell]]:
    """Cells by (recipe, protocol): only these are ever compared with each other."""
    grouped: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells(records):
        grouped.setdefault((cell.recipe, cell.protocol), []).append(cell)
    return grouped


def primary(group: Iterable[Cell]) -> str:
    """The metric that decides."""
    names: list[str] = sorted(
        {name for cell in group for r in cell.records for name in (r.get("metrics") or {})}
    )
    known = [name for name in PRIMARY if name in names]
    test = [name for name in names if name.startswith("test_")]
    return next(iter(known + test + names), PRIMARY[1])


def higher_is_better(metric: str) -> bool:
    """True of accuracies; everything else that runs record is a loss, a variance or a cost."""
    return metric.endswith("accuracy")


def metric_name(metric: str) -> str:
    """A metric's name for readers.

    >>> metric_name("test_negative_elbo")
    'test negative ELBO'
    """
    return metric.replace("_", " ").replace("elbo", "ELBO").replace(" gb", " (GB)").replace("gpu", "GPU")


def has_temperatures(group: Iterable[Cell]) -> bool:
    """Whether a name must say which temperature it means."""
    return len({cell.tau for cell in group}) > 1


def finite(value: float | None) -> float:
    """A logged number, NaN where a run had none. Beyond float32, in which runs train, is no number either."""
    return float(value) if value is not None and abs(value) <= _LARGEST else nan


def _value(record: Record, metric: str) -> float:
    value = (record.get("metrics") or {}).get(metric)
    return nan if record.get("status") == "diverged" else finite(value)
