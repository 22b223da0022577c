"""ARSM: augment, REINFORCE, swap, merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.score import Cost, Draws, Score

LIMIT = 16


@dataclass(frozen=True)
class ARSM(Score):
    """ARSM: every sample that swapping two noise values gives.

    With `π ~ Dirichlet(1)` the sample is the `i` with the smallest `π_i exp(-θ_i)`. Let `F_cd` be the cost
    after `π_c` and `π_d` have changed places, in all variables at once. Then the gradient is::

        ∇_d = Σ_c (1/K - π_c) (F_cd - mean_j F_cj)

    A masked category counts in no sum and in no mean.

    - Bias: none. Every swapped sample follows `softmax(θ)`, and the value is the mean of all of them.
    - Cost: `K (K - 1)/2 + 1` evaluations, no derivative of the cost; `K` noise values per row. For few
      categories: 16 at most.

    >>> import gapped
    >>> logits = torch.zeros(2, 3, requires_grad=True)
    >>> gapped.expectation(lambda z: (z[..., 0].sum(-1) - 1) ** 2, logits, ARSM()).backward()

    References: Yin, Yue, Zhou (2019).
    """

    name = "arsm"

    def check_size(self, variables: int, categories: int) -> None:
        if categories > LIMIT:
            accepted = f"at most {LIMIT}; for more take gapped.DisARMTree()"
            raise reject("logits", f"{categories} categories for ARSM", accepted)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        return simplex.gumbel(logits, generator)

    def index(self, logits: Tensor, noise: Tensor) -> Tensor:
        # With E = exp(-noise) unit exponentials, pi = E / sum(E): the smallest pi exp(-theta) is the largest
        # theta + noise, and swapping entries of pi is swapping entries of the noise.
        exchange = _swaps(logits.shape[-1], logits.device)
        return simplex.argmax_index(logits + noise[..., exchange].movedim(-2, 0))

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        logits, categories = cost.logits, cost.logits.shape[-1]
        exists = logits > -torch.inf
        pi = simplex.softmax((-draws.noise).masked_fill(~exists, -torch.inf))
        # A quotient of integers would have the default dtype.
        count = exists.sum(-1, keepdim=True).clamp(min=1).to(logits.dtype)
        weights = torch.where(exists, 1 / count - pi, 0.0)
        # Their mean would cancel at the end: all columns get the same of it.
        costs = cost.spread(draws.costs - draws.costs.mean(0))
        table = costs[_which(categories, logits.device)]
        table = table.reshape(categories, categories, *table.shape[2:-1]).movedim((0, 1), (-2, -1))
        # Not a matrix product: autocast would round it.
        total = (weights.unsqueeze(-1) * table).sum(-2)
        return total - torch.where(exists, total, 0.0).sum(-1, keepdim=True) / count


def _swaps(categories: int, device: torch.device) -> Tensor:
    """Permutations `(n, K)`: the identity, then every swap of two."""
    one, other = torch.triu_indices(categories, categories, 1, device=device)
    start = one.new_zeros(1)
    one, other = torch.cat([start, one]), torch.cat([start, other])
    identity = torch.arange(categories, device=device)
    half = torch.where(identity == one.unsqueeze(-1), other.unsqueeze(-1), identity)
    return torch.where(identity == other.unsqueeze(-1), one.unsqueeze(-1), half)


def _which(categories: int, device: torch.device) -> Tensor:
    """Entry (c, d): which of the permutations of `_swaps` exchanges c and d; `(K, K)`."""
    one, other = torch.triu_indices(categories, categories, 1, device=device)
    which: Tensor = one.new_zeros((categories, categories))
    which[one, other] = which[other, one] = torch.arange(1, len(one) + 1, device=device)
    return which
