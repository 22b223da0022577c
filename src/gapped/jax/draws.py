"""Drawing a category from weights by the inverse of their distribution function, without long running sums.

A running sum over a whole row takes several passes over memory, and in float32 it loses digits. Here a row is
cut into blocks: one pass adds up the weights of each block, one block is drawn by its sum, and a category
inside of that block, which is all that is read again. Blocks, and the rows of their sums, are cut up in turn
until a few weights are left.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from gapped.jax.categories import apart

# In float32 the running sum of so many weights loses no more than the uniform that is compared with it.
_ONE_UNIFORM = 256
# So many weights are summed up without cutting. XLA computes each running sum of theirs from the start.
_FEW = 16


def uniform(key: Array, logits: Array, samples: tuple[int, ...] = ()) -> Array:
    """The noise of `inverse_cdf`, `(levels, *samples, *rows)`: one float64 per row, where there is one.

    Without `jax_enable_x64` it is one float32 for rows of up to 256 categories, else two.
    """
    dtype = jnp.result_type(float)
    levels = 2 if dtype == jnp.float32 and logits.shape[-1] > _ONE_UNIFORM else 1
    return jax.random.uniform(key, (levels, *samples, *logits.shape[:-1]), dtype)


def inverse_cdf(weights: Array, u: Array) -> tuple[Array, Array]:
    """Draw one category per row in proportion to `weights`: the first whose running sum exceeds u times all.

    `u` has the shape `(levels, *rows)`. Sums are kept in the dtype of `u`. With two levels the first
    uniform draws a block and the second a category inside of it. A category without weight is never drawn.
    Returns the categories and the sums of the weights, `(*rows)`.
    """
    weights = weights.astype(u.dtype)
    if weights.shape[-1] <= _FEW:
        total = weights.sum(-1)
        return _search(weights, u[0] * total)[0], total
    blocks = _blocks(weights)
    # Else the compiler would read the whole row again for every sum of these sums.
    sums = apart(blocks.sum(-1))
    total = sums.sum(-1)
    block, rest = _search(sums, u[0] * total)
    inside = _pick(blocks, block)
    if len(u) == 2:
        rest = u[1] * inside.sum(-1)
    return block * blocks.shape[-1] + _search(inside, rest)[0], total


def _search(weights: Array, threshold: Array) -> tuple[Array, Array]:
    """The first category whose running sum exceeds the threshold, and the threshold less the sum before it.

    If rounding puts the threshold at the total or above, it is the last category with a weight.
    """
    if weights.shape[-1] > _FEW:
        blocks = _blocks(weights)
        block, rest = _search(blocks.sum(-1), threshold)
        category, rest = _search(_pick(blocks, block), rest)
        return block * blocks.shape[-1] + category, rest
    running, exists = jnp.cumsum(weights, -1), weights > 0
    total = jnp.where(exists, running, 0.0).max(-1, keepdims=True)
    category = jnp.argmax(exists & ((running > threshold[..., None]) | (running >= total)), -1)
    before = jnp.arange(weights.shape[-1]) == category[..., None] - 1
    return category, threshold - jnp.where(before, running, 0.0).sum(-1)


def _blocks(weights: Array) -> Array:
    """The weights in blocks whose size is a power of two, `(*rows, blocks, size)`; zeros at the end."""
    categories = weights.shape[-1]
    size = 1 << -(-(categories - 1).bit_length() // 2)
    count = -(-categories // size)
    ends = [(0, 0)] * (weights.ndim - 1) + [(0, count * size - categories)]
    return jnp.pad(weights, ends).reshape(*weights.shape[:-1], count, size)


def _pick(blocks: Array, block: Array) -> Array:
    """One block of each row, `(*rows, size)`."""
    place = block[..., None, None]
    return jnp.take_along_axis(blocks, place, -2, mode="promise_in_bounds")[..., 0, :]
