"""The targets of this repository for time and memory, and which of them `gapped bench` has found met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gapped.lab.records import Bench, Startup
from gapped.lab.report.tabular import NOTHING, Entry, Table, number
from gapped.lab.report.timings import last_startups, ratio, time, timings


@dataclass(frozen=True)
class Target:
    """The most that a sampler is to take at a shape, by unit, on devices whose name begins so."""

    device: str
    shape: str
    estimator: str
    backend: str
    most: Mapping[str, float]


def _on_h200(shape: str, milliseconds: float, estimator: str = "gst", tensors: float = 2.1) -> Target:
    return Target("NVIDIA H200", shape, estimator, "triton", {"ms": milliseconds, "tensors": tensors})


TARGETS = (
    _on_h200("3000x10:f32", 0.20),
    _on_h200("1048576x64:f32", 0.40),
    _on_h200("262144x256:f32", 0.40),
    _on_h200("8192x32000:f32", 1.6),
    _on_h200("8192x128256:bf16", 3.2),
    _on_h200("6400x64:f32", 0.25, "gumbel-rao:samples=100", 3),
    _on_h200("6400x64:f32", 1.5, "gumbel-rao:samples=1000", 3),
    Target("CPU", "3000x10:f32", "gst", "torch", {"× eager": 0.7}),
    Target("CPU", "65536x64:f32", "gst", "torch", {"× eager": 0.7}),
)
IMPORT_TARGET = ("import gapped", 60.0)


def target_table(lines: Iterable[Bench], startups: Iterable[Startup] = ()) -> Table:
    """Every target that the lines say something about, and whether it is met."""
    body = []
    for shape in timings(lines):
        for target in TARGETS:
            line = shape.find(target.estimator, target.backend)
            if shape.shape != target.shape or not shape.device.startswith(target.device) or not time(line):
                continue
            eager, memory = ratio(time(line), shape.reference("eager")), line.memory if line else None
            values = {"ms": time(line), "× eager": eager, "tensors": memory}
            case = Entry(f"{target.estimator}, {target.backend}")
            for unit, most in target.most.items():
                body.append((Entry(shape.title), case, *_judgement(most, values[unit], unit)))
    what, most = IMPORT_TARGET
    for startup in last_startups(startups):
        if startup.what == what:
            judgement = _judgement(most, startup.milliseconds.median, "ms")
            body.append((Entry("after import torch"), Entry(what, code=True), *judgement))
    return Table(("where", "what", "target", "measured", "verdict"), tuple(body))


def _judgement(most: float, value: float | None, unit: str) -> tuple[Entry, ...]:
    """Target, value and verdict; the number is judged as measured, not as rounded for the table."""
    word = NOTHING if value is None else "met" if value <= most else "missed"
    measured = NOTHING if value is None else f"{number(value).text} {unit}"
    return Entry(f"≤ {most:g} {unit}"), Entry(measured), Entry(word)
