"""GapMax: ReinMax with each loser's expected odds under Gumbel noise; the default, without a temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped.checks import ignore_eps
from gapped.docstrings import documented
from gapped.gradient import Points, less_half_of_last
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Pathwise, Source, cached_estimator
from gapped.simplex import LEAST, halfway_odds, logistic_slope, per_row

# Of a number torch would make this tensor at every use.
_ONE = torch.ones((), device="cpu")


@documented
@dataclass(frozen=True, eq=False)
class GapMax(Pathwise):
    """ReinMax with expected odds for its halves: the default.

    Its method `sample` draws what `gapped.gapmax` draws, whose help has the mathematics.

    Arguments:
        tau: Studies vary it; nothing is gained by tuning it.
        hard: True; there is no soft sample.
        (draw, backend)
    """

    name = "gapmax"
    has_surrogate = False

    def fused(self) -> Fused:
        is_plain = not isinstance(self.tau, Tensor) and self.tau == 1
        return Fused("gapmax" if is_plain else "gapmax-tempered", self.tau)

    def points(self, logits: Tensor, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        weights = logits.exp()
        total = draw.total(weights)
        # The logit of a category that does not exist is not finite.
        odds = halfway_odds(logits.clamp(min=LEAST), weights, total)
        if isinstance(tau, Tensor) or tau != 1:
            odds = odds ** (1 / tau)
        odds = draw.put(odds, 1.0)
        points = torch.stack([odds / draw.total(odds), weights / total])
        return Points(points, 2 / tau, less_half_of_last)

    def gate_slopes(self, lead: Tensor) -> Tensor:
        tau = per_row(self.tau, lead)
        # Of the values' logits, the larger one is 0.
        other = (-lead).clamp(max=0.0)
        weight = other.exp()
        odds = halfway_odds(other.clamp(min=LEAST), weight, weight + lead.clamp(max=0.0).exp())
        if isinstance(tau, Tensor) or tau != 1:
            odds = odds ** (1 / tau)
        return odds / (1 + odds).square() * (2 / tau) - logistic_slope(lead) / 2

    def pull(self, grad: Tensor, logits: Tensor, draw: Draw) -> Tensor:
        if self.tau != 1 or type(self) is not GapMax:
            return super().pull(grad, logits, draw)
        # What `points` gives, in place.
        weights = logits.exp()
        total = weights.sum(-1, keepdim=True)
        odds = halfway_odds(logits, weights, total, _ONE).scatter_(-1, draw.category.unsqueeze(-1), 1.0)
        centre = torch._softmax_backward_data(grad, odds.div_(odds.sum(-1, keepdim=True)), -1, grad.dtype)
        law = torch._softmax_backward_data(grad, weights.div_(total), -1, grad.dtype)
        return centre.add_(centre).add_(law, alpha=-0.5)


@documented
def gapmax(
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
    """GapMax sample: a gradient of second order, without a temperature.

    It is the default: `gapped.sample(logits)` calls it.

    Arguments:
        tau: Temperature τ of the gradient, a number or a tensor that broadcasts against the logits' shape
            without the category axis. 1 is the value to use; studies vary it.
        hard: True; there is no soft sample.

    The one-hot D, of category i, is drawn from p = softmax(θ). ReinMax has the gradient
    2 J((p + D)/2) g - J(p) g / 2. GapMax keeps its centre (p + D)/2 and adds Gumbel noise there, of which
    only the expectation is needed: given that i wins, a loser of probability x has the odds

        o(x) = x (-log x - 1 + x) / (1 - x)²

    against i on average. With q_i ∝ 1 and q_j ∝ o(p_j/2)^(1/τ) for j ≠ i, a gradient g at the sample is::

        (2/τ) J(q) g - J(p) g / 2,    J(q) = diag(q) - q qᵀ

    - Law of hard samples: exactly softmax(θ).
    - Bias: biased, for linear costs too.
    - Cost: one evaluation of what follows, one uniform per row.

    >>> g = torch.Generator().manual_seed(0)
    >>> gapmax(torch.zeros(2, 3), generator=g).sum(-1)
    tensor([1., 1.])
    """
    ignore_eps(eps)
    return cached_estimator(GapMax, tau=tau, hard=hard, draw=draw, backend=backend).sample(
        logits, dim=dim, mask=mask, generator=generator
    )
