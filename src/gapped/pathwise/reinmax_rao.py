"""ReinMax-Rao: ReinMax with Gumbel-Rao in the place of its first Jacobian."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gapped.checks import ignore_eps
from gapped.docstrings import documented
from gapped.gradient import Points, less_half_of_last
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Source, cached_estimator
from gapped.pathwise.gumbel_rao import GumbelRao
from gapped.simplex import divide, per_row


@documented
@dataclass(frozen=True, eq=False)
class ReinMaxRao(GumbelRao):
    """ReinMax averaged over noise given the category.

    Its method `sample` draws what `gapped.reinmax_rao` draws, whose help has the mathematics.

    Arguments:
        (tau)
        hard: True; there is no soft sample.
        (samples, draw, backend)
    """

    name = "reinmax-rao"
    tau: float | Tensor = 1.0
    has_surrogate = False
    has_gate_kernel = False

    def fused(self) -> Fused:
        return Fused("reinmax-rao", self.tau, samples=self.samples)

    def centre(self, logits: Tensor, draw: Draw) -> Tensor:
        log_p = draw.log_softmax(logits)
        # Not the logarithm of a sum: p may be too small for a number of its own.
        is_drawn = torch.arange(logits.shape[-1], device=logits.device) == draw.category.unsqueeze(-1)
        return torch.where(is_drawn, log_p.exp().log1p(), log_p) - math.log(2)

    def points(self, logits: Tensor, draw: Draw) -> Points:
        assert draw.noise is not None
        tau = per_row(self.tau, logits)
        relaxed, p = draw.softmax(divide(draw.noise, tau)), draw.softmax(logits).unsqueeze(0)
        return Points(torch.cat([relaxed, p]), 2 / (tau * self.samples), less_half_of_last)


@documented
def reinmax_rao(
    logits: Tensor,
    tau: float | Tensor = 1.0,
    hard: bool = True,
    *,
    samples: int = 10,
    draw: Source = "sample",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """ReinMax-Rao sample: ReinMax, averaged over noise given the category.

    Arguments:
        hard: True; there is no soft sample.

    The one-hot D is drawn from p = softmax(θ). ReinMax has the gradient 2 J((p + D)/2) g - J(p) g / 2. Here
    its first Jacobian is that of Gumbel-Rao at the logits θ_D = log((p + D)/2): with z_m, `samples` draws of
    θ_D + G given that D is its argmax, and q_m = softmax(z_m/τ), it is::

        (2/τ) mean_m J(q_m) g - J(p) g / 2

    The authors' second estimator, ReinMax-CV, is not here: see `docs/field_estimators.md`.

    - Law of hard samples: exactly softmax(θ).
    - Bias: biased, for quadratic costs too, unlike ReinMax.
    - Cost: one evaluation of what follows; time grows with `samples`, and so does memory, except in the
      kernel: on a GPU, for rows of up to 4,096 categories.

    >>> g = torch.Generator().manual_seed(0)
    >>> reinmax_rao(torch.zeros(2, 3), samples=10, generator=g).sum(-1)
    tensor([1., 1.])

    References: Wang and Bui (2026).
    """
    ignore_eps(eps)
    estimator = cached_estimator(ReinMaxRao, tau=tau, hard=hard, samples=samples, draw=draw, backend=backend)
    return estimator.sample(logits, dim=dim, mask=mask, generator=generator)
