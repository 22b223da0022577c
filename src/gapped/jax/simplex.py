"""Arithmetic on the probability simplex, along the last axis: the same definitions as `gapped.simplex`.

A category whose logit is -inf does not exist: it gets exactly zero mass. A row without a sample has an index
outside of the categories: `K` if it has no category (all -inf), `K + 1` if it holds a NaN or +inf.

A running sum over a whole row takes several passes over memory, and in float32 it loses digits. To draw a
category a row is cut into blocks: one pass adds up the weights of each block, one block is drawn by its sum,
and a category inside of that block, which is all that is read again. Blocks, and the rows of their sums, are
cut up in turn until a few weights are left.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gapped.docstrings import documented_in_jax as documented
from gapped.errors import reject
from gapped.jax.checks import check_logits, check_where, is_array

T = TypeVar("T")

_GAP_GUARD = 1e-5
SURPRISE = 1e3
"""A category of this much surprise, -log p, has no mass in float64 either."""
# In float32 the running sum of up to this many weights loses no more than the uniform compared with it.
_ONE_UNIFORM = 256
# Up to this many weights are summed up without cutting. XLA computes each running sum from the start.
_FEW = 16


class Rows(NamedTuple):
    """Logits ready for an estimator, without a gradient."""

    scores: Array
    """The masked logits in their own dtype, `(*rows, K)`."""
    top: Array
    """The largest logit of each row, float32 or float64, `(*rows, 1)`."""

    @property
    def logits(self) -> Array:
        """Relative to the largest of their row, in float32 or float64; 0 in rows without a distribution."""
        return jnp.where(self.lawful, computed(self.scores) - jnp.where(self.lawful, self.top, 0.0), 0.0)

    @property
    def lawful(self) -> Array:
        """Whether a row has a distribution, `(*rows, 1)`."""
        return jnp.isfinite(self.top)

    @property
    def marked_logits(self) -> Array:
        """`logits`, but -inf or NaN throughout a row without a distribution."""
        return jnp.where(self.lawful, self.logits, jnp.where(self.top == -jnp.inf, -jnp.inf, jnp.nan))

    def mark(self, category: Array) -> Array:
        """Categories of the rows, marked where a row has no distribution."""
        categories = self.scores.shape[-1]
        outside = jnp.where(self.top == -jnp.inf, categories, categories + 1).astype(category.dtype)
        return jnp.where(self.lawful[..., 0], category, outside[..., 0])

    def fill(self, points: Array) -> Array:
        """Points of the simplex, zero or NaN where a row has no distribution."""
        return jnp.where(self.lawful, points, jnp.where(self.top == -jnp.inf, 0.0, jnp.nan))


def rows_of(logits: Array) -> Rows:
    """The rows of masked logits, categories last."""
    scores = jax.lax.stop_gradient(logits)
    return Rows(scores, computed(scores.max(-1, keepdims=True)))


def separate(values: T) -> T:
    """`values` as numbers that a compiler does not know: it keeps what depends on them as it is written."""
    return jax.lax.optimization_barrier(values)  # type: ignore[no-any-return, no-untyped-call]


def computed(values: Array) -> Array:
    """`values` in the dtype that arithmetic is done in: float64 stays, all else becomes float32."""
    return values if values.dtype == jnp.float64 else values.astype(jnp.float32)


def masked(logits: Array, where: Array | None) -> Array:
    """Logits with -inf where `where` is False, before anything is normalised: masking equals deleting."""
    return logits if where is None else jnp.where(where, logits, -jnp.inf)


def pairs(log_odds: Array) -> Array:
    """Logits of "on" and "off", `(*gates, 2)`, for the log-odds of gates: see `gapped.simplex`."""
    certain = log_odds == jnp.inf
    off = jnp.where(certain, -jnp.inf, jnp.zeros_like(log_odds))
    return jnp.stack([jnp.where(certain, 0.0, log_odds), off], -1)


def per_row(level: Any, like: Array) -> Array:
    """A level that `fit` returned, so that it broadcasts against `(*rows, K)`; NaN where negative."""
    if not is_array(level):
        return jnp.asarray(float(level), like.dtype)
    level = jnp.asarray(level, like.dtype)[..., None]
    return jnp.where(level >= 0, level, jnp.nan)


def log_softmax(logits: Array) -> Array:
    """Log-softmax whose rows without categories stay -inf instead of turning NaN."""
    exists = logits.max(-1, keepdims=True) != -jnp.inf
    # Replaced before, too: what is not selected must have a gradient that zero can be multiplied with.
    return jnp.where(exists, jax.nn.log_softmax(jnp.where(exists, logits, 0.0), -1), -jnp.inf)


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
    sums = separate(blocks.sum(-1))
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


def uniform(key: Array, logits: Array, samples: tuple[int, ...] = ()) -> Array:
    """The noise of `inverse_cdf`, `(levels, *samples, *rows)`: one float64 per row, where there is one.

    Without `jax_enable_x64` it is one float32 for rows of up to 256 categories, else two.
    """
    dtype = jnp.result_type(float)
    levels = 2 if dtype == jnp.float32 and logits.shape[-1] > _ONE_UNIFORM else 1
    return jax.random.uniform(key, (levels, *samples, *logits.shape[:-1]), dtype)


def one_hot(index: Array, categories: int, dtype: Any) -> Array:
    """One-hot rows, exactly 0 and 1; zero where the index is `K`, NaN where it is `K + 1`."""
    rows = (jnp.arange(categories) == index[..., None]).astype(dtype)
    return jnp.where(index[..., None] > categories, jnp.asarray(jnp.nan, dtype), rows)


def only_sampled(values: Array, index: Array, categories: int) -> Array:
    """`values` `(*index.shape, ...)`, zero where there is no category, NaN in rows that hold one."""
    index = index.reshape(*index.shape, *(1,) * (values.ndim - index.ndim))
    values = jnp.where(index == categories, jnp.zeros((), values.dtype), values)
    return jnp.where(index > categories, jnp.asarray(jnp.nan, values.dtype), values)


def conditional_gumbel(log_p: Array, index: Array, log_e: Array) -> Array:
    r"""The scores :math:`\log p + G` given that `index` wins, for noise `(samples, *rows, K)`."""
    selected = jnp.arange(log_p.shape[-1]) == index[..., None]
    winner = jnp.where(selected, log_e, 0.0).sum(-1, keepdims=True)
    return -jnp.where(selected, winner, jnp.logaddexp(log_e - log_p, winner))


def expected_gap(p: Array) -> Array:
    """Expected gap of the two largest perturbed logits, given the winner.

    Arguments:
        p: Probabilities of the winning categories, of any shape.

    Returns:
        The gaps, an array of the shape of `p`. The function is a `gap` for `gapped.jax.gst`. The help of
        `gapped.expected_gap` has the mathematics.

    >>> expected_gap(jnp.asarray([0.0, 0.5]))
    Array([1.       , 1.3862882], dtype=float32)
    """
    guarded = computed(jnp.asarray(p)) * (1 - _GAP_GUARD)
    limits = np.finfo(guarded.dtype)
    # For small p the quotient loses digits; the series is then exact to the last one.
    series = 1 + guarded * (1 / 2 + guarded * (1 / 3 + guarded / 4))
    quotient = -jnp.log1p(-guarded) / jnp.maximum(guarded, limits.tiny)
    return jnp.where(guarded < limits.eps**0.25 / 4, series, quotient).astype(jnp.asarray(p).dtype)


def log_expected_odds(log_p: Array) -> Array:
    """The logarithm of a losing category's expected odds against the winner: see `gapped.simplex`."""
    loss = -jnp.expm1(log_p)
    # Next to 1 the numerator and the square vanish together; the series is then exact to the last digit.
    near = loss < (0.03 if log_p.dtype == jnp.float32 else 1e-3)
    series = 1 / 2 + loss * (1 / 3 + loss * (1 / 4 + loss * (1 / 5 + loss / 6)))
    exists = log_p != -jnp.inf
    finite = jnp.where(exists, log_p, 0.0)
    quotient = (-finite - loss) / jnp.where(near, 1.0, loss) ** 2
    return jnp.where(exists, finite + jnp.log(jnp.where(near | ~exists, series, quotient)), -jnp.inf)


def halfway_odds(logits: Array, total: Array) -> Array:
    """The expected odds of losing categories at half of their probability: see `gapped.simplex`."""
    half = jnp.exp(logits) / (2 * total)
    surprise = jnp.minimum(jnp.log(2 * total) - logits, SURPRISE)
    return half * (surprise - 1 + half) / (1 - half) ** 2


def log_exponential(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """The logarithm of unit exponentials: Gumbel noise with its sign reversed; always finite."""
    return -jax.random.gumbel(key, shape, dtype)


@documented
def unimix(logits: Array, amount: float = 0.01, *, axis: int = -1, where: Array | None = None) -> Array:
    """Mix a categorical distribution with the uniform one, in its logits.

    Arguments:
        amount: The share of the uniform distribution, from 0 to 1. 0 returns the log-softmax.

    Returns:
        Normalised logits in the shape and dtype of `logits`, with their ordinary gradient. The help of
        `gapped.unimix` has the mathematics and the reference.

    >>> jnp.exp(unimix(jnp.asarray([100.0, 0.0]), 0.5))
    Array([0.75, 0.25], dtype=float32)
    """
    check_logits(logits, axis)
    check_where(where, logits, axis)
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount <= 1:
        raise reject("amount", amount, "a number from 0 to 1")
    rows = jnp.moveaxis(computed(masked(jnp.asarray(logits), where)), axis, -1)
    exists = rows != -jnp.inf
    log_p = log_softmax(rows)
    if amount > 0:
        count = exists.sum(-1, keepdims=True).astype(log_p.dtype)
        # Replaced before adding: the slope of a sum of two zeros is NaN in log space.
        kept = jnp.where(exists, log_p, 0.0) + jnp.log1p(-jnp.asarray(amount, log_p.dtype))
        mixed = jnp.logaddexp(kept, jnp.log(amount) - jnp.log(count))
        log_p = jnp.where(exists, mixed, -jnp.inf)
    return jnp.moveaxis(log_p, -1, axis).astype(logits.dtype)
