"""The backward sweep of the tree, in torch: the definition of what `sweep_kernels` does.

docs/listops.md has the mathematics.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped.lab.tasks.listops.sampler import allowed_pairs
from gapped.lab.tasks.listops.tables import Tables, lines, near, take


@dataclass(frozen=True)
class Sweep:
    """What the backward pass knows between two layers.

    A pair :math:`p` with the state P and the children l and r matters by two directions, e = P - r and
    f = r - l. docs/listops.md explains why.
    """

    score_h: Tensor
    """The slopes of every pair's score, in h of its left and of its right child, ``(R, 3M - 5, B, 2d)``."""
    score_cells: Tensor
    """The same in c."""
    adjoints: Tensor
    """Of every node, but for the shares of pairs that are still alive, ``(R, 2M - 1, B, 2d)``."""
    weights: Tensor
    """The sums of the gradients of every pair's score, ``(R, 3M - 5, B)``."""
    gains: Tensor
    """Of every pair <a_l, e>, <a_l, f>, <a_r, e>, <a_r, f>, with full adjoints, ``(R, 3M - 5, B, 4)``."""
    own: Tensor
    """By how much these grow with the pair's own weight, ``(R, 3M - 5, B, 4)``."""
    cross: Tensor
    """By how much they grow with a neighbour's weight, for two pairs q and p that share a node.

    <v_q, e_p>, <v_q, f_p>, <v_p, e_q>, <v_p, f_q>, with the slopes in that node, for those of the four middle
    nodes around each merge that have two pairs: ``(R, M - 1, B, 4, 4)``.
    """
    links: Tensor
    """The lines of `cross` that hold in the present layer, by node: ``(R, 2M - 1, B, 4)``."""


def relate(tables: Tables, sweep: Sweep) -> None:
    """Enter `own` and `cross`: what the weights of pairs will do to the inner products of the sweep."""
    nodes, pairs = tables.around[..., :6], tables.around[..., 6:]
    states, exists = take(tables.states, nodes.clamp(min=0)), (pairs >= 0).unsqueeze(-1)
    pairs = pairs.clamp(min=0)
    e = take(tables.pair_states, pairs) - states[..., 1:, :]
    f = states[..., 1:, :] - states[..., :-1, :]
    left, right = (_slope(sweep, pairs, side) for side in (0, 1))

    def products(v: Tensor, of: slice, along: slice) -> list[Tensor]:
        return [(v[..., of, :] * each[..., along, :]).sum(-1) for each in (e, f)]

    middle = slice(1, 4)
    own = torch.stack(products(left, middle, middle) + products(right, middle, middle), -1)
    _add(sweep.own, pairs[..., middle], own, exists[..., middle, :])
    first, second = slice(0, 4), slice(1, 5)
    cross = torch.stack(products(right, first, second) + products(left, second, first), -1)
    sweep.cross.copy_(torch.where(exists[..., first, :] & exists[..., second, :], cross, 0.0))


def pull(tables: Tables, sweep: Sweep, pairs: Tensor, layer: int) -> Tensor:
    """The sample's gradient ``(R, B, L)``; the adjoint of the node that the layer made is complete then.

    The two pairs that the layer made have come to their first layer: their shares are added for good. With
    the layer's own pairs beside the merge begin the inner products of its neighbours.
    """
    size, count = pairs.shape[1], tables.merges.shape[1] + 1
    (_, x, left, right, y, _), (far_left, before, merged, after, far_right) = (
        each.unbind(-1) for each in near(tables, layer)
    )
    new = lines(tables.states, count + layer, count + layer + 1)[:, 0]
    if size > 1:
        at = count - 1 + 2 * layer
        on_left, on_right = lines(tables.pair_scores, at, at + 2).unbind(1)
        _add(sweep.adjoints, x, _share(sweep, on_left, 0), x >= 0)
        _add(sweep.adjoints, new, _share(sweep, on_left, 1), x >= 0)
        _add(sweep.adjoints, new, _share(sweep, on_right, 0), y >= 0)
        _add(sweep.adjoints, y, _share(sweep, on_right, 1), y >= 0)
    a_x = take(sweep.adjoints, x.clamp(min=0)) + _share(sweep, far_left, 1)
    a_y = take(sweep.adjoints, y.clamp(min=0)) + _share(sweep, far_right, 0)
    none = torch.zeros_like(a_x[..., :2])
    _add(sweep.gains, before, torch.cat([_along(tables, a_x, before, x, left), none], -1), before >= 0)
    _add(sweep.gains, after, torch.cat([none, _along(tables, a_y, after, right, y)], -1), after >= 0)
    own = _along(tables, take(sweep.adjoints, new), merged, left, right)
    place = torch.arange(size, device=pairs.device).view(-1, 1)
    gains, merge = take(sweep.gains, pairs), tables.merges[:, layer : layer + 1]
    # Left of the merge the pair's left child stays at its place, right of it its right child comes there.
    either = torch.where((place < merge).unsqueeze(-1), gains[..., :2], gains[..., 2:])
    direct, moved = torch.where((place == merge).unsqueeze(-1), own.unsqueeze(1), either).unbind(-1)
    return (direct + moved.flip(1).cumsum(1).flip(1)).transpose(1, 2)


def push(
    tables: Tables,
    sweep: Sweep,
    nodes: Tensor,
    pairs: Tensor,
    layer: int,
    g_h: Tensor,
    g_cells: Tensor,
    delta: Tensor | None,
) -> None:
    """Go from a layer's next to its own nodes.

    `g_h` and `g_cells` ``(R, B, 2d)`` are the gradients of the merged pair's children, with which their
    adjoints begin. `delta` ``(R, B, L)`` is that of the layer's scores: all pairs' weights and inner products
    change with it, as far as the expression goes.
    """
    width = g_h.shape[-1] // 2
    (_, x, left, right, y, _), (_, before, merged, after, _) = (
        each.unbind(-1) for each in near(tables, layer)
    )
    to_left, to_right = (
        torch.cat([g_h[..., half], g_cells[..., half]], -1)
        for half in (slice(0, width), slice(width, 2 * width))
    )
    _add(sweep.adjoints, left, to_left, left >= 0)
    _add(sweep.adjoints, right, to_right, right >= 0)
    none = torch.zeros_like(to_left[..., :2])
    for line, gains in (
        (before, (none, _along(tables, to_left, before, x, left))),
        (merged, tuple(_along(tables, each, merged, left, right) for each in (to_left, to_right))),
        (after, (_along(tables, to_right, after, right, y), none)),
    ):
        _add(sweep.gains, line, torch.cat(gains, -1), line >= 0)
    # The node that the layer made is no more: its line takes what is of no use.
    node = tables.merges.shape[1] + 1 + layer
    gone = lines(tables.states, node, node + 1)[:, 0].unsqueeze(-1)
    middle = tables.around[:, layer, :, 1:5]
    sweep.links.flatten(0, 2)[torch.where(middle >= 0, middle, gone)] = sweep.cross[:, layer]
    if delta is None:
        return
    # An estimator may have anything to say of a place that is not there.
    here = allowed_pairs(tables.lengths, layer, pairs.shape[1]).transpose(1, 2).unsqueeze(-1)
    delta = torch.where(here, delta.transpose(1, 2).unsqueeze(-1), 0.0)
    sweep.weights.view(-1)[pairs] += delta[..., 0]
    change = take(sweep.own, pairs) * delta
    between = take(sweep.links, nodes[:, 1:-1])
    change[:, 1:, :, :2] += between[..., :2] * delta[:, :-1]
    change[:, :-1, :, 2:] += between[..., 2:] * delta[:, 1:]
    sweep.gains.flatten(0, 2)[pairs] += torch.where(here, change, 0.0)


def collect(sweep: Sweep, count: int) -> Tensor:
    """The adjoints of the leaves, ``(R, M, B, 2d)``, with the shares of their own pairs."""
    pairs = lines(sweep.weights, 0, count - 1)
    out = sweep.adjoints[:, :count].clone()
    out[:, :-1] += _share(sweep, pairs, 0)
    out[:, 1:] += _share(sweep, pairs, 1)
    return out


def _slope(sweep: Sweep, pairs: Tensor, side: int) -> Tensor:
    """The slopes of scores in h and c of the left (0) or right (1) child."""
    width = sweep.score_h.shape[-1] // 2
    half = slice(side * width, (side + 1) * width)
    return torch.cat([take(each, pairs)[..., half] for each in (sweep.score_h, sweep.score_cells)], -1)


def _share(sweep: Sweep, pairs: Tensor, side: int) -> Tensor:
    """What a child's adjoint has from its pairs so far; nothing from one that does not exist."""
    line = pairs.clamp(min=0)
    share = _slope(sweep, line, side) * take(sweep.weights, line).unsqueeze(-1)
    return share.masked_fill((pairs < 0).unsqueeze(-1), 0.0)


def _along(tables: Tables, adjoint: Tensor, pair: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Inner products of an adjoint with the two directions of a pair, ``(..., 2)``."""
    l_state, r_state = (take(tables.states, each.clamp(min=0)) for each in (left, right))
    e = take(tables.pair_states, pair.clamp(min=0)) - r_state
    return torch.stack([(adjoint * each).sum(-1) for each in (e, r_state - l_state)], -1)


def _add(table: Tensor, where: Tensor, values: Tensor, exists: Tensor) -> None:
    """Add to lines of a table, each of them named once; what does not `exist` has no line."""
    exists = exists if exists.dim() == values.dim() else exists.unsqueeze(-1)
    values = torch.where(exists, values, 0.0)
    table.flatten(0, 2).index_add_(0, where.clamp(min=0).flatten(), values.flatten(0, -2))
