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


def choose(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    *,
    estimator: Pathwise | str | None = None,
    axis: int = -1,
    where: Array | None = None,
) -> Choice:
    """Draw one category per row without ever writing its one-hot vector, for look-ups and routers.

    `estimator` is an object or its text; None is the recommended default at `tau`. Values and gradients are
    those of the hard sample.

    >>> import jax
    >>> choice = choose(jax.random.key(0), jnp.zeros((2, 4)), 0.5)
    >>> choice.index.shape, choice.select(jnp.eye(4)).shape, choice.gate()
    ((2,), (2, 4), Array([1., 1.], dtype=float32))
    """
    return resolve_pathwise(estimator, tau, True).choose(key, logits, axis=axis, where=where)


def gate(
    key: Array,
    logits: Array,
    tau: Level = 1.0,
    hard: bool = False,
    *,
    estimator: Pathwise | str | None = None,
    where: Array | None = None,
) -> Array:
    r"""Bernoulli samples that carry a gradient, for masks and switches.

    Each logit is the log-odds of a 1: the hard sample is 1 with probability :math:`\sigma(\theta)`, else 0,
    and value and gradient are those of the first entry of the estimator's sample of :math:`(\theta, 0)`.

    - `logits`: any shape. `tau` broadcasts against it.
    - `estimator`: a pathwise estimator or its text; None is the recommended default at `tau`.
    - `where`: gates where it is False are 0, without gradient, as are those of -inf.

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
    return resolved.sample(key, jnp.stack([odds, jnp.zeros_like(odds)], -1))[..., 0]
