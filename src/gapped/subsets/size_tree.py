r"""How many elements of each part of a set are selected, part by part up a binary tree.

Element :math:`i` is selected with probability :math:`p_i`, independently of the others. A node of the tree
has the law of how many of the elements below it are selected: the two numbers :math:`(1 - p_i, p_i)` at a
leaf, and the convolution of its two children's laws at every other node. The root says how probable each
size of the selected set is. Sizes above a `degree` that is never needed are left out, so a tree over `n`
elements takes about `n * degree` products, in `log2(n)` steps.

A law lies on the last axis, the nodes of a level on the axis before it: node `j` has the children `2 j` and
`2 j + 1`. A level with an odd number of nodes gets a node without elements at its end. The leaves come
first in a list of levels, the root last. There are at least two elements.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from gapped import simplex


def ascend(p: Tensor, q: Tensor, degree: int) -> list[Tensor]:
    """The levels of the tree whose leaves are `(q, p)`, each of shape `(..., nodes, sizes)`."""
    levels = [_make_even(torch.stack([q, p], -1))]
    while levels[-1].shape[-2] > 1:
        left, right = _children(levels[-1])
        levels.append(_make_even(_convolve(left, right, min(2 * (left.shape[-1] - 1), degree))))
    return levels


def ascend_moments(levels: list[Tensor], moments: Tensor) -> list[Tensor]:
    r"""For each node and size, the expected sum of the selected elements' weights :math:`g_i`.

    That is :math:`\sum_S P(S) \sum_{i \in S} g_i` over the sets :math:`S` of that size; `moments` has
    :math:`p_i g_i`. Sums over two parts add, so this follows the product rule.
    """
    sums = [_pad(torch.stack([torch.zeros_like(moments), moments], -1), levels[0])]
    for level, above in pairwise(levels):
        (left, right), (sum_left, sum_right) = _children(level), _children(sums[-1])
        most = above.shape[-1] - 1
        both = _convolve(sum_left, right, most) + _convolve(left, sum_right, most)
        sums.append(_pad(both, above))
    return sums


def descend(levels: list[Tensor], by_law: Tensor) -> Tensor:
    """The derivative of a function of the root's law with respect to the leaves' laws, `(..., n, 2)`.

    `by_law` is its derivative with respect to the root's law.
    """
    for level in reversed(levels[:-1]):
        left, right = _children(level)
        by_law = by_law[..., : left.shape[-2], :]
        by_law = _interleave(_windows(by_law, left) @ torch.stack([right, left], -1))
    return by_law


def descend_moments(
    levels: list[Tensor], sums: list[Tensor], by_law: Tensor, by_sum: Tensor
) -> tuple[Tensor, Tensor]:
    """`descend` for a function of the root's law and of its `sums`: its derivatives by both at the leaves."""
    for level, weighted in zip(reversed(levels[:-1]), reversed(sums[:-1]), strict=True):
        (left, right), (sum_left, sum_right) = _children(level), _children(weighted)
        by_law, by_sum = by_law[..., : left.shape[-2], :], by_sum[..., : left.shape[-2], :]
        products = _windows(by_sum, left) @ torch.stack([right, left, sum_right, sum_left], -1)
        by_law = _windows(by_law, left) @ torch.stack([right, left], -1) + products[..., 2:]
        by_law, by_sum = _interleave(by_law), _interleave(products[..., :2])
    return by_law, by_sum


def draw(levels: list[Tensor], size: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw which elements are selected, given that `size` of them are, with one uniform per node.

    From the root down, each node divides its number among its children: `a` to the left with a probability
    in proportion to the product of their laws, at `a` and at the rest. Returns zeros and ones, int64.
    """
    sizes = size.unsqueeze(-1)
    for level in reversed(levels[:-1]):
        left, right = _children(level)
        most = left.shape[-1] - 1
        sizes = sizes[..., : left.shape[-2]]
        rest = sizes.unsqueeze(-1) - torch.arange(most + 1, device=left.device)
        fits = (rest >= 0) & (rest <= most)
        weights = left * torch.where(fits, right.gather(-1, rest.clamp(0, most)), 0.0)
        # The clamp is for rows of NaN, in which no weight can be chosen.
        first = simplex.inverse_cdf(weights, generator).clamp(max=most)
        sizes = torch.stack([first, sizes - first], -1).flatten(-2)
    return sizes


def _children(level: Tensor) -> tuple[Tensor, Tensor]:
    """The left and the right children of the nodes above `level`."""
    return level[..., 0::2, :], level[..., 1::2, :]


def _convolve(left: Tensor, right: Tensor, most: int) -> Tensor:
    """The convolution of `left` and `right`, up to the size `most`."""
    sizes = right.shape[-1]
    # Window c holds the entries c - sizes + 1, ..., c: in the order of left, turned round.
    windows = F.pad(right, (sizes - 1, most + 1 - sizes)).unfold(-1, sizes, 1)
    return (windows * left.flip(-1).unsqueeze(-2)).sum(-1)


def _windows(slopes: Tensor, child: Tensor) -> Tensor:
    """Window a holds the entries a, a + 1, ...: times a child's law, it is the slope of the other child's."""
    sizes = child.shape[-1]
    padded = F.pad(slopes, (0, 2 * sizes - 1 - slopes.shape[-1]))
    # Contiguous: a product with overlapping rows would copy them node by node.
    return padded.unfold(-1, sizes, 1).contiguous()


def _interleave(pair: Tensor) -> Tensor:
    """Columns of left and right children `(..., nodes, sizes, 2)` as a level `(..., 2 nodes, sizes)`."""
    return pair.movedim(-1, -2).flatten(-3, -2)


def _make_even(level: Tensor) -> Tensor:
    """The level with an even number of nodes, but for the root: one without elements surely has size 0."""
    if level.shape[-2] == 1 or level.shape[-2] % 2 == 0:
        return level
    certain = F.pad(torch.ones_like(level[..., :1, :1]), (0, level.shape[-1] - 1))
    return torch.cat([level, certain], -2)


def _pad(sums: Tensor, level: Tensor) -> Tensor:
    """Sums with as many nodes as the level has: the sum over no elements is 0."""
    return F.pad(sums, (0, 0, 0, level.shape[-2] - sums.shape[-2]))
