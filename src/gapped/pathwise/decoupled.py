"""Straight-through Gumbel-Softmax with a temperature for each direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_level, ignore_eps
from gapped.docstrings import documented
from gapped.gradient import Points
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Pathwise, Source, cached_estimator
from gapped.simplex import conditional_noise, divide, per_row


@documented
@dataclass(frozen=True, eq=False)
class DecoupledGumbelSoftmax(Pathwise):
    """Gumbel-softmax with a second, forward temperature.

    Its method `sample` draws what `gapped.decoupled_gumbel_softmax` draws, whose help has the mathematics.

    Arguments:
        (tau, hard, tau_forward, draw, backend)
    """

    name = "decoupled"
    levels = ("tau", "tau_forward")

    tau_forward: float | Tensor = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_level("tau_forward", self.tau_forward, positive=True)

    def fused(self) -> Fused:
        return Fused("decoupled", self.tau, tau_forward=self.tau_forward, soft=not self.hard)

    def draw_category(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        log_e = simplex.log_exponential(logits, generator)
        tau_forward = per_row(self.tau_forward, logits)
        scores = divide(logits, tau_forward) - log_e
        # A tensor on a GPU may hold an invalid temperature, which makes its row NaN.
        may_be_nan = isinstance(tau_forward, Tensor)
        return Draw(simplex.argmax_index(scores) if may_be_nan else scores.argmax(-1), log_e)

    def draw_given(
        self, logits: Tensor, category: Tensor, generator: torch.Generator | None, surrogate: bool
    ) -> Draw:
        log_p = torch.log_softmax(divide(logits, per_row(self.tau_forward, logits)), -1)
        scores = conditional_noise(log_p, category, 1, generator, surrogate)
        if scores is None:
            return Draw(category)
        # The noise alone, its sign reversed. A category that does not exist has none.
        return Draw(category, torch.where(log_p == -torch.inf, 0.0, log_p - scores[0]))

    def law(self, logits: Tensor) -> tuple[Tensor, float | Tensor]:
        tau_forward = per_row(self.tau_forward, logits)
        return divide(logits, tau_forward), 1 / tau_forward

    def points(self, logits: Tensor, draw: Draw) -> Points:
        assert draw.noise is not None
        tau = per_row(self.tau, logits)
        return Points(draw.softmax(divide(logits, tau) - draw.noise).unsqueeze(0), 1 / tau)


@documented
def decoupled_gumbel_softmax(
    logits: Tensor,
    tau: float | Tensor = 1.0,
    hard: bool = True,
    *,
    tau_forward: float | Tensor = 1.0,
    draw: Source = "sample",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """Gumbel-softmax sample with one temperature to draw, another for gradients.

    With one Gumbel noise G, added after dividing (else the forward temperature could not matter), the hard
    sample is the one-hot argmax of θ/τ_f + G. The surrogate is h = softmax(θ/τ + G), whose gradient is
    J(h) g / τ.

    - Law of hard samples: exactly softmax(θ/τ_f).
    - Bias: biased.
    - Cost: one evaluation of what follows, K noise values per row.
    - `draw="argmax"`: G is drawn given that the largest logit wins at the forward temperature.

    >>> g = torch.Generator().manual_seed(0)
    >>> decoupled_gumbel_softmax(torch.zeros(2, 3), tau=2.0, hard=True, generator=g).sum(-1)
    tensor([1., 1.])

    References: Shah, Yan, Mozer, Liu (2024).
    """
    ignore_eps(eps)
    estimator = cached_estimator(
        DecoupledGumbelSoftmax, tau=tau, hard=hard, tau_forward=tau_forward, draw=draw, backend=backend
    )
    return estimator.sample(logits, dim=dim, mask=mask, generator=generator)
