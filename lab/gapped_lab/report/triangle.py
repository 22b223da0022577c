"""Pictures on the simplex of three categories, and of the gap of Lemma 1: SVG text from arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from gapped.comparison.figures import GRID, INK, SERIES, Tip, new_figure, style, to_svg
from gapped.comparison.statistics import Floats, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# As in the paper: which corner is whose, in reading order.
CATEGORIES = ("top", "left", "right")
COLOURS = (SERIES[1], SERIES[2], SERIES[4])
CORNERS = np.array([[0.5, sqrt(3) / 2], [0.0, 0.0], [1.0, 0.0]])
CENTRE = CORNERS.mean(0)
# From one triangle to the next, in lengths of a side.
STEP = 1.16
# A shade is added where a density exceeds each of these multiples of the uniform one; it is unbounded at the
# corners. Then the places of the grid along a side.
SHADES = (0.25, 0.5, 1.0, 2.0, 4.0)
PLACES = 40
DASH: Any = (0, (4, 2.5))


@dataclass(frozen=True)
class Cloud:
    """Surrogates of one estimator; `behind` are the draws that one of them, the first, averages."""

    title: str
    chosen: Sequence[int] | np.ndarray
    points: Floats
    behind: Floats | None = None


@dataclass(frozen=True)
class Setting:
    """Where the surrogates of a picture come from."""

    logits: Sequence[float]
    tau: float

    def density(self, points: Floats) -> Floats:
        r"""The density of Gumbel-softmax at points of the simplex ``(..., K)``, per unit of its first K - 1
        coordinates:

        .. math:: (K-1)!\, \tau^{K-1} \prod_k p_k x_k^{-\tau-1} \Big/ \Big(\sum_k p_k x_k^{-\tau}\Big)^K.

        Maddison, Mnih, Teh (2017); Jang, Gu, Poole (2017).
        """
        theta, k = np.asarray(self.logits, dtype=np.float64), len(self.logits)
        log_x = np.log(points)
        scores = theta - self.tau * log_x
        total = np.logaddexp.reduce(scores, -1)
        constant = factorial(k - 1) * self.tau ** (k - 1)
        density: Floats = constant * np.exp((scores - log_x).sum(-1) - k * total)
        return density


def draw_samples(clouds: Sequence[Cloud], stops: Floats, setting: Setting, what: str) -> str:
    """A triangle for each estimator with its surrogates, coloured by the drawn category.

    The density of Gumbel-softmax lies behind them. The last one also shows the way there: `stops` as
    `movements.movements` has them.
    """
    with style("simplex-samples"):
        figure, axes = new_figure(168)
        _bare(axes)
        for i, cloud in enumerate(clouds):
            _shades(axes, setting, i * STEP)
            _triangle(axes, i * STEP)
            axes.text(
                *_place([1 / 3, 1 / 3, 1 / 3], i * STEP, below=0.43), cloud.title, ha="center", va="top"
            )
            if cloud.behind is not None:
                _dots(axes, cloud.behind, GRID, i * STEP, size=1.8, alpha=0.8)
            for category, colour in enumerate(COLOURS):
                mine = cloud.points[np.asarray(cloud.chosen) == category]
                _dots(axes, mine, colour, i * STEP, size=2.6, alpha=0.7)
        tips = _paths(axes, stops, (len(clouds) - 1) * STEP, width=1.1, size=5.5)
        return to_svg(figure, what, tips)


def draw_movements(stops: Floats, setting: Setting, what: str) -> str:
    """GST's two movements for each category that may be drawn, over the density of Gumbel-softmax."""
    with style("simplex-movements"):
        figure, axes = new_figure(400)
        _bare(axes)
        _shades(axes, setting, 0.0)
        _triangle(axes, 0.0)
        for category, (x, y) in enumerate(CORNERS):
            share = f"{CATEGORIES[category]}, p = {stops[category, 0, category]:.2f}"
            axes.annotate(
                share,
                (x, y),
                (0, 6 if category == 0 else -6),
                textcoords="offset points",
                ha="center",
                va="bottom" if category == 0 else "top",
                color=COLOURS[category],
            )
        tips = _paths(axes, stops, 0.0, width=1.8, size=9)
        start = _place(stops[0, 0], 0.0)
        axes.annotate("p", start, (-6, 3), textcoords="offset points", ha="right", style="italic")
        for name, dash in (
            ("m₁: the drawn logit rises to the largest", DASH),
            ("m₂: the others fall below it by the gap", "-"),
        ):
            axes.plot([], [], color=INK, linestyle=dash, linewidth=1.8, label=name)
        figure.legend(loc="outside lower center", ncols=1)
        return to_svg(figure, what, tips)


def draw_gaps(p: Floats, gaps: Floats, curve: tuple[Floats, Floats]) -> str:
    """Lemma 1's curve, and the mean of simulated gaps with its 95% interval at each probability."""
    means = [summary(gaps[:, i]) for i in range(len(p))]
    with style("expected-gap"):
        figure, axes = new_figure(290)
        axes.axhline(1.0, color=GRID, linewidth=1, linestyle=DASH)
        axes.plot(*curve, color=SERIES[0], label="Lemma 1: −log(1 − p) / p")
        errors = np.array([m.half for m in means])
        axes.errorbar(
            p,
            [m.mean for m in means],
            errors,
            fmt="o",
            color=SERIES[1],
            markersize=4,
            capsize=2.5,
            linewidth=1.2,
            label=f"mean of {len(gaps):,} simulated gaps, 95% interval",
        )
        axes.set(xlabel="probability p of the winner", xlim=(0, 1), ylim=(0, None))
        axes.set_title("gap between the two largest perturbed logits")
        figure.legend(loc="outside lower center", ncols=1)
        tips = [
            Tip(axes, float(x), m.mean, f"p = {x:g}: {m.mean:.3f} (95%: {m.low:.3f} to {m.high:.3f})")
            for x, m in zip(p, means, strict=True)
        ]
        text = "; ".join(f"p {x:g}: {m.mean:.2f}" for x, m in zip(p, means, strict=True))
        return to_svg(figure, f"Expected gap against the winner's probability, simulated: {text}", tips)


def _place(point: Floats | list[float], across: float, below: float = 0.0) -> tuple[float, float]:
    """Where a point of the simplex lies in the picture."""
    x, y = np.asarray(point) @ CORNERS
    return float(x) + across, float(y) - below


def _bare(axes: Axes) -> None:
    axes.set_aspect("equal")
    axes.axis("off")
    axes.margins(0.02)


def _triangle(axes: Axes, across: float) -> None:
    """The simplex, and the dashed borders between the regions where each category is the largest."""
    around = np.vstack([CORNERS, CORNERS[:1]])
    axes.plot(around[:, 0] + across, around[:, 1], color=INK, linewidth=1.2)
    for i in range(3):
        middle = (CORNERS[i] + CORNERS[(i + 1) % 3]) / 2
        axes.plot(
            [CENTRE[0] + across, middle[0] + across],
            [CENTRE[1], middle[1]],
            color=GRID,
            linewidth=0.9,
            linestyle=DASH,
        )


def _shades(axes: Axes, setting: Setting, across: float) -> None:
    """The regions where the density exceeds one level after the other."""
    counts = np.array([(i, j, PLACES - i - j) for i in range(PLACES + 1) for j in range(PLACES + 1 - i)])
    # Just inside of the border, on which the density is 0 or unbounded.
    points: Floats = (counts + 0.05) / (PLACES + 0.15)
    x, y = (points @ CORNERS).T
    heights = setting.density(points)
    for shade in SHADES:
        # The uniform density is the reciprocal of the area, 1/2 in the first two coordinates.
        levels = [2 * shade, heights.max() + 1]
        axes.tricontourf(x + across, y, heights, levels=levels, colors=[SERIES[0]], alpha=0.13)


def _dots(axes: Axes, points: Floats, colour: str, across: float, size: float, alpha: float) -> None:
    """One path whose strokes have no length but round ends: a third of the bytes of as many markers."""
    x, y = (points @ CORNERS).T
    there_and_back = [np.stack([v, v, np.full_like(v, np.nan)], -1).ravel() for v in (x + across, y)]
    (line,) = axes.plot(*there_and_back, color=colour, linewidth=size, alpha=alpha)
    line.get_path().should_simplify = False


def _paths(axes: Axes, stops: Floats, across: float, width: float, size: float) -> list[Tip]:
    """From the start over the two movements to the surrogate, for each category."""
    tips = []
    for category, colour in enumerate(COLOURS):
        start, after_m1, end = (_place(stop, across) for stop in stops[category])
        _arrow(axes, start, after_m1, colour, width, DASH)
        _arrow(axes, after_m1, end, colour, width, "-")
        axes.plot(*end, "o", color=colour, markersize=size)
        numbers = ", ".join(f"{entry:.3f}" for entry in stops[category, 2])
        tips.append(Tip(axes, *end, f"{CATEGORIES[category]} drawn: surrogate ({numbers})", 9))
    axes.plot(*_place(stops[0, 0], across), "o", color=INK, markersize=0.7 * size)
    return tips


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, width: float, dash: Any
) -> None:
    if np.hypot(end[0] - start[0], end[1] - start[1]) < 1e-6:
        return
    how = {"color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 1, "mutation_scale": 6 * width}
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "linestyle": dash, **how})
