"""The series that runs logged, gathered cell by cell for drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gapped.lab.report.cells import finite, metric_name
from gapped.lab.report.figures import Curve, learning_curves
from gapped.lab.report.svg import SERIES
from gapped.lab.report.tables import DRAWN, Row

Line = dict[str, Any]


def series_of(rows: Sequence[Row], lines: Mapping[str, Line], metric: str) -> list[str]:
    """The names of the series that these runs logged, the deciding one first."""
    logged = [line for row in rows for line in _lines(row, lines)]
    names = {name for line in logged for name, values in line.items() if isinstance(values, list)} - {"epoch"}
    first = [metric, metric.replace("test_", "train_").replace("validation_", "train_"), "gradient_variance"]
    return sorted(names, key=lambda n: (first.index(n) if n in first else len(first), n))


def curve(row: Row, lines: Mapping[str, Line], series: str, name: str, key: str) -> Curve | None:
    """A cell's runs on one axis of epochs; none where nothing finite was logged."""
    logged = [line for line in _lines(row, lines) if isinstance(line.get(series), list)]
    epochs = sorted({epoch for line in logged for epoch in _epochs(line, series)})
    column = {epoch: i for i, epoch in enumerate(epochs)}
    values = np.full((len(logged), len(epochs)), np.nan)
    for i, line in enumerate(logged):
        for epoch, value in zip(_epochs(line, series), line[series], strict=False):
            values[i, column[epoch]] = finite(value)
    if not np.isfinite(values).any():
        return None
    return Curve(name, key, np.array(epochs, dtype=np.float64), values)


def curve_figures(
    rows: Sequence[Row], lines: Mapping[str, Line], series: str, colours: Mapping[str, str], salt: str
) -> list[tuple[str, str, str]]:
    """(name, title, SVG) of one figure, or of one for each temperature where one would be crowded.

    Of many cells the best are drawn, and of many temperatures those that have the best cells.
    """
    taus = list(dict.fromkeys(r.tau for r in rows if r.tau is not None)) if len(rows) > len(SERIES) else []
    parts: list[tuple[str, str, Sequence[Row]]] = [("", "", rows)]
    if len(taus) > 1:
        parts = [
            (f"-tau-{tau:g}", f" at τ={tau:g}", [r for r in rows if r.tau in (tau, None)])
            for tau in taus[: len(SERIES)]
        ]
    made = []
    for suffix, at, part in parts:
        # Where all cells of a figure share the temperature its title names, the legend need not repeat it.
        best = part[:DRAWN]
        candidates = [curve(r, lines, series, r.label if at else r.name, colour_key(r, rows)) for r in best]
        curves = [c for c in candidates if c is not None]
        if not curves:
            continue
        name, title = series.replace("_", "-") + suffix, metric_name(series) + at
        log = "variance" in series
        made.append((name, title, learning_curves(curves, title, series, colours, log, f"{salt}-{name}")))
    return made


def palette(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each key, the same in every figure; none at all where there are more keys than colours."""
    keys = sorted({colour_key(row, rows) for row in rows})
    return dict(zip(keys, SERIES, strict=False)) if len(keys) <= len(SERIES) else {}


def colour_key(row: Row, rows: Sequence[Row]) -> str:
    """What a colour stands for: the cell where there are few, else the estimator at every temperature."""
    return row.name if len(rows) <= len(SERIES) else row.label


def _lines(row: Row, lines: Mapping[str, Line]) -> list[Line]:
    """What a cell's runs logged; runs that did not end well count only if there is no other."""
    records = row.cell.records
    runs = [r for r in records if r.get("status", "ok") == "ok"] or records
    return [lines[str(r.get("id"))] for r in runs if str(r.get("id")) in lines]


def _epochs(line: Line, series: str) -> list[float]:
    return [float(e) for e in line.get("epoch") or range(1, len(line[series]) + 1)]
