"""Estimators that need the cost of each sample: the definitions of `gapped.score`.

An estimator consists of `noise`, which is all that is random, and two pure functions of it: `index`, the
categories to evaluate, and `gradient`, which is given their costs. All get logits in float32 or float64,
without a gradient, with the categories on the last axis and the largest of each row at 0, -inf throughout a
row without categories and NaN throughout one with a NaN or +inf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gapped.errors import GappedError, reject
from gapped.jax.checks import check_count, check_number, is_array
from gapped.jax.simplex import inverse_cdf, one_hot, rows_of, uniform

LIMIT = 65_536


class Draws(NamedTuple):
    """Samples and their costs, without a gradient."""

    category: Array
    """The evaluated categories, `(n, *batch, *variables)`."""
    costs: Array
    """Their costs, `(n, *batch)`."""
    slopes: Array | None = None
    """Derivatives of the costs by the samples, for estimators that ask for them."""


class Score(ABC):
    """An estimator that learns from the costs of its samples.

    `gapped.jax.RLOO` and the others of this family are its subclasses. They are used as
    `gapped.jax.expectation(key, f, logits, estimator)`, and have no method `sample`: their gradient needs the
    cost.
    """

    name: ClassVar[str]
    """Its name in text."""
    needs_slopes: ClassVar[bool] = False
    """Whether `gradient` is given the derivatives of the costs by the samples."""
    samples: int = 1

    def sample(self, *arguments: Any, **options: Any) -> Any:
        """There is none: raises an error that says what to use instead."""
        name = type(self).__name__
        raise GappedError(
            f"{name}.sample: a score-function estimator needs the cost of its samples, use "
            f"gapped.jax.expectation(key, f, logits, {name}(...)), or a pathwise one such as gapped.jax.GST()"
        )

    def estimate(self, key: Array, f: Callable[[Array], Array], rows: Array) -> tuple[Array, Array]:
        """The value `batch`, which depends on all that `f` does, and the gradient of the masked logits."""
        scores = rows_of(rows).marked_logits
        one = jax.ShapeDtypeStruct((1, *rows.shape), rows.dtype)  # type: ignore[no-untyped-call]
        shape = jax.eval_shape(f, one)
        check_costs(shape, one)
        noise = self.noise(key, scores, shape.ndim - 1)
        index = self.index(scores, noise)
        points, slopes = one_hot(index, rows.shape[-1], rows.dtype), None
        if self.needs_slopes:
            costs, pull = jax.vjp(f, points)
            (slopes,) = pull(jnp.ones_like(costs))
            # At a category that does not exist the cost may have any slope.
            slopes = jnp.where(scores == -jnp.inf, 0.0, jax.lax.stop_gradient(slopes))
        else:
            costs = f(points)
        wide = jax.lax.stop_gradient(costs).astype(jnp.result_type(float))
        gradient = self.gradient(scores, noise, Draws(index, wide, slopes))
        gradient = jnp.where(jax.lax.stop_gradient(rows) == -jnp.inf, 0.0, gradient)
        return self.value(scores, costs, noise), gradient

    def noise(self, key: Array, logits: Array, batch_axes: int) -> Any:
        """Everything random about an estimate: by default, that of independent samples."""
        return uniform(key, logits, (self.samples,))

    def index(self, logits: Array, noise: Any) -> Array:
        """The categories to evaluate, `(n, *batch, *variables)`."""
        weights = jnp.broadcast_to(jnp.exp(logits), (*noise.shape[1:], logits.shape[-1]))
        return mark_absent(inverse_cdf(weights, noise)[0], logits)

    def value(self, logits: Array, costs: Array, noise: Any) -> Array:
        """The estimated cost, `batch`."""
        return costs.mean(0)

    @abstractmethod
    def gradient(self, logits: Array, noise: Any, draws: Draws) -> Array:
        """The estimated gradient, `(*batch, *variables, K)`."""


def mark_absent(index: Array, logits: Array) -> Array:
    """`index`, in rows without a sample replaced: `K` if empty, `K + 1` with a NaN."""
    top = logits.max(-1)
    index = jnp.where(top == -jnp.inf, logits.shape[-1], index)
    return jnp.where(jnp.isnan(top), logits.shape[-1] + 1, index)


def probabilities(logits: Array) -> Array:
    """Softmax of logits that are at most 0, whose rows without categories are zero."""
    weights = jnp.exp(logits)
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 0.5)


def spread(signal: Array, like: Array) -> Array:
    """`signal` with axes of size 1 until it has as many as `like`, in the dtype of `like`."""
    return signal.astype(like.dtype).reshape(*signal.shape, *(1,) * (like.ndim - signal.ndim))


def check_costs(costs: Any, points: Any) -> None:
    """Check what `f` returned for `points` `(n, *batch, *variables, K)`: costs `(n, *batch)`."""
    n, rows = points.shape[0], points.shape[1:-1]
    accepted = f"an array of costs (n, *batch): n = {n}, then some or all of the leading axes of {rows}"
    if not (is_array(costs) or isinstance(costs, jax.ShapeDtypeStruct)):
        raise reject("f", f"a result of type {type(costs).__name__}", accepted)
    if not jnp.issubdtype(costs.dtype, jnp.floating):
        raise reject("f", f"costs of dtype {costs.dtype}", "floating-point costs")
    if not costs.shape or costs.shape[0] != n or costs.shape[1:] != rows[: len(costs.shape) - 1]:
        raise reject("f", f"costs of shape {costs.shape}", accepted)


@dataclass(frozen=True)
class DisARMTree(Score):
    """DisARM on categories as paths down a binary tree.

    The help of `gapped.DisARMTree` has the mathematics and the references.

    - Bias: none.
    - Cost: two evaluations, no derivative of the cost; K - 1 uniforms per row after padding.
    """

    name = "disarm-tree"

    def noise(self, key: Array, logits: Array, batch_axes: int) -> Array:
        nodes = (1 << depth(logits.shape[-1])) - 1
        return jax.random.uniform(key, (*logits.shape[:-1], nodes), jnp.result_type(float))

    def index(self, logits: Array, noise: Array) -> Array:
        p = node_probabilities(logits.astype(noise.dtype))
        # No u in [0, 1) gives a bit that a p of 0 or 1 forbids.
        bits = jnp.stack([noise < p, noise >= 1 - p]).astype(jnp.int32)
        node = jnp.zeros((2, *logits.shape[:-1]), jnp.int32)
        for _ in range(depth(logits.shape[-1])):
            # The children of node t are 2 t + 1 and 2 t + 2.
            node = 2 * node + 1 + jnp.take_along_axis(bits, node[..., None], -1)[..., 0]
        return mark_absent(node - noise.shape[-1], logits)

    def gradient(self, logits: Array, noise: Any, draws: Draws) -> Array:
        # The difference of the costs, times the factor of `gapped.score.disarm.direction_of_pair`.
        delta, index = (draws.costs[0] - draws.costs[1]).astype(logits.dtype), draws.category
        # The highest bit in which the two leaves differ is decided where the paths part.
        height = jnp.maximum(31 - jax.lax.clz((index[0] ^ index[1]).astype(jnp.int32)), 0)[..., None]
        leaves = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        sides = (leaves >> height) == (index[..., None].astype(jnp.int32) >> height)
        weights = jnp.exp(logits) * sides
        mass = jnp.maximum(weights.sum(-1, keepdims=True), np.finfo(logits.dtype).tiny)
        # sigma(-|phi|) is the lesser side's part of both.
        lesser = mass.min(0) / mass.sum(0)
        off = one_hot(index, logits.shape[-1], logits.dtype) - weights * (lesser / mass)
        direction = 0.5 * (off[0] - off[1])
        return spread(delta, direction) * direction


def depth(categories: int) -> int:
    """The levels of a balanced tree whose leaves are the categories."""
    return (categories - 1).bit_length()


def node_probabilities(logits: Array) -> Array:
    """The probabilities of going right, level by level from the root; NaN where no sample comes."""
    categories = logits.shape[-1]
    ends = [(0, 0)] * (logits.ndim - 1) + [(0, (1 << depth(categories)) - categories)]
    masses = jnp.pad(jnp.exp(logits), ends)
    rights, totals = [masses[..., :0]], [masses[..., :0]]
    while masses.shape[-1] > 1:
        rights.append(masses[..., 1::2])
        masses = masses[..., 0::2] + rights[-1]
        totals.append(masses)
    return jnp.concatenate(rights[::-1], -1) / jnp.concatenate(totals[::-1], -1)


@dataclass(frozen=True)
class DoubleCV(Score):
    """RLOO with slopes of the cost as control variates.

    Arguments:
        samples: How many samples are drawn, n below, at least two.
        alpha: The factor α of the control variate. It is fixed here; `gapped.DoubleCV` starts with it and can
            train it.

    The help of `gapped.DoubleCV` has the mathematics and the references.

    - Bias: none, whatever α is.
    - Cost: `samples` evaluations and their derivatives.
    """

    name = "double-cv"
    needs_slopes = True

    samples: int = 2
    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)
        check_number("alpha", self.alpha)

    def gradient(self, logits: Array, noise: Any, draws: Draws) -> Array:
        assert draws.slopes is not None
        p, alpha = probabilities(logits), float(self.alpha)
        off = one_hot(draws.category, logits.shape[-1], logits.dtype) - p
        slopes = draws.slopes.astype(logits.dtype)
        others = (slopes.sum(0) - slopes) / (self.samples - 1)
        axes = tuple(range(draws.costs.ndim, off.ndim))
        # Apart from each other: next to a large cost the control variate would lose its digits.
        signal = leave_one_out(draws.costs) - alpha * leave_one_out((off * others).sum(axes))
        mean = slopes.mean(0)
        straight = p * (mean - (p * mean).sum(-1, keepdims=True))
        return (spread(signal, off) * off).mean(0) + alpha * straight


@dataclass(frozen=True)
class Exact(Score):
    """The exact gradient: a sum over all values.

    - Bias and variance: none.
    - Cost: K^L evaluations for L variables of K categories, 65,536 at most, in one call of the cost. Values
      of probability zero are replaced by the mode: the cost need not be defined on them.
    """

    name = "exact"

    def noise(self, key: Array, logits: Array, batch_axes: int) -> tuple[Array, Array]:
        """The joint values `(n, *batch, *variables)` and their probabilities `(n, *batch)`."""
        categories, variables = logits.shape[-1], logits.shape[batch_axes:-1]
        size = 1
        for length in variables:
            size *= length
        if categories**size > LIMIT:
            raise GappedError(
                f"Exact: got {size} variables of {categories} categories, expected at most {LIMIT:,} "
                "combinations; take a sampling estimator such as gapped.jax.RLOO()"
            )
        digits = categories ** jnp.arange(size)[::-1].reshape(variables)
        number = jnp.arange(categories**size).reshape(-1, *(1,) * (logits.ndim - 1))
        index = jnp.broadcast_to((number // digits) % categories, (number.shape[0], *logits.shape[:-1]))
        empty = logits.max(-1, keepdims=True) == -jnp.inf
        # A row without categories has one value, whatever the number it gets.
        p = jnp.where(empty, jnp.arange(categories) == 0, probabilities(logits))
        chosen = jnp.take_along_axis(jnp.broadcast_to(p, (*index.shape, categories)), index[..., None], -1)
        weights = chosen[..., 0].prod(tuple(range(1 + batch_axes, index.ndim)))
        possible = (weights > 0).reshape(*weights.shape, *(1,) * len(variables))
        mode = logits.argmax(-1)
        return mark_absent(jnp.where(possible, index, mode), logits), weights

    def index(self, logits: Array, noise: tuple[Array, Array]) -> Array:
        return noise[0]

    def value(self, logits: Array, costs: Array, noise: tuple[Array, Array]) -> Array:
        return (noise[1].astype(costs.dtype) * costs).sum(0)

    def gradient(self, logits: Array, noise: Any, draws: Draws) -> Array:
        off = one_hot(draws.category, logits.shape[-1], logits.dtype) - probabilities(logits)
        # Relative to one cost, which changes nothing but the rounding.
        signal = noise[1] * (draws.costs - draws.costs[0])
        return (spread(signal, off) * off).sum(0)


@dataclass(frozen=True)
class RLOO(Score):
    """REINFORCE; each sample is judged by the others (RLOO).

    Arguments:
        samples: How many samples are drawn, n below, at least two.

    The help of `gapped.RLOO` has the mathematics and the references.

    - Bias: none.
    - Cost: `samples` evaluations, no derivative of the cost.
    """

    name = "rloo"

    samples: int = 4

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)

    def gradient(self, logits: Array, noise: Any, draws: Draws) -> Array:
        off = one_hot(draws.category, logits.shape[-1], logits.dtype) - probabilities(logits)
        return (spread(leave_one_out(draws.costs), off) * off).mean(0)


def leave_one_out(costs: Array) -> Array:
    """Each cost less the mean of the others, along the leading axis."""
    n = costs.shape[0]
    # Relative to one cost, which changes nothing but the rounding: equal costs give exactly zero.
    costs = costs - costs[0]
    return (costs - costs.mean(0)) * (n / (n - 1))
