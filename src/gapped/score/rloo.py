"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped.checks import check_count
from gapped.score.base import Cost, Sampled, Score, draw_independent, score_product
from gapped.score.reinforce import leave_one_out


@dataclass(frozen=True)
class RLOO(Score):
    r"""REINFORCE with a leave-one-out baseline: several samples, each judged by the others.

    .. math:: \frac1n \sum_i \Bigl(f(D_i) - \frac1{n-1}\sum_{j\ne i} f(D_j)\Bigr)\,(D_i - p).

    The baseline of a sample does not depend on it, so nothing is added in the mean; adding a constant to
    the cost changes nothing at all. It equals ``Reinforce("leave-one-out", samples=n)``.

    - Bias: none.
    - Cost: `samples` evaluations, no derivative of the cost; one uniform per row and sample.

    >>> import gapped
    >>> logits = torch.zeros(3, requires_grad=True)
    >>> gapped.expectation(lambda z: z.sum(-1), logits, RLOO(4)).backward()
    >>> logits.grad
    tensor([0., 0., 0.])

    References: Kool, van Hoof, Welling (2019); Salimans and Knowles (2014).
    """

    samples: int = 2
    """How many samples, at least two."""

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)

    @property
    def evaluations(self) -> int:
        return self.samples

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        return draw_independent(logits, self.samples, generator)

    def gradient(self, cost: Cost, sampled: Sampled) -> Tensor:
        return score_product(cost, sampled, leave_one_out(sampled.costs))
