"""Score-function estimators along the run axis: several in one call, and with a state for each run."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped.errors import GappedError, reject
from gapped.lab.fleet.run_layers import Linear, generators
from gapped.registry import Estimator
from gapped.score import Cost, Draws, Score, one_hot_rows
from gapped.score.nvil import NVIL
from gapped.score.rebar import REBAR
from gapped.score.trainable import Perceptron, Trainable


@dataclass(frozen=True)
class ScoreGroup(Score):
    """One estimator along the run axis for others that evaluate the cost at equally many samples.

    Each has its own runs of the logits ``(R, ...)``, independent of the others.
    """

    members: tuple[tuple[int, int, Score], ...]
    """First run, last run exclusive, and the estimator of these."""

    def check(self, cost: Cost) -> None:
        for each, own in self._costs(cost):
            each.check(own)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> list[Any]:
        return [each.draw(logits[a:b], generator) for a, b, each in self.members]

    def index(self, logits: Tensor, noise: list[Any]) -> Tensor:
        members = zip(self.members, noise, strict=True)
        return torch.cat([each.index(logits[a:b], own) for (a, b, each), own in members], 1)

    def points(self, logits: Tensor, index: Tensor) -> Tensor:
        # All samples of a run next to each other, as a batched product over the runs wants them.
        return one_hot_rows(logits, index.transpose(0, 1)).transpose(0, 1)

    def gradient(self, cost: Cost, sampled: Draws) -> Tensor:
        noise, *rest = sampled
        gradients = []
        for (a, b, each), own, (_, cost_) in zip(self.members, noise, self._costs(cost), strict=True):
            gradients.append(each.gradient(cost_, Draws(own, *(tensor[:, a:b] for tensor in rest))))
        return torch.cat(gradients)

    def _costs(self, cost: Cost) -> Iterator[tuple[Score, Cost]]:
        for a, b, each in self.members:
            yield each, replace(cost, logits=cost.logits[a:b])


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


def structure(estimator: Trainable) -> Hashable:
    """What estimators with a state must have in common to be stacked."""
    network = getattr(estimator, "network", None)
    rest = tuple(getattr(estimator, name, None) for name in ("decay", "scale", "samples"))
    return network.hidden if isinstance(network, Perceptron) else network, rest


def stack_trained(same: Sequence[Estimator], first: Trainable, rows: int, widths: Widths | None) -> Trainable:
    """One estimator for all of `same`, like the `first` of them, whose state has a leading run axis.

    Runs have a batch axis, so that logits are ``(R, B, ...)`` with `rows` axes between run and category.
    """
    runs, name = len(same), type(first).__name__
    stack = copy.deepcopy(first)
    if isinstance(stack, REBAR):
        for option, axes in (("eta", 1), ("log_tau", rows)):
            values = [getattr(each, option).detach() for each in same]
            if any(value.dim() for value in values):
                raise reject(option.removeprefix("log_"), "a tensor", f"a number for each run of {name}")
            setattr(stack, option, torch.nn.Parameter(torch.stack(values).view(-1, *(1,) * axes)))
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
