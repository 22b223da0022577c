"""Estimators with parameters of their own, trained to lower the variance of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped.errors import GappedError
from gapped.score.base import Score

__all__ = ["Trained"]


class Trained(torch.nn.Module, Score):
    """A score-function estimator that is a module: it has a state_dict, and parameters to be optimised.

    In training mode each call of `gapped.expectation` that estimates a gradient also leaves behind a loss for
    the estimator's own parameters, and nothing else: `variance_loss` hands it out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loss: Tensor | None = None
        self._slopes: list[tuple[torch.nn.Parameter, Tensor]] = []

    def variance_loss(self) -> Tensor:
        """The loss that the last `gapped.expectation` left behind, a scalar; it can be taken once.

        Its gradient reaches this module's parameters alone, so it may be added to any other loss:
        ``(gapped.expectation(f, logits, est).mean() + est.variance_loss()).backward()``.
        """
        if self._loss is None:
            name = type(self).__name__
            raise GappedError(f"{name}.variance_loss: nothing to train on, call gapped.expectation before it")
        loss = self._loss
        for parameter, slope in self._slopes:
            # Adds a slope and exactly no value.
            loss = loss + ((parameter - parameter.detach()) * slope).sum()
        self._loss, self._slopes = None, []
        return loss

    def is_trained(self) -> bool:
        """Whether there is anything to train, and it is the time for it."""
        return self.training and any(parameter.requires_grad for parameter in self.parameters())

    def leave(self, losses: Tensor) -> None:
        """Keep the mean of `losses` and its slopes for `variance_loss`, without the graph behind them."""
        if losses.numel() == 0:
            return
        loss = losses.mean()
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
        self._loss = loss.detach()
        self._slopes = [(p, s) for p, s in zip(parameters, slopes, strict=True) if s is not None]
