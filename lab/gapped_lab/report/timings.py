"""Records of `gapped bench` as tables and a picture: times as ratios, memory in tensors or bytes.

Ratios are taken inside one run at one shape only: the lines of other runs, however near, were measured under
other conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gapped.comparison.figures import GRID, INK, SERIES, Tip, legend, name_places, new_figure, style, to_svg
from gapped.comparison.table import NOTHING, Entry, Table, number, without_empty
from gapped.errors import GappedError, listing
from gapped_lab.records import Bench, Startup, Work

L = TypeVar("L", Bench, Work)

REFERENCE = "F.gumbel_softmax"

FLOOR = 2.5
"""A sample reads logits and writes a value, then reads logits and gradient and writes a gradient: five passes
over a tensor. A copy is two."""

# Below this many bytes a copy is the time of a launch, and no floor.
LEAST_BYTES = 2**24
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}

# A mark and a colour for each backend: told apart without colour, too.
MARKS: dict[str, dict[str, Any]] = {
    "eager": {"marker": "D", "markersize": 5, "color": INK},
    "compiled": {"marker": "^", "markersize": 6.5, "color": SERIES[2]},
    "torch": {"marker": "s", "markersize": 5.5, "color": SERIES[1]},
    "triton": {"marker": "o", "markersize": 7, "color": SERIES[0]},
}


@dataclass(frozen=True)
class Timings:
    """The measurements of one run at one shape on one device."""

    device: str
    shape: str
    lines: tuple[Bench, ...]

    @property
    def width(self) -> int | None:
        """The width of the embedding that samples select from, if there is one."""
        return self.lines[0].width

    @property
    def title(self) -> str:
        """The shape for readers: `65,536 × 64 f32`."""
        one = self.lines[0]
        sizes = [one.rows, one.categories, *([one.width] if one.width else [])]
        return " × ".join(f"{size:,}" for size in sizes) + f" {one.dtype}"

    @property
    def copy(self) -> float | None:
        """Milliseconds of a copy of the logits."""
        copy = self.lines[0].copy
        return copy.median if copy else None

    @property
    def floor(self) -> float | None:
        """The least time that memory allows, where the tensor is large enough for that to be the limit."""
        one = self.lines[0]
        size = one.rows * one.categories * WIDTHS[one.dtype]
        return None if self.copy is None or one.width or size < LEAST_BYTES else FLOOR * self.copy

    def find(self, estimator: str, backend: str) -> Bench | None:
        """The line of an estimator, if there is one."""
        return next((x for x in self.lines if (x.estimator, x.backend) == (estimator, backend)), None)

    def reference(self, backend: str) -> float | None:
        """Milliseconds of torch's own sampler, `eager` or `compiled`."""
        return time(self.find(REFERENCE, backend))


def timings(lines: Iterable[Bench]) -> list[Timings]:
    """For each device and shape, the lines of the last run that has it; in order of first appearance."""
    groups = last_runs(lines, lambda line: line.shape)
    return [Timings(device_of(group[0]), group[0].shape, group) for group in groups]


def last_runs(lines: Iterable[L], key: Callable[[L], Hashable]) -> list[tuple[L, ...]]:
    """For each device and `key`, the lines of the last run that has it; in order of first appearance."""
    runs: dict[Hashable, dict[str, list[L]]] = {}
    for line in lines:
        runs.setdefault((device_of(line), key(line)), {}).setdefault(line.run, []).append(line)
    return [tuple(each[max(each)]) for each in runs.values()]


def last_startups(lines: Iterable[Startup]) -> list[Startup]:
    """The last line about each kind of import on each device."""
    return list({(device_of(line), line.what): line for line in lines}.values())


def time(line: Bench | Work | None) -> float | None:
    """The median of a line, in milliseconds; None where nothing was measured."""
    return line.milliseconds.median if line and line.milliseconds else None


def ratio(value: float | None, reference: float | None) -> float | None:
    """How many times `reference` it is.

    >>> ratio(1.0, 4.0), ratio(1.0, None)
    (0.25, None)
    """
    return None if value is None or not reference else value / reference


def table_of(shape: Timings) -> Table:
    """One run at one shape: every case beside torch's."""
    body = []
    for line in shape.lines:
        spent = time(line)
        eager, compiled = (ratio(spent, shape.reference(how)) for how in ("eager", "compiled"))
        body.append(
            (
                Entry(line.estimator),
                Entry(line.backend),
                Entry("" if line.form == "sample" else line.form),
                # Without a time, the status without its reason.
                as_milliseconds(spent) if spent is not None else Entry(line.status.partition(":")[0]),
                Entry(spread(line)),
                *(as_ratio(each) for each in (eager, compiled, ratio(spent, shape.floor), line.memory)),
            )
        )
    ratios = ("× eager", "× compiled", "× floor")
    columns = ("estimator", "backend", "form", "ms", "10% to 90%", *ratios, "memory")
    return without_empty(Table(columns, tuple(body)))


def title_of(shape: Timings) -> str:
    """The shape, the time of a copy, and the floor where there is one."""
    floor = "" if shape.floor is None else f", floor {as_milliseconds(shape.floor).text} ms"
    copy = "" if shape.copy is None else f": copy {as_milliseconds(shape.copy).text} ms{floor}"
    return f"{shape.title}{copy}"


def reasons(shape: Timings) -> list[str]:
    """Why some of the cases have no time."""
    gaps = [line for line in shape.lines if ":" in line.status]
    return [f"{line.estimator}, {line.backend}, {line.form}: {line.status}" for line in gaps]


def losses(shapes: Sequence[Timings]) -> str:
    """A line about the shapes where torch, eager or compiled, is faster than the first estimator there."""
    slower = []
    for shape in shapes:
        references = [each for how in ("eager", "compiled") if (each := shape.reference(how))]
        first = next((line.estimator for line in shape.lines if line.estimator != REFERENCE), None)
        own = [each for line in shape.lines if line.estimator == first and (each := time(line))]
        if own and references and min(own) > min(references):
            slower.append(f"{shape.title} ({first}: {min(own) / min(references):.2f} × the time)")
    return f"torch is faster at: {listing(slower)}"


def as_milliseconds(value: float) -> Entry:
    """A time for a table."""
    return Entry(f"{value:.3f}" if value < 10 else f"{value:.1f}", value)


def as_ratio(value: float | None) -> Entry:
    """A ratio for a table."""
    if value is None:
        return Entry(NOTHING)
    return Entry(f"{value:.2f}" if value < 100 else f"{value:.0f}", value)


def device_of(line: Bench | Work | Startup) -> str:
    """The name of the device that a line was measured on."""
    return str(line.environment.get("device") or "an unnamed device")


def spread(line: Bench | Work) -> str:
    """The 10% and 90% quantiles for a table."""
    timing = line.milliseconds
    if timing is None:
        return NOTHING
    return f"{as_milliseconds(timing.low).text} to {as_milliseconds(timing.high).text}"


@dataclass(frozen=True)
class WorkTimings:
    """The measurements of one run: one workload at one size on one device."""

    lines: tuple[Work, ...]

    @property
    def device(self) -> str:
        """The name of the device."""
        return device_of(self.lines[0])

    def heading(self) -> str:
        """The workload and its size for readers: `masks, 25,000,000 × 4 f32: gradients 400 MB`."""
        one, gradients = self.lines[0], max(line.gradients for line in self.lines)
        size = " × ".join(f"{size:,}" for size in one.sizes)
        share = f"gradients {as_bytes(gradients).text}" if gradients else "forward alone"
        return f"{one.work}, {size} {one.dtype}: {share}"

    def table(self) -> Table:
        """Every way beside the first."""
        body = []
        first = time(self.lines[0])
        for line in self.lines:
            spent, memory = time(line), line.memory
            body.append(
                (
                    Entry(line.way),
                    # Without a time, the status without its reason.
                    Entry(line.status.partition(":")[0]) if spent is None else as_milliseconds(spent),
                    Entry(spread(line)),
                    as_ratio(ratio(spent, first)),
                    as_bytes(memory),
                    as_ratio(None if memory is None else memory / line.logits),
                )
            )
        columns = ("way", "ms", "10% to 90%", "× first", "memory", "tensors")
        return without_empty(Table(columns, tuple(body)))

    def reasons(self) -> list[str]:
        """Why some of the ways have no time."""
        return [f"{line.way}: {line.status}" for line in self.lines if ":" in line.status]


def as_bytes(count: int | None) -> Entry:
    """A size in memory for a table.

    >>> as_bytes(11_700_000_000).text, as_bytes(40_512_000).text, as_bytes(8).text, as_bytes(None).text
    ('11.7 GB', '40.5 MB', '8 bytes', '–')
    """
    if count is None:
        return Entry(NOTHING)
    scale, unit = next((each for each in UNITS if count >= each[0]), (1, "bytes"))
    return Entry(f"{number(count / scale).text} {unit}", count)


def work_timings(lines: Iterable[Work]) -> list[WorkTimings]:
    """For each device, workload and size, the last run that has it; in order of first appearance."""
    groups = last_runs(lines, lambda line: (line.work, *line.sizes, line.dtype))
    return [WorkTimings(group) for group in groups]


def bench_figure(lines: Iterable[Bench]) -> str:
    """Times as multiples of eager `F.gumbel_softmax`, on a scale of powers; the floor as a line where known.

    It shows the first device that is no CPU, or else the first.
    """
    candidates = [shape for shape in timings(lines) if shape.reference("eager")]
    if not candidates:
        raise GappedError("bench.svg: nothing to draw, expected what gapped bench writes to bench.jsonl")
    devices = [shape.device for shape in candidates]
    device = next((name for name in devices if not name.startswith("CPU")), devices[0])
    shapes = [shape for shape in candidates if shape.device == device]
    ticks = [(shape, label) for shape in shapes for label in (None, *_labels(shape))]
    with style("bench"):
        figure, axes = new_figure(92 + 15 * len(ticks))
        tips: list[Tip] = []
        for shape in shapes:
            tips += _draw(axes, shape, [y for y, (each, _) in enumerate(ticks) if each is shape])
        _scale(axes, [(label or shape.title, label is None) for shape, label in ticks])
        axes.set_title(device)
        axes.set_xlabel("time, as a multiple of eager F.gumbel_softmax")
        backends = dict.fromkeys(line.backend for shape in shapes for line in shape.lines)
        for backend in backends:
            axes.plot([], [], linestyle="", label=backend, **MARKS[backend])
        if any(shape.floor for shape in shapes):
            axes.plot([], [], color=INK, linewidth=1.5, label="floor")
        legend(figure, [*backends, "floor"])
        return to_svg(figure, f"Times on {device}: {'; '.join(tip.text for tip in tips)}", tips)


def _labels(shape: Timings) -> list[str]:
    """A tick for each estimator, and form where there are several."""
    return list(dict.fromkeys(_label(line) for line in shape.lines))


def _label(line: Bench) -> str:
    return line.estimator + ("" if line.form == "sample" else f", {line.form}")


def _draw(axes: Any, shape: Timings, places: Sequence[int]) -> list[Tip]:
    """The marks of one shape; its first place is for the heading."""
    eager = shape.reference("eager")
    at = dict(zip(_labels(shape), places[1:], strict=True))
    floor = ratio(shape.floor, eager)
    if floor:
        axes.plot([floor, floor], [places[1] - 0.4, places[-1] + 0.4], color=INK, linewidth=1.5, zorder=1)
    tips = []
    for line in shape.lines:
        value = ratio(time(line), eager)
        if value is not None:
            axes.plot([value], [at[_label(line)]], zorder=3, **MARKS[line.backend])
            text = f"{shape.title}, {_label(line)}, {line.backend}: {value:.2f} × ({time(line):.3g} ms)"
            tips.append(Tip(axes, value, at[_label(line)], text, 7))
    return tips


def _scale(axes: Any, ticks: Sequence[tuple[str, bool]]) -> None:
    """Powers along the times, and a tick for each text; headings are bold."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1, color=GRID, linewidth=1)
    name_places(axes, [text for text, _ in ticks])
    for tick, (_, is_heading) in zip(axes.get_yticklabels(), ticks, strict=True):
        tick.set_weight("bold" if is_heading else "normal")
