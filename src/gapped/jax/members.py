"""The pathwise estimators, one class each: draws and points as `gapped.pathwise` defines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax.arguments import check_count, check_level, constant, is_array, per_row
from gapped.jax.attached import attach, jacobian_product
from gapped.jax.categories import (
    Rows,
    conditional_gumbel,
    expected_gap,
    log_expected_odds,
    log_exponential,
    one_hot,
)
from gapped.jax.draws import inverse_cdf, uniform
from gapped.jax.fused import Mode
from gapped.jax.samplers import Draw, Level, Pathwise, Points, softmax_points
from gapped.jax.shared_arguments import documented

Gap = float | Array | Literal["auto"] | Callable[[Array], Array]


@documented
@dataclass(frozen=True)
class GST(Pathwise):
    """Gapped Straight-Through: a gap in place of noise.

    Its method `sample` draws what `gapped.jax.gst` draws, whose help has the mathematics.

    Arguments:
        (tau, hard)
        gap: Least lead of the drawn category over the others: a number, an array that broadcasts as `tau`
            does, a function of the drawn probability such as `gapped.jax.expected_gap`, or "auto".
        (backend)
    """

    name = "gst"
    levels = ("tau", "gap")

    gap: Gap = 1.0
    """Least distance of the selected logit to the others: a number, an array, a function of the selected
    probability, or `"auto"`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gap, str):
            if self.gap != "auto":
                raise reject("gap", self.gap, 'a number, an array, a function or "auto"')
        elif not callable(self.gap):
            check_level("gap", self.gap, positive=False)

    def mode(self) -> Mode | None:
        if callable(self.gap):
            return self._mode(gap=None) if self.gap is expected_gap else None
        return self._mode("gst-auto") if isinstance(self.gap, str) else self._mode(gap=self.gap)

    def settled(self, logits: Array, draw: Draw) -> Self:
        if not callable(self.gap):
            return self
        selected = jnp.take_along_axis(logits, draw.category[..., None], -1)[..., 0]
        p = jnp.exp(selected) / draw.total
        gap = jnp.asarray(self.gap(p), logits.dtype)
        if gap.shape != p.shape:
            raise reject("gap", f"a function whose result has shape {gap.shape}", f"one of shape {p.shape}")
        return replace(self, gap=constant("gap", gap))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        selected = jnp.arange(logits.shape[-1]) == draw.category[..., None]
        if isinstance(self.gap, str):
            lowered = log_expected_odds(logits - jnp.log(draw.total)[..., None])
        else:
            lowered = jnp.minimum(logits, -per_row(self.gap, logits))
        return softmax_points(jnp.where(selected, 0.0, lowered)[None] / tau, 1 / tau)


@documented
@dataclass(frozen=True)
class StraightThrough(Pathwise):
    """Straight-through: the gradient of the softmax itself.

    Its method `sample` draws what `gapped.jax.straight_through` draws, whose help has the mathematics.

    Arguments:
        (tau, hard, backend)
    """

    name = "straight-through"

    def mode(self) -> Mode:
        return self._mode()

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        return softmax_points(logits[None] / tau, 1 / tau)


@documented
@dataclass(frozen=True)
class ReinMax(Pathwise):
    """ReinMax: straight-through, second-order accurate.

    Its method `sample` draws what `gapped.jax.reinmax` draws, whose help has the mathematics.

    Arguments:
        (tau)
        hard: True; there is no soft sample.
        (backend)
    """

    name = "reinmax"
    has_surrogate = False

    def mode(self) -> Mode:
        return self._mode()

    def points(self, logits: Array, draw: Draw) -> Points:
        hard = one_hot(draw.category, logits.shape[-1], logits.dtype)
        sharp = jnp.exp(logits / self._tau(logits))
        halfway = (sharp / sharp.sum(-1, keepdims=True) + hard) / 2
        weights = jnp.asarray([2.0, -0.5], logits.dtype).reshape(2, *(1,) * logits.ndim)
        return Points(jnp.stack([halfway, jnp.exp(logits) / draw.total[..., None]]), weights)

    def backward(self, grad: Array, rows: Rows, draw: Draw) -> Array:
        points, weights, _ = self.points(rows.logits, draw)
        # One by one: for an array of two points the compiler would read everything once more.
        products = [jacobian_product(grad, points[m : m + 1], weights[m : m + 1]) for m in (0, 1)]
        return rows.filled(products[0] + products[1])


@documented
@dataclass(frozen=True)
class GumbelSoftmax(Pathwise):
    """Gumbel-softmax (Concrete); straight-through if hard.

    Its method `sample` draws what `gapped.jax.gumbel_softmax` draws, whose help has the mathematics.

    Arguments:
        tau: Temperature, a positive number or an array that broadcasts against the logits' shape without the
            category axis. An array gets a gradient.
        (hard, backend)
    """

    name = "gumbel-softmax"
    has_noise = True

    def mode(self) -> Mode | None:
        # An array may be learned, which takes the noise.
        return None if is_array(self.tau) else self._mode()

    def noise(self, key: Array, logits: Array) -> Array:
        return log_exponential(key, logits.shape, logits.dtype)

    def draw(self, logits: Array, noise: Array) -> Draw:
        scores = logits - noise
        return Draw(scores.argmax(-1), scores - scores.max(-1, keepdims=True))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        return softmax_points(draw.noise[None] / tau, 1 / tau)

    def fixed(self) -> Self:
        return replace(self, tau=jax.lax.stop_gradient(self.tau)) if is_array(self.tau) else self

    def finish(self, sample: Array, rows: Rows, draw: Draw) -> Array:
        if not is_array(self.tau):
            return sample
        tau = jnp.broadcast_to(per_row(self.tau, draw.noise), (*sample.shape[:-1], 1))
        points = self.fixed().points(rows.logits, draw)
        return attach(_tau_product, sample, tau, rows.filled(points.points), *points[1:], draw.noise)


def _tau_product(grad: Array, points: Array, weights: Array, mass: Any, scores: Array) -> Array:
    """The gradient of tau in softmax(scores / tau), whose gradient in the scores is `jacobian_product`."""
    exists = scores > -jnp.inf
    product = jacobian_product(jnp.where(exists, grad, 0.0), points, weights, mass)
    product = product * jnp.where(exists, scores, 0.0)
    return -(weights * product).sum(-1, keepdims=True)


@documented
@dataclass(frozen=True)
class GumbelRao(Pathwise):
    """Gumbel-softmax averaged over noise given the category.

    Its method `sample` draws what `gapped.jax.gumbel_rao` draws, whose help has the mathematics.

    Arguments:
        (tau, hard)
        samples: How many surrogates are averaged.
        (backend)
    """

    name = "gumbel-rao"
    has_noise = True
    # It is `samples` times as large as the logits.
    keeps_noise = False

    samples: int = 100
    """How many conditional draws are averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("samples", self.samples)

    def mode(self) -> Mode:
        return self._mode()._replace(samples=self.samples)

    def noise(self, key: Array, logits: Array) -> tuple[Array, Array]:
        first, second = jax.random.split(key)
        log_e = log_exponential(second, (self.samples, *logits.shape), logits.dtype)
        return uniform(first, logits), log_e

    def draw(self, logits: Array, noise: tuple[Array, Array]) -> Draw:
        category, total = inverse_cdf(jnp.exp(logits), noise[0])
        log_p = logits - jnp.log(total.astype(logits.dtype))[..., None]
        return Draw(category, conditional_gumbel(log_p, category, noise[1]))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        scores = draw.noise - draw.noise.max(-1, keepdims=True)
        return softmax_points(scores / tau, 1 / (tau * self.samples))


@documented
@dataclass(frozen=True)
class DecoupledGumbelSoftmax(Pathwise):
    """Gumbel-softmax with a second, forward temperature.

    Its method `sample` draws what `gapped.jax.decoupled_gumbel_softmax` draws, whose help has the
    mathematics.

    Arguments:
        (tau, hard)
        tau_forward: Temperature of the draw, a number or an array as `tau`; 1 keeps the logits' own law.
        (backend)
    """

    name = "decoupled"
    has_noise = True
    levels = ("tau", "tau_forward")

    tau_forward: Level = 1.0
    """Temperature of the law that samples are drawn from, positive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_level("tau_forward", self.tau_forward, positive=True)

    def mode(self) -> Mode:
        return self._mode(tau_forward=self.tau_forward)

    def noise(self, key: Array, logits: Array) -> Array:
        return log_exponential(key, logits.shape, logits.dtype)

    def draw(self, logits: Array, noise: Array) -> Draw:
        scores = logits / per_row(self.tau_forward, logits) - noise
        return Draw(scores.argmax(-1), noise)

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = self._tau(logits)
        return Points(jax.nn.softmax(logits / tau - draw.noise, -1)[None], 1 / tau)
