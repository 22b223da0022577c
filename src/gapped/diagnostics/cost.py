"""A look at a cost before anything is measured on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import GappedError, reject
from gapped.score import check_costs

PROBES = 64


def batch_axes_of(f: Callable[[Tensor], Tensor], logits: Tensor, mask: Tensor | None) -> int:
    """How many of the logits' axes are the batch, after checking that `f` is a cost that can be measured.

    It is asked for random samples: the costs must have the right shape, be finite, be the same when asked
    again, depend on the sample, and not depend on the other samples of the call.
    """
    rows = simplex.masked(logits, mask)
    exists = rows > -torch.inf
    if not (exists.sum(-1) > 1).any():
        raise reject("logits", "no row with a choice", "at least one row with two categories or more")
    points = _probes(exists, logits.dtype)
    first = _costs(f, points)
    if not first.isfinite().all():
        raise reject("f", "costs that are not all finite", "finite costs")
    # The cost may compute in the dtype of its samples, whatever dtype it answers in.
    eps = max(torch.finfo(each.dtype).eps for each in (first, points))
    tolerance = eps * first.abs().max()
    again = _costs(f, points)
    # The same call on the same device may still add in another order there.
    slack = 0.0 if first.device.type == "cpu" else 16 * tolerance
    if ((again - first).abs() > slack).any():
        raise GappedError("f: not deterministic: the same samples got other costs when asked again")
    if (first.amax(0) - first.amin(0) <= 16 * tolerance).all():
        raise GappedError(
            f"f: ignores its input: {PROBES} random samples all cost the same, expected a cost that depends "
            "on the sample"
        )
    alone = torch.cat([_costs(f, points[i : i + 1]) for i in range(4)])
    # Products of other shapes round differently; a mean over the samples differs by far more.
    if ((alone - first[:4]).abs() > 1e3 * tolerance).any():
        raise GappedError(
            "f: the cost of a sample depends on the other samples of the call, expected a function of each "
            "alone (no mean over the leading axis, no batch normalisation)"
        )
    return first.dim() - 1


def _probes(exists: Tensor, dtype: torch.dtype) -> Tensor:
    """Random samples, every category that exists equally likely; the same ones each time."""
    generator = torch.Generator(exists.device).manual_seed(0)
    level = torch.where(exists, 0.0, -torch.inf).expand(PROBES, *exists.shape)
    return simplex.one_hot(simplex.draw_index(level, generator), exists.shape[-1], dtype)


def _costs(f: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    with torch.no_grad():
        # A copy: a cost that writes into its input must not change the next call.
        costs = f(points.clone())
    check_costs(costs, points)
    return costs
