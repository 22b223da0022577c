"""A subset of a given size that carries a gradient: the definitions of `gapped.subset`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax import selection_law as law
from gapped.jax.arguments import (
    check_flag,
    check_key,
    check_level,
    check_logits,
    check_where,
    constant,
    described,
    fitted,
    is_array,
    per_row,
)
from gapped.jax.attached import attach
from gapped.jax.categories import masked, rows_of
from gapped.jax.members import GST, StraightThrough
from gapped.jax.named import resolve_pathwise
from gapped.jax.samplers import Level
from gapped.jax.shared_arguments import documented


@documented
def subset(
    key: Array,
    logits: Array,
    k: int,
    tau: Level = 1.0,
    hard: bool = True,
    *,
    estimator: str | GST = "simple",
    axis: int = -1,
    where: Array | None = None,
) -> Array:
    """Draw exactly k of n elements: zeros and ones that carry a gradient.

    Arguments:
        (key)
        logits: Logits θ of any floating dtype and shape, the `n` elements on the axis `axis`. An element with
            the logit -inf does not exist.
        k: How many elements are selected, from 0 to `n`; a static number under `jax.jit`. With `k=1` the
            functions `gapped.jax.straight_through` and `gapped.jax.gst` draw.
        tau: Temperature τ of the surrogate, a positive number or an array that broadcasts against the logits'
            shape without the axis of the elements.
        hard: True returns zeros and ones, False the surrogate itself.
        estimator: "simple" or "gst", both explained below. Another gap than 1 is given as "gst:gap=1.2", or
            as a `gapped.jax.GST` object, whose gap may be an array with one for each row.
        axis: The axis of the elements.
        where: Booleans that broadcast against the logits, with all of their axes where `axis` is not the last
            one. Elements where it is False do not exist; a row with no more than `k` has all of them
            selected.

    Returns:
        An array of the shape and dtype of `logits`.

    The set S has a probability in proportion to Π_{i ∈ S} exp(θ_i), with the marginals μ(θ). The sample goes
    forward, and the gradient is that of a surrogate h = μ(t/τ): the covariance matrix of the selections under
    t/τ times the incoming gradient, over τ. "simple" has t = θ. "gst" raises the selected logits to at least
    the k-th largest one and lowers the others to a gap below it. The help of `gapped.subset` has the formulas
    and the references.

    >>> import jax
    >>> subset(jax.random.key(0), jnp.zeros((2, 4)), 2, estimator="gst").sum(-1)
    Array([2., 2.], dtype=float32)
    """
    check_key(key)
    check_logits(logits, axis)
    check_size(k, logits.shape[axis])
    check_level("tau", tau, positive=True)
    check_flag("hard", hard)
    check_where(where, logits, axis)
    gapped = _gapped(estimator, k)
    if k == 1:
        single = StraightThrough(tau, hard) if gapped is None else replace(gapped, tau=tau, hard=hard)
        return single.sample(key, logits, axis=axis, where=where)
    temperature = _level("tau", tau, logits, axis)
    gap = None if gapped is None or k == 0 else _level("gap", gapped.gap, logits, axis)
    rows = jnp.moveaxis(masked(jnp.asarray(logits), where), axis, -1)
    value, surrogate, weight = _outcome(key, rows, k, temperature, gap, hard)
    return jnp.moveaxis(attach(partial(_product, k), value, rows, surrogate, weight), -1, axis)


def check_size(k: object, n: int) -> None:
    """Check how many of `n` elements are selected."""
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= n:
        accepted = f"an integer from 0 to {n}, the number of elements"
        raise reject("k", described(k) if is_array(k) else k, accepted)


def _gapped(estimator: object, k: int) -> GST | None:
    """The GST object whose gap is taken; None for SIMPLE."""
    accepted = '"simple", "gst", or another gap as in "gst:gap=1.2"'
    if estimator == "simple":
        return None
    if isinstance(estimator, str):
        if estimator.partition(":")[0] != "gst":
            raise reject("estimator", estimator, accepted)
        estimator = resolve_pathwise(estimator)
    if not isinstance(estimator, GST):
        raise reject("estimator", f"an object of type {type(estimator).__name__}", accepted)
    if is_array(estimator.tau) or estimator.tau != 1 or not estimator.hard:
        raise reject(
            "estimator", estimator, "one with no option but the gap: tau and hard are arguments here"
        )
    if k > 1 and (callable(estimator.gap) or isinstance(estimator.gap, str)):
        accepted = "a number or an array: the others are for one selected element"
        raise reject("gap", estimator.gap, accepted)
    return estimator


def _level(name: str, level: Any, logits: Array, axis: int) -> Any:
    """A level that fits the rows, and must not be differentiated."""
    level = fitted(name, level, logits, axis)
    return constant(name, level) if is_array(level) else level


def _outcome(key: Array, rows: Array, k: int, tau: Any, gap: Any, hard: bool) -> tuple[Array, Array, Array]:
    """The sample of masked logits `(*rows, n)`, the surrogate's logits, and the weight of its gradient."""
    scores = rows_of(rows).marked_logits
    tau = per_row(tau, scores)
    surrogate = scores
    if hard or gap is not None:
        chosen = law.draw(scores, k, law.noise(key, scores))
        value = jnp.where(jnp.isnan(scores), jnp.nan, chosen.astype(scores.dtype))
        if gap is not None:
            level = law.kth_largest(scores, k)
            lowered = jnp.minimum(scores, level - per_row(gap, scores))
            surrogate = jnp.where(chosen, jnp.maximum(scores, level), lowered)
    surrogate = surrogate / tau
    if not hard:
        value = law.marginals(surrogate, k)
    return value.astype(rows.dtype), surrogate, 1 / tau


def _product(k: int, grad: Array, surrogate: Array, weight: Array) -> Array:
    return law.covariance_product(grad, surrogate, k) * weight
