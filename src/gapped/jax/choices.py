"""A sample known by its index alone, for look-ups and routing, where most of a one-hot vector is idle."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from gapped.errors import reject
from gapped.jax.arguments import described, is_array
from gapped.jax.attached import attach, entry_product, table_product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """One category per row, and ways to use it that carry the gradient.

    `gapped.jax.choose` returns it. A choice is a pytree: it may leave `jax.jit`, and `jax.vmap` makes a batch
    of it.

    Arguments:
        index: The selected categories, integers, of the shape of the logits without the category axis. A row
            without categories has the index K, one with a NaN or +inf K + 1.

    With D the one-hot sample that is never written, and V a table:

    - `select(table)`: the rows D V of the table, as an embedding look-up.
    - `gate()`: the entry D_i = 1 of the selected category, to be multiplied with the result of the branch
      that a router selects. The results of the other branches count as zero.
    """

    index: Array
    """The selected categories, integers, `(*rows)`. A row without categories has index `K`, one with a NaN
    or +inf `K + 1`."""
    _logits: Array = field(repr=False)
    _points: Array = field(repr=False)
    """`(m, *rows, K)`, with -0.0 where a category does not exist."""
    _weights: Array = field(repr=False)

    def select(self, table: Array) -> Array:
        """Look up the selected rows of a table.

        Arguments:
            table: One row per category, `(K, *rest)`.

        Returns:
            The rows `table[index]`, `(*rows, *rest)`, with gradients for the logits and the table.

        >>> import gapped.jax
        >>> logits = jnp.asarray([[0.0, 99.0], [99.0, 0.0]])
        >>> gapped.jax.choose(jax.random.key(0), logits).select(jnp.asarray([10.0, 20.0]))
        Array([20., 10.], dtype=float32)
        """
        categories = self._logits.shape[-1]
        is_table = is_array(table) and jnp.issubdtype(table.dtype, jnp.floating) and table.ndim > 0
        if not is_table or table.shape[0] != categories:
            accepted = f"a floating-point array with {categories} rows, one per category"
            raise reject("table", described(table), accepted)
        table = jnp.asarray(table)
        rows = table[jnp.minimum(self.index, categories - 1)]
        value = self._only_sampled(rows)
        return attach(table_product, value, self._logits, self._points, self._weights, table)

    def gate(self) -> Array:
        """Ones, `(*rows)`, in the dtype of the logits; zero in a row without categories."""
        ones = self._only_sampled(jnp.ones(self.index.shape, self._logits.dtype))
        selected = jnp.arange(self._logits.shape[-1]) == self.index[..., None]
        return attach(entry_product, ones, self._logits, self._points, self._weights, selected)

    def _only_sampled(self, values: Array) -> Array:
        """`values`, but zero where a row has no sample and NaN where it holds a NaN."""
        index = self.index.reshape(*self.index.shape, *(1,) * (values.ndim - self.index.ndim))
        categories = self._logits.shape[-1]
        values = jnp.where(index == categories, jnp.zeros((), values.dtype), values)
        return jnp.where(index > categories, jnp.asarray(jnp.nan, values.dtype), values)
