"""Limits of a run: seconds that it may take, and values that its curve keeps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

# Values that a curve keeps; above twice as many, every other one goes.
LONGEST_CURVE = 1000
# A function that goes on after its time is interrupted again, this many seconds later.
_AGAIN = 1.0


class TimedOut(BaseException):
    """A run has taken too long. No Exception: training functions may pass over those."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """A block that `TimedOut` interrupts, where the system has alarms and this is the main thread."""
    on_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not on_main or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def until(deadline: float, values: Iterable[object]) -> Iterator[object]:
    """The values up to a deadline, for where nothing interrupts the function that yields them."""
    for value in values:
        yield value
        if time.monotonic() > deadline:
            raise TimedOut


class Points:
    """The values that a run has yielded: all of up to twice `LONGEST_CURVE`, beyond that evenly spaced ones.

    The last value is kept in any case.
    """

    def __init__(self) -> None:
        self.count, self._stride = 0, 1
        self._kept: list[tuple[int, Mapping[str, float]]] = []
        self.last: Mapping[str, float] = {}

    def add(self, value: Mapping[str, float]) -> None:
        self.count, self.last = self.count + 1, value
        if (self.count - 1) % self._stride == 0:
            self._kept.append((self.count, value))
        if len(self._kept) > 2 * LONGEST_CURVE:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def curve(self) -> tuple[list[int], list[Mapping[str, float]]]:
        """The numbers of the values that are kept, from 1, and the values."""
        end = [(self.count, self.last)] if self._kept and self._kept[-1][0] < self.count else []
        kept = [*self._kept, *end]
        return [number for number, _ in kept], [value for _, value in kept]
