"""What the tree asks of an estimator, and the greedy choice that takes its place at evaluation."""

from __future__ import annotations

from typing import Protocol as Interface

import torch
from torch import Tensor

from gapped import simplex


class Sampler(Interface):
    """Chooses one pair of each layer."""

    @property
    def hard(self) -> bool:
        """Whether samples are one-hot."""

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor: ...


class Greedy:
    """Always the pair with the highest score; no gradient."""

    hard = True

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        scores = simplex.masked(logits.detach(), mask)
        return simplex.one_hot(simplex.argmax_index(scores), scores.shape[-1], scores.dtype)


def allowed_pairs(lengths: Tensor, layer: int, pairs: int) -> Tensor:
    """Which of the `pairs` places of a layer hold nodes of the expression, ``(*lengths.shape, pairs)``."""
    left = lengths.unsqueeze(-1) - 1 - layer
    return torch.arange(pairs, device=lengths.device) < left
