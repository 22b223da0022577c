"""Subsets, and masks made of them, that carry a gradient: through marginals, or those of gapped logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import (
    ROWS,
    check_count,
    check_fit,
    check_flag,
    check_generator,
    check_level,
    check_logits,
    check_mask,
    is_integer,
    note_backend,
)
from gapped.errors import reject
from gapped.gradient import is_differentiated, with_pull
from gapped.kernels.backend import takes_groups
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.pathwise.gst import GST, Gap
from gapped.pathwise.straight_through import StraightThrough
from gapped.simplex import divide, per_row
from gapped.subsets import conditional_bernoulli as law
from gapped.texts import of_sets


def subset(
    logits: Tensor,
    k: int,
    tau: float | Tensor = 1.0,
    hard: bool = True,
    *,
    estimator: str | GST | StraightThrough | None = "simple",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw exactly k of n elements: zeros and ones that carry a gradient.

    Arguments:
        logits: Logits θ of any floating dtype and shape, the `n` elements on the axis `dim`. An element with
            the logit -inf does not exist.
        k: How many elements are selected, from 0 to `n`. With `k=1` the functions `gapped.straight_through`
            and `gapped.gst` draw.
        tau: Temperature τ of the surrogate, a positive number or a tensor that broadcasts against the logits'
            shape without the axis `dim`. The law of the sample does not depend on it.
        hard: True returns zeros and ones, False the surrogate h itself.
        estimator: "simple", which is "straight-through" for sets, or a gap as in "gst:gap=1"; both are
            explained below. A `gapped.GST` object may have a tensor as its gap, with one for each row.
        dim: The axis of the elements.
        mask: Booleans that broadcast against the logits, with all of their axes where `dim` is not the last
            one. Elements where it is False do not exist; a row with no more than `k` has all of them
            selected.
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        A tensor of the shape and dtype of `logits` that carries the gradient.

    The set S has a probability in proportion to Π_{i ∈ S} exp(θ_i). Its marginals μ(θ), the probabilities
    that each element is selected, take the place of the softmax: they lie between 0 and 1 and sum to k. Both
    estimators are straight-through: the sample goes forward, and a gradient g at the sample becomes that of a
    surrogate h::

        h = μ(t/τ),    gradient of the logits: Cov(S) g / τ

    where Cov(S), the Jacobian of μ, is the covariance matrix of the selections under the logits t/τ.

    - "simple" has t = θ. For τ = 1 its gradient is exact, of no variance, for costs that are linear in the
      sample.
    - "gst" raises the selected logits to at least the k-th largest one, θ_(k), and lowers the others to a gap
      γ below it, with t - θ constant. So the elements with the k largest entries of h are the selected ones;
      for k = 1 it is GST::

        t_i = max(θ_i, θ_(k))  for i ∈ S,    t_j = min(θ_j, θ_(k) - γ)  for j ∉ S

    - Law of hard samples: exact, in any dtype.
    - Bias: biased, but for "simple" with linear costs.
    - Cost: one evaluation of what follows; about n min(k, n - k) operations and one uniform per element, or,
      where there are no more than 70 subsets, one uniform per row. On CUDA kernels take about n √k operations
      and keep no table, for float32 or less and `n` up to 8,192.

    >>> g = torch.Generator().manual_seed(0)
    >>> logits = torch.zeros(2, 6, requires_grad=True)
    >>> subset(logits, 2, estimator="gst:gap=1", generator=g).sum(-1)
    tensor([2., 2.], grad_fn=<SumBackward1>)

    References: Ahmed, Zeng, Niepert, Van den Broeck (2023), SIMPLE; Chen, Dempster, Liu (1994), the law; Fan,
    Chi, Rudnicky, Ramadge (2022), GST.
    """
    check_logits(logits, dim)
    k = check_size("k", k, logits.shape[dim])
    check_level("tau", tau, positive=True)
    check_flag("hard", hard)
    check_mask(mask, logits, dim)
    check_generator(generator, logits)
    kinds = GST, StraightThrough
    own = of_sets(estimator, k, *kinds, resolve_pathwise, "a tensor", draw="sample", detach=True)
    if k == 1:
        single: Pathwise = replace(own or StraightThrough(), tau=tau, hard=hard)
        return single.sample(logits, dim=dim, mask=mask, generator=generator)
    rows = simplex.masked(logits, mask).movedim(dim, -1)
    gap = getattr(own, "gap", None) if k else None
    check_fit("tau", tau, rows.shape[:-1], ROWS)
    check_fit("gap", gap, rows.shape[:-1], ROWS)
    backend = own.backend if own else "auto"
    if backend != "torch" and takes_groups(rows, tau, gap):
        from gapped.kernels import masks

        options = masks.Options(k, tau, gap, not hard)  # type: ignore[arg-type]
        return masks.sample(rows, options, generator).movedim(-1, dim)
    return _sample(rows, k, tau, hard, gap, generator, backend).movedim(-1, dim)


def nm_mask(
    logits: Tensor,
    n: int,
    m: int,
    tau: float | Tensor = 1.0,
    hard: bool = True,
    *,
    estimator: str | GST | StraightThrough | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a mask that keeps n of each m consecutive entries on the last axis.

    Arguments:
        logits: One logit per entry, θ below. The last axis is a multiple of `m`.
        n: How many entries of each group are kept.
        m: The size of a group of consecutive entries.
        tau: Temperature of the gradient, a positive number or a tensor that broadcasts against the shape of
            the groups, `(*logits.shape[:-1], logits.shape[-1] // m)`.
        hard: True returns zeros and ones, False the surrogate.
        estimator: As for `gapped.subset`; None is "simple".
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        The mask, a tensor of the shape and dtype of `logits` that carries the gradient.

    Each group is a `gapped.subset` of its own: the kept set S of a group has a probability in proportion to
    Π_{i ∈ S} exp(θ_i).

    A free logit for each of the possible masks of a group, as in MaskLLM, which has six for 2:4, is a
    categorical choice: `gapped.gst(choices, tau, hard) @ options`. Here a mask's logit is the sum of the
    logits of its entries: `m` parameters for each group instead of `m` choose `n`.

    - Cost: where a group has no more than 70 masks they are enumerated, with one uniform per group; on CUDA,
      for groups of up to 8, by one kernel forward and one backward.

    >>> g = torch.Generator().manual_seed(0)
    >>> nm_mask(torch.zeros(2, 8), 2, 4, generator=g).unflatten(-1, (-1, 4)).sum(-1)
    tensor([[2., 2.],
            [2., 2.]])

    References: Fang et al. (2024), MaskLLM; Ahmed, Zeng, Niepert, Van den Broeck (2023), SIMPLE.
    """
    check_logits(logits)
    n, m = check_groups(logits.shape[-1], n, m, "logits")
    groups = torch.unflatten(logits, -1, (-1, m))
    return subset(groups, n, tau, hard, estimator=estimator, generator=generator).flatten(-2)


def check_groups(entries: int, n: object, m: object, name: str) -> tuple[int, int]:
    """`n` and `m` as integers, once it is checked that `entries` divide into groups of `m` that keep `n`."""
    check_count("m", m)
    assert is_integer(m)
    n, m = check_size("n", n, int(m)), int(m)
    if entries % m:
        raise reject(name, f"a last axis of {entries}", f"a multiple of m={m}")
    return n, m


def check_size(name: str, k: object, n: int) -> int:
    """How many of `n` elements are selected, once that is checked; numpy's small integers would overflow."""
    if not is_integer(k) or not 0 <= k <= n:
        raise reject(name, k, f"an integer from 0 to {n}, the number of elements")
    return int(k)


def perturbed(scores: Tensor, chosen: Tensor, k: int, gap: float | Tensor) -> Tensor:
    """Scores whose chosen ones are at least the `k`-th largest, and the others at least `gap` below it."""
    # Any number where there are no more than k elements.
    level = scores.topk(k).values[..., -1:]
    return torch.where(chosen, scores.maximum(level), scores.minimum(level - gap))


def _sample(
    rows: Tensor,
    k: int,
    tau: float | Tensor,
    hard: bool,
    gap: Gap | None,
    generator: torch.Generator | None,
    backend: str,
) -> Tensor:
    """A sample of masked logits `(*rows, n)`, once all arguments are checked; SIMPLE if there is no gap."""
    wants_gradient = is_differentiated(rows)
    scores = simplex.shift(simplex.computed(rows.detach()))
    backend = "triton" if law.runs_on_kernels(scores, k, backend=backend) else "torch"
    note_backend(backend)
    tau = per_row(tau, scores)
    if not hard and gap is None:
        surrogate = divide(scores, tau)
        value = law.marginals(surrogate, k, backend=backend)
    else:
        chosen = law.draw(scores, k, generator, backend=backend)
        value = torch.where(scores[..., :1].isnan(), torch.nan, chosen.to(scores.dtype))
        if gap is not None:
            scores = perturbed(scores, chosen, k, per_row(gap, scores))  # type: ignore[arg-type]
        surrogate = divide(scores, tau)
        if not hard:
            value = law.marginals(surrogate, k, backend=backend)
    value = value.to(rows.dtype)
    if not wants_gradient:
        return value
    number, weight = (1.0, 1 / tau) if isinstance(tau, Tensor) else (1 / tau, None)
    return with_pull(value, rows, partial(_pull, k, backend, number), surrogate, weight)


def _pull(
    k: int, backend: str, number: float, grad: Tensor, like: Tensor, scores: Tensor, weight: Tensor | None
) -> Tensor:
    """The gradient of the marginals at `scores`, times a number, or weights of the rows."""
    product = law.covariance_product(grad, scores, k, backend=backend)
    product = product if weight is None else product * weight
    return (product if number == 1 else product * number).to(like.dtype)
