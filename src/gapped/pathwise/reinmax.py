"""ReinMax, a second-order straight-through estimator; ZGR at temperature 1."""

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
class ReinMax(Pathwise):
    """ReinMax: straight-through, second-order accurate.

    Its method `sample` draws what `gapped.reinmax` draws, whose help has the mathematics.

    Arguments:
        (tau)
        hard: True; there is no soft sample.
        (draw, backend)
    """

    name = "reinmax"
    has_surrogate = False

    def fused(self) -> Fused:
        return Fused("reinmax", self.tau)

    def points(self, logits: Tensor, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        halfway = draw.add(draw.softmax(divide(logits, tau)) / 2, 0.5)
        return Points(torch.stack([halfway, draw.softmax(logits)]), (2.0, -0.5))

    def gate_slopes(self, lead: Tensor) -> Tensor:
        # Half of the tempered mass m of the other value is its mass in the centre: 2 m/2 (1 - m/2).
        other = torch.sigmoid(-divide(lead, per_row(self.tau, lead)))
        return other - (other.square() + logistic_slope(lead)) / 2


@documented
def reinmax(
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
    """ReinMax sample: straight-through, second-order accurate.

    One tensor is returned, not a sample and probabilities as in the authors' package.

    Arguments:
        tau: Temperature τ of the gradient, a number or a tensor that broadcasts against the logits' shape
            without the category axis. The authors recommend 1 or more.
        hard: True; there is no soft sample.

    The one-hot D is drawn from p = softmax(θ). A gradient g at the sample becomes::

        2 J((softmax(θ/τ) + D)/2) g - J(p) g / 2,    J(q) = diag(q) - q qᵀ

    At τ = 1 this equals ZGR, [J(p) + (D - p)(D - p)ᵀ] g / 2, and is the limit of Gumbel-Rao at temperature 0.

    - Law of hard samples: exactly softmax(θ).
    - Bias: none for costs up to quadratic at τ = 1.
    - Cost: one evaluation of what follows, one uniform per row.

    >>> g = torch.Generator().manual_seed(0)
    >>> reinmax(torch.zeros(2, 3), generator=g).sum(-1)
    tensor([1., 1.])

    References: Liu, Dong, Liu, Yu, Gao (2023); Shekhovtsov (2023) for ZGR.
    """
    ignore_eps(eps)
    return cached_estimator(ReinMax, tau=tau, hard=hard, draw=draw, backend=backend).sample(
        logits, dim=dim, mask=mask, generator=generator
    )
