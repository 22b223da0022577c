"""Figures of a comparison as SVG text that follows the page: its colours, font and tooltips.

Colours are written as CSS variables whose fallbacks are mid-tones: inside the report a figure takes the
page's light or dark palette, and alone (in the documentation) it reads on either background. The same input
gives the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, isfinite, isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from gapped.comparison.records import Curve
from gapped.comparison.statistics import Floats, band
from gapped.comparison.table import DRAWN, NOTHING, Row, finite, metric_name, number, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Drawing units. A phone shows them at 0.8 pixels, a desk at 1.3; fonts are chosen to be readable at both.
WIDTH = 440

# Characters in a line as wide as the figure, and in one beside the rows of a chart.
LINE, BESIDE = 60, 30

INK = "#78797b"
GRID = "#a0a1a2"
# After Okabe and Ito: told apart under the common colour-vision deficiencies, darkened to read on white.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#b8589a", "#c08a00", "#3d9bd6", "#8a6d5c", "#5b5fc7")

VARIABLES = {INK: "ink", GRID: "grid"} | {colour: f"series-{i + 1}" for i, colour in enumerate(SERIES)}


# Values of a curve that have a tip.
TIPS_PER_CURVE = 20


@dataclass(frozen=True)
class Tip:
    """A spot that shows `text` when hovered, in the data coordinates of its axes."""

    axes: Axes
    x: float
    y: float
    text: str
    radius: float = 6


def style(name: str) -> Any:
    """matplotlib's settings for the time of drawing one figure; the salt makes its ids its own."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "svg.hashsalt": name,
            # A name may hold dollar signs: they are no mathematics.
            "text.parse_math": False,
            # Text stays text: it is selectable, takes the page's font, and costs few bytes.
            "svg.fonttype": "none",
            "font.size": 11,
            "font.family": "DejaVu Sans",
            "text.color": INK,
            "axes.edgecolor": GRID,
            "axes.labelcolor": INK,
            "axes.titlecolor": INK,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.unicode_minus": True,
            "grid.color": GRID,
            "grid.alpha": 0.35,
            "grid.linewidth": 0.6,
            "xtick.color": INK,
            "ytick.color": INK,
            "xtick.labelsize": 10,
            "ytick.labelsize": 10,
            "legend.frameon": False,
            "legend.fontsize": 10.5,
            "lines.solid_capstyle": "round",
        }
    )


def new_figure(height: float) -> tuple[Figure, Axes]:
    """A transparent figure of the common width. No pyplot: nothing is registered, nothing needs closing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def to_svg(figure: Figure, label: str, tips: list[Tip]) -> str:
    """The figure as one `<svg>` element, described by `label` for those who do not see it."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        # matplotlib's own, on a layout without room or a font without a letter, are no help to a reader.
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].rstrip().removesuffix("</svg>")
    # Several figures share a page, where an id must be unique: only those stay that something points to.
    targets = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in targets else "", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(f": {colour}", f": var(--{variable}, {colour})")
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    height, spots = float(figure.get_figheight() * 72), ""
    for tip in tips:
        x, y = tip.axes.transData.transform((tip.x, tip.y))
        spots += (
            f'<circle class="tip" cx="{x:.1f}" cy="{height - y:.1f}" r="{tip.radius:g}" fill-opacity="0">'
        )
        spots += f"<title>{escape(tip.text)}</title></circle>"
    return f"{text}<g>{spots}</g></svg>\n"


def scale(axes: Axes, means: Sequence[Floats], log: bool, whole: bool) -> None:
    """Limits from what comes after the first steep tenth, so that the ends can be told apart, or from all."""
    from matplotlib.ticker import LogLocator

    starts = [0 if whole else min(len(m) // 10 + (len(m) > 4), len(m) - 1) for m in means]
    tails = np.concatenate([m[start:] for m, start in zip(means, starts, strict=True)] or [np.zeros(0)])
    tails = tails[np.isfinite(tails) & ((tails > 0) | (not log))]
    if log and tails.size:
        axes.set_yscale("log")
        low, high = tails.min() / 1.4, min(tails.max(), np.median(tails) * 1e4) * 1.4
        between = (2, 5) if high / low < 100 else ()
        if between:
            axes.yaxis.set_minor_locator(LogLocator(subs=between))
            axes.grid(which="minor", axis="y", alpha=0.25)
        axes.yaxis.set_major_formatter(lambda value, _: power(value, (1,)))
        axes.yaxis.set_minor_formatter(lambda value, _: power(value, between))
        axes.set_ylim(low, high)
    elif tails.size:
        low, high = float(tails.min()), min(float(tails.max()), outer(tails, 6))
        pad = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
        axes.set_ylim(low - pad, high + pad)


def outer(values: Iterable[float], spreads: float = 2) -> float:
    """Beyond this, some interquartile ranges out, a value leaves the chart: one must not flatten the rest."""
    x = np.array([v for v in values if isfinite(v)])
    if x.size < 3:
        return inf
    q1, q3 = np.percentile(x, [25, 75])
    return float(q3 + spreads * (q3 - q1)) if q3 > q1 else inf


def window(rows: Sequence[Row]) -> tuple[float, float]:
    """The limits of a chart of final values: they leave out the far end of the bad side."""
    ends = [end for r in rows for end in (r.value.low, r.value.mean, r.value.high)]
    return (-outer(-end for end in ends), inf) if rows[0].higher else (-inf, outer(ends))


def name_places(axes: Axes, names: Sequence[str]) -> None:
    """Places 0, 1, ... of a chart from the top down, each with its name at the left."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.06)


def legend(figure: Figure, names: Sequence[str]) -> None:
    """Below the axes, in as many columns as the longest name leaves room for."""
    lines = [line for name in names for line in wrap(name, LINE, 2).split("\n")]
    wide = 6.4 * max(map(len, lines), default=1) + 40
    columns = max(1, min(4, int(WIDTH // wide)))
    # A long one is not to take the room of the axes.
    figure.set_figheight(figure.get_figheight() + 14 / 72 * max(0, len(lines) // columns - 4))
    figure.legend(loc="outside lower center", ncols=columns, columnspacing=1.2)


def power(value: float, leading: Sequence[int]) -> str:
    """A round number as text, if its leading digit is one of those asked for.

    >>> power(1e-6, (1,)), power(5e-6, (2, 5)), power(3e-6, (2, 5))
    ('10⁻⁶', '5·10⁻⁶', '')
    """
    digit, exponent = f"{value:.0e}".split("e")
    if int(digit) not in leading:
        return ""
    ten = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ten if digit == "1" else f"{digit}·{ten}"


@dataclass(frozen=True)
class CellCurve:
    """A series of a cell: values of (runs, epochs), NaN where a run has none; `key` chooses the colour."""

    name: str
    key: str
    epochs: Floats
    values: Floats


def learning_curves(
    curves: Sequence[CellCurve],
    what: str,
    metric: str,
    colours: Mapping[str, str],
    log: bool = False,
    *,
    salt: str,
    runs: bool = False,
    named: bool = True,
) -> str:
    """Mean and 95% band over seeds against epochs, best curve first; those past the palette turn grey.

    With `runs`, each run is a thin line in place of the band, and the first epochs are in view too. The
    legend is left out unless `named`.
    """
    from matplotlib.ticker import MaxNLocator

    visible = curves if len(curves) <= len(SERIES) else curves[: len(SERIES) - 1]
    palette = colours or dict(zip(dict.fromkeys(c.key for c in visible), SERIES, strict=False))
    with style(salt):
        figure, axes = new_figure(300)
        means, tips = [], []
        for rank, curve in enumerate(visible):
            mean, own = _draw_curve(axes, curve, palette.get(curve.key, INK), rank, metric, log, runs)
            means.append(mean)
            tips += own
        rest = curves[len(visible) :]
        for i, curve in enumerate(rest):
            mean, name = band(curve.values, log)[0], f"{len(rest)} more" if i == 0 else None
            axes.plot(curve.epochs, mean, color=GRID, linewidth=0.8, zorder=1, label=name)
        axes.set_title(wrap(what, LINE, 2))
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
        scale(axes, [run for curve in visible for run in curve.values] if runs else means, log, whole=runs)
        if named:
            legend(figure, [c.name for c in visible])
        bottom, top = axes.get_ylim()
        names = ", ".join(c.name for c in visible)
        inside = [tip for tip in tips if bottom <= tip.y <= top]
        return to_svg(figure, f"Learning curves: {what} against epochs for {names}", inside)


Finish = Callable[["Figure", list[Tip]], object]
"""A callback that may add to a figure before it becomes text."""


def final_values(
    rows: Sequence[Row],
    what: str,
    colours: Mapping[str, str],
    salt: str,
    finish: Finish | None = None,
) -> str:
    """`final_figure` of the rows with a value, as SVG text."""
    rows = [r for r in rows if r.value.count]
    with style(salt):
        figure, tips = final_figure(rows, what, colours)
        if finish is not None:
            finish(figure, tips)
        order = "; ".join(f"{r.name} {number(r.value.mean, r.metric).text}" for r in rows)
        return to_svg(figure, f"Final {what}, best first: {order}", tips)


def final_figure(rows: Sequence[Row], what: str, colours: Mapping[str, str]) -> tuple[Figure, list[Tip]]:
    """A dot for each cell with its 95% interval, best on top.

    Values far outside the rest are cut off: a mean becomes an arrow at the edge, with its number beside it,
    and so does the end of an interval.
    """
    inside = window(rows)
    names = [wrap(r.name, BESIDE, 3) for r in rows]
    tallest = max(name.count("\n") for name in names)
    figure, axes = new_figure(82 + (20 + 12 * tallest) * max(len(rows), 2))
    tips = []
    for i, row in enumerate(rows):
        _draw_row(axes, i, row, colours.get(row.name, SERIES[0]), inside)
        s, x = row.value, float(np.clip(row.value.mean, *inside))
        said = f"{_with_interval(s.mean, s.low, s.high, row.metric)}, {s.count} seed{'s' * (s.count != 1)}"
        tips.append(Tip(axes, x, i, f"{row.name}: {said}", 9))
    name_places(axes, names)
    axes.set_title(wrap(f"{what}, mean and 95% interval", LINE, 2))
    return figure, tips


def heat_map(
    values: Mapping[tuple[Any, Any], float],
    what: str,
    metric: str,
    salt: str = "heat",
    names: tuple[str, str] = ("gap", "temperature τ"),
    over: str = "of GST over gap and temperature",
    unknown: str = NOTHING,
    higher: bool = False,
) -> str:
    """Values over two settings, gap and temperature, a field each: the better the stronger, the best in bold.

    The first setting runs upward, the second to the right; `names` has their names. Fields are opaque, so
    that their numbers read whatever is behind the figure. A field without a number, NaN, says `unknown`.
    """
    from matplotlib.patches import Rectangle

    ups, rights = sorted({up for up, _ in values}), sorted({right for _, right in values})
    shades = _shades(values, higher)
    best = max(shades, key=lambda key: shades[key], default=None)
    with style(salt):
        figure, axes = new_figure(84 + 30 * len(ups))
        tips = []
        for up, right in sorted(values):
            x, y = rights.index(right), ups.index(up)
            fill, ink = _field(shades.get((up, right), 0.0))
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=fill, lw=0))
            text = unknown if isnan(values[up, right]) else number(values[up, right], metric).text
            weight = "bold" if (up, right) == best else "normal"
            axes.text(x, y, text, ha="center", va="center", weight=weight, color=ink)
            tips.append(Tip(axes, x, y, f"{_setting(names, up, right)}: {text}", 12))
        axes.set(xlim=(-0.5, len(rights) - 0.5), ylim=(-0.5, len(ups) - 0.5))
        axes.set(xlabel=names[1], ylabel=names[0])
        axes.set_xticks(range(len(rights)), [_level(right) for right in rights])
        axes.set_yticks(range(len(ups)), [_level(up) for up in ups])
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(what)
        top = f"best {number(values[best], metric).text} at {_setting(names, *best)}" if best else unknown
        return to_svg(figure, f"{what} {over}: {top}", tips)


def _level(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _setting(names: tuple[str, str], up: Any, right: Any) -> str:
    """
    >>> _setting(("gap", "temperature τ"), 1.0, 0.5)
    'gap 1, τ=0.5'
    """
    name, _, symbol = names[1].rpartition(" ")
    return f"{names[0]} {_level(up)}, {symbol or name}={_level(right)}"


def _draw_curve(
    axes: Axes, curve: CellCurve, colour: str, rank: int, metric: str, log: bool, runs: bool
) -> tuple[Floats, list[Tip]]:
    """Draw a curve; its mean, and tips along it."""
    mean, low, high = band(curve.values, log)
    # The dash is a second channel beside colour, for print and for eyes to which two hues are one.
    dash = (0, (4, 1.5)) if is_dashed(colour) else "-"
    mark = "o" if np.isfinite(mean).sum() == 1 else ""
    if runs:
        axes.plot(curve.epochs, curve.values.T, color=colour, linewidth=0.7, alpha=0.45, zorder=2)
    else:
        axes.fill_between(curve.epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    # matplotlib keeps names that begin with an underscore out of its legends.
    name = " " * curve.name.startswith("_") + wrap(curve.name, LINE, 2)
    axes.plot(curve.epochs, mean, marker=mark, color=colour, linestyle=dash, label=name, zorder=4 - rank / 10)
    tips = []
    for i in np.unique(np.linspace(0, len(mean) - 1, TIPS_PER_CURVE).astype(int)):
        epoch, value = float(curve.epochs[i]), float(mean[i])
        if isfinite(value):
            said = _with_interval(value, float(low[i]), float(high[i]), metric)
            tips.append(Tip(axes, epoch, value, f"{curve.name}, epoch {epoch:g}: {said}"))
    return mean, tips


def _with_interval(mean: float, low: float, high: float, metric: str) -> str:
    """A mean and its 95% interval, where that is known."""
    value, lower, upper = (number(each, metric).text for each in (mean, low, high))
    return f"{value} (95%: {lower} to {upper})" if isfinite(high) else value


def _draw_row(axes: Axes, y: int, row: Row, colour: str, inside: tuple[float, float]) -> None:
    s, (left, right) = row.value, inside
    if s.count > 1 and left <= s.mean <= right:
        axes.plot(np.clip([s.low, s.high], left, right), [y, y], color=colour, linewidth=3, alpha=0.45)
        if s.low < left:
            axes.plot([left], [y], "<", markersize=5, color=colour, alpha=0.45)
        if s.high > right:
            axes.plot([right], [y], ">", markersize=5, color=colour, alpha=0.45)
    marker = "<" if s.mean < left else ">" if s.mean > right else "o"
    axes.plot([np.clip(s.mean, left, right)], [y], marker, markersize=7, color=colour)
    beside: Any = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
    axes.annotate(number(s.mean, row.metric).text, (1.02, y), va="center", size=10, **beside)


def _field(shade: float) -> tuple[str, str]:
    """The colour of a field, and that of the number on it.

    >>> _field(0.0), _field(1.0)
    (('#d5dde4', '#16202a'), ('#1668a0', '#ffffff'))
    """
    pale, strong = (0xD5, 0xDD, 0xE4), (0x16, 0x68, 0xA0)
    levels = [round(a + (b - a) * shade) for a, b in zip(pale, strong, strict=True)]
    return "#" + "".join(f"{level:02x}" for level in levels), "#ffffff" if shade > 0.75 else "#16202a"


def _shades(values: Mapping[tuple[Any, Any], float], higher: bool) -> dict[tuple[Any, Any], float]:
    """0 for the worst field that has a value, 1 for the best."""
    merits = {key: v if higher else -v for key, v in values.items() if isfinite(v)}
    known = np.array([*merits.values()] or [0.0])
    best = float(known.max())
    # Twice as far from the best as the middle field is as pale as it gets: collapsed fields keep no shades.
    span = min(best - float(known.min()), 2 * (best - float(np.median(known)))) or 1.0
    return {key: max(0.0, 1 - (best - merit) / span) for key, merit in merits.items()}


def series_of(rows: Sequence[Row], curves: Mapping[str, Curve], metric: str) -> list[str]:
    """The names of the series that these runs logged, the deciding one first."""
    names = {name for row in rows for line in _logged(row, curves) for name in line.series}
    first = (metric, re.sub("test_|validation_", "train_", metric), "gradient_variance")
    return [*(name for name in dict.fromkeys(first) if name in names), *sorted(names.difference(first))]


def cell_curve(row: Row, curves: Mapping[str, Curve], series: str, name: str, key: str) -> CellCurve | None:
    """A cell's runs on one axis of epochs; none where nothing finite was logged."""
    logged = [dict(zip(c.epoch, c.series.get(series, ()), strict=False)) for c in _logged(row, curves)]
    epochs = sorted({epoch for run in logged for epoch in run})
    values = np.array([[finite(run.get(epoch)) for epoch in epochs] for run in logged if run])
    return CellCurve(name, key, np.array(epochs), values) if np.isfinite(values).any() else None


def curve_figure(
    rows: Sequence[Row],
    curves: Mapping[str, Curve],
    series: str,
    colours: Mapping[str, str],
    salt: str,
    at: str = "",
    every: Sequence[Row] = (),
) -> tuple[str, str]:
    """Title and SVG of a series of the best cells; no SVG where nothing was logged.

    A figure whose `colours` are given has no legend: one beside it serves all. `at` says what all cells have
    in common, which their names need not repeat; `every` cell has a part in the colours.
    """
    lines, title = [], metric_name(series) + at
    for row in rows[:DRAWN]:
        name, key = row.label if at else row.name, colour_key(row, every or rows)
        if (curve := cell_curve(row, curves, series, name, key)) is not None:
            lines.append(curve)
    if not lines:
        return title, ""
    log, named = "variance" in series, not colours
    return title, learning_curves(lines, title, series, colours, log, salt=salt, named=named)


def is_dashed(colour: str) -> bool:
    """Whether lines of this colour are dashed."""
    return colour not in SERIES[:4]


def palette(
    rows: Sequence[Row], own_colour: Callable[[Row], str | None] = lambda row: None
) -> dict[str, str]:
    """A colour for each key, the same in every figure; none at all where there are more keys than colours.

    Estimators with a colour of their own have it, the first of each if there are several; the rest take what
    is left, in order.
    """
    keys = {colour_key(row, rows): own_colour(row) for row in sorted(rows, key=lambda r: r.name)}
    if len(keys) > len(SERIES):
        return {}
    colours = {colour: key for key, colour in reversed(keys.items()) if colour}
    free = (colour for colour in SERIES if colour not in colours)
    own = {key: colour for colour, key in colours.items()}
    return {key: own.get(key) or next(free) for key in keys}


def colour_key(row: Row, rows: Sequence[Row]) -> str:
    """The owner of a colour: the cell where there are few, else the estimator at every temperature."""
    return row.name if len(rows) <= len(SERIES) else row.label


def _logged(row: Row, curves: Mapping[str, Curve]) -> list[Curve]:
    """What a cell's runs logged; runs that did not end well count only if there is no other."""
    records = row.cell.records
    runs = [r for r in records if r.status == "ok"] or records
    return [curves[r.id] for r in runs if r.id in curves]
