"""Samples for look-ups and for switches: an index without its one-hot vector, and zeros and ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, overload

import jax
import jax.numpy as jnp
from jax import Array

from gapped.docstrings import documented_in_jax as documented
from gapped.errors import reject
from gapped.jax.checks import check_key, check_logits, check_table, check_where
from gapped.jax.gradient import attach, jacobian_product
from gapped.jax.pathwise import Pathwise
from gapped.jax.registry import resolve_pathwise
from gapped.jax.simplex import masked, only_sampled, pairs, rows_of

if TYPE_CHECKING:
    from gapped.jax.choices import Choices, Law, Source


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Choice:
    """One category per row, and ways to use it that carry the gradient.

    `gapped.jax.choose` returns it. A choice is a pytree: it may leave `jax.jit`, and `jax.vmap` makes a batch
    of it.

    Arguments:
        index: The selected categories, integers, of the shape of the logits without the category axis. A row
            without categories has the index K, one with a NaN or +inf K + 1.
    """

    index: Array
    _logits: Array = field(repr=False)
    _points: Array = field(repr=False)
    """`(m, *rows, K)`, with -0.0 where a category does not exist."""
    _weights: Array = field(repr=False)

    def select(self, table: Array) -> Array:
        """Look up the selected rows of a table.

        Arguments:
            table: One row per category, `(K, *rest)`.

        Returns:
            The rows `table[index]`, `(*rows, *rest)`, with gradients for the logits and the table.

        >>> import gapped.jax
        >>> logits = jnp.asarray([[0.0, 99.0], [99.0, 0.0]])
        >>> gapped.jax.choose(jax.random.key(0), logits).select(jnp.asarray([10.0, 20.0]))
        Array([20., 10.], dtype=float32)
        """
        categories = self._logits.shape[-1]
        check_table(table, categories)
        table = jnp.asarray(table)
        value = only_sampled(table[jnp.minimum(self.index, categories - 1)], self.index, categories)
        return attach(_table_product, value, self._logits, self._points, self._weights, table)

    def gate(self) -> Array:
        """Ones, `(*rows)`, in the dtype of the logits; zero in a row without categories.

        They are to be multiplied with the results of the branches that a router selects. Those of the other
        branches count as zero.
        """
        categories = self._logits.shape[-1]
        ones = only_sampled(jnp.ones(self.index.shape, self._logits.dtype), self.index, categories)
        selected = jnp.arange(categories) == self.index[..., None]
        return attach(_entry_product, ones, self._logits, self._points, self._weights, selected)


def _table_product(grad: Array, points: Array, weights: Array, table: Array) -> Array:
    """`jacobian_product` for the gradient of rows that were looked up in `table`, `(K, *rest)`.

    The table's rows of categories that do not exist, where the points are -0.0, may hold anything.
    """
    flat = grad.reshape(*points.shape[1:-1], -1)
    dense = jnp.matmul(flat, table.reshape(table.shape[0], -1).T, precision="highest")
    absent = (points[0] == 0) & jnp.signbit(points[0])
    return jacobian_product(jnp.where(absent, 0.0, dense), points, weights)


def _entry_product(grad: Array, points: Array, weights: Array, selected: Array) -> Array:
    """`jacobian_product` for the gradient of the selected entries, which `selected` marks."""
    return jacobian_product(jnp.where(selected, grad[..., None], 0.0), points, weights)


def draw_choice(estimator: Pathwise, key: Array, logits: Array, axis: int, where: Array | None) -> Choice:
    """The choice that `Pathwise.choose` returns."""
    if not estimator.hard:
        raise reject("hard", False, "True: a choice is a hard sample")
    estimator, scores = estimator.prepare(key, logits, axis, where)
    estimator, rows = estimator.freeze(), rows_of(scores)
    draw = estimator.draw_category(key, rows.logits)
    points, weights, mass = estimator.evaluate(rows.logits, draw).points(rows.logits, draw)
    points = rows.fill(points / mass)
    points = jnp.where(scores == -jnp.inf, -points, points)
    return Choice(rows.mark(draw.category), scores, points, weights)


@documented
def sample(
    key: Array,
    logits: Array,
    *,
    estimator: Pathwise | str | None = None,
    axis: int = -1,
    where: Array | None = None,
) -> Array:
    """Draw a one-hot sample that carries a gradient, without a temperature.

    Returns:
        An array of the shape and dtype of `logits` whose rows are exactly one-hot, unless the estimator is a
        soft one. A row where nothing is allowed is zero. It is differentiated once, in reverse mode.

    The category is drawn from softmax(θ), whatever the estimator; the gradient is the estimator's.

    >>> sample(jax.random.key(0), jnp.zeros((2, 4))).sum(-1)
    Array([1., 1.], dtype=float32)
    """
    return resolve_pathwise(estimator).sample(key, logits, axis=axis, where=where)


@overload
def choose(
    key: Array,
    logits: Array,
    k: None = None,
    *,
    estimator: Pathwise | str | None = None,
    axis: int = -1,
    where: Array | None = None,
) -> Choice: ...
@overload
def choose(
    key: Array,
    logits: Array,
    k: int,
    *,
    estimator: Pathwise | str | None = None,
    draw: Source = "sample",
    law: Law = "subset",
    axis: int = -1,
    where: Array | None = None,
) -> Choices: ...
@documented
def choose(
    key: Array,
    logits: Array,
    k: int | None = None,
    *,
    estimator: Pathwise | str | None = None,
    draw: Source = "sample",
    law: Law = "subset",
    axis: int = -1,
    where: Array | None = None,
) -> Choice | Choices:
    """Draw one category per row by its index, or k distinct ones.

    For look-ups and routers: no zeros and ones are written. Values and gradients are those of hard samples.

    Arguments:
        k: How many categories are drawn, a static number from 1 to K. None is one, without an axis for it.
        estimator: A pathwise one, as an object or its text; None is the default, GapMax, and for sets of more
            than one category ReinMax.
        draw: "sample"; where k is given, "argmax" takes the k largest logits, with the same gradient.
        law: Where k is given, "subset", the law of `gapped.jax.subset`, or "sequential", one category after
            the other.

    Returns:
        A `gapped.jax.Choice`, or for k categories a `gapped.jax.Choices`. Its `index` has the shape of the
        logits without the category axis, or with k in its place; `select(table)` looks up entries, `gate()`
        is a 1 for each that carries the gradient, and `weights()` of k categories are their normalised
        probabilities. The help of `gapped.choose` has the laws and the gradients.

    >>> choice = choose(jax.random.key(0), jnp.zeros((2, 4)))
    >>> choice.index.shape, choice.select(jnp.eye(4)).shape, choice.gate()
    ((2,), (2, 4), Array([1., 1.], dtype=float32))
    >>> choose(jax.random.key(0), jnp.zeros((2, 4)), k=2).weights()
    Array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    """
    if k is not None:
        from gapped.jax.choices import choose

        return choose(key, logits, k, estimator, law, draw, axis, where)
    if draw != "sample":
        raise reject("draw", draw, "'sample' where k is not given")
    return resolve_pathwise(estimator).choose(key, logits, axis=axis, where=where)


@documented
def gate(
    key: Array, logits: Array, *, estimator: Pathwise | str | None = None, where: Array | None = None
) -> Array:
    """Gates: Bernoulli samples that carry a gradient, one number each.

    Arguments:
        logits: Log-odds φ of a 1, of any shape.
        where: Booleans that broadcast against the logits. Gates where it is False are 0, without gradient, as
            are those of -inf; those of +inf are 1, without gradient too.

    Returns:
        An array of the shape and dtype of `logits`: exactly 0 or 1, with P(1) = σ(φ), or a number in between
        if the estimator is soft.

    Value and gradient are those of the first entry of the estimator's sample of the logits (φ, 0).

    >>> gate(jax.random.key(0), jnp.asarray([99.0, -99.0]))
    Array([1., 0.], dtype=float32)
    """
    check_key(key)
    # A gate has no category axis: for the checks, its logits get one.
    check_logits(logits[..., None] if hasattr(logits, "ndim") else logits)
    check_where(where, logits)
    # A kernel would write both entries of each pair; XLA does not.
    resolved = replace(resolve_pathwise(estimator), backend="xla")
    return resolved.sample(key, pairs(masked(jnp.asarray(logits), where)))[..., 0]
