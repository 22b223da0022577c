"""A value forward, an estimated gradient backward, by `jax.custom_vjp`.

Such a gradient is an estimator's choice: it has a value, but no derivative. Forward mode is refused by JAX
itself, a second reverse pass by the rule of `_first_order`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import TWICE

Pull = Callable[..., Array]
"""`pull(grad, *operands)`: the gradient of the logits for a gradient `grad` of the value."""


class Points(NamedTuple):
    """Where a gradient comes from: it is Σ_m w_m J(q_m) g."""

    points: Array
    """Points of the simplex, `(m, *rows, K)`."""
    weights: Array
    """Their weights, which broadcast against the points."""
    mass: Any = 1.0
    """The sums of the points over the categories, `(m, *rows, 1)`, if they are not normalised."""


def attach(pull: Pull, value: Array, logits: Array, *operands: Any) -> Array:
    """Return `value`, bit for bit, as a function of `logits` whose gradient is `pull(grad, *operands)`.

    Whatever `value` depends on besides keeps its own gradient. Operands get none: what they depend on must
    get its gradient through `value`.
    """
    # Inside of shard_map, a gradient varies over the devices as the operands do: so must what it belongs to.
    axes = frozenset[Any]().union(
        *(_varying_axes(leaf) for leaf in jax.tree.leaves((value, logits, operands)))
    )
    return _attach(pull, _vary(value, axes), _vary(logits, axes), *operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(pull: Pull, value: Array, logits: Array, *operands: Any) -> Array:
    return _tie(value, (logits, operands))


def _forward(pull: Pull, value: Array, logits: Array, *operands: Any) -> tuple[Array, Any]:
    # An array without entries stands for the logits: what depends on it depends on them.
    return _tie(value, (logits, operands)), (logits[..., :0], operands)


def _backward(pull: Pull, saved: Any, grad: Array) -> tuple[Array | None, ...]:
    anchor, operands = saved
    gradient = _first_order(pull, grad, anchor, *operands).astype(anchor.dtype)
    axes = _varying_axes(anchor)
    return _vary(grad, axes), _vary(gradient, axes), *(None for _ in operands)


_attach.defvjp(_forward, _backward)


def _tie(value: Array, others: Any) -> Array:
    """`value`, bit for bit, as something that depends on all arrays in `others`.

    Under `jax.vmap` a value without the batch axis of an operand would bring back the sum of the batch's
    gradients, and the rule would give that sum to every entry of the batch.
    """
    anchors = []
    for leaf in jax.tree.leaves(others):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        numbers = jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)
        anchors.append(jnp.any(jnp.atleast_1d(numbers)[..., :0]))
    return jnp.where(jnp.stack(anchors).any(), value, value)


def _varying_axes(leaf: Any) -> frozenset[Any]:
    """The mesh axes of `jax.shard_map` over which an array varies."""
    kind = jax.typeof(leaf)
    # JAX has renamed this attribute.
    axes: Any = getattr(getattr(kind, "mat", None), "varying", None) or getattr(kind, "vma", ())
    return frozenset(axes)


def _vary(array: Array, axes: frozenset[Any]) -> Array:
    """`array` as one that varies over `axes`; its gradient is summed over those where it did not."""
    missing = tuple(axes - _varying_axes(array))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")  # type: ignore[no-any-return]
    return jax.lax.pvary(array, missing)  # type: ignore[no-any-return, attr-defined]


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


def with_gradient(value: Array, logits: Array, gradient: Array) -> Array:
    """Return `value`, bit for bit, as a function of `logits` whose derivative is `gradient`.

    `value` has the shape `batch`; `logits` and `gradient` are `(*batch, *variables, K)` and each example
    depends on its own logits alone. Whatever `value` depends on besides keeps its own gradient.
    """
    return attach(_per_example, value, logits, gradient)


def _per_example(grad: Array, gradient: Array) -> Array:
    return grad.astype(gradient.dtype).reshape(*grad.shape, *(1,) * (gradient.ndim - grad.ndim)) * gradient
