"""Records of recipes as cells: what decides between them, and under which protocol they stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from pathlib import Path

from gapped.comparison import outcome, table
from gapped.comparison.records import Record, read
from gapped.comparison.statistics import summary
from gapped.comparison.table import Cell, Row, Table, digits, failures, finite, number
from gapped.errors import GappedError

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

# The data that a protocol is for: with one of these, its name says enough.
_USUAL = ("", "mnist", "digits", "listops", "none")
_USUAL_FASHION = (*_USUAL, "fashion-mnist")


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


def cells(records: Iterable[Record]) -> list[Cell]:
    """`table.cells`, where each protocol says on which data it is, unless these are the usual ones.

    Where runs of a table were trained for different numbers of epochs, only the longest are comparable and
    count.
    """
    unique = {record.key: record for record in records}
    longest: dict[tuple[str, str], int] = {}
    for r in unique.values():
        longest[_table(r)] = max(longest.get(_table(r), 0), r.epochs)
    return table.cells((r for r in unique.values() if r.epochs == longest[_table(r)]), _table)


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
    return table.rows_of(group, metric, _higher(group, metric))


def summary_table(rows: Sequence[Row]) -> Table:
    """Cells as a table, with the variance of their gradients and the time of an epoch where known."""
    variances = (summary(row.cell.values("gradient_variance")) for row in rows)
    return table.summary_table(
        rows,
        {
            "gradient variance": [number(each.mean) for each in variances],
            "ms / epoch": [number(1e3 * pace(row.cell)) for row in rows],
        },
    )


def verdict_of(group: Sequence[Cell]) -> str:
    """The verdict on cells that share recipe and protocol."""
    if group[0].recipe in MEASURED:
        return MEASURED[group[0].recipe]
    if table.own_metric(group):
        return str(outcome.judge(group))
    metric = primary(group)
    quick = any(record.quick for cell in group for record in cell.records)
    verdict = outcome.judge(group, metric, higher_is_better(metric), digits(metric))
    return " ".join([str(verdict), *[QUICK] * quick])


def primary(group: Iterable[Cell]) -> str:
    """The metric that decides."""
    group = list(group)
    if metric := table.own_metric(group):
        return metric
    names = sorted({name for cell in group for name in cell.metrics})
    known = [name for name in PRIMARY if name in names]
    test = [name for name in names if name.startswith("test_")]
    return next(iter(known + test + names), PRIMARY[1])


def _higher(group: Sequence[Cell], metric: str) -> bool:
    return table.own_direction(group) if metric == table.own_metric(group) else higher_is_better(metric)


def higher_is_better(metric: str) -> bool:
    """True of accuracies; everything else that runs record is a loss, a variance or a cost."""
    return metric.endswith("accuracy")


def gap_of(cell: Cell) -> float | None:
    """The gap of a GST run, if it is a number."""
    gap = cell.records[0].options.get("gap") if cell.records[0].estimator == "gst" else None
    return float(gap) if isinstance(gap, int | float) else None


def pace(cell: Cell) -> float:
    """The mean of the runs' seconds per epoch, NaN where none trained alone."""
    return summary([seconds_per_epoch(r) for r in cell.records]).mean


def seconds_per_epoch(record: Record) -> float:
    """Of a run that trained alone; NaN in a fleet, whose runs share their time, whatever their estimators.

    Where the run has measured its epochs, without the first, which compiles, that is the number.
    """
    if record.runs_in_fleet != 1 or not (record.seconds and record.epochs):
        return nan
    return finite(record.metrics.get("seconds_per_epoch", record.seconds / record.epochs))
