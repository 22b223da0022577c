"""k distinct categories of each row, stored by index: the definitions of `gapped.choices`.

Gradients are computed anew in the backward pass, from logits and indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax import subsets
from gapped.jax.checks import check_table, is_array
from gapped.jax.gradient import attach
from gapped.jax.pathwise import GST, Draw, Pathwise, ReinMax, StraightThrough
from gapped.jax.registry import resolve_pathwise
from gapped.jax.simplex import computed, log_exponential, log_softmax, only_sampled, per_row, rows_of

Law = Literal["subset", "sequential"]
Source = Literal["sample", "argmax"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Choices:
    """k distinct categories of each row, and uses that carry the gradient.

    `gapped.jax.choose` returns it where `k` is given. It is a pytree.

    Arguments:
        index: The drawn categories, integers, `(*rows, k)`, ascending, or in the order in which they were
            drawn. Places without a category have the index K, those of a row with a NaN or +inf K + 1.

    `gate()`, `weights()`, `select(table)` and `log_prob` are those of `gapped.Choices`.
    """

    index: Array
    _logits: Array = field(repr=False)
    _levels: dict[str, Array] = field(repr=False)
    _estimator: Pathwise = field(repr=False, metadata={"static": True})
    _law: Law = field(repr=False, metadata={"static": True})

    def gate(self) -> Array:
        """Ones, `(*rows, k)`, in the dtype of the logits; zero in places without a category."""
        ones = jnp.ones(self.index.shape, self._logits.dtype)
        return self._attach(only_sampled(ones, self.index, self._logits.shape[-1]), None)

    def weights(self) -> Array:
        """The softmax over the logits of the drawn categories, with its own gradient, times `gate()`."""
        exists = self.index < self._logits.shape[-1]
        chosen = jnp.where(exists, _at(computed(self._logits), self.index), -jnp.inf)
        top = jax.lax.stop_gradient(chosen.max(-1, keepdims=True))
        mass = jnp.exp(chosen - jnp.where(jnp.isfinite(top), top, 0.0))
        share = mass / jnp.maximum(mass.sum(-1, keepdims=True), 0.5)
        # Nothing comes back from places without a category, whatever arrives there.
        weights = share.astype(self._logits.dtype) * self.gate()
        return jnp.where(self.index == self._logits.shape[-1], jnp.zeros((), weights.dtype), weights)

    def select(self, table: Array) -> Array:
        """The rows `table[index]` of a table `(K, *rest)`: `(*rows, k, *rest)`."""
        categories = self._logits.shape[-1]
        check_table(table, categories)
        table = jnp.asarray(table)
        rows = table[jnp.minimum(self.index, categories - 1)]
        return self._attach(only_sampled(rows, self.index, categories), table)

    @property
    def log_prob(self) -> Array:
        """The log-probability of what was drawn, `(*rows)`, with its exact gradient."""
        rows = rows_of(self._logits)
        scores = computed(self._logits) - jnp.where(rows.lawful, rows.top, 0.0)
        scores = jnp.where(jnp.isnan(rows.marked_logits), jnp.nan, scores)
        if self._law == "sequential":
            return _log_prob_of_sequence(scores, self.index)
        chosen = jnp.where(self.index < scores.shape[-1], _at(scores, self.index), 0.0).sum(-1)
        return chosen - subsets.log_normaliser(scores, self.index.shape[-1])

    def _attach(self, value: Array, table: Array | None) -> Array:
        pull = partial(_pull, self._estimator, self._law)
        scores = jax.lax.stop_gradient(self._logits)
        return attach(pull, value, self._logits, self._levels, scores, self.index, table)


def choose(
    key: Array,
    logits: Array,
    k: int,
    estimator: Pathwise | str | None,
    law: Law,
    draw: Source,
    axis: int,
    where: Array | None,
) -> Choices:
    """Draw k categories per row: see `gapped.jax.choose`."""
    if law not in ("subset", "sequential"):
        raise reject("law", law, "'subset' or 'sequential'")
    if draw not in ("sample", "argmax"):
        raise reject("draw", draw, "'sample' or 'argmax'")
    # One category has the same law either way, and any estimator.
    law = "sequential" if k == 1 else law
    is_set = law == "subset"
    resolved = ReinMax() if estimator is None and is_set else resolve_pathwise(estimator)
    if not resolved.hard:
        raise reject("hard", False, "True: a choice is a hard sample")
    fitted, scores = resolved.prepare(key, logits, axis, where)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= scores.shape[-1]:
        raise reject("k", k, f"an integer from 1 to {scores.shape[-1]}, the number of categories")
    (_check_set if is_set else _check_sequence)(fitted)
    plain, levels = fitted.freeze().split_levels()
    rows = rows_of(scores).marked_logits
    if draw == "argmax" or not is_set:
        noise = 0.0 if draw == "argmax" else -log_exponential(key, rows.shape, rows.dtype)
        top, index = jax.lax.top_k(rows + noise, k)
        index = jnp.where(top == -jnp.inf, rows.shape[-1], index)
    else:
        chosen = subsets.draw(rows, k, subsets.noise(key, rows))
        # The largest of n, n - 1, ... are those of the chosen categories, in order; what is left is 0.
        order = jnp.where(chosen, jnp.arange(rows.shape[-1], 0, -1), 0)
        index = rows.shape[-1] - jax.lax.top_k(order, k)[0]
    index = jnp.where(jnp.isnan(rows[..., :1]), rows.shape[-1] + 1, index)
    return Choices(index, scores, levels, plain, law)


def _check_set(estimator: Pathwise) -> None:
    """Raise an error unless there is a gradient of this kind for sets."""
    if not isinstance(estimator, ReinMax | StraightThrough | GST):
        accepted = "'reinmax', 'straight-through' or a gap as in 'gst:gap=1' for k > 1, or law='sequential'"
        raise reject("estimator", estimator, accepted)
    if isinstance(estimator, ReinMax) and (is_array(estimator.tau) or estimator.tau != 1):
        raise reject("tau", estimator.tau, "1: ReinMax has no other temperature for k > 1")
    if isinstance(estimator, GST) and (callable(estimator.gap) or isinstance(estimator.gap, str)):
        raise reject("gap", estimator.gap, "a number or an array, as in 'gst:gap=1', for k > 1")


def _check_sequence(estimator: Pathwise) -> None:
    """Raise an error unless the estimator's gradient follows from the drawn category."""
    if estimator.has_noise or type(estimator).draw is not Pathwise.draw:
        accepted = "one whose gradient needs no noise, such as 'gapmax', 'reinmax' or 'gst', where k is given"
        raise reject("estimator", estimator, accepted)


def _at(values: Array, index: Array) -> Array:
    """The entries of `(*rows, K)` at the indices; any where there is no category."""
    return jnp.take_along_axis(values, jnp.minimum(index, values.shape[-1] - 1), -1)


def _put(index: Array, values: Array, categories: int) -> Array:
    """`(*rows, K)`, zero but for `values` at the indices."""
    places = jnp.arange(categories)
    # Place by place: nothing of the size of k rows is written.
    total = jnp.zeros((*index.shape[:-1], categories), values.dtype)
    for place in range(index.shape[-1]):
        total = jnp.where(places == index[..., place, None], values[..., place, None], total)
    return total


def _pull(
    estimator: Pathwise,
    law: Law,
    grad: Array,
    levels: dict[str, Array],
    scores: Array,
    index: Array,
    table: Array | None,
) -> Array:
    """The gradient of the logits by that of gates, or of rows of a table."""
    estimator, wide = estimator.with_levels(levels), computed(scores)
    if table is not None:
        flat = grad.reshape(*index.shape, -1)
        entries = table.reshape(table.shape[0], -1).T
        dense = jnp.matmul(flat, entries, precision="highest").astype(wide.dtype)
        dense = jnp.where(wide[..., None, :] == -jnp.inf, 0.0, dense)
    if law == "sequential":
        steps = [
            _put(index[..., i : i + 1], grad[..., i : i + 1].astype(wide.dtype), wide.shape[-1])
            if table is None
            else dense[..., i, :]
            for i in range(index.shape[-1])
        ]
        return _pull_sequence(estimator, wide, index, steps)
    if table is None:
        return _pull_set(estimator, wide, index, _put(index, grad.astype(wide.dtype), wide.shape[-1]))
    # In any of the k places each category that was not drawn could stand.
    mean = dense.mean(-2)
    own = jnp.take_along_axis(dense, jnp.minimum(index, wide.shape[-1] - 1)[..., None], -1)[..., 0]
    chosen = _put(index, jnp.ones_like(own), wide.shape[-1]) > 0
    return _pull_set(estimator, wide, index, jnp.where(chosen, _put(index, own, wide.shape[-1]), mean))


def _pull_set(estimator: Pathwise, scores: Array, index: Array, grad: Array) -> Array:
    """The gradient of the logits of a subset, by that at its zeros and ones."""
    k, scores = index.shape[-1], rows_of(scores).marked_logits
    chosen = _put(index, jnp.ones(index.shape, scores.dtype), scores.shape[-1])
    tau = per_row(1.0 if isinstance(estimator, ReinMax) else estimator.tau, scores)
    if isinstance(estimator, GST):
        scores = subsets.perturbed(scores, chosen > 0, k, estimator.gap)
    scores = scores / tau
    product = subsets.covariance_product(grad, scores, k)
    if isinstance(estimator, ReinMax):
        centred = chosen - subsets.marginals(scores, k)
        product = (product + centred * (centred * grad).sum(-1, keepdims=True)) / 2
    return product / tau


def _pull_sequence(estimator: Pathwise, scores: Array, index: Array, grads: list[Array]) -> Array:
    """The sum of the estimator's gradients of all draws, each given those before it."""
    total = jnp.zeros_like(scores)
    for place, grad in enumerate(grads):
        at, rows = index[..., place], rows_of(scores)
        category = jnp.where(rows.lawful[..., 0] & (at < scores.shape[-1]), at, 0)
        draw = Draw(category, total=jnp.exp(rows.logits).sum(-1))
        fitted = estimator.evaluate(rows.logits, draw)
        total = total + fitted.gradient(grad, rows, draw)
        scores = jnp.where(jnp.arange(scores.shape[-1]) == at[..., None], -jnp.inf, scores)
    return total


def _log_prob_of_sequence(scores: Array, index: Array) -> Array:
    categories, total = scores.shape[-1], jnp.zeros(scores.shape[:-1], scores.dtype)
    for place in range(index.shape[-1]):
        at = index[..., place : place + 1]
        step = _at(log_softmax(scores), at)[..., 0]
        total = total + jnp.where(at[..., 0] == categories, 0.0, step)
        scores = jnp.where(jnp.arange(categories) == at, -jnp.inf, scores)
    return total
