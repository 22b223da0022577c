"""Neighbouring runs with different score-function estimators whose costs are evaluated in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gapped.score import Cost, Draws, Score, one_hot_rows


@dataclass(frozen=True)
class Neighbours(Score):
    """One estimator along the run axis for others that evaluate the cost at equally many samples.

    Each has its own runs of logits ``(R, ...)`` and sees nothing of the others.
    """

    members: tuple[tuple[int, int, Score], ...]
    """First run, last run exclusive, and the estimator of these."""

    def check(self, cost: Cost) -> None:
        for each, own in self._costs(cost):
            each.check(own)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> list[Any]:
        return [each.draw(logits[a:b], generator) for a, b, each in self.members]

    def index(self, logits: Tensor, noise: list[Any]) -> Tensor:
        own = zip(self.members, noise, strict=True)
        return torch.cat([each.index(logits[a:b], drawn) for (a, b, each), drawn in own], 1)

    def points(self, logits: Tensor, index: Tensor) -> Tensor:
        # All samples of a run next to each other, as a batched product over the runs wants them.
        return one_hot_rows(logits, index.transpose(0, 1)).transpose(0, 1)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        noise, *rest = draws
        gradients = []
        for (a, b, each), drawn, (_, own) in zip(self.members, noise, self._costs(cost), strict=True):
            gradients.append(each.gradient(own, Draws(drawn, *(tensor[:, a:b] for tensor in rest))))
        return torch.cat(gradients)

    def _costs(self, cost: Cost) -> Iterator[tuple[Score, Cost]]:
        for a, b, each in self.members:
            yield each, replace(cost, logits=cost.logits[a:b])
