"""Figures of recipes: the colours that estimators have everywhere, and curves at each temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gapped.comparison import figures
from gapped.comparison.figures import INK, SERIES, Finish, Tip, curve_figure, window
from gapped.comparison.records import Curve
from gapped.comparison.table import Row, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN_COLOURS = {
    "gumbel-rao": SERIES[1],
    "gumbel-softmax": SERIES[2],
    "reinmax": SERIES[4],
    "straight-through": SERIES[5],
    "rloo": SERIES[6],
    "gapmax": SERIES[7],
}


def palette(rows: Sequence[Row]) -> dict[str, str]:
    """`figures.palette` with the colours that estimators have in every figure of every page."""
    return figures.palette(rows, own_colour)


def curve_figures(
    rows: Sequence[Row], curves: Mapping[str, Curve], series: str, colours: Mapping[str, str], salt: str
) -> list[tuple[str, str, str]]:
    """(name, title, SVG) of one figure, or of one for each temperature where one would be crowded.

    Of many temperatures those are drawn that have the best cells.
    """
    taus = list(dict.fromkeys(r.tau for r in rows if r.tau is not None)) if len(rows) > len(SERIES) else []
    selections: list[tuple[str, str, Sequence[Row]]] = [("", "", rows)]
    if len(taus) > 1:
        selections = [
            (f"-tau-{tau:g}", f" at τ={tau:g}", [r for r in rows if r.tau in (tau, None)])
            for tau in taus[: len(SERIES)]
        ]
    pictures = []
    for suffix, at, selection in selections:
        name = series.replace("_", "-") + suffix
        title, svg = curve_figure(selection, curves, series, colours, f"{salt}-{name}", at, rows)
        if svg:
            pictures.append((name, title, svg))
    return pictures


def mark_published(rows: Sequence[Row], published: Mapping[str, float]) -> Finish:
    """Adds the paper's number to a figure of final values, a diamond in each row that has one."""
    rows = [row for row in rows if row.value.count]
    mark: Any = {"marker": "D", "markersize": 5.5, "markerfacecolor": "none", "color": INK, "linestyle": ""}

    def finish(figure: Figure, tips: list[Tip]) -> None:
        if not published:
            return
        (axes,), (left, right) = figure.axes, window(rows)
        for place, row in enumerate(rows):
            if (value := published.get(row.name)) is None:
                continue
            if left <= value <= right:
                axes.plot([value], [place], **mark)
            text = f"{tips[place].text}, the paper {number(value, row.metric).text}"
            tips[place] = replace(tips[place], text=text)
        axes.plot([], [], label="the paper", **mark)
        figure.legend(loc="outside lower right", borderpad=0.2)

    return finish


def own_colour(row: Row) -> str | None:
    run = row.cell.records[0]
    return estimator_colour(run.estimator, run.options)


def estimator_colour(name: str, options: Mapping[str, object]) -> str | None:
    """The colour that an estimator has in every figure of every page, if it is one of the usual ones."""
    if name != "gst":
        return OWN_COLOURS.get(name)
    return {"auto": SERIES[0], "1.0": SERIES[3]}.get(str(options.get("gap", 1.0)))
