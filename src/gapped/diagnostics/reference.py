"""The gradient that estimators are measured against."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.diagnostics.intervals import Interval, norm_interval
from gapped.diagnostics.stream import GradientStream
from gapped.score import Cost, Draws, Score, draw_independent


@dataclass(frozen=True)
class Coordinates(Score):
    r"""One variable summed out at a time: the other variables are drawn, this one takes all its values.

    With :math:`f_{lk}` the cost of the sample after its variable :math:`l` is set to :math:`k`,

    .. math:: \nabla_{\theta_l} = p_l \odot \bigl(f_l - \langle p_l, f_l\rangle\bigr).

    It is the exact gradient given the other variables, so it is unbiased, with no more variance than any
    estimator that draws all of them by themselves. `L K` evaluations, and one to learn which axes are the
    batch. With one variable it is exact.

    References: Titsias and Lázaro-Gredilla (2015).
    """

    def estimate(
        self, cost: Cost, generator: torch.Generator | None, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits, categories = cost.logits, cost.logits.shape[-1]
        with torch.no_grad():
            drawn = draw_independent(logits, 1, generator)
            batch = cost(simplex.one_hot(drawn, categories, logits.dtype)).shape[1:]
            p = simplex.normalised(logits).reshape(*batch, -1, categories)
            index = _substituted(drawn.reshape(*batch, -1), p > 0)
            points = simplex.one_hot(index.reshape(-1, *logits.shape[:-1]), categories, logits.dtype)
        # (L K, *batch) to (*batch, L, K)
        costs = cost(points).reshape(-1, categories, *batch).movedim((0, 1), (-2, -1))
        mean = (p * costs).sum(-1, keepdim=True)
        value = mean.mean((-2, -1))
        gradient = (p * (costs - mean)).detach().reshape(logits.shape).to(logits.dtype)
        return value, gradient if wanted else None

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> None:
        raise NotImplementedError("what is evaluated depends on which axes are the batch")

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        raise NotImplementedError("what is evaluated depends on which axes are the batch")


def _substituted(index: Tensor, possible: Tensor) -> Tensor:
    """`index` ``(*batch, L)`` with each entry set to each category in turn, ``(L, K, *batch, L)``.

    Where a category is impossible the entry stays: the cost need not be defined there.
    """
    variables, categories = possible.shape[-2:]
    batch = (1,) * (index.dim() - 1)
    here = torch.eye(variables, dtype=torch.bool, device=index.device).view(variables, 1, *batch, variables)
    value = torch.arange(categories, device=index.device).view(1, categories, *batch, 1)
    return torch.where(here & possible.movedim(-1, 0).unsqueeze(0), value, index)


@dataclass(frozen=True, eq=False)
class Reference:
    """A gradient, and how well it is known."""

    kind: str
    """How it was found."""
    gradient: Tensor
    """The flat gradient ``(d,)``, float64."""
    noise: float = 0.0
    """The trace of the covariance of its error; 0 if it is exact."""
    overlap: float = 0.0
    """The trace of the square of that covariance."""
    samples: int = 0
    """How many gradients were averaged; 0 if it is exact."""

    @classmethod
    def of(cls, kind: str, stream: GradientStream) -> Reference:
        """The mean of a stream of unbiased gradients."""
        count = stream.count
        overlap = float(stream.overlap.mean) / count**2
        return cls(kind, stream.gradient.mean.clone(), stream.variance / count, overlap, count)

    def norm(self, confidence: float) -> Interval:
        """The length of the exact gradient."""
        square = float(self.gradient.square().sum())
        # The root of the overlap bounds the variance along any direction.
        return norm_interval(square, self.noise, self.overlap, math.sqrt(self.overlap), confidence)
