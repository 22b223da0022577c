r"""The law of `k` of `n` elements: its samples, marginals and covariances, as `gapped.subsets` defines them.

A set :math:`S` of `k` elements has a probability in proportion to :math:`\prod_{i \in S} e^{\theta_i}`. That
is the law of independent choices with probabilities :math:`p_i = \sigma(\theta_i - \lambda)`, given that `k`
are made, whatever :math:`\lambda` is. Here :math:`\lambda` is the one for which about `k` are made on
average, so that no number of the `selection_tree` is too small or too large to be held. If `k` is more than
half of `n`, the elements that are left out are chosen instead, with negated logits.

All functions take `scores` `(*rows, n)`: logits relative to the largest of their row, -inf for an element
that does not exist, NaN in a row without a law. A row with fewer than `k` elements has all of them selected.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gapped.jax.selection_tree import ascend, decisions, descend

# Halvings of the interval of lambda: its error must be small beside the inverse of the size's deviation.
_HALVINGS = 12


class Choices(NamedTuple):
    """Independent choices whose law, given their number, is that of a subset or of its complement."""

    p: Array
    """The probability that an element is chosen, `(*rows, n)`."""
    q: Array
    """The probability that it is not."""
    size: Array
    """How many are chosen, `(*rows)`."""
    degree: int
    """The largest size that a row may have."""
    is_complement: bool
    """Whether the chosen elements are those that do not belong to the subset."""


def noise(key: Array, scores: Array) -> Array:
    """What `draw` needs: one uniform for each node of the tree that has children, `(*rows, nodes)`."""
    nodes = sum(decisions(scores.shape[-1]))
    return jax.random.uniform(key, (*scores.shape[:-1], nodes), jnp.result_type(float))


def draw(scores: Array, k: int, u: Array) -> Array:
    """Draw a subset with the uniforms of `noise`: a boolean array of the shape of `scores`."""
    exists = scores != -jnp.inf
    if k in (0, scores.shape[-1]):
        return exists & (k > 0)
    choices = _choices(scores, k)
    levels = ascend(choices.p, choices.q, choices.degree)
    chosen = descend(levels, choices.size, u)[..., : scores.shape[-1]] > 0
    return exists & ~chosen if choices.is_complement else chosen


def marginals(scores: Array, k: int) -> Array:
    """The probability that each element is selected, in the shape and dtype of `scores`."""
    exists = jnp.where(jnp.isnan(scores), jnp.nan, (scores != -jnp.inf).astype(scores.dtype))
    if k in (0, scores.shape[-1]):
        return exists * (k > 0)
    choices = _choices(scores, k)
    chosen, without = _marginals(choices.p, choices.q, choices)
    selected = jnp.where(scores == -jnp.inf, 0.0, without) if choices.is_complement else chosen
    return selected.astype(scores.dtype)


def covariance_product(grad: Array, scores: Array, k: int) -> Array:
    r"""The covariances of the selections times a vector, :math:`\mathrm{Cov}(S, \langle g, S\rangle)`.

    That is the Jacobian of the marginals, which is symmetric, times `grad`, which has the shape of `scores`.
    """
    if k in (0, scores.shape[-1]):
        return jnp.where(jnp.isnan(scores), jnp.nan, jnp.zeros_like(scores))
    choices = _choices(scores, k)
    p, q = choices.p, choices.q
    grad = jnp.where(scores == -jnp.inf, 0.0, grad.astype(p.dtype))
    # A constant added to g changes nothing, as the size is fixed: digits are kept by removing the mean.
    grad = grad - (p * grad).sum(-1, keepdims=True) / jnp.maximum(p.sum(-1, keepdims=True), 0.5)
    # The derivatives of p and q along g.
    slope = p * q * grad
    _, (product, _) = jax.jvp(lambda p, q: _marginals(p, q, choices), (p, q), (slope, -slope))
    result: Array = product.astype(scores.dtype)
    return result


def kth_largest(scores: Array, k: int) -> Array:
    """The `k`-th largest score of each row, `(*rows, 1)`; any number where there are no more than `k`."""
    return jax.lax.top_k(scores, k)[0][..., -1:]


def _marginals(p: Array, q: Array, choices: Choices) -> tuple[Array, Array]:
    """The probabilities that each element is chosen, and that it is not, given how many are.

    The probability of the size is linear in p and q of each element: the part of it that has p, or q.
    """
    law, pull = jax.vjp(lambda p, q: ascend(p, q, choices.degree)[-1][..., 0, :], p, q)
    at = jnp.arange(law.shape[-1]) == choices.size[..., None]
    of_size = jnp.where(at, law, 0.0).sum(-1, keepdims=True)
    by_p, by_q = pull(at / of_size)
    return p * by_p, q * by_q


def _choices(scores: Array, k: int) -> Choices:
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
    return Choices(p, q, size, degree, is_complement)


def _tilt(scores: Array, size: Array, degree: int) -> Array:
    r"""The :math:`\lambda` at which the probabilities :math:`\sigma(\theta_i - \lambda)` add up to `size`.

    It lies between the next score after the `size` largest ones, less the logarithm of `size`, and the last
    of these, plus the logarithm of how many others there are. It need not be exact, since the law does not
    depend on it.
    """
    size = size[..., None]
    largest = jax.lax.top_k(scores, degree + 1)[0]
    low = jnp.take_along_axis(largest, size, -1) - log(degree)
    high = jnp.take_along_axis(largest, jnp.maximum(size - 1, 0), -1) + log(scores.shape[-1])
    width = (high - low) / 2

    def halved(n: Array, low: Array) -> Array:
        middle = low + width / 2**n
        return jnp.where(jax.nn.sigmoid(scores - middle).sum(-1, keepdims=True) > size, middle, low)

    result: Array = jax.lax.fori_loop(0, _HALVINGS, halved, low)
    return result
