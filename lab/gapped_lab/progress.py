"""Progress callbacks: what training reports while it runs, and how it learns that it should stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gapped_lab.planning import Fleet


class Snapshot(NamedTuple):
    """How far a fleet has come, in plain values that travel between processes."""

    epoch: int
    epochs: int
    metrics: dict[str, list[float]]
    """The latest value of each run, by metric."""
    alive: list[bool]


class Callbacks:
    """Callbacks of a training command; these are no-ops, to be overridden."""

    def start(self, fleets: Sequence[Fleet]) -> None:
        """Called once, with the fleets that are about to be trained."""

    def step(self, fleet: Fleet, epochs: float) -> None:
        """Called before each step of a fleet that trains in this process; `epochs` so far, such as 2.5."""

    def epoch(self, fleet: Fleet, snapshot: Snapshot) -> None:
        """Called after each epoch of a fleet."""

    def done(self, fleet: Fleet) -> None:
        """Called when a fleet is finished, or has failed."""

    def wants_stop(self) -> bool:
        """Whether training should stop before its next step, with a checkpoint; asked after each of them."""
        return False
