"""Gumbel-Rao: straight-through Gumbel-Softmax averaged over the noise that leads to the same category."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped.checks import check_count, ignore_eps
from gapped.docstrings import documented
from gapped.gradient import Points
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Pathwise, Source, cached_estimator
from gapped.simplex import conditional_noise, divide, per_row


@documented
@dataclass(frozen=True, eq=False)
class GumbelRao(Pathwise):
    """Gumbel-softmax averaged over noise given the category.

    Its method `sample` draws what `gapped.gumbel_rao` draws, whose help has the mathematics.

    Arguments:
        (tau, hard, samples, draw, backend)
    """

    name = "gumbel-rao"

    tau: float | Tensor = 0.7
    samples: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("samples", self.samples)

    def fused(self) -> Fused | None:
        return Fused("gumbel-rao", self.tau, samples=self.samples, soft=not self.hard)

    def draw_given(
        self, logits: Tensor, category: Tensor, generator: torch.Generator | None, surrogate: bool
    ) -> Draw:
        log_p = self.centre(logits, Draw(category))
        scores = conditional_noise(log_p, category, self.samples, generator, surrogate)
        return Draw(category, None if scores is None else scores - scores.amax(-1, keepdim=True))

    def centre(self, logits: Tensor, draw: Draw) -> Tensor:
        """The log-probabilities that noise is added to, given the drawn categories."""
        return draw.log_softmax(logits)

    def points(self, logits: Tensor, draw: Draw) -> Points:
        assert draw.noise is not None
        tau = per_row(self.tau, logits)
        return Points(draw.softmax(divide(draw.noise, tau)), 1 / (tau * self.samples))


@documented
def gumbel_rao(
    logits: Tensor,
    tau: float | Tensor = 0.7,
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
    """Gumbel-Rao sample (GR-MC): Gumbel-softmax, averaged given the category.

    The category i is drawn from p = softmax(θ), then `samples` times θ + G given that its argmax is i. The
    surrogate h is the mean of their softmaxes at τ, with the noise held constant.

    - Law of hard samples: exactly softmax(θ).
    - Bias: that of straight-through Gumbel-softmax at the same temperature, whose law one sample has; more
      only lower its variance.
    - Cost: one evaluation of what follows; time and memory grow with `samples`.
    - `draw="argmax"`: i is the largest logit, and so the winner that the noise is drawn for.

    >>> g = torch.Generator().manual_seed(0)
    >>> gumbel_rao(torch.zeros(2, 3), tau=0.5, hard=True, samples=10, generator=g).sum(-1)
    tensor([1., 1.])

    References: Paulus, Maddison, Krause (2021).
    """
    ignore_eps(eps)
    estimator = cached_estimator(GumbelRao, tau=tau, hard=hard, samples=samples, draw=draw, backend=backend)
    return estimator.sample(logits, dim=dim, mask=mask, generator=generator)
