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
    """Logits of a mixture with the uniform distribution, so that no category becomes impossible.

    For `amount` `a`, from 0 to 1, and `n` categories that exist::

        log((1 - a) softmax(θ)_k + a/n)

    in log space: normalised logits in the shape and dtype of `logits`, with its gradient. `dim` is the
    category axis. Categories where the boolean `mask` is False, or whose logit is -inf, do not exist, and
    theirs is -inf: masking equals deleting. An `amount` of 0 returns the log-softmax. Half precision is
    computed in float32 and rounded once.

    World models such as DreamerV3 take 1% of it, before sampling: ``gapped.gst(gapped.unimix(logits))``.

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
