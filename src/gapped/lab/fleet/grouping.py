"""One estimator for a whole fleet, made of the estimators of its runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import values_unseen
from gapped.errors import GappedError
from gapped.kernels import launch
from gapped.lab.fleet.neighbours import Neighbours
from gapped.lab.fleet.stateful import Widths, joined, structure
from gapped.objective import expectation
from gapped.pathwise import Pathwise
from gapped.registry import Estimator
from gapped.score import Score, draw_independent, one_hot_rows
from gapped.score.trainable import Trainable

_LEVELS = ("tau", "gap", "tau_forward", "eta")


def group_key(estimator: Estimator) -> Hashable:
    """What runs must have in common to be sampled by one call: everything but the numeric levels."""
    if isinstance(estimator, Trainable):
        return type(estimator), structure(estimator)
    rest = ((f.name, getattr(estimator, f.name)) for f in fields(estimator))  # type: ignore[arg-type]
    return type(estimator), tuple((name, value) for name, value in rest if not is_level(name, value))


@dataclass(frozen=True)
class Part:
    """Neighbouring runs whose costs are evaluated in one call."""

    start: int
    stop: int
    differentiated: bool = False
    """Whether the estimator itself differentiates the costs, perhaps twice."""

    @property
    def runs(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Grouped:
    """Samples logits ``(R, *rows, K)``, and estimates expectations, with each run's own estimator.

    Neighbouring runs whose estimators differ only in numbers (`tau`, `gap`, `tau_forward`, `eta`) are
    sampled together, with those numbers as tensors along the run axis. `tau` can be changed in place between
    steps: it is the tensor, one entry per run, that all pathwise groups look at.
    """

    groups: tuple[tuple[int, int, Estimator], ...]
    tau: Tensor

    @classmethod
    def of(
        cls,
        estimators: Sequence[Estimator],
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        widths: Widths | None = None,
    ) -> Grouped:
        """Group `estimators`, one per run in order, for logits with `rows` axes between run and category.

        Estimators with networks of their own also need to know the task's `widths`.
        """
        tau = torch.tensor([_temperature(e) for e in estimators], device=device, dtype=dtype)
        groups: list[tuple[int, int, Estimator]] = []
        start = 0
        for _, members in groupby(estimators, key=group_key):
            same = list(members)
            stop = start + len(same)
            trained = [e for e in same if isinstance(e, Trainable)]
            pathwise = [e for e in same if isinstance(e, Pathwise)]
            if pathwise:
                groups.append((start, stop, _with_levels(pathwise, tau[start:stop], rows)))
            elif trained:
                groups.append((start, stop, joined(trained, rows, widths).to(device, dtype)))
            else:
                groups.append((start, stop, same[0]))
            start = stop
        return cls(tuple(groups), tau)

    def soft(self) -> Grouped:
        """The same, but with the surrogates as samples."""
        if not all(isinstance(each, Pathwise) for _, _, each in self.groups):
            raise GappedError("soft samples: a score-function estimator has no surrogate")
        soft = ((a, b, replace(each, hard=False)) for a, b, each in self.groups)  # type: ignore[type-var]
        return replace(self, groups=tuple(soft))

    @property
    def hard(self) -> bool:
        """Whether the samples of all runs are one-hot."""
        return all(getattr(each, "hard", True) for _, _, each in self.groups)

    @values_unseen()
    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """One sample of each run; that of a score-function estimator carries no gradient."""
        logits = simplex.masked(logits, mask)
        if len(self.groups) == 1:
            return _sample(self.groups[0][2], logits, generator)
        pieces = torch.split(logits, self._sizes)
        kernels = self._kernels(pieces)
        if kernels is not None:
            return launch.sample_side_by_side(logits, self._sizes, kernels, generator)
        samples = [
            _sample(each, piece, generator) for (_, _, each), piece in zip(self.groups, pieces, strict=True)
        ]
        return torch.cat(samples)

    def parts(self) -> tuple[Part, ...]:
        """In which parts `expectation` evaluates the costs: one for all where no gradient is asked for."""
        return self._parts if torch.is_grad_enabled() else (Part(0, self.groups[-1][1]),)

    @values_unseen()
    def expectation(
        self,
        f: Callable[[Tensor, Part], Tensor],
        logits: Tensor,
        generator: torch.Generator | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Estimate each run's expected cost and its gradient, as `gapped.expectation` does; ``(R, *batch)``.

        `f` maps samples ``(n, r, *rows, K)`` of the runs of a part to costs ``(n, r, *batch)``. `context` is
        what learned baselines look at, ``(R, *batch, ...)``. Without a gradient there is one sample of each
        run, whatever its estimator.
        """
        parts = self.parts()
        if len(parts) == 1 and (not torch.is_grad_enabled() or isinstance(self.groups[0][2], Pathwise)):
            return f(self.sample(logits, generator=generator).unsqueeze(0), parts[0]).squeeze(0)
        costs = []
        shares = torch.split(logits, [len(part) for part in parts])
        for part, estimator, share in zip(parts, self._estimators, shares, strict=True):
            if isinstance(estimator, Grouped):
                samples = estimator.sample(share, generator=generator)
                costs.append(f(samples.unsqueeze(0), part).squeeze(0))
                continue
            looks = isinstance(estimator, Trainable) and getattr(estimator, "network", None) is not None
            wanted = looks and not part.differentiated and context is not None
            costs.append(
                expectation(
                    lambda z, part=part: f(z, part),  # type: ignore[misc]
                    share,
                    estimator,
                    generator=generator,
                    context=context[part.runs] if wanted else None,  # type: ignore[index]
                )
            )
        return torch.cat(costs)

    @property
    def stateful(self) -> list[tuple[Part, Trainable]]:
        """The groups with a state, part by part: each run has its own share along the first axis."""
        return [(Part(a, b), each) for a, b, each in self.groups if isinstance(each, Trainable)]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Estimates in which no state changes and nothing is left to train on."""
        for _, each in self.stateful:
            each.eval()
        try:
            yield
        finally:
            for _, each in self.stateful:
                each.train()

    def _kernels(self, pieces: Sequence[Tensor]) -> list[launch.Fused] | None:
        """What the kernels are told, if they can sample all groups."""
        if torch.compiler.is_compiling() or pieces[0].shape[-1] > launch.LONGEST_BLOCK:
            return None
        kernels: list[launch.Fused] = []
        for (_, _, each), piece in zip(self.groups, pieces, strict=True):
            kernel = each.kernel(piece) if isinstance(each, Pathwise) else None
            if kernel is None:
                return None
            kernels.append(kernel)
        launch.note_backend("triton")
        return kernels

    @cached_property
    def _sizes(self) -> list[int]:
        return [b - a for a, b, _ in self.groups]

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        # What is evaluated in the same way and is neighbours goes through one call.
        joined = (list(groups) for _, groups in groupby(self.groups, key=_call))
        return tuple(
            Part(groups[0][0], groups[-1][1], getattr(groups[0][2], "derivatives", 0) > 0)
            for groups in joined
        )

    @cached_property
    def _estimators(self) -> tuple[Grouped | Score, ...]:
        """What estimates each part's expectation; where that is pathwise, what samples it."""
        found: list[Grouped | Score] = []
        for part in self._parts:
            own = tuple(
                (a - part.start, b - part.start, each)
                for a, b, each in self.groups
                if part.start <= a < part.stop
            )
            if isinstance(own[0][2], Pathwise):
                found.append(Grouped(own, self.tau[part.runs]))
            else:
                found.append(own[0][2] if len(own) == 1 else Neighbours(own))  # type: ignore[arg-type]
        return tuple(found)


def _call(group: tuple[int, int, Estimator]) -> Hashable:
    """What groups must have in common for their costs to be evaluated in one call."""
    start, _, each = group
    if isinstance(each, Pathwise):
        return "pathwise"
    return each.evaluations or ("alone", start)


def is_level(name: str, value: object) -> bool:
    """Whether an option is a number that may differ between runs that are sampled together."""
    return name in _LEVELS and isinstance(value, int | float)


def _temperature(estimator: Estimator) -> float:
    """1 where there is none; an estimator that trains its own is never asked for it."""
    tau: float | Tensor = getattr(estimator, "tau", 1.0)
    return float(tau.detach() if isinstance(tau, Tensor) else tau)


def _with_levels(same: Sequence[Pathwise], tau: Tensor, rows: int) -> Pathwise:
    shape = (-1,) + (1,) * rows
    levels: dict[str, Any] = {"tau": tau.view(shape)}
    for name in _LEVELS[1:]:
        values = [getattr(e, name, None) for e in same]
        if is_level(name, values[0]):
            levels[name] = torch.tensor(values, device=tau.device, dtype=tau.dtype).view(shape)
    return replace(same[0], **levels)


def _sample(estimator: Estimator, logits: Tensor, generator: torch.Generator | None) -> Tensor:
    if isinstance(estimator, Pathwise):
        return estimator.sample(logits, generator=generator)
    with torch.no_grad():
        rows = simplex.shift(logits)
        return one_hot_rows(rows, draw_independent(rows, 1, generator)).squeeze(0)
