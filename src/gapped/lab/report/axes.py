"""Limits, ticks and legends: what keeps a figure readable whatever the numbers are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING

import numpy as np

from gapped.lab.report.statistics import Floats
from gapped.lab.report.svg import WIDTH
from gapped.lab.report.tables import wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Characters in a line as wide as the figure, and in one beside the rows of a chart.
LINE, BESIDE = 60, 30


def scale(axes: Axes, means: Sequence[Floats], log: bool, whole: bool = False) -> None:
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
