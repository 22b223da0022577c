"""The law of k of n elements, written out subset by subset in float64; shares no code with the package."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor


class Law(NamedTuple):
    """All subsets of one row of logits."""

    subsets: Tensor
    """Zeros and ones, ``(number, n)``."""
    p: Tensor
    """Their probabilities, ``(number,)``, in the graph of the logits."""
    log_normaliser: Tensor


def enumerate_law(theta: Tensor, k: int) -> Law:
    n = len(theta)
    rows = [[1.0 if i in chosen else 0.0 for i in range(n)] for chosen in combinations(range(n), k)]
    subsets = torch.tensor(rows, dtype=torch.float64).reshape(-1, n)
    weights = torch.stack([theta[row > 0].sum().exp() for row in subsets])
    return Law(subsets, weights / weights.sum(), weights.sum().log())


def marginals(theta: Tensor, k: int) -> Tensor:
    law = enumerate_law(theta, k)
    return law.p @ law.subsets


def covariances(theta: Tensor, k: int) -> Tensor:
    law = enumerate_law(theta, k)
    centred = law.subsets - marginals(theta, k)
    return centred.T @ (law.p.unsqueeze(-1) * centred)


def plackett_luce(theta: Tensor, k: int) -> Tensor:
    """The probabilities of the same subsets if the k largest of logits with Gumbel noise are taken."""
    weights = theta.exp().tolist()

    def ways(members: frozenset[int], left: float) -> float:
        """Over all orders in which the members may come first."""
        if not members:
            return 1.0
        return sum(weights[i] / left * ways(members - {i}, left - weights[i]) for i in members)

    chosen = [frozenset(c) for c in combinations(range(len(weights)), k)]
    return torch.tensor([ways(members, sum(weights)) for members in chosen], dtype=torch.float64)


def gapped_logits(theta: Tensor, chosen: Tensor, k: int, gap: float) -> Tensor:
    """t_i = max(theta_i, theta_(k)) if chosen, else min(theta_i, theta_(k) - gap), entry by entry."""
    level = sorted(theta.tolist(), reverse=True)[k - 1]
    entries = [
        max(value, level) if inside else min(value, level - gap)
        for value, inside in zip(theta.tolist(), chosen.tolist(), strict=True)
    ]
    return torch.tensor(entries, dtype=theta.dtype)
