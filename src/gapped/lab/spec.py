"""Run specs: everything that determines a run's result, and its hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gapped.errors import reject
from gapped.fleet.schedule import Schedule, schedule
from gapped.lab.text import make
from gapped.registry import Pathwise

__all__ = ["Entry", "RunSpec"]

# Fields added since the first published records, with their defaults.
_LATER = {"rate_decay": "none"}


@dataclass(frozen=True)
class RunSpec:
    """One run, in plain values. Two runs with equal specs are the same run."""

    task: str
    """Registered task, such as ``vae``."""
    protocol: str
    """One of the task's named protocols."""
    data: str
    """Data set by name."""
    estimator: str
    """Registered name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options as in text; a function is named, such as ``expected``."""
    tau: float = 1.0
    seed: int = 0
    epochs: int = 1
    learning_rate: float | None = None
    """The protocol's own if None."""
    schedule: dict[str, Any] = field(default_factory=lambda: {"kind": "constant"})
    rate_decay: Literal["none", "cosine"] = "none"
    """Whether the learning rate falls to zero along a half cosine, epoch by epoch."""
    split: Literal["test", "validation"] = "test"
    """Where the final number comes from; ``validation`` holds out the last sixth of the training images."""
    train_images: int | None = None
    """Use only the first so many; all that the protocol uses if None."""
    test_images: int | None = None
    variance_samples: int = 0
    """Gradients per measurement of their variance; none if 0."""
    variance_images: int = 1000
    variance_every_epoch: bool = False
    """Measure after every epoch, or only after the last."""
    entropy_steps: int = 0
    """Over how many first steps the surrogate's entropy is averaged; none if 0."""

    def __post_init__(self) -> None:
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise reject("epochs", self.epochs, "a positive integer")
        if self.rate_decay not in ("none", "cosine"):
            raise reject("rate_decay", self.rate_decay, "none or cosine")
        self.make_estimator()
        self.make_schedule()

    @property
    def id(self) -> str:
        """Content hash. Fields that came later count only where they are used: old records keep their ids."""
        plain = asdict(self)
        text = json.dumps({k: v for k, v in plain.items() if _LATER.get(k, ...) != v}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def shape(self) -> str:
        """What runs must have in common to be trained as one fleet."""
        own = {"estimator", "options", "tau", "seed", "learning_rate", "rate_decay", "schedule"}
        return json.dumps({k: v for k, v in asdict(self).items() if k not in own}, sort_keys=True)

    def make_estimator(self) -> Pathwise:
        return make(self.estimator, {"tau": self.tau, **self.options})

    def make_schedule(self) -> Schedule:
        return schedule(**self.schedule)


@dataclass(frozen=True)
class Entry:
    """A run's place in a table. One run may stand in several."""

    recipe: str
    label: str
    spec: RunSpec
    quick: bool = False
