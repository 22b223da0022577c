"""The straight-through estimator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped.checks import ignore_eps
from gapped.docstrings import documented
from gapped.gradient import Points
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Pathwise, Source, cached_estimator
from gapped.simplex import divide, logistic_slope, per_row


@documented
@dataclass(frozen=True, eq=False)
class StraightThrough(Pathwise):
    """Straight-through: the gradient of the softmax itself.

    Its method `sample` draws what `gapped.straight_through` draws, whose help has the mathematics.

    Arguments:
        (tau, hard, draw, backend)
    """

    name = "straight-through"
    is_consistent = False

    def fused(self) -> Fused:
        return Fused("straight-through", self.tau, soft=not self.hard)

    def points(self, logits: Tensor, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        return Points(draw.softmax(divide(logits, tau)).unsqueeze(0), 1 / tau)

    def gate_slopes(self, lead: Tensor) -> Tensor:
        tau = per_row(self.tau, lead)
        return divide(logistic_slope(divide(lead, tau)), tau)


@documented
def straight_through(
    logits: Tensor,
    tau: float | Tensor = 1.0,
    hard: bool = True,
    *,
    draw: Source = "sample",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """Straight-through sample: a category, with the gradient of the probabilities.

    The category is drawn from p = softmax(θ); the surrogate is h = softmax(θ/τ). It does not know what was
    drawn: property 1 of the paper (consistency) fails.

    - Law of hard samples: exactly softmax(θ).
    - Bias: none for linear costs at τ = 1, else biased.
    - Cost: one evaluation, one uniform per row.

    >>> straight_through(torch.tensor([0.0, 0.0]), hard=False)
    tensor([0.5000, 0.5000])

    References: Bengio, Léonard, Courville (2013).
    """
    ignore_eps(eps)
    return cached_estimator(StraightThrough, tau=tau, hard=hard, draw=draw, backend=backend).sample(
        logits, dim=dim, mask=mask, generator=generator
    )
