"""Records of `gapped bench` as tables: times as ratios, memory in tensors, targets met or missed.

Ratios are taken inside one run at one shape only: the lines of other runs, however near, were measured under
other conditions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gapped.records import Line
from gapped.report.tables import NOTHING, Entry, Table, number, to_markdown, without_empty

__all__ = [
    "BLOCKS",
    "FLOOR",
    "Bench",
    "benches",
    "ratio",
    "reasons",
    "render_bench",
    "startup_lines",
    "table_of",
    "target_table",
    "time",
    "title_of",
]

REFERENCE = "F.gumbel_softmax"

FLOOR = 2.5
"""A sample reads logits and writes a value, then reads logits and gradient and writes a gradient: five passes
over a tensor. A copy is two."""

# Below this many bytes a copy is the time of a launch, and no floor.
LEAST_BYTES = 2**24
WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}


@dataclass(frozen=True)
class Target:
    """What is aimed at: milliseconds on one device, or a ratio to eager torch on any of its kind."""

    device: str
    shape: str
    estimator: str
    backend: str
    milliseconds: float | None = None
    ratio: float | None = None
    memory: float | None = None


def _on_h200(shape: str, milliseconds: float, estimator: str = "gst", memory: float = 2.1) -> Target:
    return Target("NVIDIA H200", shape, estimator, "triton", milliseconds, memory=memory)


TARGETS = (
    _on_h200("3000x10:f32", 0.20),
    _on_h200("1048576x64:f32", 0.40),
    _on_h200("262144x256:f32", 0.40),
    _on_h200("8192x32000:f32", 1.6),
    _on_h200("8192x128256:bf16", 3.2),
    _on_h200("6400x64:f32", 0.25, "gumbel-rao:samples=100", 3),
    _on_h200("6400x64:f32", 1.5, "gumbel-rao:samples=1000", 3),
    Target("CPU", "3000x10:f32", "gst", "torch", ratio=0.7),
    Target("CPU", "65536x64:f32", "gst", "torch", ratio=0.7),
)
IMPORT_TARGET = ("import gapped", 60.0)


@dataclass(frozen=True)
class Bench:
    """What one run measured at one shape on one device."""

    device: str
    shape: str
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        """The shape for readers.

        >>> Bench("CPU", "65536x64:f32", ({"rows": 65536, "categories": 64, "dtype": "f32"},)).title
        '65,536 × 64 f32'
        """
        one = self.lines[0]
        sizes = [one["rows"], one["categories"], *([one["width"]] if one.get("width") else [])]
        return " × ".join(f"{size:,}" for size in sizes) + f" {one['dtype']}"

    @property
    def copy(self) -> float | None:
        """Milliseconds of a copy of the logits."""
        copy = self.lines[0].get("copy")
        return float(copy["median"]) if copy else None

    @property
    def floor(self) -> float | None:
        """The least time that memory allows, where the tensor is large enough for that to be the limit."""
        one = self.lines[0]
        size = one["rows"] * one["categories"] * WIDTHS[one["dtype"]]
        if self.copy is None or one.get("width") or size < LEAST_BYTES:
            return None
        return FLOOR * self.copy

    def reference(self, backend: str) -> float | None:
        """Milliseconds of torch's own sampler, `eager` or `compiled`."""
        return next(
            (time(line) for line in self.lines if _who(line) == (REFERENCE, backend)),
            None,
        )

    def find(self, estimator: str, backend: str) -> Line | None:
        """The line of an estimator, if there is one."""
        return next((line for line in self.lines if _who(line) == (estimator, backend)), None)


def benches(lines: Iterable[Line]) -> list[Bench]:
    """For each device and shape, the lines of the last run that has it; in order of first appearance."""
    found: dict[tuple[str, str], dict[str, list[Line]]] = {}
    for line in lines:
        if line.get("kind") == "bench":
            runs = found.setdefault((_device(line), str(line["shape"])), {})
            runs.setdefault(str(line["run"]), []).append(line)
    return [Bench(*key, tuple(runs[max(runs)])) for key, runs in found.items()]


def startup_lines(lines: Iterable[Line]) -> list[Line]:
    """The last line about each kind of import on each device."""
    last = {(_device(one), one["what"]): one for one in lines if one.get("kind") == "startup"}
    return list(last.values())


def time(line: Line | None) -> float | None:
    """The median of a line, in milliseconds; None where nothing was measured."""
    timing = (line or {}).get("milliseconds")
    return float(timing["median"]) if timing else None


def ratio(value: float | None, reference: float | None) -> float | None:
    """How many times `reference` it is.

    >>> ratio(1.0, 4.0), ratio(1.0, None)
    (0.25, None)
    """
    return None if value is None or not reference else value / reference


def table_of(bench: Bench) -> Table:
    """One run at one shape: every case beside torch's."""
    body = []
    for line in bench.lines:
        spent = time(line)
        eager, compiled = (ratio(spent, bench.reference(how)) for how in ("eager", "compiled"))
        body.append(
            (
                Entry(str(line["estimator"])),
                Entry(str(line["backend"])),
                Entry("" if line["form"] == "sample" else str(line["form"])),
                _milliseconds(spent) if spent is not None else Entry(_short(line)),
                Entry(_spread(line)),
                *(_ratio(one) for one in (eager, compiled, ratio(spent, bench.floor))),
                _ratio(line.get("memory")),
            )
        )
    columns = (
        "estimator",
        "backend",
        "form",
        "ms",
        "10% to 90%",
        "× eager",
        "× compiled",
        "× floor",
        "memory",
    )
    return without_empty(Table(columns, tuple(body)))


def title_of(bench: Bench) -> str:
    """The shape, the time of a copy, and the floor where there is one."""
    floor = "" if bench.floor is None else f", floor {_milliseconds(bench.floor).text} ms"
    copy = "" if bench.copy is None else f": copy {_milliseconds(bench.copy).text} ms{floor}"
    return f"{bench.title}{copy}"


def reasons(bench: Bench) -> list[str]:
    """Why some of the cases have no time."""
    gaps = [line for line in bench.lines if ":" in str(line["status"])]
    return [f"{line['estimator']}, {line['backend']}, {line['form']}: {line['status']}" for line in gaps]


def target_table(lines: Sequence[Line]) -> Table:
    """Every target that the lines say something about, and whether it is met."""
    body = []
    for bench in benches(lines):
        for target in TARGETS:
            line = bench.find(target.estimator, target.backend)
            if bench.shape == target.shape and bench.device.startswith(target.device) and time(line):
                body += _verdicts(bench, target, line or {})
    for line in startup_lines(lines):
        what, most = IMPORT_TARGET
        if line["what"] == what:
            body.append(_verdict("after `import torch`", f"`{what}`", most, time(line), " ms"))
    return Table(("where", "what", "target", "measured", "verdict"), tuple(body))


def _verdicts(bench: Bench, target: Target, line: Line) -> list[tuple[Entry, ...]]:
    what = f"{target.estimator}, {target.backend}"
    eager = ratio(time(line), bench.reference("eager"))
    asked = (
        (target.milliseconds, time(line), " ms"),
        (target.ratio, eager, " × eager"),
        (target.memory, line.get("memory"), " tensors"),
    )
    return [_verdict(bench.title, what, most, got, unit) for most, got, unit in asked if most is not None]


def _verdict(where: str, what: str, most: float, got: float | None, unit: str) -> tuple[Entry, ...]:
    """The number is judged as measured, not as rounded for the table."""
    word = NOTHING if got is None else "met" if got <= most else "missed"
    measured = NOTHING if got is None else f"{number(got).text}{unit}"
    return (Entry(where), Entry(what), Entry(f"≤ {most:g}{unit}"), Entry(measured), Entry(word))


def render_bench(lines: Sequence[Line], name: str) -> str:
    """The text of a block."""
    if not any(line.get("kind") == "bench" for line in lines):
        return "Not measured yet."
    return BLOCKS[name](lines)


def _all_tables(lines: Sequence[Line]) -> str:
    return _by_device([bench for bench in benches(lines) if not bench.lines[0].get("width")])


def _index_tables(lines: Sequence[Line]) -> str:
    return _by_device([bench for bench in benches(lines) if bench.lines[0].get("width")])


def _by_device(found: Sequence[Bench]) -> str:
    if not found:
        return "Not measured yet."
    parts = []
    for device in dict.fromkeys(bench.device for bench in found):
        mine = [bench for bench in found if bench.device == device]
        parts.append(f"### {device}, {_made_with(mine)}\n")
        parts += [f"{title_of(bench)}\n\n{to_markdown(table_of(bench))}" for bench in mine]
    return "\n".join(parts)


def _targets(lines: Sequence[Line]) -> str:
    table = target_table(lines)
    if not table.rows:
        return "No target is stated for what these records measure."
    missed = sum(row[-1].text == "missed" for row in table.rows)
    said = f"{len(table.rows) - missed} of {len(table.rows)} targets are met, {missed} missed."
    return f"{said}\n\n{to_markdown(table)}"


def _figure(lines: Sequence[Line]) -> str:
    return "![Times as multiples of F.gumbel_softmax in eager mode, shape by shape](figures/bench.svg)"


BLOCKS = {
    "bench-targets": _targets,
    "bench-figure": _figure,
    "bench": _all_tables,
    "bench-index": _index_tables,
}


def _made_with(found: Sequence[Bench]) -> str:
    places = [bench.lines[0].get("environment") or {} for bench in found]
    versions = dict.fromkeys(f"torch {p.get('torch')}, gapped at {p.get('commit')}" for p in places)
    return "; ".join(versions)


def _who(line: Line) -> tuple[str, str]:
    return str(line["estimator"]), str(line["backend"])


def _device(line: Line) -> str:
    return str((line.get("environment") or {}).get("device") or "an unnamed device")


def _short(line: Line) -> str:
    """The status without its reason."""
    return str(line["status"]).partition(":")[0]


def _milliseconds(value: float) -> Entry:
    return Entry(f"{value:.3f}" if value < 10 else f"{value:.1f}", value)


def _ratio(value: float | None) -> Entry:
    return (
        Entry(NOTHING) if value is None else Entry(f"{value:.2f}" if value < 100 else f"{value:.0f}", value)
    )


def _spread(line: Line) -> str:
    timing = line.get("milliseconds")
    if not timing:
        return NOTHING
    return f"{_milliseconds(timing['low']).text} to {_milliseconds(timing['high']).text}"
