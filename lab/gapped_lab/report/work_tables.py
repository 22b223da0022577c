"""Records of `gapped bench --work` as tables: every way to do a workload beside the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gapped.comparison.table import NOTHING, Entry, Table, number, without_empty
from gapped_lab.records import Work
from gapped_lab.report.timings import as_milliseconds, as_ratio, device_of, last_runs, ratio, spread, time

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


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
