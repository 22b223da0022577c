"""The base class of estimators whose sample carries the gradient.

An estimator consists of three methods. `noise` is all that is random. `draw` makes the category of it, and
`points` the points of the simplex that carry the gradient; both are pure functions, of logits in float32 or
float64, without a gradient, with the categories on the last axis and the largest of each row at 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax.arguments import (
    check_flag,
    check_key,
    check_level,
    check_logits,
    check_where,
    fitted,
    per_row,
)
from gapped.jax.attached import attach, jacobian_product
from gapped.jax.categories import (
    Rows,
    inverse_cdf,
    masked,
    one_hot,
    rows_of,
    uniform,
)
from gapped.jax.choices import Choice

Level = float | Array


class Draw(NamedTuple):
    """Everything random about a sample."""

    category: Array
    """The category of each row, ``(*rows)``."""
    noise: Any = None
    """Further noise of the surrogate, in the estimator's own form."""


class Points(NamedTuple):
    r"""Where a gradient comes from: it is :math:`\sum_m w_m J(q_m) g`."""

    points: Array
    """Points of the simplex, ``(m, *rows, K)``."""
    weights: Array
    """Their weights, which broadcast against the points."""


@dataclass(frozen=True)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient."""

    name: ClassVar[str]
    """What text calls it."""
    levels: ClassVar[tuple[str, ...]] = ("tau",)
    """The options that may be arrays, with one value per row."""
    has_surrogate: ClassVar[bool] = True
    """Whether there is a surrogate, and hence a soft sample; else `hard` must be True."""

    tau: Level = 1.0
    """Temperature of the surrogate: a positive number, or an array that broadcasts against the logits' shape
    without the category axis. An array with as many axes as the logits has that axis too, of size 1."""
    hard: bool = True
    """One-hot samples if true, else the surrogate itself."""

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True)
        check_flag("hard", self.hard)
        if not (self.hard or self.has_surrogate):
            raise reject("hard", self.hard, f"True: {type(self).__name__} has no soft sample")

    def sample(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Array:
        """Draw a sample of the shape and dtype of `logits` that carries this estimator's gradient.

        `axis` is the category axis. Categories where the boolean `where` is False do not exist; where `axis`
        is not the last one, `where` needs all axes of the logits. Half precision is computed in float32 and
        rounded once, at the end.
        """
        estimator, scores = self._prepared(key, logits, axis, where)
        rows, draw, points = estimator._outcome(key, scores)
        if self.hard:
            value = one_hot(rows.marked(draw.category), scores.shape[-1], scores.dtype)
        else:
            value = points.points.mean(0).astype(scores.dtype)
        sample = attach(jacobian_product, value, scores, *points)
        return jnp.moveaxis(estimator.finish(sample, draw, points), -1, axis)

    def __call__(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Array:
        """`sample`."""
        return self.sample(key, logits, axis=axis, where=where)

    def choose(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Choice:
        """Draw one category per row without ever writing its one-hot vector: see `Choice`."""
        if not self.hard:
            raise reject("hard", False, "True: a choice is a hard sample")
        estimator, scores = self._prepared(key, logits, axis, where)
        rows, draw, points = estimator._outcome(key, scores)
        return Choice(rows.marked(draw.category), scores, *points)

    def _prepared(self, key: Array, logits: Array, axis: int, where: Array | None) -> tuple[Self, Array]:
        """This estimator with levels that fit, and the masked logits with the categories last."""
        check_key(key)
        check_logits(logits, axis)
        check_where(where, logits, axis)
        levels: dict[str, Any] = {
            name: fitted(name, getattr(self, name), logits, axis) for name in self.levels
        }
        return replace(self, **levels), jnp.moveaxis(masked(jnp.asarray(logits), where), axis, -1)

    def _outcome(self, key: Array, scores: Array) -> tuple[Rows, Draw, Points]:
        rows = rows_of(scores)
        draw = self.draw(rows.logits, self.noise(key, rows.logits))
        points, weights = self.points(rows.logits, draw)
        return rows, draw, Points(rows.filled(points), weights)

    def noise(self, key: Array, logits: Array) -> Any:
        """All that is random: by default, that of `inverse_cdf`."""
        return uniform(key, logits)

    def draw(self, logits: Array, noise: Any) -> Draw:
        """The category of each row, and what the surrogate needs of the noise."""
        return Draw(inverse_cdf(jnp.exp(logits), noise))

    @abstractmethod
    def points(self, logits: Array, draw: Draw) -> Points:
        """The points and weights that belong to `draw`."""

    def finish(self, sample: Array, draw: Draw, points: Points) -> Array:
        """The sample, with the gradient of learned options where there are any."""
        return sample

    def _tau(self, like: Array) -> Array:
        return per_row("tau", self.tau, like)
