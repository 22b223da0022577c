"""What the samplers are to take at most, and whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gapped.lab.records import Line
from gapped.lab.report.bench import Bench, benches, ratio, startup_lines, time
from gapped.lab.report.tables import NOTHING, Entry, Table, number


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
            body.append(_verdict("after import torch", what, most, time(line), " ms", code=True))
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


def _verdict(
    where: str, what: str, most: float, got: float | None, unit: str, code: bool = False
) -> tuple[Entry, ...]:
    """The number is judged as measured, not as rounded for the table."""
    word = NOTHING if got is None else "met" if got <= most else "missed"
    measured = NOTHING if got is None else f"{number(got).text}{unit}"
    return (Entry(where), Entry(what, code=code), Entry(f"≤ {most:g}{unit}"), Entry(measured), Entry(word))
