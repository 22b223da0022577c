"""matplotlib figures as SVG text that follows the page: its colours, font and tooltips; limits and legends.

Colours are written as CSS variables whose fallbacks are mid-tones: inside the report a figure takes the
page's light or dark palette, and alone (in the documentation) it reads on either background.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from gapped_lab.report.statistics import Floats
from gapped_lab.report.tabular import wrap

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
    text = text[text.index("<svg") :].rstrip()
    text = _drop_unused_ids(text)
    for colour, variable in VARIABLES.items():
        text = text.replace(f": {colour}", f": var(--{variable}, {colour})")
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    height = float(figure.get_figheight() * 72)
    spots = "".join(_spot(tip, height) for tip in tips)
    return text.removesuffix("</svg>") + f"<g>{spots}</g></svg>\n"


def _spot(tip: Tip, height: float) -> str:
    x, y = tip.axes.transData.transform((tip.x, tip.y))
    return (
        f'<circle class="tip" cx="{x:.1f}" cy="{height - y:.1f}" r="{tip.radius:g}" fill-opacity="0">'
        f"<title>{escape(tip.text)}</title></circle>"
    )


def _drop_unused_ids(text: str) -> str:
    """Several figures share a page, where an id must be unique: keep only those that something points to."""
    pairs = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    targets = {one or other for one, other in pairs}
    return re.sub(r' id="([^"]+)"', lambda m: m.group(0) if m.group(1) in targets else "", text)


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


def window(values: Sequence[float], higher: bool) -> tuple[float, float]:
    """What a chart of final values shows: everything but the far end of the bad side."""
    return (-outer(-v for v in values), inf) if higher else (-inf, outer(values))


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
