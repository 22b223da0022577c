"""Checks of arguments, as far as shapes and dtypes tell: values may be traced and are not looked at."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gapped.errors import reject

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def is_array(value: object) -> bool:
    """Whether `value` is an array of JAX, traced or not, or of numpy."""
    return isinstance(value, jax.Array | np.ndarray)


def describe(value: Any) -> str:
    """The argument that came, in a few words."""
    if is_array(value):
        return f"a {value.dtype} array of shape {value.shape}"
    return f"an object of type {type(value).__name__}"


def check_flag(name: str, flag: object) -> None:
    """Check an option that is either on or off, which a traced value cannot be."""
    if not isinstance(flag, bool):
        raise reject(name, describe(flag) if is_array(flag) else flag, "True or False")


def check_count(name: str, count: object, least: int = 1) -> None:
    """Check a whole number that has a least value."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise reject(name, count, "a positive integer" if least == 1 else f"an integer of at least {least}")


def check_number(name: str, number: object) -> None:
    """Check a number of any sign, in float32's range."""
    if not abs(_real(number)) <= _MOST:
        raise reject(name, number, "a finite number")


def check_level(name: str, level: Any, *, positive: bool) -> None:
    """Check a temperature or a gap: a number in float32's range, or a real array."""
    accepted = f"a {'positive' if positive else 'non-negative'} number or array"
    if is_array(level):
        if not (jnp.issubdtype(level.dtype, jnp.floating) or jnp.issubdtype(level.dtype, jnp.integer)):
            raise reject(name, describe(level), accepted)
        return
    if not (_LEAST if positive else 0.0) <= _real(level) <= _MOST:
        raise reject(name, level, accepted)


def _real(number: object) -> float:
    """A number as a float: inf if it is too large for one, NaN if it is no number."""
    if isinstance(number, bool) or not isinstance(number, Real):
        return math.nan
    try:
        return float(number)
    except OverflowError:
        return math.inf


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    extra = len(target) - len(shape)
    return extra >= 0 and all(n in (1, m) for n, m in zip(shape, target[extra:], strict=True))


def fit(name: str, level: Any, logits: Array, axis: int) -> Any:
    """A level that is an array, without the category axis; one with all axes of the logits has it as 1."""
    if not is_array(level):
        return level
    if level.ndim == logits.ndim and level.shape[axis] == 1:
        level = level.squeeze(axis)
    target = tuple(np.delete(logits.shape, axis).tolist())
    if not broadcasts(level.shape, target):
        accepted = f"a shape that broadcasts to {target}, the logits' shape without the category axis"
        raise reject(name, describe(level), accepted)
    return level


def forbid_gradient(name: str, level: Any) -> Any:
    """`level`, which must not be differentiated: a gradient of zero would be a silent error."""
    return _constant(name, level) if is_array(level) else level


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name: str, level: Array) -> Array:
    return level


@_constant.defjvp
def _refuse(name: str, primals: Any, tangents: Any) -> Any:
    accepted = "a constant: the estimator has no gradient for it, take jax.lax.stop_gradient"
    raise reject(name, "an array that is differentiated", accepted)


def check_key(key: Any) -> None:
    """Check a random key, of the new style or the old one."""
    is_new = is_array(key) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
    is_old = is_array(key) and key.dtype == jnp.uint32 and key.ndim == 1
    if not (is_new or is_old):
        raise reject("key", describe(key), "a random key such as jax.random.key(0); it comes first")


def check_logits(logits: Any, axis: object = -1) -> None:
    """Check logits and their category axis."""
    accepted = "a floating-point array of scores, one per category"
    if not is_array(logits) or not jnp.issubdtype(logits.dtype, jnp.floating) or logits.ndim == 0:
        raise reject("logits", describe(logits), accepted)
    if isinstance(axis, bool) or not isinstance(axis, int) or not -logits.ndim <= axis < logits.ndim:
        raise reject("axis", axis, f"an axis of logits of shape {logits.shape}")
    if logits.shape[axis] == 0:
        raise reject("logits", describe(logits), f"at least one category on axis {axis}")


def check_where(where: Any, logits: Array, axis: int = -1) -> None:
    """Check a mask of the categories that exist."""
    if where is None:
        return
    accepted = f"a boolean array that broadcasts to the logits' shape {logits.shape}"
    if not is_array(where) or where.dtype != jnp.bool_ or not broadcasts(where.shape, logits.shape):
        raise reject("where", describe(where), accepted)
    if where.ndim < logits.ndim and axis not in (-1, logits.ndim - 1):
        # Broadcasting would take its last axis for the logits' last one, which is not that of the categories.
        accepted = f"one with all {logits.ndim} axes of the logits, since axis={axis} is not the last of them"
        raise reject("where", describe(where), accepted)


def check_table(table: Any, categories: int) -> None:
    """Check a table that is looked up by category."""
    is_table = is_array(table) and jnp.issubdtype(table.dtype, jnp.floating) and table.ndim > 0
    if not is_table or table.shape[0] != categories:
        accepted = f"a floating-point array with {categories} rows, one per category"
        raise reject("table", describe(table), accepted)


def check_size(k: object, n: int) -> None:
    """Check how many of `n` elements are selected."""
    if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= n:
        accepted = f"an integer from 0 to {n}, the number of elements"
        raise reject("k", describe(k) if is_array(k) else k, accepted)
