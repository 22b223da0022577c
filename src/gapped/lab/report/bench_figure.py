"""The picture of a bench: every time as a multiple of torch's own, shape by shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gapped.errors import GappedError
from gapped.lab.records import Line
from gapped.lab.report.axes import legend
from gapped.lab.report.bench import Bench, benches, ratio, time
from gapped.lab.report.svg import GRID, INK, SERIES, Tip, new_figure, style, to_svg

# A mark and a colour for each backend: told apart without colour, too.
MARKS: dict[str, dict[str, Any]] = {
    "eager": {"marker": "D", "markersize": 5, "color": INK},
    "compiled": {"marker": "^", "markersize": 6.5, "color": SERIES[2]},
    "torch": {"marker": "s", "markersize": 5.5, "color": SERIES[1]},
    "triton": {"marker": "o", "markersize": 7, "color": SERIES[0]},
}


def bench_figure(lines: Sequence[Line], device: str | None = None) -> str:
    """Times as multiples of eager `F.gumbel_softmax`, on a scale of powers; the floor as a line where known.

    Without `device`, the first one that is no CPU, or else the first.
    """
    measured = [bench for bench in benches(lines) if bench.reference("eager")]
    devices = list(dict.fromkeys(bench.device for bench in measured))
    if not devices or device not in (None, *devices):
        raise GappedError("bench.svg: nothing to draw, expected what gapped bench writes to bench.jsonl")
    chosen = device or next((name for name in devices if not name.startswith("CPU")), devices[0])
    shown = [bench for bench in measured if bench.device == chosen]
    rows = [(bench, label) for bench in shown for label in (None, *_labels(bench))]
    with style("bench"):
        figure, axes = new_figure(92 + 15 * len(rows))
        tips: list[Tip] = []
        for bench in shown:
            tips += _draw(axes, bench, [y for y, (b, _) in enumerate(rows) if b is bench])
        _scale(axes, rows)
        axes.set_title(chosen)
        axes.set_xlabel("time, as a multiple of eager F.gumbel_softmax")
        present = dict.fromkeys(str(line["backend"]) for bench in shown for line in bench.lines)
        for backend in present:
            axes.plot([], [], linestyle="", label=backend, **MARKS[backend])
        if any(bench.floor for bench in shown):
            axes.plot([], [], color=INK, linewidth=1.5, label="floor")
        legend(figure, [*present, "floor"])
        return to_svg(figure, f"Times on {chosen}: {'; '.join(tip.text for tip in tips)}", tips)


def _labels(bench: Bench) -> list[str]:
    """A row for each estimator, and form where there are several."""
    return list(dict.fromkeys(_label(line) for line in bench.lines))


def _label(line: Line) -> str:
    return str(line["estimator"]) + ("" if line["form"] == "sample" else f", {line['form']}")


def _draw(axes: Any, bench: Bench, places: Sequence[int]) -> list[Tip]:
    """The marks of one shape; its first place is for the heading."""
    eager = bench.reference("eager")
    at = dict(zip(_labels(bench), places[1:], strict=True))
    floor = ratio(bench.floor, eager)
    if floor:
        axes.plot([floor, floor], [places[1] - 0.4, places[-1] + 0.4], color=INK, linewidth=1.5, zorder=1)
    tips = []
    for line in bench.lines:
        value = ratio(time(line), eager)
        if value is None:
            continue
        y, backend = at[_label(line)], str(line["backend"])
        axes.plot([value], [y], zorder=3, **MARKS[backend])
        text = f"{bench.title}, {_label(line)}, {backend}: {value:.2f} × ({time(line):.3g} ms)"
        tips.append(Tip(axes, value, y, text, 7))
    return tips


def _scale(axes: Any, rows: Sequence[tuple[Bench, str | None]]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.06)
    axes.axvline(1, color=GRID, linewidth=1)
    axes.yaxis.set_major_locator(FixedLocator(range(len(rows))))
    axes.set_yticks(range(len(rows)), [bench.title if label is None else label for bench, label in rows])
    for tick, (_, label) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_weight("bold" if label is None else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
