"""Estimators with a state, for the runs of a fleet: each run has its own share of it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gapped.errors import GappedError, reject
from gapped.lab.fleet.layers import Linear, generators
from gapped.score.nvil import NVIL
from gapped.score.rebar import REBAR
from gapped.score.trainable import Perceptron, Trainable


class Widths(NamedTuple):
    """How many numbers an example has."""

    context: int
    """In what a learned baseline looks at."""
    sample: int
    """In all of its variables together."""


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
    """What estimators with a state must have in common to be joined."""
    network = getattr(estimator, "network", None)
    rest = tuple(getattr(estimator, name, None) for name in ("decay", "scale", "samples"))
    return network.hidden if isinstance(network, Perceptron) else network, rest


def joined(same: Sequence[Trainable], rows: int, widths: Widths | None) -> Trainable:
    """One estimator for all of `same`, whose state has a leading run axis.

    Runs have a batch axis, so that logits are ``(R, B, ...)`` with `rows` axes between run and category.
    """
    first, runs = same[0], len(same)
    name = type(first).__name__
    made = copy.deepcopy(first)
    if isinstance(made, REBAR):
        for option, axes in (("eta", 1), ("log_tau", rows)):
            values = [getattr(each, option).detach() for each in same]
            if any(value.dim() for value in values):
                raise reject(option.removeprefix("log_"), "a tensor", f"a number for each run of {name}")
            stacked = torch.stack(values).view(-1, *(1,) * axes)
            setattr(made, option, torch.nn.Parameter(stacked))
    elif isinstance(made, NVIL):
        for buffer in ("mean", "variance"):
            made.register_buffer(buffer, torch.zeros(runs, 1, dtype=torch.float64))
    network = getattr(first, "network", None)
    if isinstance(network, Perceptron):
        if widths is None:
            raise GappedError(f"{name}: this task does not say how wide its network must be")
        width = widths.context if isinstance(first, NVIL) else widths.sample
        made.network = RunPerceptron(width, network.hidden, runs)
    elif network is not None:
        accepted = "a number of hidden units: in a fleet each run has its own network"
        raise reject("network", f"a network for {name}", accepted)
    return made
