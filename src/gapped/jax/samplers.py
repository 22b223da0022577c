"""Estimators whose sample carries the gradient, as frozen objects: the definitions of `gapped.pathwise`.

An estimator consists of three methods. `noise` is all that is random. `draw` makes the category of it, and
`points` the points of the simplex that carry the gradient; both are pure functions, of logits in float32 or
float64, without a gradient, with the categories on the last axis and the largest of each row at 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax.arguments import (
    check_count,
    check_flag,
    check_key,
    check_level,
    check_logits,
    check_where,
    fitted,
    is_array,
    per_row,
)
from gapped.jax.attached import attach, jacobian_product
from gapped.jax.categories import (
    Rows,
    conditional_gumbel,
    inverse_cdf,
    log_expected_odds,
    log_exponential,
    log_softmax,
    masked,
    one_hot,
    rows_of,
    uniform,
)
from gapped.jax.choices import Choice

Level = float | Array
Gap = float | Array | Literal["auto"] | Callable[[Array], Array]


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


@dataclass(frozen=True)
class GST(Pathwise):
    """The Gapped Straight-Through estimator: see `gst`."""

    name = "gst"
    levels = ("tau", "gap")

    gap: Gap = 1.0
    """Least distance of the selected logit to the others: a number, an array, a function of the selected
    probability, or ``"auto"``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gap, str):
            if self.gap != "auto":
                raise reject("gap", self.gap, 'a number, an array, a function or "auto"')
        elif not callable(self.gap):
            check_level("gap", self.gap, positive=False)

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        selected = jnp.arange(logits.shape[-1]) == draw.category[..., None]
        if isinstance(self.gap, str):
            lowered = log_expected_odds(log_softmax(logits))
        else:
            lowered = jnp.minimum(logits, -self._gap_of(logits, selected))
        return Points(jax.nn.softmax(jnp.where(selected, 0.0, lowered) / tau, -1)[None], 1 / tau)

    def _gap_of(self, logits: Array, selected: Array) -> Array:
        if not callable(self.gap):
            return per_row("gap", self.gap, logits)
        p = jnp.where(selected, jax.nn.softmax(logits, -1), 0.0).sum(-1)
        gap = jnp.asarray(self.gap(p), logits.dtype)
        if gap.shape != p.shape:
            raise reject("gap", f"a function whose result has shape {gap.shape}", f"one of shape {p.shape}")
        return per_row("gap", gap, logits)


@dataclass(frozen=True)
class StraightThrough(Pathwise):
    """The straight-through estimator: see `straight_through`."""

    name = "straight-through"

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        return Points(jax.nn.softmax(logits / tau, -1)[None], 1 / tau)


@dataclass(frozen=True)
class ReinMax(Pathwise):
    """ReinMax: see `reinmax`."""

    name = "reinmax"
    has_surrogate = False

    def points(self, logits: Array, draw: Draw) -> Points:
        hard = one_hot(draw.category, logits.shape[-1], logits.dtype)
        halfway = (jax.nn.softmax(logits / self._tau(logits), -1) + hard) / 2
        weights = jnp.asarray([2.0, -0.5], logits.dtype).reshape(2, *(1,) * logits.ndim)
        return Points(jnp.stack([halfway, jax.nn.softmax(logits, -1)]), weights)


@dataclass(frozen=True)
class GumbelSoftmax(Pathwise):
    """Gumbel-Softmax, straight-through when hard: see `gumbel_softmax`."""

    name = "gumbel-softmax"

    def noise(self, key: Array, logits: Array) -> Array:
        return log_exponential(key, logits.shape, logits.dtype)

    def draw(self, logits: Array, noise: Array) -> Draw:
        scores = logits - noise
        return Draw(scores.argmax(-1), scores - scores.max(-1, keepdims=True))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        return Points(jax.nn.softmax(draw.noise / tau, -1)[None], 1 / tau)

    def finish(self, sample: Array, draw: Draw, points: Points) -> Array:
        if not is_array(self.tau):
            return sample
        tau = jnp.asarray(self.tau, points.points.dtype)[..., None]
        tau = jnp.broadcast_to(tau, (*sample.shape[:-1], 1))
        return attach(_tau_product, sample, tau, *points, draw.noise)

    def _tau(self, like: Array) -> Array:
        return per_row("tau", jax.lax.stop_gradient(self.tau) if is_array(self.tau) else self.tau, like)


def _tau_product(grad: Array, points: Array, weights: Array, scores: Array) -> Array:
    """The gradient of tau in softmax(scores / tau), whose gradient in the scores is `jacobian_product`."""
    product = jacobian_product(grad, points, weights) * jnp.where(scores == -jnp.inf, 0.0, scores)
    return -(weights * product).sum(-1, keepdims=True)


@dataclass(frozen=True)
class GumbelRao(Pathwise):
    """Gumbel-Rao by Monte Carlo: see `gumbel_rao`."""

    name = "gumbel-rao"

    samples: int = 100
    """How many conditional draws are averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("samples", self.samples)

    def sample(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Array:
        """`Pathwise.sample`; the backward pass draws the noise again instead of keeping it."""
        # The points are `samples` times as large as the logits, and a hard sample does not need them.
        again: Callable[..., Array] = jax.checkpoint(partial(super().sample, axis=axis))
        return again(key, logits, where=where)

    def noise(self, key: Array, logits: Array) -> tuple[Array, Array]:
        first, second = jax.random.split(key)
        log_e = log_exponential(second, (self.samples, *logits.shape), logits.dtype)
        return uniform(first, logits), log_e

    def draw(self, logits: Array, noise: tuple[Array, Array]) -> Draw:
        category = inverse_cdf(jnp.exp(logits), noise[0])
        return Draw(category, conditional_gumbel(jax.nn.log_softmax(logits, -1), category, noise[1]))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        scores = draw.noise - draw.noise.max(-1, keepdims=True)
        return Points(jax.nn.softmax(scores / tau, -1), 1 / (tau * self.samples))


@dataclass(frozen=True)
class DecoupledGumbelSoftmax(Pathwise):
    """Decoupled straight-through Gumbel-Softmax: see `decoupled_gumbel_softmax`."""

    name = "decoupled"
    levels = ("tau", "tau_forward")

    tau_forward: Level = 1.0
    """Temperature of the law that samples are drawn from, positive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_level("tau_forward", self.tau_forward, positive=True)

    def noise(self, key: Array, logits: Array) -> Array:
        return log_exponential(key, logits.shape, logits.dtype)

    def draw(self, logits: Array, noise: Array) -> Draw:
        scores = logits / per_row("tau_forward", self.tau_forward, logits) - noise
        return Draw(scores.argmax(-1), noise)

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        return Points(jax.nn.softmax(logits / tau - draw.noise, -1)[None], 1 / tau)
