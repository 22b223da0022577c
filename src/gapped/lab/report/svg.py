"""matplotlib figures as SVG text that follows the page: its colours, its font, its tooltips.

Colours are written as CSS variables whose fallbacks are mid-tones: inside the report a figure takes the
page's light or dark palette, and alone (in the documentation) it reads on either background.
"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Drawing units. A phone shows them at 0.8 pixels, a desk at 1.3; fonts are chosen to be readable at both.
WIDTH = 440

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
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    kept = {one or other for one, other in used}
    return re.sub(r' id="([^"]+)"', lambda m: m.group(0) if m.group(1) in kept else "", text)
