"""Samples for look-ups and for switches: an index without its one-hot vector, and zeros and ones."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import Array

from gapped.jax.arguments import check_key, check_logits, check_where
from gapped.jax.categories import masked
from gapped.jax.choices import Choice
from gapped.jax.named import resolve_pathwise
from gapped.jax.samplers import Level, Pathwise
from gapped.jax.shared_arguments import documented


@documented
def choose(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    *,
    estimator: Pathwise | str | None = None,
    axis: int = -1,
    where: Array | None = None,
) -> Choice:
    """Draw one category per row by its index, for look-ups and routers.

    No one-hot vector is written. Values and gradients are those of the hard sample.

    Arguments:
        (key, logits, tau)
        estimator: A pathwise one, as an object or as text; None is the recommended default at `tau`.
        (axis, where)

    Returns:
        A `gapped.jax.Choice`. Its `index` has the shape of the logits without the category axis;
        `select(table)` looks up entries, and `gate()` is a 1 for each row that carries the gradient.

    >>> import jax
    >>> choice = choose(jax.random.key(0), jnp.zeros((2, 4)), 0.5)
    >>> choice.index.shape, choice.select(jnp.eye(4)).shape, choice.gate()
    ((2,), (2, 4), Array([1., 1.], dtype=float32))
    """
    return resolve_pathwise(estimator, tau, True).choose(key, logits, axis=axis, where=where)


@documented
def gate(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    estimator: Pathwise | str | None = None,
    where: Array | None = None,
) -> Array:
    """Gates: Bernoulli samples that carry a gradient, one number each.

    Soft by default: pass `hard=True` for zeros and ones.

    Arguments:
        (key)
        logits: Log-odds φ of a 1, of any shape.
        tau: Temperature, a positive number or an array that broadcasts against the logits' shape.
        hard: True returns exactly 0 or 1, with P(1) = σ(φ); False the surrogate, from 0 to 1.
        estimator: A pathwise one, as an object or as text; None is the recommended default at `tau`.
        where: Booleans that broadcast against the logits. Gates where it is False are 0, without gradient, as
            are those of -inf; those of +inf are 1, without gradient too.

    Returns:
        An array of the shape and dtype of `logits`.

    Value and gradient are those of the first entry of the estimator's sample of the logits (φ, 0).

    >>> import jax
    >>> gate(jax.random.key(0), jnp.asarray([99.0, -99.0]), hard=True)
    Array([1., 0.], dtype=float32)
    """
    check_key(key)
    # A gate has no category axis: for the checks, its logits get one.
    expanded = logits[..., None] if hasattr(logits, "ndim") else logits
    check_logits(expanded)
    check_where(where, logits)
    # A kernel would write both entries of each pair; XLA does not.
    resolved = replace(resolve_pathwise(estimator, tau, hard), backend="xla")
    odds = masked(jnp.asarray(logits), where)
    # Odds of +inf are certain, as those of -inf are: then one of the two categories does not exist.
    certain = odds == jnp.inf
    pair = jnp.stack([jnp.where(certain, 0.0, odds), jnp.where(certain, -jnp.inf, jnp.zeros_like(odds))], -1)
    return resolved.sample(key, pair)[..., 0]
