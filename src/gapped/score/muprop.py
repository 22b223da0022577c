"""MuProp: REINFORCE with a first-order Taylor expansion as control variate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.score import Cost, Draws, Score, drop_absent, one_hot_rows, pullback, score_product


@dataclass(frozen=True)
class MuProp(Score):
    """MuProp: the cost's expansion about the mean as baseline.

    The expansion is differentiated exactly, the rest by its score::

        [f(D) - f(p) - ⟨f'(p), D - p⟩] (D - p) + J(p) f'(p),    J(p) = diag(p) - p pᵀ

    With several variables the inner product runs over all of them, and the bracket is shared. The cost must
    accept rows of probabilities as well as one-hot ones, and be differentiable there.

    - Bias: none. Exact, without variance, for costs that are linear over the simplex.
    - Cost: two evaluations and one derivative; one uniform per row.

    >>> import gapped
    >>> logits, slope = torch.zeros(2, requires_grad=True), torch.tensor([0.0, 1.0])
    >>> gapped.expectation(lambda z: z @ slope, logits, MuProp()).backward()
    >>> logits.grad
    tensor([-0.2500,  0.2500])

    References: Gu, Levine, Sutskever, Mnih (2016).
    """

    name = "muprop"
    derivatives = 1

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        p = simplex.normalised(cost.logits).unsqueeze(0)
        at_mean, pull = pullback(cost, p)
        slope = drop_absent(pull(torch.ones_like(at_mean)), cost.logits)
        apart = one_hot_rows(cost.logits, draws.category) - p
        product = (slope * apart).flatten(draws.costs.dim()).sum(-1)
        rest = draws.costs - simplex.accumulated(at_mean.detach()) - product
        exact = p * (slope - (p * slope).sum(-1, keepdim=True))
        return score_product(cost, draws, rest) + exact.squeeze(0)
