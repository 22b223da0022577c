"""Our numbers beside those of the paper."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from math import inf, isnan, nan, sqrt
from typing import Any

from gapped.comparison.records import Record
from gapped.comparison.statistics import Summary, summary
from gapped.comparison.table import NOTHING, Cell, Entry, Table, metric_name, number, tau_entry
from gapped_lab.report.cells import cells, primary

FAILED_ABOVE = 148.67
"""Nats of test negative ELBO above which a run counts as not having converged.

The worst cell that the paper's comparison table still calls converging (STGS at temperature 0.01) has
141.61 with a standard deviation of 3.53; this is two of its standard deviations above it.
"""

RULE = (
    f"A cell *fails to converge* if at least half of its seeds diverge or end above {FAILED_ABOVE} nats: "
    "two standard deviations above the worst cell that the paper's table calls converging."
)

# Differences smaller than these are not worth a mark, however small their standard error.
MARGIN = {"listops": 0.01}
NATS, FIELD_NATS = 0.3, 0.5

DISAGREES = "≠"


@dataclass(frozen=True)
class PaperRow:
    """One cell, ours and the paper's; either side may be missing, and `note` says why.

    `lost` of our runs ended without a value. A cell that has such runs disagrees with the paper's.
    """

    label: str
    tau: float | None
    metric: str
    ours: Summary | None
    paper_mean: float | None = None
    paper_std: float | None = None
    paper_count: int | None = None
    difference: float | None = None
    standard_errors: float | None = None
    disagrees: bool = False
    note: str = ""
    lost: int = 0


@cache
def paper() -> dict[str, Any]:
    """The published numbers, by the name of the recipe that reproduces them."""
    return _numbers("paper.json")


@cache
def field() -> dict[str, Any]:
    """The published numbers of other papers, by recipe; their rows begin with the protocol."""
    return _numbers("field.json")


def _numbers(name: str) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(files("gapped_lab.report").joinpath(name).read_text("utf-8"))
    return numbers


def against_paper(records: Iterable[Record], recipe: str, protocol: str | None = None) -> list[PaperRow]:
    """The paper's rows in its order, then what it marks as failing, then cells that it does not have.

    Only records under `protocol` count, or without one, those under any protocol of the paper's; those of
    other protocols are not comparable, and neither are recipes that the paper has no table for. Where a
    recipe has the table of another paper, that is the paper, and only its rows under `protocol` are shown.
    """
    matching = [c for c in cells(records) if c.recipe == recipe and protocol in (None, c.protocol)]
    if recipe in field():
        table: Any = _under(protocol, field()[recipe])
        ours = matching
    else:
        table = paper().get(recipe)
        ours = [c for c in matching if _is_papers(c.protocol)]
    if table is None or (protocol is not None and not ours and recipe not in field()):
        return []
    seeds = table.get("seeds")
    rows: list[PaperRow] = []
    seen: list[Cell] = []
    for name, tau, published in (_find_published(recipe, row, table) for row in table.get("rows", [])):
        matching = [c for c in ours if _matches(c, name, tau)]
        seen += matching
        if why := table.get("incomparable", {}).get(name):
            rows += [_incomparable(c, *published[0], why) for c in matching]
            continue
        for metric, mean, std in published:
            absent = PaperRow(name, tau, metric, None, mean, std, seeds, note="not run here")
            rows += [_compare(c, recipe, metric, mean, std, seeds) for c in matching] or [absent]
    for name, tau in table.get("fails_to_converge", []):
        failing = [c for c in ours if _matches(c, name, tau)]
        seen += failing
        rows += [_failure(c) for c in failing]
    metric = primary(ours)
    others = [c for c in ours if c not in seen and recipe not in field()]
    return rows + [
        PaperRow(c.label, c.tau, metric, summary(c.values(metric)), note="not in the paper") for c in others
    ]


def paper_table(rows: Sequence[PaperRow], recipe: str = "") -> Table:
    """Rows as a table, with the notes that its marks need; the margin in them is that of `recipe`."""
    several = len({r.metric for r in rows}) > 1
    columns = ("estimator", "τ", *(["measure"] * several), "ours", "seeds", "paper", "seeds")
    columns += ("difference", "std. errors", "mark", "note")
    spread = any(r.ours and r.ours.count > 1 for r in rows)
    notes = ["Mean ± standard deviation over seeds."] if spread else []
    if any(r.disagrees for r in rows):
        unit = "of accuracy" if any(r.metric.endswith("accuracy") for r in rows) else "nats"
        margin = f"{_margin(recipe)} {unit}"
        notes.append(
            f"{DISAGREES}: further apart than two standard errors and {margin}, or in whether it converges."
        )
    if any(r.note.startswith("paper: X") for r in rows):
        notes.append(RULE)
    return Table(columns, tuple(_entries(r, several) for r in rows), tuple(notes))


def _entries(row: PaperRow, several: bool) -> tuple[Entry, ...]:
    ours = row.ours or summary([])
    errors = None if row.standard_errors is None or isnan(row.standard_errors) else row.standard_errors
    return (
        Entry(row.label),
        tau_entry(row.tau),
        *([Entry(metric_name(row.metric))] * several),
        _mean_std(ours.mean, ours.std, row.metric),
        Entry(str(ours.count), ours.count) if row.ours else Entry(NOTHING),
        _mean_std(row.paper_mean, row.paper_std, row.metric),
        Entry(str(row.paper_count), row.paper_count) if row.paper_count else Entry(NOTHING),
        _sign(number(row.difference, row.metric)),
        _sign(Entry(NOTHING) if errors is None else Entry(f"{errors:.1f}", errors)),
        Entry(DISAGREES if row.disagrees else ""),
        Entry(row.note),
    )


def _sign(entry: Entry) -> Entry:
    """A difference with its sign, unless it rounds to nothing."""
    if entry.value is None or float(entry.text) == 0:
        return Entry(entry.text.removeprefix("-"), entry.value)
    return Entry(("+" if entry.value > 0 else "") + entry.text, entry.value)


def _mean_std(mean: float | None, std: float | None, metric: str) -> Entry:
    entry, spread = number(mean, metric), number(std, metric)
    return Entry(f"{entry.text} ± {spread.text}", entry.value) if spread.value is not None else entry


def _under(protocol: str | None, table: dict[str, Any]) -> dict[str, Any]:
    """The rows of a protocol, without its name."""
    return {**table, "rows": [row[1:] for row in table["rows"] if row[0] == protocol]}


def _find_published(
    recipe: str, row: list[Any], table: dict[str, Any]
) -> tuple[str, float | None, list[tuple[str, float, float | None]]]:
    """A row of the paper's data as label, temperature, and (metric, mean, std) for each of its numbers."""
    if recipe == "efficiency":
        return row[0], None, [("gpu_memory_gb", row[1], None), ("seconds_per_epoch", row[2], None)]
    if recipe == "entropy":
        return row[0], None, [("surrogate_entropy", row[1], None)]
    metric = "test_accuracy" if recipe == "listops" else "test_negative_elbo"
    if recipe in field():
        metric = table["metric"]
    return row[0], row[1], [(metric, row[2], row[3])]


def _compare(
    cell: Cell, recipe: str, metric: str, mean: float, std: float | None, count: int | None
) -> PaperRow:
    ours = summary(cell.values(metric))
    lost = len(cell.records) - ours.count
    losses = f"{lost} of {len(cell.records)} runs without a value" if lost else ""
    known = PaperRow(cell.label, cell.tau, metric, ours, mean, std, count, lost=lost)
    if not ours.count:
        return replace(known, disagrees=True, note=losses)
    gap = ours.mean - mean
    # In the field's tables a number without a spread counts as exact.
    judged = recipe in field() or (std is not None and count)
    errors = standard_errors(ours, mean, std or 0.0, count or 1) if judged else None
    far = errors is not None and abs(errors) > 2 and abs(gap) > _margin(recipe)
    scaled = "quick run, scaled down: not comparable" if _is_quick(cell) else ""
    return replace(
        known,
        difference=gap,
        standard_errors=errors,
        disagrees=(far or lost > 0) and not scaled,
        note="; ".join(filter(None, [scaled, losses])),
    )


def standard_errors(ours: Summary, paper_mean: float, paper_std: float, paper_count: int) -> float:
    """How many standard errors of the difference lie between our mean and a published one.

    NaN where our own spread is unknown (one seed).

    >>> round(standard_errors(summary([107.0, 108.0, 109.0]), 107.33, 0.69, 10), 3)
    1.086
    """
    gap = ours.mean - paper_mean
    error = sqrt(ours.std**2 / ours.count + paper_std**2 / paper_count) if ours.count > 1 else nan
    return gap / error if error else (0.0 if gap == 0 else inf if gap > 0 else -inf)


def _margin(recipe: str) -> float:
    return MARGIN.get(recipe, FIELD_NATS if recipe in field() else NATS)


def _incomparable(cell: Cell, metric: str, mean: float, std: float | None, why: str) -> PaperRow:
    """A cell whose published number was measured otherwise: it stands in the note."""
    note = f"the paper has {mean:.2f} ± {std:.2f}, {why}: not comparable"
    return PaperRow(cell.label, cell.tau, metric, summary(cell.values(metric)), note=note)


def _failure(cell: Cell) -> PaperRow:
    """A cell that the paper marks X: what happened here, under the stated rule."""
    values = cell.values("test_negative_elbo")
    bad = int((~(values <= FAILED_ABOVE)).sum())
    failed = 2 * bad >= values.size
    note = f"paper: X; here {bad} of {values.size} seeds fail, so it {'fails too' if failed else 'converges'}"
    mark = not failed and not _is_quick(cell)
    return PaperRow(cell.label, cell.tau, "test_negative_elbo", summary(values), disagrees=mark, note=note)


def _is_quick(cell: Cell) -> bool:
    return any(record.quick for record in cell.records)


def _matches(cell: Cell, name: str, tau: float | None) -> bool:
    return tau in (None, cell.tau) and fnmatchcase(cell.label, name)


def _is_papers(protocol: str) -> bool:
    """Whether numbers of this protocol can be set beside the paper's: it is the paper's, on its data."""
    return not protocol or (protocol.startswith("paper") and " on " not in protocol)
