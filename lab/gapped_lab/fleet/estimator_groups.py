"""One estimator for a whole fleet, made of the estimators of its runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import note_backend, values_unseen
from gapped.errors import GappedError, reject
from gapped.kernels import runner
from gapped.kernels.sampling.fused import Fused
from gapped.objective import expectation
from gapped.pathwise import Pathwise
from gapped.registry import Estimator
from gapped.score import Cost, Draws, Score, draw_independent, one_hot_rows
from gapped.score.nvil import NVIL
from gapped.score.rodeo import RODEO
from gapped.score.trainable import Perceptron, Trainable
from gapped_lab.fleet.run_layers import Linear, generators

Group = tuple[int, int, Estimator]  # first run, last run exclusive, and the estimator of these
_LEVELS = ("tau", "gap", "tau_forward", "eta", "alpha", "beta", "smoothing")


def group_key(estimator: Estimator) -> Hashable:
    """The key of runs that one call samples: everything but the numeric levels."""
    if isinstance(estimator, Trainable):
        network = getattr(estimator, "network", None)
        rest = tuple(getattr(estimator, name, None) for name in ("decay", "scale", "samples", "hidden"))
        return type(estimator), network.hidden if isinstance(network, Perceptron) else network, rest
    options = ((f.name, getattr(estimator, f.name)) for f in fields(estimator))  # type: ignore[arg-type]
    return type(estimator), tuple((name, value) for name, value in options if not is_level(name, value))


@dataclass(frozen=True)
class Part:
    """Neighbouring runs whose costs are evaluated in one call."""

    start: int
    stop: int
    derivatives: int = 0
    """How often the estimator itself differentiates the costs."""

    @property
    def runs(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Grouped:
    """Samples logits ``(R, *rows, K)``, and estimates expectations, with each run's own estimator.

    Neighbouring runs whose estimators differ only in levels, numbers such as `tau` and `gap`, are sampled
    together, with those numbers as tensors along the run axis. `tau` and `smoothing` have one entry per run
    and can be changed in place between steps: all pathwise groups are views of them.
    """

    groups: tuple[Group, ...]
    tau: Tensor
    smoothing: Tensor

    @classmethod
    def of(
        cls,
        estimators: Sequence[Estimator],
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        widths: Widths | None = None,
        *,
        compiled: bool = False,
    ) -> Grouped:
        """Group `estimators`, one per run in order, for logits with `rows` axes between run and category.

        Estimators with networks of their own also need to know the task's `widths`.
        """
        tau, smoothing = (
            torch.tensor(values, device=device, dtype=dtype)
            for values in zip(
                *((_temperature(e), getattr(e, "smoothing", 0.0)) for e in estimators), strict=True
            )
        )
        groups: list[Group] = []
        start = 0
        for _, members in groupby(estimators, key=group_key):
            same = list(members)
            stop, each = start + len(same), same[0]
            if isinstance(each, Pathwise):
                each = _with_levels(same, each, tau[start:stop], smoothing[start:stop], rows)
            elif isinstance(each, Trainable):
                each = stack_trained(same, each, rows, widths).to(device, dtype)
                if compiled and each.needs_slopes:
                    # Of slopes and costs that are given, it calls nothing of the user's.
                    each.gradient = torch.compile(each.gradient, dynamic=False)  # type: ignore[method-assign]
            groups.append((start, stop, each))
            start = stop
        return cls(tuple(groups), tau, smoothing)

    def soft(self) -> Grouped:
        """This sampler with the surrogates as samples, at temperatures that it shares."""
        if not all(isinstance(each, Pathwise) for _, _, each in self.groups):
            raise GappedError("soft samples: a score-function estimator has no surrogate")
        soft = ((a, b, replace(each, hard=False)) for a, b, each in self.groups)  # type: ignore[type-var]
        return replace(self, groups=tuple(soft))

    def discrete(self) -> Grouped:
        """This sampler with one-hot samples, also of runs that train with soft ones."""
        if self.hard:
            return self
        return replace(self, groups=tuple((a, b, _hard(each)) for a, b, each in self.groups))

    @property
    def hard(self) -> bool:
        """Whether the samples of all runs are one-hot."""
        return all(getattr(each, "hard", True) for _, _, each in self.groups)

    @property
    def masks_late(self) -> bool:
        """Whether an estimator needs to see what a mask hides; all must be pathwise then."""
        return any(getattr(each, "masks_late", False) for _, _, each in self.groups)

    @values_unseen()
    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """One sample of each run; that of a score-function estimator carries no gradient."""
        if mask is not None and self.masks_late:
            shares = (torch.split(each, self._sizes) for each in (logits, mask))
            return torch.cat(
                [
                    each.sample(own, mask=allowed, generator=generator)
                    for (_, _, each), own, allowed in zip(self.groups, *shares, strict=True)
                ]
            )
        logits = simplex.masked(logits, mask)
        if len(self.groups) == 1:
            return _sample(self.groups[0][2], logits, generator)
        pieces = torch.split(logits, self._sizes)
        kernels = self._kernels(pieces)
        if kernels is not None:
            from gapped_lab.fleet import side_by_side

            return side_by_side.sample(logits, self._sizes, kernels, generator)
        samples = [
            _sample(each, piece, generator) for (_, _, each), piece in zip(self.groups, pieces, strict=True)
        ]
        return torch.cat(samples)

    def parts(self) -> tuple[Part, ...]:
        """In which parts `expectation` evaluates the costs: a single one where no gradient is computed."""
        return tuple(self._calls) if torch.is_grad_enabled() else (Part(0, self.groups[-1][1]),)

    @values_unseen()
    def expectation(
        self,
        f: Callable[[Tensor, Part], Tensor],
        logits: Tensor,
        generator: torch.Generator | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Estimate each run's expected cost and its gradient, as `gapped.expectation` does; ``(R, *batch)``.

        `f` maps samples ``(n, r, *rows, K)`` of the runs of a part to costs ``(n, r, *batch)``. `context`
        ``(R, *batch, ...)`` is the input of learned baselines. Where no gradient is computed, every estimator
        draws one sample of each run.
        """
        parts = self.parts()
        if len(parts) == 1 and (not torch.is_grad_enabled() or isinstance(self.groups[0][2], Pathwise)):
            return f(self.sample(logits, generator=generator).unsqueeze(0), parts[0]).squeeze(0)
        costs = []
        shares = torch.split(logits, [len(part) for part in parts])
        for (part, estimator), share in zip(self._calls.items(), shares, strict=True):
            if isinstance(estimator, Grouped):
                samples = estimator.sample(share, generator=generator)
                costs.append(f(samples.unsqueeze(0), part).squeeze(0))
                continue
            has_baseline = isinstance(estimator, NVIL) and estimator.network is not None
            costs.append(
                expectation(
                    lambda z, part=part: f(z, part),  # type: ignore[misc]
                    share,
                    estimator,
                    generator=generator,
                    context=context[part.runs] if has_baseline and context is not None else None,
                )
            )
        return torch.cat(costs)

    @property
    def stateful(self) -> list[tuple[Part, Trainable]]:
        """The groups with a state, whose first axis is the run axis, each with its runs."""
        return [(Part(a, b), each) for a, b, each in self.groups if isinstance(each, Trainable)]

    @contextmanager
    def freeze(self) -> Iterator[None]:
        """A context in which estimates neither change a state nor add to an estimator's own loss."""
        for _, each in self.stateful:
            each.eval()
        try:
            yield
        finally:
            for _, each in self.stateful:
                each.train()

    def _kernels(self, pieces: Sequence[Tensor]) -> list[Fused] | None:
        """The kernels of all groups; None if one of them has none."""
        if torch.compiler.is_compiling() or pieces[0].shape[-1] > runner.LONGEST_BLOCK:
            return None
        kernels: list[Fused] = []
        for (_, _, each), piece in zip(self.groups, pieces, strict=True):
            kernel = each.kernel(piece) if isinstance(each, Pathwise) else None
            if kernel is None:
                return None
            kernels.append(kernel)
        note_backend("triton")
        return kernels

    @cached_property
    def _sizes(self) -> list[int]:
        return [b - a for a, b, _ in self.groups]

    @cached_property
    def _calls(self) -> dict[Part, Grouped | Score]:
        """The parts, and what estimates each one's expectation; where that is pathwise, what samples it."""
        calls: dict[Part, Grouped | Score] = {}
        for _, members in groupby(self.groups, key=_call):
            groups = list(members)
            start, stop, first = groups[0][0], groups[-1][1], groups[0][2]
            own = tuple((a - start, b - start, each) for a, b, each in groups)
            if isinstance(first, Pathwise):
                calls[Part(start, stop)] = Grouped(own, self.tau[start:stop], self.smoothing[start:stop])
            else:
                score = first if len(own) == 1 else ScoreGroup(own)  # type: ignore[arg-type]
                calls[Part(start, stop, max(each.derivatives for _, _, each in own))] = score  # type: ignore[union-attr]
        return calls


def _call(group: Group) -> Hashable:
    """The key of groups whose costs are evaluated in one call."""
    start, _, each = group
    if isinstance(each, Pathwise):
        return "pathwise"
    return each.evaluations or ("alone", start)


def is_level(name: str, value: object) -> bool:
    """Whether an option is a number that may differ between runs that are sampled together."""
    return name in _LEVELS and isinstance(value, int | float)


def _temperature(estimator: Estimator) -> float:
    """An estimator's temperature, 1 where it has none; one that trains its own never reads this."""
    tau: float | Tensor = getattr(estimator, "tau", 1.0)
    return float(tau.detach() if isinstance(tau, Tensor) else tau)


def _with_levels(
    same: Sequence[Estimator], first: Pathwise, tau: Tensor, smoothing: Tensor, rows: int
) -> Pathwise:
    """The `first` of `same` with the levels of all as tensors along the run axis."""
    shape = (-1,) + (1,) * rows
    shared = {"tau": tau, "smoothing": smoothing}
    levels: dict[str, Any] = {k: v.view(shape) for k, v in shared.items() if k in first.levels}
    for name in _LEVELS:
        values = [getattr(e, name, None) for e in same]
        if name not in shared and is_level(name, values[0]):
            levels[name] = torch.tensor(values, device=tau.device, dtype=tau.dtype).view(shape)
    return replace(first, **levels)


def _hard(estimator: Estimator) -> Estimator:
    return replace(estimator, hard=True) if isinstance(estimator, Pathwise) else estimator


def _sample(estimator: Estimator, logits: Tensor, generator: torch.Generator | None) -> Tensor:
    if isinstance(estimator, Pathwise):
        return estimator.sample(logits, generator=generator)
    with torch.no_grad():
        rows = simplex.shift(logits)
        return one_hot_rows(rows, draw_independent(rows, 1, generator)).squeeze(0)


@dataclass(frozen=True)
class ScoreGroup(Score):
    """One estimator along the run axis for others that evaluate the cost at equally many samples.

    Each has its own runs of the logits ``(R, ...)``, independent of the others.
    """

    members: tuple[tuple[int, int, Score], ...]
    """First run, last run exclusive, and the estimator of these."""

    @property
    def needs_slopes(self) -> bool:  # type: ignore[override]
        return any(each.needs_slopes for _, _, each in self.members)

    def check(self, cost: Cost) -> None:
        for a, b, each in self.members:
            each.check(replace(cost, logits=cost.logits[a:b]))

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> list[Any]:
        return [each.draw(logits[a:b], generator) for a, b, each in self.members]

    def index(self, logits: Tensor, noise: list[Any]) -> Tensor:
        members = zip(self.members, noise, strict=True)
        return torch.cat([each.index(logits[a:b], own) for (a, b, each), own in members], 1)

    def points(self, logits: Tensor, index: Tensor) -> Tensor:
        # All samples of a run next to each other, as a batched product over the runs wants them.
        return one_hot_rows(logits, index.transpose(0, 1)).transpose(0, 1)

    def gradient(self, cost: Cost, sampled: Draws) -> Tensor:
        gradients = []
        for (a, b, each), noise in zip(self.members, sampled.noise, strict=True):
            slopes = None if sampled.slopes is None else sampled.slopes[:, a:b]
            own = Draws(noise, sampled.category[:, a:b], sampled.costs[:, a:b], slopes)
            gradients.append(each.gradient(replace(cost, logits=cost.logits[a:b]), own))
        return torch.cat(gradients)


class Widths(NamedTuple):
    """How many numbers an example has."""

    context: int
    """In the input of a learned baseline."""
    sample: int
    """In the one-hot samples of all of its variables."""


class RunPerceptron(Perceptron):
    """One perceptron for each run, all with the same weights to begin with."""

    def __init__(self, width: int, hidden: int, runs: int) -> None:
        super().__init__(hidden)
        start = generators([0] * runs)
        self.inner, self.outer = Linear(width, hidden, start), Linear(hidden, 1, start)
        for parameter in self.outer.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, x: Tensor, batch: torch.Size) -> Tensor:
        """Numbers of shape `batch`, ``(R, B)`` or ``(n, R, B)``, for `x` of shape ``(*batch, ...)``."""
        *samples, runs, size = batch
        folded = x.reshape(-1, runs, size, x[(0,) * len(batch)].numel()).transpose(0, 1)
        y = self.layers(folded.flatten(1, 2))
        return y.view(runs, -1, size).transpose(0, 1).reshape(*samples, runs, size)


def stack_trained(same: Sequence[Estimator], first: Trainable, rows: int, widths: Widths | None) -> Trainable:
    """One estimator for all of `same`, like the `first` of them, whose state has a leading run axis.

    Runs have a batch axis, so that logits are ``(R, B, ...)`` with `rows` axes between run and category.
    """
    runs, name = len(same), type(first).__name__
    stack = copy.deepcopy(first)
    # The factor of a control variate has one entry for each example, a temperature one for each row.
    for option, axes in (("alpha", 1), ("beta", 1), ("eta", 1), ("log_tau", rows)):
        if not hasattr(stack, option):
            continue
        values = [getattr(each, option).detach() for each in same]
        if any(value.dim() for value in values):
            raise reject(option.removeprefix("log_"), "a tensor", f"a number for each run of {name}")
        setattr(stack, option, torch.nn.Parameter(torch.stack(values).view(-1, *(1,) * axes)))
    if isinstance(stack, RODEO):
        for key in dict(stack.site.named_parameters()):
            values = [each.get_parameter(f"site.{key}").detach() for each in same if isinstance(each, RODEO)]
            setattr(stack.site, key, torch.nn.Parameter(torch.stack(values).unsqueeze(1)))
    elif isinstance(stack, NVIL):
        for buffer in ("mean", "variance"):
            stack.register_buffer(buffer, torch.zeros(runs, 1, dtype=torch.float64))
    network = getattr(first, "network", None)
    if isinstance(network, Perceptron):
        if widths is None:
            raise GappedError(f"{name}: this task does not say how wide its network must be")
        width = widths.context if isinstance(first, NVIL) else widths.sample
        stack.network = RunPerceptron(width, network.hidden, runs)
    elif network is not None:
        accepted = "a number of hidden units: in a fleet each run has its own network"
        raise reject("network", f"a network for {name}", accepted)
    return stack
