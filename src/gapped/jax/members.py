"""The pathwise estimators, one class each: draws and points as `gapped.pathwise` defines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax.arguments import check_count, check_level, is_array, per_row
from gapped.jax.attached import attach, jacobian_product
from gapped.jax.categories import (
    conditional_gumbel,
    inverse_cdf,
    log_expected_odds,
    log_exponential,
    log_softmax,
    one_hot,
    uniform,
)
from gapped.jax.samplers import Draw, Level, Pathwise, Points

Gap = float | Array | Literal["auto"] | Callable[[Array], Array]


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
