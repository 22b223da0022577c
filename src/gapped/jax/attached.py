"""A value forward, an estimated gradient backward, by `jax.custom_vjp`.

Such a gradient is an estimator's choice: it has a value, but no derivative. Forward mode is refused by JAX
itself, a second reverse pass by the rule of `_first_order`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import TWICE

Pull = Callable[..., Array]
"""`pull(grad, *operands)`: the gradient of the logits for a gradient `grad` of the value."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attach(pull: Pull, value: Array, logits: Array, *operands: Array) -> Array:
    """Return `value`, bit for bit, as a function of `logits` whose gradient is `pull(grad, *operands)`.

    Whatever `value` depends on besides keeps its own gradient. Operands get none: what they depend on must
    get its gradient through `value`.
    """
    return value


def _forward(pull: Pull, value: Array, logits: Array, *operands: Array) -> tuple[Array, Any]:
    # An array without entries stands for the logits: what depends on it depends on them.
    return value, (logits[..., :0], operands)


def _backward(pull: Pull, saved: Any, grad: Array) -> tuple[Array | None, ...]:
    anchor, operands = saved
    gradient = _first_order(pull, grad, anchor, *operands).astype(anchor.dtype)
    return grad, gradient, *(None for _ in operands)


attach.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _first_order(pull: Pull, grad: Array, anchor: Array, *operands: Array) -> Array:
    return pull(grad, *operands)


@_first_order.defjvp
def _refuse(pull: Pull, primals: Any, tangents: Any) -> Any:
    raise RuntimeError(TWICE)


def jacobian_product(
    grad: Array, points: Array, weights: Array, mass: Any = 1.0, mean: Array | None = None
) -> Array:
    r"""The product :math:`\sum_m w_m J(q_m) g`, for points `(m, *rows, K)` and weights that broadcast.

    With a `mass` the points are :math:`q_m` times that. `mean` is :math:`\langle q_m, g\rangle` if known.
    """
    grad, points = grad.astype(points.dtype), points / mass
    if mean is None:
        mean = (points * grad).sum(-1, keepdims=True)
    return (weights * points * (grad - mean)).sum(0)


def table_product(grad: Array, points: Array, weights: Array, table: Array) -> Array:
    """`jacobian_product` for the gradient of rows that were looked up in `table`, `(K, *rest)`.

    The table's rows of categories that do not exist, where the points are -0.0, may hold anything.
    """
    flat = grad.reshape(*points.shape[1:-1], -1)
    dense = jnp.matmul(flat, table.reshape(table.shape[0], -1).T, precision="highest")
    masked = (points[0] == 0) & jnp.signbit(points[0])
    return jacobian_product(jnp.where(masked, 0.0, dense), points, weights)


def entry_product(grad: Array, points: Array, weights: Array, selected: Array) -> Array:
    """`jacobian_product` for the gradient of the selected entries, which `selected` marks."""
    return jacobian_product(jnp.where(selected, grad[..., None], 0.0), points, weights)


def example_product(grad: Array, gradient: Array) -> Array:
    """A gradient `(*batch, *variables, K)` times that of its example's cost, `batch`."""
    return grad.astype(gradient.dtype).reshape(*grad.shape, *(1,) * (gradient.ndim - grad.ndim)) * gradient
