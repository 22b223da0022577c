"""The estimators whose sample carries the gradient: their base class, then one after the other.

An estimator consists of three methods. `noise` is all that is random. `draw` makes the category of it, and
`points` the points of the simplex that carry the gradient; both are pure functions, of logits in float32 or
float64, without a gradient, with the categories on the last axis and the largest of each row at 0.
`Pathwise.sample` does the rest: `prepare` the logits, `draw_category`, the `outcome`, and its `gradient`.

The backward pass computes the points again, from the logits and the category, and where they have noise of
their own from the key: all of them are there anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from inspect import cleandoc, isclass
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from gapped.docstrings import documented_in_jax as documented
from gapped.errors import reject
from gapped.jax import kernels, simplex
from gapped.jax.checks import (
    check_count,
    check_flag,
    check_key,
    check_level,
    check_logits,
    check_where,
    fit,
    forbid_gradient,
    is_array,
)
from gapped.jax.gradient import Points, attach, jacobian_product
from gapped.jax.kernels import Fused
from gapped.jax.simplex import Rows, per_row, rows_of

if TYPE_CHECKING:
    from gapped.jax.choice import Choice

T = TypeVar("T", bound=Any)
Level = float | Array
Gap = float | Array | Literal["auto"] | Callable[[Array], Array]
BACKENDS = ("auto", "xla", "triton")

# Up to this length XLA computes the products of a row in one kernel for GPUs. Longer rows it reads several
# times, and it would write the points in between rather than compute them again.
_LONGEST_BLOCK = 16_384


class Draw(NamedTuple):
    """Everything random about a sample."""

    category: Array
    """The category of each row, `(*rows)`."""
    noise: Any = None
    """Further noise of the surrogate, in the estimator's own form."""
    total: Any = None
    """The sum of the exponentials of each row's logits, `(*rows)`, where the draw has it."""


@documented
@dataclass(frozen=True)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient.

    `gapped.jax.GST`, `gapped.jax.GumbelSoftmax` and the others of this family are its subclasses. All have
    the arguments below, and the methods `sample` and `choose`.
    """

    name: ClassVar[str]
    """Its name in text."""
    levels: ClassVar[tuple[str, ...]] = ("tau",)
    """The options that may be arrays, with one value per row."""
    has_surrogate: ClassVar[bool] = True
    """Whether there is a surrogate, and hence a soft sample; else `hard` must be True."""
    has_noise: ClassVar[bool] = False
    """Whether the points depend on more noise than the category."""
    keeps_noise: ClassVar[bool] = True
    """Whether a compiler may keep that noise for the backward pass, where it would be drawn again."""

    tau: Level = 1.0
    hard: bool = True
    backend: str = field(default="auto", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True)
        check_flag("hard", self.hard)
        if self.backend not in BACKENDS:
            raise reject("backend", self.backend, f"one of {', '.join(BACKENDS)}")
        if not (self.hard or self.has_surrogate):
            raise reject("hard", self.hard, f"True: {type(self).__name__} has no soft sample")

    @documented
    def sample(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Array:
        """Draw a sample of the shape and dtype of `logits` that carries this estimator's gradient.

        Returns:
            The sample. Half precision is computed in float32 and rounded once, at the end.
        """
        estimator, scores = self.prepare(key, logits, axis, where)
        frozen, rows = estimator.freeze(), rows_of(scores)
        if frozen.uses_kernels(scores):
            return jnp.moveaxis(kernels.sample(*frozen.split_levels(), key, scores), -1, axis)
        draw = frozen.draw_category(key, rows.logits)
        frozen = frozen.evaluate(rows.logits, draw)
        value, category = frozen.outcome(rows, draw)
        plain, levels = frozen.split_levels()
        sample = attach(plain.pull, value, scores, levels, key, rows.scores, category, rows.top, draw.total)
        return jnp.moveaxis(estimator.attach_tau(sample, rows, draw), -1, axis)

    __call__ = sample

    @documented
    def choose(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Choice:
        """Draw one category per row, by its index; no one-hot vector is written.

        Returns:
            A `gapped.jax.Choice`, with the `index` and ways to use it that carry the gradient.
        """
        from gapped.jax.choice import draw_choice

        return draw_choice(self, key, logits, axis, where)

    def prepare(self, key: Array, logits: Array, axis: int, where: Array | None) -> tuple[Self, Array]:
        """This estimator with levels that fit, and the masked logits with the categories last."""
        check_key(key)
        check_logits(logits, axis)
        check_where(where, logits, axis)
        levels = {name: fit(name, getattr(self, name), logits, axis) for name in self.levels}
        return self.with_levels(levels), jnp.moveaxis(simplex.masked(jnp.asarray(logits), where), axis, -1)

    def freeze(self) -> Self:
        """This estimator with levels that must not be differentiated."""
        return self.with_levels({name: forbid_gradient(name, getattr(self, name)) for name in self.levels})

    def with_levels(self, levels: Mapping[str, Any]) -> Self:
        """This estimator with other levels."""
        return replace(self, **levels)

    def split_levels(self) -> tuple[Self, dict[str, Array]]:
        """This estimator with 1 for every level that is an array, and those arrays by name."""
        arrays = {name: getattr(self, name) for name in self.levels if is_array(getattr(self, name))}
        return self.with_levels(dict.fromkeys(arrays, 1.0)), arrays

    def fused(self) -> Fused | None:
        """The arguments of the kernels; None for an estimator, or options, without a kernel."""
        return None

    def uses_kernels(self, scores: Array) -> bool:
        """Whether the kernels draw; an error if they are asked for and cannot."""
        if self.backend == "xla":
            return False
        why_not = kernels.refusal(scores, self.fused())
        if why_not is not None and self.backend == "triton":
            raise reject("backend", "triton", f"xla or auto here: {why_not}")
        return why_not is None

    def noise(self, key: Array, logits: Array) -> Any:
        """All that is random: by default, that of `inverse_cdf`."""
        return simplex.uniform(key, logits)

    def draw(self, logits: Array, noise: Any) -> Draw:
        """The category of each row, and what the surrogate needs of the noise."""
        category, total = simplex.inverse_cdf(jnp.exp(logits), noise)
        return Draw(category, total=total.astype(logits.dtype))

    def draw_category(self, key: Array, logits: Array) -> Draw:
        """`draw` with the noise of `key`."""
        return self.draw(logits, self.noise(key, logits))

    def evaluate(self, logits: Array, draw: Draw) -> Self:
        """This estimator with the value of each option that is a function of the draw."""
        return self

    @abstractmethod
    def points(self, logits: Array, draw: Draw) -> Points:
        """The points and weights that belong to `draw`."""

    def outcome(self, rows: Rows, draw: Draw) -> tuple[Array, Array]:
        """A sample of these rows, and the category of each: `K` or `K + 1` where it has none."""
        category = rows.mark(draw.category)
        if self.hard:
            value = simplex.one_hot(category, rows.scores.shape[-1], rows.scores.dtype)
        else:
            points, _, mass = self.points(rows.logits, draw)
            value = rows.fill((points / mass).mean(0)).astype(rows.scores.dtype)
        return value, category

    def gradient(self, grad: Array, rows: Rows, draw: Draw) -> Array:
        """The gradient of the logits, in float32 or float64."""
        points = self.points(rows.logits, draw)
        if not self.has_surrogate:
            # One by one: for an array of two points the compiler would read everything once more.
            each = zip(points.points, points.weights, strict=True)
            products = (jacobian_product(grad, point[None], weight[None]) for point, weight in each)
            return rows.fill(reduce(add, products))
        if rows.scores.shape[-1] <= _LONGEST_BLOCK:
            return rows.fill(jacobian_product(grad, *points))
        mean = (points.points * grad.astype(points.points.dtype)).sum(-1, keepdims=True) / points.mass
        if not self.has_noise:
            # Else the compiler would write the points, to read them again once their sums are there.
            scores, mean, mass = simplex.separate((rows.scores, mean, points.mass))
            points = self.points(Rows(scores, rows.top).logits, draw)._replace(mass=mass)
        return rows.fill(jacobian_product(grad, *points, mean))

    def pull(
        self,
        grad: Array,
        levels: Mapping[str, Array],
        key: Array,
        scores: Array,
        category: Array,
        top: Array,
        total: Array | None,
    ) -> Array:
        """The gradient of logits whose sample has this category, once the levels are back: see `attach`.

        `top` is the largest logit of each row, `(*rows, 1)`, and `total` is `Draw.total`.
        """
        estimator, rows, draw = self.with_levels(levels), Rows(scores, top), Draw(category, total=total)
        # A gradient at a category that does not exist may be anything.
        grad = jnp.where(scores == -jnp.inf, 0.0, grad)
        if self.has_noise:
            draw = estimator.draw_category(key if self.keeps_noise else simplex.separate(key), rows.logits)
        return estimator.evaluate(rows.logits, draw).gradient(grad, rows, draw)

    def attach_tau(self, sample: Array, rows: Rows, draw: Draw) -> Array:
        """The sample, with the gradient of a learned temperature if there is one."""
        return sample


def softmax_points(scores: Array, weights: Array) -> Points:
    """Softmax of scores whose largest is 0, `(m, *rows, K)`, left without dividing by its sums."""
    points = jnp.exp(scores)
    return Points(points, weights, points.sum(-1, keepdims=True))


_FUNCTIONS = {"decoupled": "decoupled_gumbel_softmax"}
"""Functions whose name is not that of their estimator."""


def twin(value: T) -> T:
    """A decorator of estimators and their functions: `documented`, with the sentence that they share."""
    if value.__doc__:  # there is none under python -OO
        text, mark, example = cleandoc(value.__doc__).partition("\n>>>")
        name = value.__name__
        if isclass(value):
            estimator = getattr(value, "name")  # noqa: B009
            name = _FUNCTIONS.get(estimator, estimator.replace("-", "_"))
        help_ = f"The help of `gapped.{name}` has the mathematics and the references."
        value.__doc__ = f"{text.rstrip()}\n\n{help_}\n{mark}{example}"
    return documented(value)


@twin
@dataclass(frozen=True)
class DecoupledGumbelSoftmax(Pathwise):
    """Gumbel-softmax with a second, forward temperature."""

    name = "decoupled"
    has_noise = True
    levels = ("tau", "tau_forward")

    tau_forward: Level = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_level("tau_forward", self.tau_forward, positive=True)

    def fused(self) -> Fused:
        return Fused(self.name, not self.hard, {"tau": self.tau, "tau_forward": self.tau_forward})

    def noise(self, key: Array, logits: Array) -> Array:
        return simplex.log_exponential(key, logits.shape, logits.dtype)

    def draw(self, logits: Array, noise: Array) -> Draw:
        scores = logits / per_row(self.tau_forward, logits) - noise
        return Draw(scores.argmax(-1), noise)

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        return Points(jax.nn.softmax(logits / tau - draw.noise, -1)[None], 1 / tau)


@twin
def decoupled_gumbel_softmax(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = True,
    *,
    tau_forward: Level = 1.0,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gumbel-softmax sample with one temperature to draw, another for gradients.

    >>> decoupled_gumbel_softmax(jax.random.key(0), jnp.zeros(3), 2.0, True).sum()
    Array(1., dtype=float32)
    """
    estimator = DecoupledGumbelSoftmax(tau, hard, tau_forward, backend=backend)
    return estimator.sample(key, logits, axis=axis, where=where)


@twin
@dataclass(frozen=True)
class GapMax(Pathwise):
    """ReinMax with expected odds in the place of its halves: the default.

    Arguments:
        tau: Studies vary it; nothing is gained by tuning it.
        hard: True; there is no soft sample.
    """

    name = "gapmax"
    has_surrogate = False

    def fused(self) -> Fused:
        is_plain = not is_array(self.tau) and self.tau == 1
        return Fused("gapmax" if is_plain else "gapmax-tempered", not self.hard, {"tau": self.tau})

    def points(self, logits: Array, draw: Draw) -> Points:
        tau, total = per_row(self.tau, logits), draw.total[..., None]
        odds = simplex.halfway_odds(logits, total) ** (1 / tau)
        odds = jnp.where(jnp.arange(logits.shape[-1]) == draw.category[..., None], 1.0, odds)
        weight = jnp.broadcast_to(2 / tau, (*logits.shape[:-1], 1)).astype(logits.dtype)
        weights = jnp.stack([weight, jnp.full_like(weight, -0.5)])
        return Points(jnp.stack([odds / odds.sum(-1, keepdims=True), jnp.exp(logits) / total]), weights)


@twin
def gapmax(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = True,
    *,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """GapMax sample: a gradient of second order, without a temperature.

    It is the default: `gapped.jax.sample(key, logits)` calls it.

    Arguments:
        tau: Temperature τ of the gradient, a number or an array that broadcasts against the logits' shape
            without the category axis. 1 is the value to use; studies vary it.
        hard: True; there is no soft sample.

    >>> gapmax(jax.random.key(0), jnp.zeros(3)).sum()
    Array(1., dtype=float32)
    """
    return GapMax(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


@twin
@dataclass(frozen=True)
class GST(Pathwise):
    """Gapped Straight-Through: a gap in place of noise."""

    name = "gst"
    levels = ("tau", "gap")

    tau: Level = 0.85
    gap: Gap = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gap, str):
            if self.gap != "auto":
                raise reject("gap", self.gap, 'a number, an array, a function or "auto"')
        elif not callable(self.gap):
            check_level("gap", self.gap, positive=False)

    def fused(self) -> Fused | None:
        if isinstance(self.gap, str):
            return Fused("gst-auto", not self.hard, {"tau": self.tau})
        if callable(self.gap) and self.gap is not simplex.expected_gap:
            return None
        gap = None if callable(self.gap) else self.gap
        return Fused("gst", not self.hard, {"tau": self.tau, "gap": gap})

    def evaluate(self, logits: Array, draw: Draw) -> Self:
        if not callable(self.gap):
            return self
        selected = jnp.take_along_axis(logits, draw.category[..., None], -1)[..., 0]
        p = jnp.exp(selected) / draw.total
        gap = jnp.asarray(self.gap(p), logits.dtype)
        if gap.shape != p.shape:
            raise reject("gap", f"a function whose result has shape {gap.shape}", f"one of shape {p.shape}")
        return replace(self, gap=forbid_gradient("gap", gap))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        selected = jnp.arange(logits.shape[-1]) == draw.category[..., None]
        if isinstance(self.gap, str):
            lowered = simplex.log_expected_odds(logits - jnp.log(draw.total)[..., None])
        else:
            lowered = jnp.minimum(logits, -per_row(self.gap, logits))
        return softmax_points(jnp.where(selected, 0.0, lowered)[None] / tau, 1 / tau)


@twin
def gst(
    key: Array,
    logits: Array,
    tau: Level = 0.85,
    hard: bool = True,
    *,
    gap: Gap = "auto",
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gapped Straight-Through sample: a category, and a gradient of low variance.

    >>> gst(jax.random.key(0), jnp.zeros((2, 3)), 0.5, True).sum(-1)
    Array([1., 1.], dtype=float32)
    """
    return GST(tau, hard, gap, backend=backend).sample(key, logits, axis=axis, where=where)


@twin
@dataclass(frozen=True)
class GumbelRao(Pathwise):
    """Gumbel-softmax averaged over noise given the category."""

    name = "gumbel-rao"
    has_noise = True
    # It is `samples` times as large as the logits.
    keeps_noise = False

    tau: Level = 0.7
    samples: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("samples", self.samples)

    def fused(self) -> Fused:
        return Fused(self.name, not self.hard, {"tau": self.tau}, self.samples)

    def noise(self, key: Array, logits: Array) -> tuple[Array, Array]:
        first, second = jax.random.split(key)
        log_e = simplex.log_exponential(second, (self.samples, *logits.shape), logits.dtype)
        return simplex.uniform(first, logits), log_e

    def draw(self, logits: Array, noise: tuple[Array, Array]) -> Draw:
        category, total = simplex.inverse_cdf(jnp.exp(logits), noise[0])
        log_p = logits - jnp.log(total.astype(logits.dtype))[..., None]
        return Draw(category, simplex.conditional_gumbel(log_p, category, noise[1]))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        scores = draw.noise - draw.noise.max(-1, keepdims=True)
        return softmax_points(scores / tau, 1 / (tau * self.samples))


@twin
def gumbel_rao(
    key: Array,
    logits: Array,
    tau: Level = 0.7,
    hard: bool = True,
    *,
    samples: int = 10,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gumbel-Rao sample: Gumbel-softmax, averaged given the category.

    >>> gumbel_rao(jax.random.key(0), jnp.zeros(3), 0.5, True, samples=10).sum()
    Array(1., dtype=float32)
    """
    return GumbelRao(tau, hard, samples, backend=backend).sample(key, logits, axis=axis, where=where)


@twin
@dataclass(frozen=True)
class GumbelSoftmax(Pathwise):
    """Gumbel-softmax (Concrete); straight-through if hard.

    Arguments:
        tau: Temperature, a positive number or an array that broadcasts against the logits' shape without the
            category axis. An array gets a gradient.
    """

    name = "gumbel-softmax"
    has_noise = True

    tau: Level = 0.7

    def fused(self) -> Fused | None:
        # An array may be learned, which takes the noise.
        return None if is_array(self.tau) else Fused(self.name, not self.hard, {"tau": self.tau})

    def noise(self, key: Array, logits: Array) -> Array:
        return simplex.log_exponential(key, logits.shape, logits.dtype)

    def draw(self, logits: Array, noise: Array) -> Draw:
        scores = logits - noise
        return Draw(scores.argmax(-1), scores - scores.max(-1, keepdims=True))

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        return softmax_points(draw.noise[None] / tau, 1 / tau)

    def freeze(self) -> Self:
        return replace(self, tau=jax.lax.stop_gradient(self.tau)) if is_array(self.tau) else self

    def attach_tau(self, sample: Array, rows: Rows, draw: Draw) -> Array:
        if not is_array(self.tau):
            return sample
        tau = jnp.broadcast_to(per_row(self.tau, draw.noise), (*sample.shape[:-1], 1))
        points = self.freeze().points(rows.logits, draw)
        return attach(_tau_product, sample, tau, rows.fill(points.points), *points[1:], draw.noise)


def _tau_product(grad: Array, points: Array, weights: Array, mass: Any, scores: Array) -> Array:
    """The gradient of tau in softmax(scores / tau), whose gradient in the scores is `jacobian_product`."""
    exists = scores > -jnp.inf
    product = jacobian_product(jnp.where(exists, grad, 0.0), points, weights, mass)
    product = product * jnp.where(exists, scores, 0.0)
    return -(weights * product).sum(-1, keepdims=True)


@twin
def gumbel_softmax(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Gumbel-softmax sample; with `hard`, straight-through Gumbel-softmax (STGS).

    It is torch's function, with its defaults: soft, at a temperature of 1. The class
    `gapped.jax.GumbelSoftmax`, and so the text "gumbel-softmax", is hard and has a temperature of 0.7.

    Arguments:
        tau: Temperature τ, a positive number or an array that broadcasts against the logits' shape without
            the category axis. An array gets a gradient, so the temperature can be learned.

    >>> gumbel_softmax(jax.random.key(0), jnp.zeros(3), hard=True).sum()
    Array(1., dtype=float32)
    """
    return GumbelSoftmax(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


@twin
@dataclass(frozen=True)
class ReinMax(Pathwise):
    """ReinMax: straight-through, second-order accurate.

    Arguments:
        hard: True; there is no soft sample.
    """

    name = "reinmax"
    has_surrogate = False

    def fused(self) -> Fused:
        return Fused(self.name, not self.hard, {"tau": self.tau})

    def points(self, logits: Array, draw: Draw) -> Points:
        hard = simplex.one_hot(draw.category, logits.shape[-1], logits.dtype)
        sharp = jnp.exp(logits / per_row(self.tau, logits))
        halfway = (sharp / sharp.sum(-1, keepdims=True) + hard) / 2
        weights = jnp.asarray([2.0, -0.5], logits.dtype).reshape(2, *(1,) * logits.ndim)
        return Points(jnp.stack([halfway, jnp.exp(logits) / draw.total[..., None]]), weights)


@twin
def reinmax(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = True,
    *,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """ReinMax sample: straight-through, second-order accurate.

    Arguments:
        hard: True; there is no soft sample.

    >>> reinmax(jax.random.key(0), jnp.zeros(3)).sum()
    Array(1., dtype=float32)
    """
    return ReinMax(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)


@twin
@dataclass(frozen=True)
class StraightThrough(Pathwise):
    """Straight-through: the gradient of the softmax itself."""

    name = "straight-through"

    def fused(self) -> Fused:
        return Fused(self.name, not self.hard, {"tau": self.tau})

    def points(self, logits: Array, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        return softmax_points(logits[None] / tau, 1 / tau)


@twin
def straight_through(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = True,
    *,
    axis: int = -1,
    where: Array | None = None,
    backend: str = "auto",
) -> Array:
    """Straight-through sample: a category, with the gradient of the probabilities.

    >>> straight_through(jax.random.key(0), jnp.zeros(2), hard=False)
    Array([0.5, 0.5], dtype=float32)
    """
    return StraightThrough(tau, hard, backend=backend).sample(key, logits, axis=axis, where=where)
