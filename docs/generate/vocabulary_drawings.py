"""Figures on choices out of a vocabulary: growth of time and memory, and the word model's rewards."""

from __future__ import annotations

from collections import Counter
from typing import Any

from evidence import Evidence, LinearTiming
from vocabulary import LINEAR, WAYS, Key, cases, tunings

from gapped.comparison.figures import SERIES, Tip, legend, new_figure, style, to_svg
from gapped.errors import GappedError

_COLOURS = dict(zip((LINEAR, "dense logits", "torch"), SERIES, strict=False))
_SMOOTHED = 5


def growth(evidence: Evidence) -> str:
    """Time and memory against rows and against categories, from zero; a GPU's if there are records of one."""
    devices = cases(evidence.linear)
    if not devices:
        raise GappedError("vocabulary.svg: nothing to draw, expected results/vocabulary.jsonl")
    device = next((name for name in devices if not name.startswith("CPU")), next(iter(devices)))
    mine = {key: ways for key, ways in devices[device].items() if LINEAR in ways and key[3] != "none"}
    with style("vocabulary"):
        figure, only = new_figure(420)
        only.remove()
        grid, tips = figure.subplots(2, 2, sharex="col", sharey="row"), []
        for column, (what, axis) in enumerate((("rows", 0), ("categories", 2))):
            sweep, fixed = _sweep(mine, axis)
            for row, unit in enumerate(("ms", "MiB")):
                axes = grid[row, column]
                tips += _lines(axes, sweep, what, unit)
                axes.set_ylim(bottom=0)
                axes.set_xlim(left=0)
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
                if column == 0:
                    axes.set_ylabel("time, ms" if row == 0 else "memory beyond\ngradients, MiB")
            grid[0, column].set_title(fixed)
            grid[1, column].set_xlabel(what)
        shown = [
            way for way in (LINEAR, "dense logits", "torch") if any(way in ways for ways in mine.values())
        ]
        for way in shown:
            grid[0, 0].plot([], [], "o-", color=_COLOURS[way], label=way)
        legend(figure, shown)
        label = f"Time and memory on {device}: {'; '.join(tip.text for tip in tips)}"
        return to_svg(figure, label, tips)


Sweep = dict[int, dict[str, LinearTiming]]


def _sweep(mine: dict[Key, dict[str, LinearTiming]], axis: int) -> tuple[Sweep, str]:
    """The cases that differ along one axis only, of which there are most; and what the others are."""
    others = Counter((*key[:axis], *key[axis + 1 :]) for key in mine)
    chosen, _ = others.most_common(1)[0]
    sweep = {int(key[axis]): ways for key, ways in mine.items() if (*key[:axis], *key[axis + 1 :]) == chosen}
    width, rest = (
        (chosen[0], f"{chosen[1]:,} categories") if axis == 0 else (chosen[1], f"{chosen[0]:,} rows")
    )
    return dict(sorted(sweep.items())), f"{rest}, width {width:,}"


def _lines(axes: Any, sweep: Sweep, what: str, unit: str) -> list[Tip]:
    tips = []
    for way in WAYS:
        points = []
        for size, ways in sweep.items():
            line = ways.get(way)
            if line is not None and line.milliseconds is not None and line.memory is not None:
                points.append((size, line.milliseconds.median if unit == "ms" else line.memory))
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=_COLOURS[way], markersize=4, linewidth=1.5)
        tips += [Tip(axes, x, y, f"{way}, {x:,} {what}: {y:.3g} {unit}") for x, y in points]
    return tips


def rewards(evidence: Evidence) -> str:
    """The reward of the word model along its tuning: means over seeds and a few steps."""
    groups = tunings(evidence)
    if not groups:
        raise GappedError("word-model.svg: nothing to draw, expected results/tuning.jsonl")
    with style("word-model"):
        figure, axes = new_figure(300)
        tips = []
        for (name, runs), colour in zip(groups.items(), SERIES, strict=False):
            means = [sum(each) / len(runs) for each in zip(*(run.rewards for run in runs), strict=True)]
            steps = range(_SMOOTHED, len(means) + 1)
            values = [sum(means[step - _SMOOTHED : step]) / _SMOOTHED for step in steps]
            axes.plot(steps, values, color=colour, linewidth=1.8, label=name)
            tips += [
                Tip(axes, x, y, f"{name}, step {x}: {y:.2f}")
                for x, y in list(zip(steps, values, strict=True))[::5]
            ]
        axes.set_title(f"reward, mean over seeds and {_SMOOTHED} steps")
        axes.set_xlabel("step")
        legend(figure, list(groups))
        ends = "; ".join(tip.text for tip in tips[-1:])
        return to_svg(figure, f"Reward against steps for {', '.join(groups)}; {ends}", tips)
