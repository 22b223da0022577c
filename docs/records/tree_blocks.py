"""Blocks about the parser of ListOps: its gradient along training, controls, the authors' reading."""

from __future__ import annotations

from typing import Any

import numpy as np
from evidence import ACCURACY, Evidence, require
from template import fill
from verdicts import pending, shown

from gapped.errors import listing
from gapped_lab.report.cells import Cell, Row, rows_of
from gapped_lab.report.paper import paper
from gapped_lab.report.statistics import Difference, Summary, difference, summary
from gapped_lab.report.tabular import NOTHING, Entry, Table, tau_entry
from gapped_lab.report.trees import F1, gradient_entries

SHAPES = ("random trees", "left-branching", "right-branching", "balanced")

Values = dict[str, Any]


def parser_training(evidence: Evidence) -> str:
    """The gradient of the query in the first and in the last epoch of every cell."""
    if "listops-parser" not in evidence.recipes():
        return f"Along training, with fresh seeds: {pending('listops-parser')}."
    body = []
    for cell in evidence.group("listops-parser", "paper"):
        series = {
            name: np.array([evidence.curves[record.id].series[name] for record in cell.records], dtype=float)
            for name in ("query_gradient_norm", "query_gradient_zero")
        }
        ends = [values[:, place].mean() for values in series.values() for place in (0, -1)]
        accuracy = _spread(summary(cell.values(ACCURACY)))
        numbers = [Entry(f"{value:.0e}" if value else "0", value) for value in ends[:2]]
        shares = [Entry(f"{value:.0%}", value) for value in ends[2:]]
        body.append((Entry(cell.label), tau_entry(cell.tau), accuracy, *numbers, *shares))
    first, last = "first epoch", f"epoch {evidence.group('listops-parser', 'paper')[0].records[0].epochs}"
    measured = [f"{what}, {when}" for what in ("norm", "zero steps") for when in (first, last)]
    columns = ("estimator", "τ", "test accuracy", *measured)
    return fill("parser-training", {"table": Table(columns, tuple(body))})


def tree_controls(evidence: Evidence) -> str:
    """Trees that no score decides, and how far the estimators are ahead of the best of them."""
    if "listops-controls" not in evidence.recipes():
        return f"The same budget and seeds: {pending('listops-controls')}."
    controls = rows_of(evidence.group("listops-controls", "paper"), ACCURACY)
    estimators = rows_of(evidence.group("listops", "paper"), ACCURACY)
    values = {"table": _table(controls), **_ahead(estimators, controls)}
    require("every cell is behind right-branching trees", values["behind"] == values["cells"])
    require("right-branching is the best control", values["control"] == "right-branching")
    return fill("tree-controls", values)


def tree_authors(evidence: Evidence) -> str:
    """What the authors' way to read the data gives."""
    if "listops-authors" not in evidence.recipes():
        return f"Three seeds, five epochs: {pending('listops-authors')}."
    rows = rows_of(evidence.group("listops-authors", "authors"), ACCURACY)
    late, early = (evidence.cell("listops-authors", _LATE, tau, "authors") for tau in (0.01, 0.1))
    stuck = _at_chance(evidence, late)
    others = [row.cell for row in rows if row.cell != late]
    others += [cell for cell in evidence.group("listops", "paper") if cell.label == "STGS"]
    require("some runs stay at chance for a while", any(stuck))
    require("no others do", not any(n for cell in others for n in _at_chance(evidence, cell)))
    _, _, mean, std = next(row for row in paper()["listops"]["rows"] if row[:2] == ["STGS", 0.01])
    values = {
        "table": _table(rows),
        "chance": listing(map(str, stuck)),
        "epochs": late.records[0].epochs,
        "runs": listing(f"{value:.3f}" for value in late.values(ACCURACY)),
        "lead": shown(difference(early.values(ACCURACY), late.values(ACCURACY)), 3),
        "paper": f"{mean:.3f} ± {std:.3f}",
    }
    return fill("tree-authors", values)


_LATE = "STGS, masked after the softmax"


def _at_chance(evidence: Evidence, cell: Cell) -> list[int]:
    """Of each run, the epochs that end with a validation accuracy below 0.15: guesses among ten have 0.1."""
    curves = (evidence.curves[record.id].series["valid_accuracy"] for record in cell.records)
    return [sum(value is not None and value < 0.15 for value in values) for values in curves]


def tree_short(evidence: Evidence) -> Values | str:
    """The small protocol: estimators beside controls."""
    if "listops-short" not in evidence.recipes():
        return f"{pending('listops-short').capitalize()}."
    rows = rows_of(evidence.group("listops-short", "short"), ACCURACY)
    controls = [row for row in rows if row.label in SHAPES]
    estimators = [row for row in rows if row.label not in SHAPES]
    still = evidence.cell("listops-short", "GST-1.0", 0.01, "short")
    norms, shares = (still.values(f"query_gradient_{what}") for what in ("norm", "zero"))
    require("the parser of GST at 0.01 stays as it was", float(norms.max()) < 1e-37)
    return {
        "table": _table(rows),
        "seeds": len(still.records),
        "epochs": still.records[0].epochs,
        "norm": f"{norms.max():.0e}",
        "share": float(shares.min()),
        **_ahead(estimators, controls),
        **{f"lead_{name}": _lead(evidence, *pair) for name, pair in _PAIRS.items()},
    }


_PAIRS = {
    "gst": (("GST-1.0", 1.0), ("GST-1.0", 0.01)),
    "stgs": (("STGS", 1.0), ("STGS", 0.01)),
    "still": (("GST-1.0", 0.01), ("random trees", None)),
}


def _lead(evidence: Evidence, mine: tuple[str, float | None], other: tuple[str, float | None]) -> str:
    cells = (evidence.cell("listops-short", *which, "short") for which in (mine, other))
    return shown(difference(*(cell.values(ACCURACY) for cell in cells)), 3)


def _ahead(estimators: list[Row], controls: list[Row]) -> Values:
    """How many estimators are separated from the best control, and the lead of the best of them."""
    best, mine = controls[0], estimators[0]
    leads = [_over(row.cell, best.cell) for row in estimators]
    return {
        "control": best.name,
        "best": mine.name,
        "lead": shown(leads[0], 3),
        "ahead": sum(each.low > 0 for each in leads),
        "behind": sum(each.high < 0 for each in leads),
        "cells": len(leads),
    }


def _over(mine: Cell, other: Cell) -> Difference:
    return difference(mine.values(ACCURACY), other.values(ACCURACY))


def _table(rows: list[Row]) -> Table:
    """Accuracy, F1 where it is known, and the gradient of the query in the last epoch."""
    body = [
        (
            Entry(row.label),
            tau_entry(row.tau),
            _spread(row.value),
            _spread(summary(row.cell.values(F1))),
            *gradient_entries(row),
            Entry(str(row.value.count), row.value.count),
        )
        for row in rows
    ]
    columns = ("estimator", "τ", "test accuracy", "F1", "query gradient", "zero steps", "seeds")
    return Table(columns, tuple(body))


def _spread(s: Summary) -> Entry:
    if not s.count:
        return Entry(NOTHING)
    return Entry(f"{s.mean:.3f} ± {s.std:.3f}" if s.count > 1 else f"{s.mean:.3f}", s.mean)
