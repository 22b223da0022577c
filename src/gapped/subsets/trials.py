r"""A subset of a given size as independent choices, given how many are made.

A set of `k` elements with a probability in proportion to :math:`\prod_{i \in S} e^{\theta_i}` has the law of
independent choices with probabilities :math:`p_i = \sigma(\theta_i - \lambda)`, given that `k` are made,
whatever :math:`\lambda` is. Here :math:`\lambda` is the one for which about `k` are made on average. Then no
number of the `size_tree` is too small or too large to be held, for any logits: `k` is about the most probable
of the :math:`n + 1` sizes, and what underflows beside it has no weight. Only sums and products of positive
numbers follow, in float64.

If `k` is more than half of `n`, the elements that are left out are chosen instead, with negated logits.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from gapped import simplex

# Halvings of the interval of lambda: its error must be small beside the inverse of the size's deviation.
_HALVINGS = 12


class Trials(NamedTuple):
    """Independent choices whose law, given their number, is that of a subset or of its complement."""

    scores: Tensor
    """The scores, negated for a complement, `(*rows, n)`; -inf for an element that does not exist."""
    tilt: Tensor
    """The score that has even odds, `(*rows, 1)`."""
    p: Tensor
    """The probability that an element is chosen, float64, `(*rows, n)`."""
    q: Tensor
    """The probability that it is not."""
    size: Tensor
    """How many are chosen, `(*rows)`."""
    degree: int
    """The largest size that a row may have."""
    is_complement: bool
    """Whether the chosen elements are those that do not belong to the subset."""


def trials_of(scores: Tensor, k: int) -> Trials:
    """Trials for `k` elements, or for the others if those are fewer."""
    n, exists = scores.shape[-1], scores != -torch.inf
    count = exists.sum(-1)
    size, degree = count.clamp(max=k), k
    if is_complement := 2 * k > n:
        size, degree = count - size, n - k
        scores = torch.where(exists, -scores, -torch.inf)
    is_open = ((size > 0) & (size < count)).unsqueeze(-1)
    tilt = simplex.accumulated(torch.where(is_open, _tilt(scores, size, degree), 0.0))
    scores = simplex.accumulated(scores)
    sure = (exists & (size > 0).unsqueeze(-1)).to(scores.dtype)
    p = torch.where(is_open, torch.sigmoid(scores - tilt), sure)
    q = torch.where(is_open, torch.sigmoid(tilt - scores), 1 - sure)
    return Trials(scores, tilt, p, q, size, degree, is_complement)


@torch.no_grad()
def _tilt(scores: Tensor, size: Tensor, degree: int) -> Tensor:
    r"""The :math:`\lambda` at which the probabilities :math:`\sigma(\theta_i - \lambda)` add up to `size`.

    It lies between the next score after the `size` largest ones, less the logarithm of `size`, and the last
    of these, plus the logarithm of how many others there are: an interval that is short, or else has all
    scores far outside of it. It need not be exact, since the law does not depend on it.
    """
    n, size = scores.shape[-1], size.unsqueeze(-1)
    largest = scores.topk(degree + 1).values
    low = largest.gather(-1, size) - log(degree)
    high = largest.gather(-1, (size - 1).clamp(min=0)) + log(n)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_low = torch.sigmoid(scores - middle).sum(-1, keepdim=True) > size
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return (low + high) / 2
