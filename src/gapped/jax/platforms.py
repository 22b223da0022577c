"""One sample for several platforms: by kernels where they run, by XLA elsewhere and inside of `jax.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array

from gapped.jax import fused
from gapped.jax.attached import attach
from gapped.jax.categories import rows_of

if TYPE_CHECKING:
    from gapped.jax.samplers import Pathwise

Levels = dict[str, Array]
"""The levels of an estimator that are arrays, by name; the estimator beside them has numbers instead."""


def kernel_sample(plain: Pathwise, levels: Levels, key: Array, scores: Array) -> Array:
    """A sample of masked logits `(*rows, K)` that carries the estimator's gradient."""
    rows = jax.lax.stop_gradient(scores)
    forward = _by_platform(partial(_kernel_forward, plain), partial(_forward, plain), False)
    value, category, stats = forward(levels, key, rows)
    pull = _by_platform(partial(_kernel_gradient, plain), partial(_gradient, plain), True)
    return attach(pull, value, scores, levels, key, rows, category, stats)


def _by_platform(kernel: Callable[..., Any], plain: Callable[..., Any], is_pull: bool) -> Callable[..., Any]:
    """`kernel` where it runs, else `plain`, the same computation for XLA.

    `jax.vmap` replaces the kernel by `plain`. But a pull, whose first argument is a gradient, is done for one
    gradient after the other if nothing else has a batch axis: then the kernel drew the sample, by its noise.
    """
    function = jax.custom_batching.custom_vmap(kernel)

    @function.def_vmap
    def _(size: int, is_batched: Any, first: Any, *rest: Any) -> tuple[Any, Any]:
        if is_pull and not any(jax.tree.leaves(is_batched[1:])):
            result = jax.lax.map(lambda one: function(one, *rest), first)
        else:
            axes = jax.tree.map(lambda batch: 0 if batch else None, is_batched)
            result = jax.vmap(plain, tuple(axes), axis_size=size)(first, *rest)
        return result, jax.tree.map(lambda _: True, result)

    platforms = {fused.PLATFORM: function}
    return partial(jax.lax.platform_dependent, default=plain, **platforms)


def _kernel_forward(plain: Pathwise, levels: Levels, key: Array, scores: Array) -> tuple[Array, Array, Array]:
    mode = plain.with_levels(levels).mode()
    assert mode is not None
    return fused.forward(mode, key, scores)


def _forward(plain: Pathwise, levels: Levels, key: Array, scores: Array) -> tuple[Array, Array, Array]:
    """What `_kernel_forward` returns, but for the numbers per row, which `_gradient` computes again."""
    estimator, rows = plain.with_levels(levels), rows_of(scores)
    draw = estimator.drawn(key, rows)
    value, category, *_ = estimator.settled(rows.logits, draw).forward(rows, draw)
    return value, category.astype(jnp.int32), jnp.zeros(fused.stats_shape(scores), jnp.float32)


def _kernel_gradient(
    plain: Pathwise, grad: Array, levels: Levels, key: Array, scores: Array, category: Array, stats: Array
) -> Array:
    mode = plain.with_levels(levels).mode()
    assert mode is not None
    return fused.backward(mode, grad, key, scores, category, stats)


def _gradient(
    plain: Pathwise, grad: Array, levels: Levels, key: Array, scores: Array, category: Array, stats: Array
) -> Array:
    estimator, rows = plain.with_levels(levels), rows_of(scores)
    total = jnp.exp(rows.logits).sum(-1)
    gradient = estimator.pulled(grad, key, scores, category, rows.top, total)
    return gradient.astype(scores.dtype)
