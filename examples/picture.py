"""The picture of an example: what it has learned, and below it the result of each estimator, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gapped.comparison.figures import INK, SERIES, Tip, name_places, new_figure, style, to_svg
from gapped_lab.estimator_text import make, parse
from gapped_lab.report.plots import estimator_colour

__all__ = ["INK", "colour_of", "images", "plain", "save"]
TUNED = "tuned: "


def save(
    path: Path,
    title: str,
    results: Mapping[str, Sequence[float]],
    column: str = "",
    draw: Callable[[Any], object] | None = None,
    height: int = 0,
) -> None:
    """Write an SVG: above what `draw` adds to a figure, `height` points of it, below a row per estimator.

    `results` has an estimator's values of `column`, one for each seed, by its text; either part may be empty.
    """
    below = 62 + 22 * len(results) if results else 0
    heights = [part for part in (height, below) if part]
    with style(path.stem):
        figure, axes = new_figure(sum(heights))
        axes.remove()
        parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part in parts:
            part.patch.set_alpha(0)
        if draw is not None:
            draw(parts[0])
        tips = dots(parts[-1].subplots(), column, results) if results else []
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_svg(figure, title, tips), "utf-8")


def dots(axes: Any, column: str, results: Mapping[str, Sequence[float]]) -> list[Tip]:
    """A dot for each seed, a bar at the mean, a row for each estimator; what is tuned has open dots."""
    tips, colours = [], colours_of(list(results))
    for place, (text, values) in enumerate(results.items()):
        face = "none" if text.startswith(TUNED) else colours[text]
        mean = fmean(values)
        axes.plot(values, [place] * len(values), "o", color=colours[text], markerfacecolor=face, markersize=6)
        axes.plot([mean, mean], [place - 0.32, place + 0.32], color=colours[text], linewidth=2)
        tips.append(Tip(axes, mean, place, f"{text}: {mean:.3g}", 10))
    name_places(axes, list(results))
    several = any(len(values) > 1 for values in results.values())
    axes.set_title(f"{column}: each seed, and the mean" if several else column)
    return tips


def colours_of(texts: Sequence[str]) -> dict[str, str]:
    """The colour of each estimator: its own in all figures of the documentation, or one that is left."""
    own = {text: _own(make(*parse(text.removeprefix(TUNED)))) for text in texts}
    free = iter([colour for colour in SERIES[::-1] if colour not in own.values()])
    return {text: colour or next(free, INK) for text, colour in own.items()}


def colour_of(estimator: Any) -> str:
    """The colour of one estimator."""
    return _own(estimator) or INK


def _own(estimator: Any) -> str | None:
    return estimator_colour(estimator.name, vars(estimator))


def images(figure: Any, rows: Mapping[str, Sequence[Any]]) -> None:
    """Rows of small images in grey, each row a sequence of arrays ``(height, width)`` between 0 and 1."""
    all_axes = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (name, row) in zip(all_axes, rows.items(), strict=True):
        for left, image in enumerate(row):
            place = (1.1 * left, 1.1 * left + 1, 0, 1)
            axes.imshow(image, cmap="gray_r", vmin=0, vmax=1, extent=place, interpolation="none")
        axes.set(xlim=(0, 1.1 * len(row) - 0.1), ylim=(0, 1), xticks=[], yticks=[0.5], yticklabels=[name])
        plain(axes)


def plain(axes: Any) -> None:
    """No frame, no grid, no ticks: for axes that hold a drawing."""
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
