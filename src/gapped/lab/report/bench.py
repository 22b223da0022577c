"""Records of `gapped bench` as tables: times as ratios, memory in tensors.

Ratios are taken inside one run at one shape only: the lines of other runs, however near, were measured under
other conditions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gapped.lab.records import Line
from gapped.lab.report.tables import NOTHING, Entry, Table, without_empty

REFERENCE = "F.gumbel_softmax"

FLOOR = 2.5
"""A sample reads logits and writes a value, then reads logits and gradient and writes a gradient: five passes
over a tensor. A copy is two."""

# Below this many bytes a copy is the time of a launch, and no floor.
LEAST_BYTES = 2**24
WIDTHS = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}


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
                as_milliseconds(spent) if spent is not None else Entry(_short(line)),
                Entry(_spread(line)),
                *(as_ratio(one) for one in (eager, compiled, ratio(spent, bench.floor))),
                as_ratio(line.get("memory")),
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
    floor = "" if bench.floor is None else f", floor {as_milliseconds(bench.floor).text} ms"
    copy = "" if bench.copy is None else f": copy {as_milliseconds(bench.copy).text} ms{floor}"
    return f"{bench.title}{copy}"


def reasons(bench: Bench) -> list[str]:
    """Why some of the cases have no time."""
    gaps = [line for line in bench.lines if ":" in str(line["status"])]
    return [f"{line['estimator']}, {line['backend']}, {line['form']}: {line['status']}" for line in gaps]


def _who(line: Line) -> tuple[str, str]:
    return str(line["estimator"]), str(line["backend"])


def _device(line: Line) -> str:
    return str((line.get("environment") or {}).get("device") or "an unnamed device")


def _short(line: Line) -> str:
    """The status without its reason."""
    return str(line["status"]).partition(":")[0]


def as_milliseconds(value: float) -> Entry:
    """A time for a table."""
    return Entry(f"{value:.3f}" if value < 10 else f"{value:.1f}", value)


def as_ratio(value: float | None) -> Entry:
    """A ratio for a table."""
    return (
        Entry(NOTHING) if value is None else Entry(f"{value:.2f}" if value < 100 else f"{value:.0f}", value)
    )


def _spread(line: Line) -> str:
    timing = line.get("milliseconds")
    if not timing:
        return NOTHING
    return f"{as_milliseconds(timing['low']).text} to {as_milliseconds(timing['high']).text}"
