"""Validation while training: the best weights of each run, and learning rates that fall on a plateau."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_FACTOR = 0.5
_THRESHOLD = 1e-4


@dataclass(frozen=True)
class SelectionRule:
    """How a task's runs are validated while they train."""

    metric: str
    """What the score is called in records; more is better."""
    score: Callable[[], Tensor]
    """Takes the score of each run, ``(R,)``; NaN for a run that is broken."""
    validations: int
    """How often per epoch, evenly spaced, the last time at its end."""
    patience: int
    """After more than so many validations in a row without progress the learning rate is halved."""

    def due(self, step: int, steps: int) -> bool:
        """Whether a validation follows step number `step`, counted from 0, of `steps`."""
        return (step + 1) * self.validations // steps > step * self.validations // steps


class Selection:
    """The state of validation: the best score and weights of each run, and its learning-rate factor.

    Progress is what `torch.optim.lr_scheduler.ReduceLROnPlateau` takes it to be: a score above the best
    one by more than its ten-thousandth part. The best weights are those of the highest score, the first
    of equals.
    """

    def __init__(self, rule: SelectionRule, parameters: Sequence[Tensor]) -> None:
        self.rule, self.parameters = rule, list(parameters)
        runs, device = len(self.parameters[0]), self.parameters[0].device
        self.last = torch.full((runs,), torch.nan, dtype=torch.float64, device=device)
        self.best = torch.full_like(self.last, -torch.inf)
        self.mark = self.best.clone()
        self.bad = torch.zeros(runs, dtype=torch.int64, device=device)
        self.factor = torch.ones_like(self.last)
        self.weights = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def observe(self, scores: Tensor) -> None:
        """Update the state with the scores of a validation, ``(R,)``."""
        self.last.copy_(scores)
        better = self.last > self.best
        self.best.copy_(torch.where(better, self.last, self.best))
        for best, p in zip(self.weights, self.parameters, strict=True):
            best.copy_(torch.where(better.view(-1, *(1,) * (p.dim() - 1)), p, best))
        progress = self.last > self.mark * (1 + _THRESHOLD)
        self.mark.copy_(torch.where(progress, self.last, self.mark))
        self.bad.copy_(torch.where(progress, 0, self.bad + 1))
        stuck = self.bad > self.rule.patience
        self.factor.mul_(torch.where(stuck, _FACTOR, 1.0))
        self.bad.masked_fill_(stuck, 0)

    @contextmanager
    def best_weights(self) -> Iterator[None]:
        """A context in which the model has the best weights instead of the present ones."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, object]:
        names = ("last", "best", "mark", "bad", "factor")
        return {**{name: getattr(self, name) for name in names}, "weights": self.weights}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        for name in ("last", "best", "mark", "bad", "factor"):
            getattr(self, name).copy_(state[name])
        for mine, theirs in zip(self.weights, state["weights"], strict=True):  # type: ignore[call-overload]
            mine.copy_(theirs)

    @torch.no_grad()
    def _swap(self) -> None:
        # In place: a captured graph holds the addresses of the weights.
        for best, p in zip(self.weights, self.parameters, strict=True):
            present = p.clone()
            p.copy_(best)
            best.copy_(present)
