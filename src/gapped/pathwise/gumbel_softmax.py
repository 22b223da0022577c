"""Gumbel-Softmax and its straight-through form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import has_tangent, ignore_eps, requires_grad
from gapped.docstrings import documented
from gapped.gradient import Points, with_points
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Outcome, Pathwise, Source, cached_estimator
from gapped.simplex import conditional_noise, divide, per_row


@documented
@dataclass(frozen=True, eq=False)
class GumbelSoftmax(Pathwise):
    """Gumbel-softmax (Concrete); straight-through if hard.

    Its method `sample` draws what `gapped.gumbel_softmax` draws, whose help has the mathematics.

    Arguments:
        (tau, hard, draw, backend)
    """

    name = "gumbel-softmax"
    learns_tau = True

    tau: float | Tensor = 0.7

    def fused(self) -> Fused | None:
        if isinstance(self.tau, Tensor) and (requires_grad(self.tau) or has_tangent(self.tau)):
            return None
        return Fused("gumbel-softmax", self.tau, soft=not self.hard)

    def draw_category(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        scores = logits - simplex.log_exponential(logits, generator)
        if not surrogate:
            return Draw(scores.argmax(-1))
        top, index = scores.max(-1, keepdim=True)
        return Draw(index.squeeze(-1), scores - top)

    def draw_given(
        self, logits: Tensor, category: Tensor, generator: torch.Generator | None, surrogate: bool
    ) -> Draw:
        scores = conditional_noise(torch.log_softmax(logits, -1), category, 1, generator, surrogate)
        return Draw(category, None if scores is None else simplex.shift(scores[0]))

    def points(self, logits: Tensor, draw: Draw) -> Points:
        assert draw.noise is not None
        tau = per_row(self.tau, logits)
        return Points(draw.softmax(divide(draw.noise, tau)).unsqueeze(0), 1 / tau)

    def attach(self, rows: Tensor, outcome: Outcome) -> Tensor:
        if not self.has_learned_tau():
            return super().attach(rows, outcome)
        # The surrogate h is the softmax of s = (theta + G)/tau, which gets the gradient J(h) g, and autograd
        # takes it on to theta and tau. Up to a constant of the row, s is log h.
        assert isinstance(self.tau, Tensor)
        assert outcome.gradient is not None
        points, logits = outcome.gradient.points, simplex.computed(rows)
        tau = self.tau.to(logits).unsqueeze(-1)
        exists = points[0] > 0
        noise = (tau * points[0].log() - logits).detach()
        scores = torch.where(exists, logits + noise.masked_fill(~exists, 0.0), 0.0) / tau
        return with_points(outcome.value, scores, points, 1.0)


@documented
def gumbel_softmax(
    logits: Tensor,
    tau: float | Tensor = 1.0,
    hard: bool = False,
    *,
    draw: Source = "sample",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """Gumbel-softmax sample; with `hard`, straight-through Gumbel-softmax (STGS).

    Soft by default, at a temperature of 1: torch's function with torch's defaults. The class
    `gapped.GumbelSoftmax`, and so the text "gumbel-softmax", is hard and has a temperature of 0.7.

    Arguments:
        (logits, tau, hard, draw, dim, mask, generator, eps, backend)

    With Gumbel noise G, the surrogate is h = softmax((θ + G)/τ) and the hard sample is the one-hot argmax of
    θ + G. The gradient is that of h.

    - Law of hard samples: exactly softmax(θ).
    - Bias: biased; as τ → 0 the mean tends to that of ReinMax at temperature 1, while the variance grows
      without bound.
    - Cost: one evaluation of what follows, K noise values per row.
    - `draw="argmax"`: G is drawn given that the largest logit wins, as in `gapped.gumbel_rao` with one draw.
      Without any noise in the gradient: `gapped.straight_through`.
    - `tau` may be a tensor that requires a gradient, hard or soft: it gets that of (θ + G)/τ, so the
      temperature can be learned.

    >>> g = torch.Generator().manual_seed(0)
    >>> gumbel_softmax(torch.zeros(3), tau=0.5, hard=True, generator=g).sum()
    tensor(1.)

    References: Jang, Gu, Poole (2017); Maddison, Mnih, Teh (2017).
    """
    ignore_eps(eps)
    return cached_estimator(GumbelSoftmax, tau=tau, hard=hard, draw=draw, backend=backend).sample(
        logits, dim=dim, mask=mask, generator=generator
    )
