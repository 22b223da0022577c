r"""How many elements of each part of a set are selected, part by part up a binary tree.

Element :math:`i` is selected with probability :math:`p_i`, independently of the others. A node of the tree
has the law of how many of the elements below it are selected: the two numbers :math:`(1 - p_i, p_i)` at a
leaf, and the convolution of its two children's laws at every other node. Sizes above a `degree` that is never
needed are left out.

A law lies on the last axis, the nodes of a level on the axis before it. A level with an odd number of nodes
gets a node without elements at its end. The leaves come first in a list of levels, the root last. There are
at least two elements.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from gapped.jax.draws import inverse_cdf


def ascend(p: Array, q: Array, degree: int) -> list[Array]:
    """The levels of the tree whose leaves are `(q, p)`, each of shape `(..., nodes, sizes)`."""
    levels = [_even(jnp.stack([q, p], -1))]
    while levels[-1].shape[-2] > 1:
        left, right = levels[-1][..., 0::2, :], levels[-1][..., 1::2, :]
        levels.append(_even(_convolved(left, right, min(2 * (left.shape[-1] - 1), degree))))
    return levels


def decisions(n: int) -> list[int]:
    """How many nodes `descend` decides for at each level of a tree over `n` elements, the root's first."""
    counts = []
    while n > 1:
        n = -(-n // 2)
        counts.append(n)
    return counts[::-1]


def descend(levels: list[Array], size: Array, u: Array) -> Array:
    """Draw which elements are selected, given that `size` of them are: zeros and ones, integers.

    From the root down, each node divides its number among its children: `a` to the left with a probability
    in proportion to the product of their laws, at `a` and at the rest. `u` has one uniform for each of the
    nodes that `decisions` counts, on its last axis, in that order.
    """
    sizes, used = size[..., None], 0
    for level in reversed(levels[:-1]):
        left, right = level[..., 0::2, :], level[..., 1::2, :]
        nodes, most = left.shape[-2], left.shape[-1] - 1
        sizes = sizes[..., :nodes]
        rest = sizes[..., None] - jnp.arange(most + 1)
        others = jnp.take_along_axis(right, jnp.clip(rest, 0, most), -1)
        weights = left * jnp.where((rest >= 0) & (rest <= most), others, 0.0)
        first, _ = inverse_cdf(weights, u[None, ..., used : used + nodes])
        sizes = jnp.stack([first, sizes - first], -1).reshape(*sizes.shape[:-1], 2 * nodes)
        used += nodes
    return sizes


def _convolved(left: Array, right: Array, most: int) -> Array:
    """The convolution of `left` and `right`, up to the size `most`."""
    sizes = right.shape[-1]
    place = np.arange(most + 1)[:, None] - np.arange(sizes)
    # Window c holds the entries c, c - 1, ... of `right`, and zeros where there are none.
    windows = jnp.where((place >= 0) & (place < sizes), right[..., place.clip(0, sizes - 1)], 0.0)
    return (windows * left[..., None, :]).sum(-1)


def _even(level: Array) -> Array:
    """The level with an even number of nodes, but for the root: one without elements surely has size 0."""
    if level.shape[-2] == 1 or level.shape[-2] % 2 == 0:
        return level
    ends = [(0, 0)] * (level.ndim - 2) + [(0, 1), (0, 0)]
    return jnp.pad(level, ends).at[..., -1, 0].set(1.0)
