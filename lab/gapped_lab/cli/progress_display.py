"""The live display of training: a bar with the time left, and a table of the cells so far."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from math import inf, isinf, nan
from statistics import fmean
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gapped.comparison.table import Entry, Table, metric_name, number, tau_entry, to_rich
from gapped_lab.planning import Fleet
from gapped_lab.progress import Callbacks, Snapshot
from gapped_lab.report.cells import higher_is_better

# Lines for a fleet where the output is no terminal, and the longest time between two, in seconds.
_PLAIN_LINES, _SILENCE = 10, 30.0
# How often a bar is moved, in seconds, while an epoch lasts: steps may take less than a millisecond.
_PAUSE = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Display(Callbacks):
    """Callbacks that show progress on a terminal; plain lines where the output is not one.

    The first Ctrl-C requests a checkpoint after the present step, as does SIGTERM, by which batch systems and
    containers end a program; the second signal stops at once. A deadline `minutes` from now requests one
    before a step, or a test, that would not end in time.
    """

    def __init__(self, console: Console, minutes: float | None = None) -> None:
        self.console = console
        self.deadline = inf if minutes is None else time.monotonic() + 60 * minutes
        epochs = TextColumn("{task.completed:.0f}/{task.total:.0f} epochs")
        columns = (TextColumn("{task.description}"), BarColumn(), epochs)
        self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self.live = Live(console=console, refresh_per_second=4, transient=True)
        self.epochs: dict[str, float] = {}
        self.moved = 0.0
        """When a step last moved the bar."""
        self.said = 0.0
        """When the last plain line was printed."""
        self.calls: dict[str, float] = {}
        """When each fleet was last heard of."""
        self.pace = 0.0
        """The longest time between two calls for a fleet, but for its first step, which compiles."""
        self.bar: Any = None
        self.stop_signal = 0
        """The number of the signal that requested a stop; 0 if none did."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Display:
        self._before = {each: signal.signal(each, self._interrupt) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        if self.console.is_terminal:
            self.live.stop()

    def start(self, fleets: Sequence[Fleet]) -> None:
        if not fleets:
            self.console.print("All runs are finished already.")
            return
        epochs = sum(fleet.specs[0].epochs for fleet in fleets)
        runs = sum(len(fleet.specs) for fleet in fleets)
        self.bar = self.progress.add_task(f"{runs} runs", total=epochs)
        if self.console.is_terminal:
            self.live.start()
            self.live.update(self.progress)
        else:
            fleet = "one fleet" if len(fleets) == 1 else f"{len(fleets)} fleets"
            self.console.print(f"training {runs} runs in {fleet}")
            self.said = time.monotonic()

    def step(self, fleet: Fleet, epochs: float) -> None:
        if epochs and fleet.key not in self.calls:
            self.console.print(f"going on from epoch {epochs:.3g} of {fleet.specs[0].epochs}")
        self._measure(fleet, is_step=True)
        if time.monotonic() - self.moved >= _PAUSE:
            self.moved = time.monotonic()
            self._advance(fleet, epochs)
            if not self.console.is_terminal and self.moved - self.said >= _SILENCE:
                self._say(fleet, epochs)

    def epoch(self, fleet: Fleet, snapshot: Snapshot) -> None:
        self._measure(fleet, is_step=False)
        self._advance(fleet, snapshot.epoch)
        if self.console.is_terminal:
            table = to_rich(_cells(fleet, snapshot), "so far", self.console.width)
            self.live.update(Group(table, self.progress))
        elif snapshot.epoch % max(snapshot.epochs // _PLAIN_LINES, 1) == 0:
            self._say(fleet, snapshot.epoch)

    def done(self, fleet: Fleet) -> None:
        self._advance(fleet, fleet.specs[0].epochs)

    def wants_stop(self) -> bool:
        return self.stop_signal > 0 or self.is_late()

    def is_late(self) -> bool:
        """Whether the time is up, or would be before the next call."""
        return time.monotonic() + self.pace >= self.deadline

    def _measure(self, fleet: Fleet, is_step: bool) -> None:
        now = time.monotonic()
        if fleet.key not in self.calls:
            self.pace, self.calls[fleet.key] = 0.0, inf if is_step else now
        else:
            self.pace = max(self.pace, now - self.calls[fleet.key])
            self.calls[fleet.key] = now

    def _advance(self, fleet: Fleet, epoch: float) -> None:
        """Fleets may train side by side, or be finished by another process."""
        self.epochs[fleet.key] = epoch
        self.progress.update(self.bar, completed=sum(self.epochs.values()))

    def _say(self, fleet: Fleet, epochs: float) -> None:
        left = self.progress.tasks[0].time_remaining
        rest = "" if left is None else f", {left:.0f} s left"
        self.console.print(f"epoch {round(epochs, 2):g} of {fleet.specs[0].epochs}{rest}")
        self.said = time.monotonic()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.stop_signal:
            raise KeyboardInterrupt
        self.stop_signal = number
        self.console.print("Stopping with a checkpoint; Ctrl-C again stops at once.")


def _cells(fleet: Fleet, snapshot: Snapshot) -> Table:
    """The test metric of each cell so far, best first."""
    tests = [key for key in snapshot.metrics if not key.startswith("train_")]
    name = tests[0] if tests else "not tested yet"
    last = snapshot.metrics[name] if tests else [nan] * len(fleet.specs)
    cells: dict[tuple[str, float | None], list[int]] = {}
    for place, spec in enumerate(fleet.specs):
        cells.setdefault((fleet.label(spec), spec.tau), []).append(place)
    rows = []
    for (label, tau), places in cells.items():
        values = [last[place] for place in places if snapshot.alive[place]]
        rows.append((fmean(values) if values else inf, label, tau, len(places), len(places) - len(values)))
    up = higher_is_better(name)
    rows.sort(key=lambda row: (isinf(row[0]), -row[0] if up else row[0], *row[1:]))
    body = [
        (
            Entry(label),
            tau_entry(tau),
            number(mean, name),
            Entry(str(count), count),
            Entry(str(lost or ""), lost),
        )
        for mean, label, tau, count, lost in rows[:24]
    ]
    return Table(("estimator", "τ", metric_name(name), "seeds", "diverged"), tuple(body))
