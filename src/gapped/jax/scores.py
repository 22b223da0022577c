"""Estimators that need the cost of each sample: the definitions of `gapped.score`.

An estimator consists of `noise`, which is all that is random, and two pure functions of it: `index`, the
categories to evaluate, and `gradient`, which is given their costs. All get logits in float32 or float64,
without a gradient, with the categories on the last axis and the largest of each row at 0, -inf throughout a
row without categories and NaN throughout one with a NaN or +inf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from gapped.errors import GappedError
from gapped.jax.arguments import check_count, check_number
from gapped.jax.categories import one_hot
from gapped.jax.draws import inverse_cdf, uniform

LIMIT = 65_536


class Costs(NamedTuple):
    """Samples and what they cost, without a gradient."""

    category: Array
    """The categories, `(n, *batch, *variables)`."""
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
    """What text calls it."""
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
    def gradient(self, logits: Array, noise: Any, draws: Costs) -> Array:
        """The estimated gradient, `(*batch, *variables, K)`."""


@dataclass(frozen=True)
class RLOO(Score):
    """REINFORCE; each sample is judged by the others (RLOO).

    Arguments:
        samples: How many samples are drawn, n below, at least two.

    The gradient is::

        1/n Σ_i (f(D_i) - mean_{j≠i} f(D_j)) (D_i - p)

    - Bias: none.
    - Cost: `samples` evaluations, no derivative of the cost.

    References: Kool, van Hoof, Welling (2019).
    """

    name = "rloo"

    samples: int = 2
    """How many samples, at least two."""

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)

    def gradient(self, logits: Array, noise: Any, draws: Costs) -> Array:
        off = one_hot(draws.category, logits.shape[-1], logits.dtype) - probabilities(logits)
        return (spread(leave_one_out(draws.costs), off) * off).mean(0)


@dataclass(frozen=True)
class DoubleCV(Score):
    """RLOO with slopes of the cost as control variates.

    Arguments:
        samples: How many samples are drawn, n below, at least two.
        alpha: The factor α of the control variate. It is fixed here; `gapped.DoubleCV` starts at 1 and can
            train it. A fixed 1 can have far more variance than RLOO, so the default is 0.5.

    With h_i the mean slope of the *other* samples and s_i = f(D_i) - α ⟨h_i, D_i - p⟩ the gradient is::

        1/n Σ_i (s_i - mean_{j≠i} s_j) (D_i - p) + α/n Σ_i J(p) h_i

    Given the other samples, what is subtracted has mean zero, and its product with D_i - p the mean α J(p)
    h_i, which the last term adds back. With α = 0 it is RLOO.

    - Bias: none, whatever α is.
    - Cost: `samples` evaluations and their derivatives.

    References: Titsias and Shi (2022), for binary variables.
    """

    name = "double-cv"
    needs_slopes = True

    samples: int = 2
    """How many samples, at least two."""
    alpha: float = 0.5
    """The factor of the second control variate."""

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)
        check_number("alpha", self.alpha)

    def gradient(self, logits: Array, noise: Any, draws: Costs) -> Array:
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

    def gradient(self, logits: Array, noise: tuple[Array, Array], draws: Costs) -> Array:
        off = one_hot(draws.category, logits.shape[-1], logits.dtype) - probabilities(logits)
        # Relative to one cost, which changes nothing but the rounding.
        signal = noise[1] * (draws.costs - draws.costs[0])
        return (spread(signal, off) * off).sum(0)


def mark_absent(index: Array, logits: Array) -> Array:
    """`index`, in rows without a sample replaced: `K` if empty, `K + 1` with a NaN."""
    top = logits.max(-1)
    index = jnp.where(top == -jnp.inf, logits.shape[-1], index)
    return jnp.where(jnp.isnan(top), logits.shape[-1] + 1, index)


def probabilities(logits: Array) -> Array:
    """Softmax of logits that are at most 0, whose rows without categories are zero."""
    weights = jnp.exp(logits)
    return weights / jnp.maximum(weights.sum(-1, keepdims=True), 0.5)


def leave_one_out(costs: Array) -> Array:
    """Each cost less the mean of the others, along the leading axis."""
    n = costs.shape[0]
    # Relative to one cost, which changes nothing but the rounding: equal costs give exactly zero.
    costs = costs - costs[0]
    return (costs - costs.mean(0)) * (n / (n - 1))


def spread(signal: Array, like: Array) -> Array:
    """`signal` with axes of size 1 until it has as many as `like`, in the dtype of `like`."""
    return signal.astype(like.dtype).reshape(*signal.shape, *(1,) * (like.ndim - signal.ndim))
