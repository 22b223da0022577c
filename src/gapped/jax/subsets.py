"""A subset of a given size that carries a gradient, and its law: the definitions of `gapped.subsets`.

The choices that a law consists of are those of `gapped.subsets.conditional_bernoulli`, the tree that counts
them is that of `gapped.subsets.size_tree`. Derivatives of the law are JAX's own.

`scores` `(*rows, n)` are logits relative to the largest of their row, -inf for an element that does not
exist, NaN in a row without a law. A row with fewer than `k` elements has all of them selected.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import log
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gapped.docstrings import documented_in_jax as documented
from gapped.jax.checks import (
    check_flag,
    check_key,
    check_level,
    check_logits,
    check_size,
    check_where,
    fit,
    forbid_gradient,
)
from gapped.jax.gradient import attach
from gapped.jax.pathwise import GST, Level, StraightThrough
from gapped.jax.registry import resolve_pathwise
from gapped.jax.simplex import inverse_cdf, masked, per_row, rows_of
from gapped.texts import of_sets

# Halvings of the interval of lambda: its error must be small beside the inverse of the size's deviation.
_HALVINGS = 12


@documented
def subset(
    key: Array,
    logits: Array,
    k: int,
    tau: Level = 1.0,
    hard: bool = True,
    *,
    estimator: str | GST | StraightThrough | None = "simple",
    axis: int = -1,
    where: Array | None = None,
) -> Array:
    """Draw exactly k of n elements: zeros and ones that carry a gradient.

    Arguments:
        logits: Logits θ of any floating dtype and shape, the `n` elements on the axis `axis`. An element with
            the logit -inf does not exist.
        k: How many elements are selected, from 0 to `n`; a static number under `jax.jit`. With `k=1` the
            functions `gapped.jax.straight_through` and `gapped.jax.gst` draw.
        tau: Temperature τ of the surrogate, a positive number or an array that broadcasts against the logits'
            shape without the axis of the elements.
        hard: True returns zeros and ones, False the surrogate itself.
        estimator: "simple", which is "straight-through" for sets, or a gap as in "gst:gap=1"; both are
            explained below. A `gapped.jax.GST` object may have an array as its gap, with one for each row.
        axis: The axis of the elements.
        where: Booleans that broadcast against the logits, with all of their axes where `axis` is not the last
            one. Elements where it is False do not exist; a row with no more than `k` has all of them
            selected.

    Returns:
        An array of the shape and dtype of `logits`.

    The set S has a probability in proportion to Π_{i ∈ S} exp(θ_i), with the marginals μ(θ). The sample goes
    forward, and the gradient is that of a surrogate h = μ(t/τ): the covariance matrix of the selections under
    t/τ times the incoming gradient, over τ. "simple" has t = θ. "gst" raises the selected logits to at least
    the k-th largest one and lowers the others to a gap below it. The help of `gapped.subset` has the formulas
    and the references.

    >>> subset(jax.random.key(0), jnp.zeros((2, 4)), 2, estimator="gst:gap=1").sum(-1)
    Array([2., 2.], dtype=float32)
    """
    check_key(key)
    check_logits(logits, axis)
    check_size(k, logits.shape[axis])
    check_level("tau", tau, positive=True)
    check_flag("hard", hard)
    check_where(where, logits, axis)
    own = of_sets(estimator, k, GST, StraightThrough, resolve_pathwise, "an array")
    if k == 1:
        single = replace(own or StraightThrough(), tau=tau, hard=hard)
        return single.sample(key, logits, axis=axis, where=where)
    rows = jnp.moveaxis(masked(jnp.asarray(logits), where), axis, -1)
    scores = surrogate = rows_of(rows).marked_logits
    temperature = per_row(forbid_gradient("tau", fit("tau", tau, logits, axis)), scores)
    gap = getattr(own, "gap", None) if k else None
    if gap is not None:
        gap = forbid_gradient("gap", fit("gap", gap, logits, axis))
    if hard or gap is not None:
        chosen = draw(scores, k, noise(key, scores))
        value = jnp.where(jnp.isnan(scores), jnp.nan, chosen.astype(scores.dtype))
        if gap is not None:
            surrogate = perturbed(scores, chosen, k, gap)
    surrogate = surrogate / temperature
    if not hard:
        value = marginals(surrogate, k)
    sample = attach(partial(_product, k), value.astype(rows.dtype), rows, surrogate, 1 / temperature)
    return jnp.moveaxis(sample, -1, axis)


def _product(k: int, grad: Array, surrogate: Array, weight: Array) -> Array:
    return covariance_product(grad, surrogate, k) * weight


def noise(key: Array, scores: Array) -> Array:
    """The noise of `draw`: one uniform for each node of the tree that has children, `(*rows, nodes)`."""
    nodes = sum(decisions(scores.shape[-1]))
    return jax.random.uniform(key, (*scores.shape[:-1], nodes), jnp.result_type(float))


def draw(scores: Array, k: int, u: Array) -> Array:
    """Draw a subset with the uniforms of `noise`: a boolean array of the shape of `scores`."""
    exists = scores != -jnp.inf
    if k in (0, scores.shape[-1]):
        return exists & (k > 0)
    trials = _trials_of(scores, k)
    levels = ascend(trials.p, trials.q, trials.degree)
    chosen = descend(levels, trials.size, u)[..., : scores.shape[-1]] > 0
    return exists & ~chosen if trials.is_complement else chosen


def marginals(scores: Array, k: int) -> Array:
    """The probability that each element is selected, in the shape and dtype of `scores`."""
    exists = jnp.where(jnp.isnan(scores), jnp.nan, (scores != -jnp.inf).astype(scores.dtype))
    if k in (0, scores.shape[-1]):
        return exists * (k > 0)
    trials = _trials_of(scores, k)
    chosen, without = _marginals(trials.p, trials.q, trials)
    selected = jnp.where(scores == -jnp.inf, 0.0, without) if trials.is_complement else chosen
    return selected.astype(scores.dtype)


def covariance_product(grad: Array, scores: Array, k: int) -> Array:
    r"""The covariances of the selections times a vector, :math:`\mathrm{Cov}(S, \langle g, S\rangle)`.

    That is the Jacobian of the marginals, which is symmetric, times `grad`, which has the shape of `scores`.
    """
    if k in (0, scores.shape[-1]):
        return jnp.where(jnp.isnan(scores), jnp.nan, jnp.zeros_like(scores))
    trials = _trials_of(scores, k)
    p, q = trials.p, trials.q
    grad = jnp.where(scores == -jnp.inf, 0.0, grad.astype(p.dtype))
    # A constant added to g changes nothing, as the size is fixed: digits are kept by removing the mean.
    grad = grad - (p * grad).sum(-1, keepdims=True) / jnp.maximum(p.sum(-1, keepdims=True), 0.5)
    # The derivatives of p and q along g.
    slope = p * q * grad
    _, (product, _) = jax.jvp(lambda p, q: _marginals(p, q, trials), (p, q), (slope, -slope))
    result: Array = product.astype(scores.dtype)
    return result


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def log_normaliser(scores: Array, k: int) -> Array:
    r"""The logarithm of :math:`\sum_S \prod_{i \in S} e^{\theta_i}`, with the derivative `marginals`."""
    total = jnp.where(scores == -jnp.inf, 0.0, scores).sum(-1)
    if k in (0, scores.shape[-1]):
        return total * (k > 0)
    trials = _trials_of(scores, k)
    law = ascend(trials.p, trials.q, trials.degree)[-1][..., 0, :]
    of_size = jnp.take_along_axis(law, trials.size[..., None], -1)[..., 0]
    value = trials.size * trials.tilt[..., 0] + jax.nn.softplus(trials.odds).sum(-1) + jnp.log(of_size)
    value = value + total if trials.is_complement else value
    is_certain = (scores != -jnp.inf).sum(-1) <= k
    return jnp.where(is_certain, total, value).astype(scores.dtype)


@log_normaliser.defjvp
def _log_normaliser_jvp(k: int, primals: Any, tangents: Any) -> Any:
    (scores,), (tangent,) = primals, tangents
    # The tangent of an element that does not exist may be anything.
    slope = marginals(scores, k) * jnp.where(scores == -jnp.inf, 0.0, tangent)
    return log_normaliser(scores, k), slope.sum(-1)


def perturbed(scores: Array, chosen: Array, k: int, gap: Any) -> Array:
    """Scores whose chosen ones are at least the `k`-th largest, and the others at least `gap` below it."""
    level = jax.lax.top_k(scores, k)[0][..., -1:]
    return jnp.where(chosen, jnp.maximum(scores, level), jnp.minimum(scores, level - per_row(gap, scores)))


def _marginals(p: Array, q: Array, trials: Trials) -> tuple[Array, Array]:
    """The probabilities that each element is chosen, and that it is not, given how many are.

    The probability of the size is linear in p and q of each element: the part of it that has p, or q.
    """
    law, pull = jax.vjp(lambda p, q: ascend(p, q, trials.degree)[-1][..., 0, :], p, q)
    at = jnp.arange(law.shape[-1]) == trials.size[..., None]
    of_size = jnp.where(at, law, 0.0).sum(-1, keepdims=True)
    by_p, by_q = pull(at / of_size)
    return p * by_p, q * by_q


def ascend(p: Array, q: Array, degree: int) -> list[Array]:
    """The levels of the tree whose leaves are `(q, p)`, each of shape `(..., nodes, sizes)`."""
    levels = [_even(jnp.stack([q, p], -1))]
    while levels[-1].shape[-2] > 1:
        left, right = levels[-1][..., 0::2, :], levels[-1][..., 1::2, :]
        levels.append(_even(_convolve(left, right, min(2 * (left.shape[-1] - 1), degree))))
    return levels


def decisions(n: int) -> list[int]:
    """How many nodes `descend` decides for at each level of a tree over `n` elements, the root's first."""
    counts = []
    while n > 1:
        n = -(-n // 2)
        counts.append(n)
    return counts[::-1]


def descend(levels: list[Array], size: Array, u: Array) -> Array:
    """Draw which elements are selected, given that `size` of them are: zeros and ones, integers.

    From the root down, each node divides its number among its children: `a` to the left with a probability
    in proportion to the product of their laws, at `a` and at the rest. `u` has one uniform for each of the
    nodes that `decisions` counts, on its last axis, in that order.
    """
    sizes, used = size[..., None], 0
    for level in reversed(levels[:-1]):
        left, right = level[..., 0::2, :], level[..., 1::2, :]
        nodes, most = left.shape[-2], left.shape[-1] - 1
        sizes = sizes[..., :nodes]
        rest = sizes[..., None] - jnp.arange(most + 1)
        others = jnp.take_along_axis(right, jnp.clip(rest, 0, most), -1)
        weights = left * jnp.where((rest >= 0) & (rest <= most), others, 0.0)
        first, _ = inverse_cdf(weights, u[None, ..., used : used + nodes])
        sizes = jnp.stack([first, sizes - first], -1).reshape(*sizes.shape[:-1], 2 * nodes)
        used += nodes
    return sizes


def _convolve(left: Array, right: Array, most: int) -> Array:
    """The convolution of `left` and `right`, up to the size `most`."""
    sizes = right.shape[-1]
    place = np.arange(most + 1)[:, None] - np.arange(sizes)
    # Window c holds the entries c, c - 1, ... of `right`, and zeros where there are none.
    windows = jnp.where((place >= 0) & (place < sizes), right[..., place.clip(0, sizes - 1)], 0.0)
    return (windows * left[..., None, :]).sum(-1)


def _even(level: Array) -> Array:
    """The level with an even number of nodes, but for the root: one without elements surely has size 0."""
    if level.shape[-2] == 1 or level.shape[-2] % 2 == 0:
        return level
    ends = [(0, 0)] * (level.ndim - 2) + [(0, 1), (0, 0)]
    return jnp.pad(level, ends).at[..., -1, 0].set(1.0)


class Trials(NamedTuple):
    """Independent choices: see `gapped.subsets.conditional_bernoulli.Trials`."""

    odds: Array
    """The logarithms of the odds of p."""
    tilt: Array
    p: Array
    q: Array
    size: Array
    degree: int
    is_complement: bool


def _trials_of(scores: Array, k: int) -> Trials:
    """Choices of `k` elements, or of the others if those are fewer."""
    n, exists = scores.shape[-1], scores != -jnp.inf
    count = exists.sum(-1)
    size, degree = jnp.minimum(count, k), k
    if is_complement := 2 * k > n:
        size, degree = count - size, n - k
        scores = jnp.where(exists, -scores, -jnp.inf)
    is_open = ((size > 0) & (size < count))[..., None]
    tilt = jnp.where(is_open, _tilt(scores, size, degree), 0.0)
    wide = jnp.result_type(float)
    odds = scores.astype(wide) - tilt.astype(wide)
    sure = (exists & (size > 0)[..., None]).astype(wide)
    p = jnp.where(is_open, jax.nn.sigmoid(odds), sure)
    q = jnp.where(is_open, jax.nn.sigmoid(-odds), 1 - sure)
    return Trials(odds, tilt, p, q, size, degree, is_complement)


def _tilt(scores: Array, size: Array, degree: int) -> Array:
    """The score at which the probabilities of all choices add up to `size`."""
    size = size[..., None]
    largest = jax.lax.top_k(scores, degree + 1)[0]
    low = jnp.take_along_axis(largest, size, -1) - log(degree)
    high = jnp.take_along_axis(largest, jnp.maximum(size - 1, 0), -1) + log(scores.shape[-1])
    width = (high - low) / 2

    def halve(n: Array, low: Array) -> Array:
        middle = low + width / 2**n
        return jnp.where(jax.nn.sigmoid(scores - middle).sum(-1, keepdims=True) > size, middle, low)

    result: Array = jax.lax.fori_loop(0, _HALVINGS, halve, low)
    return result
