"""Mixtures of a categorical distribution with the uniform one."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_logits, check_mask
from gapped.errors import reject


def unimix(logits: Tensor, amount: float = 0.01, *, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Mix a categorical distribution with the uniform one, in its logits.

    No category becomes impossible. World models such as DreamerV3 take 1% of it before sampling:
    `gapped.gst(gapped.unimix(logits))`.

    Arguments:
        logits: Unnormalised log-probabilities θ, the categories on the axis `dim`.
        amount: The share a of the uniform distribution, from 0 to 1. 0 returns the log-softmax.
        dim: The category axis.
        mask: Booleans that broadcast against the logits. Categories where it is False, or whose logit is
            -inf, do not exist, and theirs is -inf: masking equals deleting.

    Returns:
        Normalised logits in the shape and dtype of `logits`, with their ordinary gradient. Half precision is
        computed in float32 and rounded once.

    For n categories that exist the result is computed in log space::

        log((1 - a) softmax(θ)_k + a/n)

    >>> unimix(torch.tensor([100.0, 0.0]), 0.5).exp()
    tensor([0.7500, 0.2500])

    References: Hafner, Pasukonis, Ba, Lillicrap (2023).
    """
    check_logits(logits, dim)
    check_mask(mask, logits, dim)
    if isinstance(amount, bool) or not isinstance(amount, Real) or not 0 <= amount <= 1:
        raise reject("amount", amount, "a number from 0 to 1")
    rows = simplex.computed(simplex.masked(logits, mask)).movedim(dim, -1)
    exists = rows.detach() != -torch.inf
    log_p = simplex.log_softmax(rows)
    if amount > 0:
        count = exists.sum(-1, keepdim=True).to(log_p.dtype)
        # Replaced before adding: the slope of a sum of two zeros is NaN in log space.
        kept = torch.where(exists, log_p, 0.0) + (math.log1p(-amount) if amount < 1 else -math.inf)
        log_p = torch.where(exists, torch.logaddexp(kept, math.log(amount) - count.log()), -torch.inf)
    return log_p.movedim(-1, dim).to(logits.dtype)
