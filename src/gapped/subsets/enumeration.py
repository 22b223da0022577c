r"""All subsets of `k` of `n` elements, written out: for the few that small groups have.

A subset is a category whose logit is the sum of its elements' logits. So the law is a softmax over the
subsets; in terms of their table :math:`O`, with a row of zeros and ones for each, the marginals are
:math:`O^\top \mathrm{softmax}(O\theta)`. Functions and arguments are those of `conditional_bernoulli`; rows
that have no subset of `k` elements are not handled here. Inside, the subsets lie on the first axis: they are
few, and the groups many.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import in_eager_mode


def draw(scores: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw a subset, with one uniform per row."""
    running = simplex.accumulated(_weights(scores, k)).cumsum(0)
    threshold = simplex.uniform(running[-1].shape, running[-1], generator) * running[-1]
    # Never the last one: rounding may put the threshold at the total.
    index = (running[:-1] <= threshold).sum(0)
    return torch.nn.functional.embedding(index, _table(scores.shape[-1], k, scores) > 0)


def marginals(scores: Tensor, k: int) -> Tensor:
    """The probability that each element is selected."""
    return _collect(_law(scores, k), scores, k)


def covariance_product(grad: Tensor, scores: Tensor, k: int) -> Tensor:
    """The covariances of the selections times `grad`."""
    law, sums = _law(scores, k), _sums(grad.to(scores.dtype), k)
    return _collect(law * (sums - (law * sums).sum(0)), scores, k)


def _law(scores: Tensor, k: int) -> Tensor:
    weights = _weights(scores, k)
    return weights / weights.sum(0)


def _weights(scores: Tensor, k: int) -> Tensor:
    """The subsets' probabilities relative to the largest one, `(n choose k, *rows)`."""
    sums = _sums(scores, k)
    return (sums - sums.amax(0)).exp()


def _sums(values: Tensor, k: int) -> Tensor:
    """The sum of each subset's values `(*rows, n)`, `(n choose k, *rows)`."""
    members = _members(values.shape[-1], k, values)
    first = values.movedim(-1, 0).contiguous()
    # Not a product with the table: 0 times -inf, of an element that does not exist, would be NaN.
    total = first.index_select(0, members[0])
    for member in members[1:]:
        total = total + first.index_select(0, member)
    return total


def _collect(values: Tensor, like: Tensor, k: int) -> Tensor:
    """For each element the sum over the subsets that have it, `(*rows, n)`."""
    # Autocast computes products in half precision, unless they are in float64.
    values = simplex.accumulated(values)
    return (values.movedim(0, -1) @ _table(like.shape[-1], k, values)).to(like.dtype)


def _members(n: int, k: int, like: Tensor) -> Tensor:
    """The smallest element of each subset, the second one, and so on, `(k, n choose k)`.

    The subsets are in the order of the integers whose bits they are, which is that of the kernels.
    """
    # Kept: a GPU waits for what comes from the host, and a CUDA graph refuses it.
    is_plain = in_eager_mode() and type(like) is Tensor
    return (_listed if is_plain else _listed.__wrapped__)(n, k, like.device)


@lru_cache(64)
def _listed(n: int, k: int, device: torch.device) -> Tensor:
    subsets = sorted(combinations(range(n), k), key=lambda subset: subset[::-1])
    # What is made in inference mode could not be saved for a backward pass later.
    with torch.inference_mode(False):
        return torch.tensor(subsets, device=device).T


def _table(n: int, k: int, like: Tensor) -> Tensor:
    """The subsets as rows of zeros and ones, `(n choose k, n)`, in the dtype of `like`.

    >>> _table(3, 2, torch.zeros(1)).int().tolist()
    [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    """
    members = _members(n, k, like).T
    return torch.zeros(len(members), n, dtype=like.dtype, device=like.device).scatter(-1, members, 1.0)
