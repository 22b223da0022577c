"""DisARM-Tree: an antithetic pair of samples, bit by bit down a tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gapped.jax.categories import one_hot
from gapped.jax.scores import Costs, Score, mark_absent, spread


@dataclass(frozen=True)
class DisARMTree(Score):
    """DisARM on categories as paths down a binary tree.

    Two samples go down a balanced binary tree whose leaves are the categories, with antithetic uniforms at
    its nodes: the help of `gapped.DisARMTree` has the mathematics.

    - Bias: none.
    - Cost: two evaluations, no derivative of the cost; K - 1 uniforms per row after padding.

    References: Dong, Mnih, Tucker (2021).
    """

    name = "disarm-tree"

    def noise(self, key: Array, logits: Array, batch_axes: int) -> Array:
        nodes = (1 << depth(logits.shape[-1])) - 1
        return jax.random.uniform(key, (*logits.shape[:-1], nodes), jnp.result_type(float))

    def index(self, logits: Array, noise: Array) -> Array:
        p = node_probabilities(logits.astype(noise.dtype))
        # No u in [0, 1) gives a bit that a p of 0 or 1 forbids.
        bits = jnp.stack([noise < p, noise >= 1 - p]).astype(jnp.int32)
        node = jnp.zeros((2, *logits.shape[:-1]), jnp.int32)
        for _ in range(depth(logits.shape[-1])):
            # The children of node t are 2 t + 1 and 2 t + 2.
            node = 2 * node + 1 + jnp.take_along_axis(bits, node[..., None], -1)[..., 0]
        return mark_absent(node - noise.shape[-1], logits)

    def gradient(self, logits: Array, noise: Any, draws: Costs) -> Array:
        delta = (draws.costs[0] - draws.costs[1]).astype(logits.dtype)
        direction = self._direction(logits, draws.category)
        return spread(delta, direction) * direction

    def _direction(self, logits: Array, index: Array) -> Array:
        r"""With :math:`q_i` the softmax of what lies below the node where the paths part, on either side,

        .. math:: \tfrac12\bigl[(D_1 - D_2) - \sigma(-|\varphi|)\,(q_1 - q_2)\bigr].
        """
        # The highest bit in which the two leaves differ is decided where the paths part.
        height = jnp.maximum(31 - jax.lax.clz((index[0] ^ index[1]).astype(jnp.int32)), 0)[..., None]
        leaves = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        sides = (leaves >> height) == (index[..., None].astype(jnp.int32) >> height)
        weights = jnp.exp(logits) * sides
        mass = jnp.maximum(weights.sum(-1, keepdims=True), np.finfo(logits.dtype).tiny)
        # sigma(-|phi|) is the lesser side's part of both.
        lesser = mass.min(0) / mass.sum(0)
        apart = one_hot(index, logits.shape[-1], logits.dtype) - weights * (lesser / mass)
        return 0.5 * (apart[0] - apart[1])


def depth(categories: int) -> int:
    """The levels of a balanced tree with so many leaves."""
    return (categories - 1).bit_length()


def node_probabilities(logits: Array) -> Array:
    """The probabilities of going right, level by level from the root; NaN where no sample comes."""
    categories = logits.shape[-1]
    ends = [(0, 0)] * (logits.ndim - 1) + [(0, (1 << depth(categories)) - categories)]
    masses = jnp.pad(jnp.exp(logits), ends)
    rights, totals = [masses[..., :0]], [masses[..., :0]]
    while masses.shape[-1] > 1:
        rights.append(masses[..., 1::2])
        masses = masses[..., 0::2] + rights[-1]
        totals.append(masses)
    return jnp.concatenate(rights[::-1], -1) / jnp.concatenate(totals[::-1], -1)
