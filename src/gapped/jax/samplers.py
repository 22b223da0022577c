"""The base class of estimators whose sample carries the gradient.

An estimator consists of three methods. `noise` is all that is random. `draw` makes the category of it, and
`points` the points of the simplex that carry the gradient; both are pure functions, of logits in float32 or
float64, without a gradient, with the categories on the last axis and the largest of each row at 0.

The backward pass computes the points again, from the logits and the category, and where they have noise of
their own from the key: all of them are there anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax import fused
from gapped.jax.arguments import (
    check_flag,
    check_key,
    check_level,
    check_logits,
    check_where,
    constant,
    fitted,
    is_array,
    per_row,
)
from gapped.jax.attached import attach, jacobian_product
from gapped.jax.categories import Rows, apart, masked, one_hot, rows_of
from gapped.jax.choices import Choice
from gapped.jax.draws import inverse_cdf, uniform
from gapped.jax.fused import Mode
from gapped.jax.platforms import kernel_sample
from gapped.jax.shared_arguments import documented

Level = float | Array
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


class Points(NamedTuple):
    """Where a gradient comes from: it is Σ_m w_m J(q_m) g."""

    points: Array
    """Points of the simplex, `(m, *rows, K)`."""
    weights: Array
    """Their weights, which broadcast against the points."""
    mass: Any = 1.0
    """The sums of the points over the categories, `(m, *rows, 1)`, if they are not normalised."""


def softmax_points(scores: Array, weights: Array) -> Points:
    """Softmax of scores whose largest is 0, `(m, *rows, K)`, left without dividing by its sums."""
    points = jnp.exp(scores)
    return Points(points, weights, points.sum(-1, keepdims=True))


class Outcome(NamedTuple):
    """What a forward pass returns."""

    value: Array
    """The sample, in the shape and dtype of the logits."""
    category: Array
    """The category of each row; `K` or `K + 1` where it has none."""
    top: Array
    """The largest logit of each row, `(*rows, 1)`."""
    total: Array
    """`Draw.total`; zeros where the draw does not have it."""


@documented
@dataclass(frozen=True)
class Pathwise(ABC):
    """An estimator whose sample carries the gradient.

    `gapped.jax.GST`, `gapped.jax.GumbelSoftmax` and the others of this family are its subclasses. All have
    the arguments below, and the methods `sample` and `choose`.

    Arguments:
        (tau, hard, backend)
    """

    name: ClassVar[str]
    """What text calls it."""
    levels: ClassVar[tuple[str, ...]] = ("tau",)
    """The options that may be arrays, with one value per row."""
    has_surrogate: ClassVar[bool] = True
    """Whether there is a surrogate, and hence a soft sample; else `hard` must be True."""
    has_noise: ClassVar[bool] = False
    """Whether the points depend on more noise than the category."""
    keeps_noise: ClassVar[bool] = True
    """Whether a compiler may keep that noise for the backward pass, where it would be drawn again."""

    tau: Level = 1.0
    """Temperature of the surrogate: a positive number, or an array that broadcasts against the logits' shape
    without the category axis. An array with as many axes as the logits has that axis too, of size 1."""
    hard: bool = True
    """One-hot samples if true, else the surrogate itself."""
    backend: str = field(default="auto", kw_only=True, repr=False)
    """`"xla"`, `"triton"` for the kernels, or `"auto"`: the kernels where they can be used."""

    def __post_init__(self) -> None:
        check_level("tau", self.tau, positive=True)
        check_flag("hard", self.hard)
        if self.backend not in BACKENDS:
            raise reject("backend", self.backend, f"one of {', '.join(BACKENDS)}")
        if not (self.hard or self.has_surrogate):
            raise reject("hard", self.hard, f"True: {type(self).__name__} has no soft sample")

    def sample(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Array:
        """Draw a sample of the shape and dtype of `logits` that carries this estimator's gradient.

        Arguments:
            key: A random key, such as `jax.random.key(0)`.
            logits: Unnormalised log-probabilities, the categories on the axis `axis`.
            axis: The category axis.
            where: Booleans that broadcast against the logits, with all of their axes where `axis` is not the
                last one. Categories where it is False do not exist.

        Returns:
            The sample. Half precision is computed in float32 and rounded once, at the end.
        """
        estimator, scores = self._prepared(key, logits, axis, where)
        fixed, rows = estimator.fixed(), rows_of(scores)
        if self._uses_kernels(fixed, scores):
            return jnp.moveaxis(kernel_sample(*fixed.without_arrays(), key, scores), -1, axis)
        draw = fixed.drawn(key, rows)
        fixed = fixed.settled(rows.logits, draw)
        value, *outcome = fixed.forward(rows, draw)
        plain, levels = fixed.without_arrays()
        sample = attach(partial(_gradient, plain), value, scores, levels, key, rows.scores, *outcome)
        return jnp.moveaxis(estimator.finish(sample, rows, draw), -1, axis)

    def __call__(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Array:
        """Draw a sample: the method `sample` under another name."""
        return self.sample(key, logits, axis=axis, where=where)

    def choose(self, key: Array, logits: Array, *, axis: int = -1, where: Array | None = None) -> Choice:
        """Draw one category per row, by its index; no one-hot vector is written.

        Arguments:
            key: A random key, such as `jax.random.key(0)`.
            logits: Unnormalised log-probabilities, the categories on the axis `axis`.
            axis: The category axis.
            where: Booleans that broadcast against the logits. Categories where it is False do not exist.

        Returns:
            A `gapped.jax.Choice`, with the `index` and ways to use it that carry the gradient.
        """
        if not self.hard:
            raise reject("hard", False, "True: a choice is a hard sample")
        estimator, scores = self._prepared(key, logits, axis, where)
        rows = rows_of(scores)
        draw = estimator.fixed().drawn(key, rows)
        points, weights, mass = estimator.fixed().settled(rows.logits, draw).points(rows.logits, draw)
        points = rows.filled(points / mass)
        points = jnp.where(scores == -jnp.inf, -points, points)
        return Choice(rows.marked(draw.category), scores, points, weights)

    def _prepared(self, key: Array, logits: Array, axis: int, where: Array | None) -> tuple[Self, Array]:
        """This estimator with levels that fit, and the masked logits with the categories last."""
        check_key(key)
        check_logits(logits, axis)
        check_where(where, logits, axis)
        levels = {name: fitted(name, getattr(self, name), logits, axis) for name in self.levels}
        return self.with_levels(levels), jnp.moveaxis(masked(jnp.asarray(logits), where), axis, -1)

    def fixed(self) -> Self:
        """This estimator with levels that must not be differentiated."""
        levels = {name: getattr(self, name) for name in self.levels}
        return self.with_levels({n: constant(n, x) if is_array(x) else x for n, x in levels.items()})

    def with_levels(self, levels: Mapping[str, Any]) -> Self:
        """This estimator with other levels."""
        return replace(self, **levels)

    def without_arrays(self) -> tuple[Self, dict[str, Array]]:
        """This estimator with 1 for every level that is an array, and those arrays by name."""
        arrays = {name: getattr(self, name) for name in self.levels if is_array(getattr(self, name))}
        return self.with_levels(dict.fromkeys(arrays, 1.0)), arrays

    def mode(self) -> Mode | None:
        """What the kernels need to know; None for an estimator, or options, without a kernel."""
        return None

    def _mode(self, name: str | None = None, **levels: Any) -> Mode:
        """A mode of this estimator's name and temperature, unless others are given."""
        return Mode(name or self.name, not self.hard, {"tau": self.tau, **levels})

    def _uses_kernels(self, fixed: Self, scores: Array) -> bool:
        """Whether the kernels draw; an error if they are asked for and cannot."""
        if self.backend == "xla":
            return False
        why_not = fused.refusal(scores, fixed.mode() is not None)
        if why_not is not None and self.backend == "triton":
            raise reject("backend", "triton", f"xla or auto here: {why_not}")
        return why_not is None

    def settled(self, logits: Array, draw: Draw) -> Self:
        """This estimator without options that are functions of the draw: each is replaced by its value."""
        return self

    def drawn(self, key: Array, rows: Rows) -> Draw:
        """`draw` with the noise of `key`."""
        return self.draw(rows.logits, self.noise(key, rows.logits))

    def forward(self, rows: Rows, draw: Draw) -> Outcome:
        """The sample, and what `backward` needs to know of it."""
        category = rows.marked(draw.category)
        if self.hard:
            value = one_hot(category, rows.scores.shape[-1], rows.scores.dtype)
        else:
            points, _, mass = self.points(rows.logits, draw)
            value = rows.filled((points / mass).mean(0)).astype(rows.scores.dtype)
        total = jnp.zeros_like(rows.top[..., 0]) if draw.total is None else draw.total
        return Outcome(value, category, rows.top, total)

    def backward(self, grad: Array, rows: Rows, draw: Draw) -> Array:
        """The gradient of the logits, in float32 or float64."""
        points = self.points(rows.logits, draw)
        if rows.scores.shape[-1] <= _LONGEST_BLOCK:
            return rows.filled(jacobian_product(grad, *points))
        mean = (points.points * grad.astype(points.points.dtype)).sum(-1, keepdims=True) / points.mass
        if not self.has_noise:
            # Else the compiler would write the points, to read them again once their sums are there.
            scores, mean, mass = apart((rows.scores, mean, points.mass))
            points = self.points(Rows(scores, rows.top).logits, draw)._replace(mass=mass)
        return rows.filled(jacobian_product(grad, *points, mean))

    def pulled(
        self, grad: Array, key: Array, scores: Array, category: Array, top: Array, total: Array
    ) -> Array:
        """`backward` after `forward` returned this `Outcome` for these logits and that key."""
        rows, draw = Rows(scores, top), Draw(category, total=total)
        # What stands at a category that does not exist may be anything.
        grad = jnp.where(scores == -jnp.inf, 0.0, grad)
        if self.has_noise:
            draw = self.drawn(key if self.keeps_noise else apart(key), rows)
        return self.settled(rows.logits, draw).backward(grad, rows, draw)

    def noise(self, key: Array, logits: Array) -> Any:
        """All that is random: by default, that of `inverse_cdf`."""
        return uniform(key, logits)

    def draw(self, logits: Array, noise: Any) -> Draw:
        """The category of each row, and what the surrogate needs of the noise."""
        category, total = inverse_cdf(jnp.exp(logits), noise)
        return Draw(category, total=total.astype(logits.dtype))

    @abstractmethod
    def points(self, logits: Array, draw: Draw) -> Points:
        """The points and weights that belong to `draw`."""

    def finish(self, sample: Array, rows: Rows, draw: Draw) -> Array:
        """The sample, with the gradient of learned options where there are any."""
        return sample

    def _tau(self, like: Array) -> Array:
        return per_row(self.tau, like)


def _gradient(plain: Pathwise, grad: Array, levels: dict[str, Array], *saved: Array) -> Array:
    """`Pathwise.pulled` of `plain` with these levels."""
    return plain.with_levels(levels).pulled(grad, *saved)
