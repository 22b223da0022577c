"""REINFORCE, the score-function estimator, and RLOO, its leave-one-out form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gapped.checks import check_count
from gapped.errors import reject
from gapped.score import Cost, Draws, Score, score_product


@dataclass(frozen=True)
class Reinforce(Score):
    """REINFORCE: the cost times the score.

    Arguments:
        baseline: "none", or "leave-one-out": each cost is taken relative to the mean cost of the other
            samples, which is `gapped.RLOO`. For a running mean take `gapped.NVIL(scale=False)`.
        samples: How many samples are averaged; "leave-one-out" needs at least two.

    With D ~ p = softmax(θ) the gradient is f(D) (D - p), averaged over independent samples.

    - Bias: none. Variance: without a baseline it grows with the square of the cost's level.
    - Cost: `samples` evaluations, no derivative of the cost; one uniform per row and sample.

    >>> import torch, gapped
    >>> logits = torch.zeros(3, requires_grad=True)
    >>> gapped.expectation(lambda z: z.sum(-1), logits, Reinforce(samples=4))
    tensor(1., grad_fn=<_WithGradientBackward>)

    References: Williams (1992).
    """

    name = "reinforce"
    takes_samples_alone = True

    baseline: Literal["none", "leave-one-out"] = "none"
    samples: int = 1

    def __post_init__(self) -> None:
        if self.baseline not in ("none", "leave-one-out"):
            accepted = "'none' or 'leave-one-out'; for a running mean take gapped.NVIL(scale=False)"
            raise reject("baseline", self.baseline, accepted)
        check_count("samples", self.samples, 1 if self.baseline == "none" else 2)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        signal = draws.costs if self.baseline == "none" else leave_one_out(draws.costs)
        return score_product(cost, draws, signal)


@dataclass(frozen=True)
class RLOO(Score):
    """REINFORCE; each sample is judged by the others (RLOO).

    Arguments:
        samples: How many samples are drawn, n below, at least two.

    The gradient is::

        1/n Σ_i (f(D_i) - mean_{j≠i} f(D_j)) (D_i - p)

    The baseline of a sample does not depend on it, so nothing is added in the mean. Adding a constant to the
    cost changes nothing at all. It equals `gapped.Reinforce("leave-one-out", samples=n)`.

    - Bias: none.
    - Cost: `samples` evaluations, no derivative of the cost; one uniform per row and sample.

    >>> import torch, gapped
    >>> logits = torch.zeros(3, requires_grad=True)
    >>> gapped.expectation(lambda z: z.sum(-1), logits, RLOO(4)).backward()
    >>> logits.grad
    tensor([0., 0., 0.])

    References: Kool, van Hoof, Welling (2019); Salimans and Knowles (2014).
    """

    name = "rloo"
    takes_samples_alone = True

    samples: int = 4

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        return score_product(cost, draws, leave_one_out(draws.costs))


def leave_one_out(costs: Tensor) -> Tensor:
    """Each cost less the mean of the others, along the leading axis.

    >>> import torch
    >>> leave_one_out(torch.tensor([1.0, 2.0, 6.0]))
    tensor([-3.0000, -1.5000,  4.5000])
    """
    n = costs.shape[0]
    return (costs - costs.mean(0)) * (n / (n - 1))
