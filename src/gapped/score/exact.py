"""Enumeration: the expected cost and its gradient, without any randomness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gapped import simplex
from gapped.checks import in_eager_mode
from gapped.errors import GappedError
from gapped.score import Cost, Draws, Score, one_hot_rows

LIMIT = 65_536
# Numbers that the cost is given in one call.
CALL = 2**22


@dataclass(frozen=True)
class Exact(Score):
    """The exact gradient: a sum over all values.

    With `L` variables of `K` categories, over `s ∈ {1, …, K}^L` with probabilities `w_s = Π_l p_{l s_l}`::

        E f = Σ_s w_s f(s),    ∇θ_l E f = Σ_s w_s f(s) (e_{s_l} - p_l)

    It is what every other estimator is measured against. Masked categories are never shown to the cost. A
    row without categories makes no choice: it is zero, as in every sample of it.

    - Bias and variance: none. No noise is drawn.
    - Cost: `K^L` evaluations, 65,536 at most, and one more to learn which axes are the batch. The cost is
      called with at most four million numbers, or one sample, at a time, so the memory does not grow with
      `K^L`. Where that takes several calls and `f` has parameters of its own, `f` is called again in the
      backward pass instead of keeping what all calls computed.

    >>> import gapped
    >>> logits = torch.zeros(2, 3, requires_grad=True)
    >>> gapped.expectation(lambda z: z[..., 0].prod(-1), logits, Exact())
    tensor(0.1111, grad_fn=<_WithGradientBackward>)
    """

    name = "exact"

    def check_size(self, variables: int, categories: int) -> None:
        count = categories**variables
        if count > LIMIT:
            number = f"{count:,}" if count < 10**12 else f"{count:.0e}"
            raise GappedError(
                f"Exact: got {variables} variables of {categories} categories, {number} combinations, "
                f"expected at most {LIMIT:,}; take a sampling estimator such as gapped.RLOO()"
            )

    def estimate(
        self, cost: Cost, generator: torch.Generator | None, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits, categories = cost.logits, cost.logits.shape[-1]
        with torch.no_grad():
            mode = simplex.argmax_index(logits)
            level = cost(one_hot_rows(logits, mode.unsqueeze(0)))
        batch_axes = level.dim() - 1
        variables = logits.shape[batch_axes:-1].numel()
        self.check_size(variables, categories)
        count, size = categories**variables, max(CALL // max(logits.numel(), 1), 1)

        def combine(start: int) -> tuple[Tensor, Tensor | None]:
            with torch.no_grad():
                number = torch.arange(start, min(start + size, count), device=logits.device)
                index, weights = _combinations(logits, mode, batch_axes, number)
            costs = cost(one_hot_rows(logits, index))
            value = (weights * costs).sum(0)
            if not wanted:
                return value, None
            with torch.no_grad():
                # Relative to the mode's cost, which changes nothing but the rounding.
                signal = (weights * (costs - level)).to(logits.dtype)
                points = one_hot_rows(logits, index) - simplex.normalised(logits)
                return value, (cost.spread(signal) * points).sum(0)

        value, gradient = combine(0)
        # Tensors for f's own backward are computed again there: kept, they would grow with the combinations.
        again = value.requires_grad and in_eager_mode()
        rest: Callable[[int], Any] = partial(checkpoint, combine, use_reentrant=False) if again else combine
        for start in range(size, count, size):
            other, more = rest(start)
            value = value + other
            gradient = None if gradient is None else gradient + more
        return value.to(level.dtype), gradient

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        raise NotImplementedError("an enumeration has no sampled gradient")


def _combinations(logits: Tensor, mode: Tensor, batch_axes: int, number: Tensor) -> tuple[Tensor, Tensor]:
    """The joint values of such `number` `(n,)`, `(n, *batch, *variables)`, and their probabilities.

    Values of probability zero are replaced by the mode: the cost need not be defined on them.
    """
    categories, variables = logits.shape[-1], logits.shape[batch_axes:-1]
    digits = categories ** torch.arange(variables.numel(), device=logits.device).flip(0).view(variables)
    index = (number.view(-1, *(1 for _ in logits.shape[:-1])) // digits) % categories
    # A large level of the costs shows how far the weights are from a sum of 1.
    p = simplex.normalised(simplex.accumulated(logits))
    # A row without categories has one value, whatever the number it gets.
    first = torch.arange(categories, device=p.device) == 0
    p = torch.where(mode.unsqueeze(-1) == categories, first.to(p.dtype), p)
    index = index.expand(len(number), *logits.shape[:-1])
    weights = p.expand(len(number), *p.shape).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if variables:
        weights = weights.flatten(1 + batch_axes).prod(-1)
    possible = (weights != 0).reshape(weights.shape + (1,) * len(variables))
    return torch.where(possible & (mode < categories), index, mode), weights
