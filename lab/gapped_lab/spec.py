"""Run specs: everything that determines a run's result, and its hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from gapped.checks import check_count, check_flag, check_level
from gapped.errors import reject
from gapped.registry import Estimator
from gapped.score import Score
from gapped_lab.estimator_text import make, options_of, parse
from gapped_lab.fleet import RateDecay
from gapped_lab.fleet.schedule import Schedule, schedule
from gapped_lab.task_kinds import TASK_KINDS, TaskKind
from gapped_lab.tasks.count_vae import Fini

# Name, least value, and whether None is accepted.
_COUNTS = (
    ("epochs", 1, False),
    ("seed", 0, False),
    ("train_images", 1, True),
    ("test_images", 1, True),
    ("variance_samples", 0, False),
    ("variance_images", 1, False),
    ("entropy_steps", 0, False),
    ("test_every", 1, False),
)

# Fields added since the first published records, with their defaults.
_LATER = {"rate_decay": "none", "test_every": 1, "variance_beside": ""}
# Options that published records leave out and whose default has changed since, with the default they had.
_FORMER = {"double-cv": {"alpha": 1.0}}


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
    tau: float | None = 1.0
    """None where the estimator has no temperature."""
    seed: int = 0
    epochs: int = 1
    learning_rate: float | None = None
    """The protocol's own if None."""
    schedule: dict[str, Any] = field(default_factory=lambda: {"kind": "constant"})
    rate_decay: RateDecay = "none"
    split: Literal["test", "validation"] = "test"
    """Where the final number comes from; ``validation`` holds out the last sixth of the training images."""
    train_images: int | None = None
    """How many are used, from the first; all that the protocol uses if None."""
    test_images: int | None = None
    variance_samples: int = 0
    """Gradients per measurement of their variance; none if 0."""
    variance_images: int = 1000
    variance_every_epoch: bool = False
    """Measure after every epoch, or only after the last."""
    entropy_steps: int = 0
    """Over how many first steps the surrogate's entropy is averaged; none if 0."""

    test_every: int = 1
    """Epochs from one test to the next; the last epoch is always tested. Curves have the tested epochs."""

    variance_beside: str = ""
    """An estimator, as text, whose variance is measured too, at the same weights; none if empty."""

    def __post_init__(self) -> None:
        _check_choice("task", self.task, tuple(TASK_KINDS))
        self.kind.rules(self.protocol)
        _check_choice("data", self.data, self.kind.data)
        _check_choice("split", self.split, ("test", "validation"))
        _check_choice("rate_decay", self.rate_decay, get_args(RateDecay))
        for name, least, optional in _COUNTS:
            if not (optional and getattr(self, name) is None):
                check_count(name, getattr(self, name), least)
        if self.seed >= 2**63:
            raise reject("seed", self.seed, "an integer below 2**63")
        check_flag("variance_every_epoch", self.variance_every_epoch)
        if self.variance_beside:
            parse(self.variance_beside)
        if self.variance_samples == 1:
            raise reject("variance_samples", 1, "0, or at least 2: one gradient has no variance")
        if self.learning_rate is not None:
            check_level("learning_rate", self.learning_rate, positive=True)
        if not isinstance(self.schedule, dict):
            raise reject("schedule", self.schedule, 'a table such as { kind = "mixed" }')
        for each in fields(self):
            if each.name in self.kind.unsupported and getattr(self, each.name) != each.default:
                raise reject(each.name, getattr(self, each.name), f"nothing: {self.task} does not support it")
        estimator = self.make_estimator()
        if self.kind.estimators:
            _check_choice("estimator", self.estimator, self.kind.estimators)
        elif isinstance(estimator, Fini):
            raise reject("estimator", self.estimator, f"one for categories: {self.task} has no counts")
        level = self.make_schedule().level
        if level not in ("", "tau", *options_of(self.estimator)):
            raise reject("schedule", level, f"a level that {self.estimator} has")
        if isinstance(estimator, Score):
            self._check_score(estimator)
        # 1 and 1.0 are one number, and must have one hash.
        levels = {k: float(v) if _is_level(k, v) else v for k, v in self.options.items()}
        object.__setattr__(self, "options", levels)
        object.__setattr__(self, "tau", float(self.tau) if self._has_tau() and self.tau is not None else None)

    @property
    def kind(self) -> TaskKind:
        return TASK_KINDS[self.task]

    @property
    def id(self) -> str:
        """Content hash. Old records keep their ids: fields that came later count only where they are used.

        An option of `_FORMER` counts unless it has its former default.
        """
        former = _FORMER.get(self.estimator, {})
        left_out = {name: "default" for name in former if name not in self.options}
        options = {k: v for k, v in self.options.items() if former.get(k, ...) != v}
        plain = asdict(self) | {"options": options | left_out}
        text = json.dumps({k: v for k, v in plain.items() if _LATER.get(k, ...) != v}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def shape(self) -> str:
        """The key of runs that may be trained as one fleet."""
        own = {"estimator", "options", "tau", "seed", "learning_rate", "rate_decay", "schedule"}
        return json.dumps({k: v for k, v in asdict(self).items() if k not in own}, sort_keys=True)

    def make_estimator(self) -> Estimator:
        tau = {"tau": self.tau} if self._has_tau() else {}
        return make(self.estimator, {**tau, **self.options})

    def make_schedule(self) -> Schedule:
        return schedule(**self.schedule)

    def _has_tau(self) -> bool:
        return "tau" in options_of(self.estimator)

    def _check_score(self, estimator: Score) -> None:
        """Refuse what only makes sense where the sample carries the gradient."""
        if self.kind.variables is None:
            accepted = f"a pathwise one: {self.task} chooses inside of its model"
            raise reject("estimator", self.estimator, accepted)
        estimator.check_size(*self.kind.variables(self.protocol))
        if self.schedule.get("kind", "constant") != "constant":
            raise reject("schedule", self.schedule["kind"], f"constant for {self.estimator}")
        if self.entropy_steps:
            accepted = f"0: {self.estimator} has no surrogate"
            raise reject("entropy_steps", self.entropy_steps, accepted)


@dataclass(frozen=True)
class Entry:
    """A run's place in a table. One run may stand in several."""

    recipe: str
    label: str
    spec: RunSpec
    quick: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The key of its record."""
        return self.recipe, self.spec.id


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise reject(name, value, f"one of {', '.join(known)}")


def _is_level(name: str, value: object) -> bool:
    whole = name in ("samples", "network", "hidden", "order")
    return not whole and isinstance(value, int) and not isinstance(value, bool)
