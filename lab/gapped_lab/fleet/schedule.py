"""Temperature schedules: the temperature of a run at each of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gapped.checks import check_count, check_level
from gapped.errors import GappedError, reject

LEVELS = ("tau", "smoothing")
"""The levels that a schedule may change."""


@dataclass(frozen=True)
class Constant:
    """One temperature throughout."""

    level = ""

    def tau(self, base: float, step: int, steps: int) -> float:
        """The temperature at `step` of `steps`, for a run whose own temperature is `base`."""
        return base


@dataclass(frozen=True)
class Annealed:
    """Exponential annealing, from `start` at the first step to the run's own temperature at the last.

    The `level` may be another one than the temperature: MVE's smoothing.
    """

    start: float = 1.0
    level: str = "tau"

    def __post_init__(self) -> None:
        check_level("start", self.start, positive=True)
        if self.level not in LEVELS:
            raise reject("level", self.level, f"one of {', '.join(LEVELS)}")

    def tau(self, base: float, step: int, steps: int) -> float:
        progress = step / max(steps - 1, 1)
        return float(self.start ** (1 - progress) * base**progress)


@dataclass(frozen=True)
class Mixed:
    """The paper's mixed temperature training: every `period`-th batch at the run's own, low temperature,
    all others at `mid`. Such a run is tested at its own temperature."""

    level = "tau"

    mid: float = 0.5
    period: int = 20

    def __post_init__(self) -> None:
        check_level("mid", self.mid, positive=True)
        check_count("period", self.period)

    def tau(self, base: float, step: int, steps: int) -> float:
        return base if (step + 1) % self.period == 0 else self.mid


Schedule = Constant | Annealed | Mixed
SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "annealed": Annealed, "mixed": Mixed}


def schedule(kind: str = "constant", **options: Any) -> Schedule:
    """The schedule called `kind`.

    >>> schedule("mixed", period=10)
    Mixed(mid=0.5, period=10)
    """
    if not isinstance(kind, str) or kind not in SCHEDULES:
        raise reject("schedule", kind, f"one of {', '.join(SCHEDULES)}")
    try:
        return SCHEDULES[kind](**options)
    except TypeError:
        known = ", ".join(SCHEDULES[kind].__dataclass_fields__) or "none"
        raise GappedError(
            f"schedule {kind}: got options {', '.join(options)}, expected among {known}"
        ) from None
