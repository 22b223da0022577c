"""Enumeration: the expected cost and its gradient, without any randomness."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import GappedError
from gapped.score.base import Cost, Sampled, Score

__all__ = ["LIMIT", "Exact"]

LIMIT = 65_536


@dataclass(frozen=True)
class Exact(Score):
    r"""The exact expectation: a sum over all values that the variables of an example can take.

    With `L` variables of `K` categories, over :math:`s \in \{1, \dots, K\}^L` with probabilities
    :math:`w_s = \prod_l p_{l s_l}`:

    .. math:: \mathbb{E} f = \sum_s w_s f(s), \qquad
              \nabla_{\theta_l} \mathbb{E} f = \sum_s w_s f(s)\,(e_{s_l} - p_l).

    It is what every other estimator is measured against. Masked categories are never shown to the cost. A
    row without categories makes no choice: it is zero, as in every sample of it.

    - Bias and variance: none. No noise is drawn.
    - Cost: :math:`K^L` evaluations in one call, 65,536 at most, and one more to learn which axes are the
      batch.

    >>> import gapped
    >>> logits = torch.zeros(2, 3, requires_grad=True)
    >>> gapped.expectation(lambda z: z[..., 0].prod(-1), logits, Exact())
    tensor(0.1111, grad_fn=<_AttachBackward>)
    """

    def check_size(self, variables: int, categories: int) -> None:
        count = categories**variables
        if count > LIMIT:
            shown = f"{count:,}" if count < 10**12 else f"{count:.0e}"
            raise GappedError(
                f"Exact: got {variables} variables of {categories} categories, {shown} combinations, "
                f"expected at most {LIMIT:,}; take a sampling estimator such as gapped.RLOO()"
            )

    def estimate(
        self, cost: Cost, generator: torch.Generator | None, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = cost.logits
        with torch.no_grad():
            mode = simplex.argmax_index(logits)
            probe = cost(simplex.one_hot(mode.unsqueeze(0), logits.shape[-1], logits.dtype))
            self.check_size(logits.shape[probe.dim() - 1 : -1].numel(), logits.shape[-1])
            index, weights = _combinations(logits, mode, batch_axes=probe.dim() - 1)
            points = simplex.one_hot(index, logits.shape[-1], logits.dtype)
        costs = cost(points)
        value = (weights.to(costs.dtype) * costs).sum(0)
        if not wanted:
            return value, None
        with torch.no_grad():
            # Relative to the mean, which changes nothing but the rounding.
            signal = weights * (costs - value).to(logits.dtype)
            return value, (cost.spread(signal) * (points - simplex.normalised(logits))).sum(0)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> None:
        raise NotImplementedError("an enumeration draws nothing")

    def gradient(self, cost: Cost, sampled: Sampled) -> Tensor:
        raise NotImplementedError("an enumeration has no sampled gradient")


def _first(like: Tensor) -> Tensor:
    return (torch.arange(like.shape[-1], device=like.device) == 0).to(like.dtype)


def _combinations(logits: Tensor, mode: Tensor, batch_axes: int) -> tuple[Tensor, Tensor]:
    """All joint values ``(K^L, *batch, *variables)`` and their probabilities ``(K^L, *batch)``.

    Values of probability zero are replaced by the mode: the cost need not be defined on them.
    """
    categories, variables = logits.shape[-1], logits.shape[batch_axes:-1]
    count = categories ** variables.numel()
    digits = categories ** torch.arange(variables.numel(), device=logits.device).flip(0).view(variables)
    step = torch.arange(count, device=logits.device).view(-1, *(1 for _ in logits.shape[:-1]))
    index = (step // digits) % categories
    p = simplex.normalised(logits)
    # A row without categories has one value, whatever the number it gets.
    p = torch.where(mode.unsqueeze(-1) == categories, _first(p), p)
    index = index.expand(count, *logits.shape[:-1])
    chosen = p.expand(count, *p.shape).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    weights = chosen.flatten(1 + batch_axes).prod(-1) if variables else chosen
    possible = (weights != 0).reshape(weights.shape + (1,) * len(variables))
    return torch.where(possible & (mode < categories), index, mode), weights
