"""A run of a training function of the user: one estimator, one seed; its record and its curve."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from gapped.checks import check_count
from gapped.diagnostics import label_of, labelled
from gapped.errors import GappedError, one_line, printable, reject
from gapped.lab.defaults import temperature
from gapped.lab.environment import describe
from gapped.lab.estimator_text import make, parse, show
from gapped.lab.fleet import derived_hash
from gapped.lab.records import Curve, Record, RunLine

Train = Callable[[Any, int], Any]
Lines = list[RunLine]

# The longest label that a record holds.
_LONGEST = 200
# Fields of a curve, which no series can be called.
_FIELDS = ("id", "epoch", "schema")


@dataclass(frozen=True)
class UserRun:
    """One estimator and seed; `text` says what the estimator is, whatever its label."""

    function: str
    label: str
    text: str
    estimator: Any
    seed: int
    maximize: bool

    @property
    def id(self) -> str:
        return derived_hash(json.dumps([self.function, self.label, self.text, self.seed]))

    @property
    def key(self) -> tuple[str, str]:
        """The key of its record."""
        return self.function, self.id

    def lines(self, train: Train) -> Lines:
        """Train, and return what there is to write: a record, and a curve if `train` yields."""
        start, error, result = time.perf_counter(), "", None
        points: list[dict[str, float]] = []
        try:
            result = train(deepcopy(self.estimator), self.seed)
            for each in result if isinstance(result, Iterator) else [result]:
                points.append(_numbers(each))
            if not points:
                raise GappedError("train yielded nothing, expected a number or a dict of numbers")
        except Exception as problem:
            error = one_line(problem)
        except SystemExit as problem:
            error = f"SystemExit: {problem.code}"
        seconds = time.perf_counter() - start
        curve = [self._curve(points)] if points and isinstance(result, Iterator) else []
        if error:
            return [*curve, self.failure(error, seconds)]
        last = points[-1]
        metric = next(iter(last))
        record = self._record(
            status="ok" if isfinite(last[metric]) else "diverged",
            metrics={name: _finite(value) for name, value in last.items()},
            metric=metric,
            seconds=seconds,
        )
        return [*curve, record]

    def _curve(self, points: Sequence[Mapping[str, float]]) -> Curve:
        names = dict.fromkeys(name for point in points for name in point if name not in _FIELDS)
        series: Any = {name: [_finite(point.get(name)) for point in points] for name in names}
        return Curve(id=self.id, epoch=[float(i + 1) for i in range(len(points))], more=series)

    def failure(self, error: str, seconds: float = 0.0) -> Record:
        """The record of a run that an error ended."""
        return self._record(status="failed", error=error, metric="value", seconds=seconds)

    def _record(self, **result: Any) -> Record:
        device = torch.device("cuda" if uses_cuda() else "cpu")
        return Record(
            id=self.id,
            recipe=self.function,
            label=self.label,
            estimator=self.text[:_LONGEST],
            seed=self.seed,
            maximize=self.maximize,
            environment=_environment(device),
            **result,
        )


@functools.cache
def _environment(device: torch.device) -> dict[str, Any]:
    return dict(describe(device))


def plan(train: Train, estimators: Any, seeds: int | Sequence[int], maximize: bool) -> list[UserRun]:
    """All runs, seed by seed, so that a budget leaves estimators with about as many runs each."""
    if not isinstance(seeds, Iterable):
        check_count("seeds", seeds)
        seeds = range(seeds)
    numbers = list(dict.fromkeys(seeds))
    if not numbers or not all(isinstance(seed, Integral) and seed >= 0 for seed in numbers):
        raise reject("seeds", seeds, "a count, or integers from 0")
    members = {}
    for name, member in labelled(estimators).items():
        label, text = printable(name), label_of(member)
        if isinstance(member, str):
            kind, options = parse(member)
            if (tau := temperature(member)) is not None:
                options["tau"] = tau
            text, estimator = show(kind, options), make(kind, options)
            # With its temperature, so that it says the same wherever it is given as text.
            label = text if name == member else label
        else:
            estimator = member
        if len(label) > _LONGEST:
            raise reject("estimators", f"a label of {len(label)} characters", f"at most {_LONGEST}")
        members[label] = text, estimator
    home = definition(train)
    # A script and the module of its name hold the same function.
    script = getattr(sys.modules["__main__"], "__file__", None) if home.__module__ == "__main__" else None
    module = Path(script).stem if script else home.__module__
    function = f"{module}.{home.__qualname__}"[-_LONGEST:]
    return [
        UserRun(function, label, text, estimator, int(seed), maximize)
        for seed in numbers
        for label, (text, estimator) in members.items()
    ]


def definition(train: Train) -> Any:
    """What has the name of a training function: itself, what it is a partial of, or its class."""
    inner: Any = train.func if isinstance(train, functools.partial) else train
    return inner if hasattr(inner, "__qualname__") else type(inner)


def uses_cuda() -> bool:
    """Whether this process has begun to use a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _numbers(result: Any) -> dict[str, float]:
    """What `train` returned, as numbers by name; what is no number in a dict is left out."""
    values = result if isinstance(result, Mapping) else {"value": result}
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if not numbers:
        raise GappedError(f"train returned {type(result).__name__}, expected a number or a dict of numbers")
    if not all(0 < len(name) <= _LONGEST for name in numbers):
        raise GappedError(f"train returned a dict, expected names of 1 to {_LONGEST} characters in it")
    return numbers


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
