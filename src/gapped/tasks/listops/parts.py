"""The elementwise work of the tree and of the leaf LSTM, in torch: the definition.

`gapped.tasks.listops.fused` has the same functions as kernels. `Tables` says what they work on,
docs/listops.md has the mathematics.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapped.kernels import launch
from gapped.tasks.listops.cell import compose, compose_vjp
from gapped.tasks.listops.sampler import allowed_pairs

__all__ = [
    "Sweep",
    "Tables",
    "advance",
    "collect",
    "form",
    "lines",
    "merge",
    "parts_for",
    "product",
    "pull",
    "push",
    "relate",
    "retreat",
    "rounded",
    "scores",
    "select",
    "slopes",
    "totals",
]


def parts_for(x: Tensor, fused: bool) -> Any:
    """The module that does the work: this one, or its twin of kernels if asked for and able to."""
    if fused and x.dtype == torch.float32 and launch.runs_on(x.device):
        from gapped.tasks.listops import fused as kernels

        return kernels
    return sys.modules[__name__]


@dataclass(frozen=True)
class Tables:
    """All nodes and pairs of R * B trees with M leaves each.

    Nodes: the leaves, then one for each merge. Pairs: those of the leaves, then two for each merge but the
    last, the new node with its left and with its right neighbour. Where there is no such neighbour, or no
    merge, a line holds finite numbers that nothing refers to. Every table is ``(R, size, B, ...)``, and a
    node or pair is named by its line in the table with these axes flattened.
    """

    states: Tensor
    """h and c of the nodes, ``(R, 2M - 1, B, 2d)``."""
    products: Tensor
    """The nodes' products with the left and the right half of the weight, ``(R, 2M - 1, B, 10d)``."""
    pair_states: Tensor
    """``(R, 3M - 5, B, 2d)``."""
    pair_scores: Tensor
    children: Tensor
    """The nodes of each pair, ``(R, pairs, B, 2)``."""
    merged_at: Tensor
    """The layer that merged a pair, ``(R, pairs, B)``, or -1."""
    merges: Tensor
    """Which pair each layer merged, by its place in the layer, ``(R, M - 1, B)``, or -1."""
    around: Tensor
    """The six nodes around each merge, its own in the middle, and their five pairs: ``(R, M - 1, B, 11)``.

    -1 where the expression has none, or nothing was merged.
    """
    lengths: Tensor
    bias: Tensor
    query: Tensor
    """``(R, 1, d)``, with the scores' factor."""


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


def lines(table: Tensor, start: int, stop: int) -> Tensor:
    """Lines of the places from `start` to `stop`, ``(R, stop - start, B)``."""
    runs, size, batch = table.shape[:3]
    device = table.device
    run = torch.arange(runs, device=device).view(-1, 1, 1) * size
    return (run + torch.arange(start, stop, device=device).view(-1, 1)) * batch + torch.arange(
        batch, device=device
    )


def near(tables: Tables, layer: int) -> tuple[Tensor, Tensor]:
    """The nodes and pairs around a layer's merge, ``(R, B, 6)`` and ``(R, B, 5)``."""
    around = tables.around[:, layer]
    return around[..., :6], around[..., 6:]


def take(table: Tensor, where: Tensor) -> Tensor:
    """The lines `where` of a table."""
    return table.flatten(0, 2)[where]


def rounded(weight: Tensor, rows: int) -> Tensor:
    """A weight as products of so many rows of a run take it: torch's round it themselves, if at all."""
    return weight


def product(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool = False) -> None:
    """Write the products of rows ``(R, B, K)`` with each run's `rounded` weight ``(R, K, N)`` to `out`.

    Several weights one below the other, ``(R, P * K, N)``, have their products side by side, and one that is
    `transposed` is ``(R, N, K)``.
    """
    pieces = (weight.transpose(1, 2),) if transposed else weight.chunk(weight.shape[1] // x.shape[2], 1)
    for piece, columns in zip(pieces, out.chunk(len(pieces), 2), strict=True):
        torch.bmm(x, piece, out=columns)


def _gates(tables: Tables, left: Tensor, right: Tensor) -> Tensor:
    """Gates ``(R, n, B, 5d)`` of pairs of nodes."""
    half = tables.bias.shape[-1]
    products = take(tables.products, left)[..., :half] + take(tables.products, right)[..., half:]
    return products + tables.bias.unsqueeze(1)


def form(tables: Tables, start: int, count: int) -> None:
    """Enter state and score of `count` pairs whose children are known."""
    width = tables.query.shape[-1]
    left, right = tables.children[:, start : start + count].unbind(-1)
    c_left, c_right = (take(tables.states, each)[..., width:] for each in (left, right))
    h, c = compose(_gates(tables, left, right), c_left, c_right)
    tables.pair_states[:, start : start + count] = torch.cat([h, c], -1)
    tables.pair_scores[:, start : start + count] = (h * tables.query.unsqueeze(1)).sum(-1)


def scores(tables: Tables, pairs: Tensor, layer: int) -> Tensor:
    """Scores ``(R, B, L)`` of a layer's pairs, -inf beyond the expression."""
    values = take(tables.pair_scores, pairs).transpose(1, 2)
    return values.masked_fill(~allowed_pairs(tables.lengths, layer, pairs.shape[1]), -torch.inf)


def merge(
    tables: Tables, nodes: Tensor, pairs: Tensor, sample: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Enter the node that `sample` ``(R, B, L)`` merges, and the children of its new pairs.

    Returns the place of the merged pair, ``(R, 1, B)``, L + 1 where nothing is merged, and the nodes and
    pairs of the next layer.
    """
    size = pairs.shape[1]
    count = size + 1 + layer
    place = sample.detach().argmax(-1).unsqueeze(1)
    alive = tables.lengths.unsqueeze(1) > layer + 1
    tables.merges[:, layer : layer + 1] = torch.where(alive, place, -1)
    chosen = torch.where(alive, place, size + 1)
    picked = pairs.gather(1, chosen.clamp(max=size - 1))
    merged_at = tables.merged_at.view(-1)
    merged_at[picked] = torch.where(alive, layer, merged_at[picked])
    here = tables.lengths.unsqueeze(1) - layer
    for each, out, left in zip((nodes, pairs), near(tables, layer), (here, here - 1), strict=True):
        at = chosen + torch.arange(-2, out.shape[-1] - 2, device=pairs.device).view(-1, 1)
        found = each.gather(1, at.clamp(0, each.shape[1] - 1))
        out.copy_(torch.where(alive & (at >= 0) & (at < left), found, -1).transpose(1, 2))
    node, pair = count + layer, count - 1 + 2 * layer
    tables.states[:, node : node + 1] = take(tables.pair_states, picked)
    fresh = lines(tables.states, node, node + 1)
    formed = lines(tables.pair_scores, pair, pair + 2)
    if size > 1:
        left = nodes.gather(1, (chosen - 1).clamp(0, size))
        right = nodes.gather(1, (chosen + 2).clamp(max=size))
        new = torch.stack([torch.cat([left, fresh], 1), torch.cat([fresh, right], 1)], -1)
        tables.children[:, pair : pair + 2] = new
    at = torch.arange(size, device=pairs.device).unsqueeze(-1)
    moved = torch.where(at < chosen, nodes[:, :-1], nodes[:, 1:])
    moved = torch.where(at == chosen, fresh, moved)
    at = at[:-1]
    kept = torch.where(at < chosen, pairs[:, :-1], pairs[:, 1:])
    kept = torch.where(at == chosen - 1, formed[:, :1], kept)
    return chosen, moved, torch.where(at == chosen, formed[:, 1:], kept)


def slopes(tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Of every pair: the gradient of its score in its gates and in its children's cells, and their h."""
    width = tables.query.shape[-1]
    left, right = tables.children.unbind(-1)
    l_state, r_state = take(tables.states, left), take(tables.states, right)
    gates = _gates(tables, left, right)
    cells = l_state[..., width:], r_state[..., width:]
    g_gates, g_left, g_right = compose_vjp(gates, *cells, tables.query.unsqueeze(1), 0.0)
    h = torch.cat([l_state[..., :width], r_state[..., :width]], -1)
    return g_gates, torch.cat([g_left, g_right], -1), h


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


def pull(tables: Tables, sweep: Sweep, pairs: Tensor, chosen: Tensor, layer: int) -> Tensor:
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
    gains = take(sweep.gains, pairs)
    # Left of the merge the pair's left child stays at its place, right of it its right child comes there.
    either = torch.where((place < chosen).unsqueeze(-1), gains[..., :2], gains[..., 2:])
    direct, moved = torch.where((place == chosen).unsqueeze(-1), own.unsqueeze(1), either).unbind(-1)
    return (direct + moved.flip(1).cumsum(1).flip(1)).transpose(1, 2)


def select(
    tables: Tables, sweep: Sweep, pairs: Tensor, chosen: Tensor, layer: int, g_gates: Tensor
) -> Tensor:
    """Write the gradient of the merged pair's gates, ``(R, B, 5d)``; returns its children's cells'.

    The latter is ``(R, B, 2d)``, left and right side by side; both are zero where nothing was merged.
    """
    runs, size, batch = pairs.shape
    width = tables.query.shape[-1]
    node = tables.merges.shape[1] + 1 + layer
    left, right = take(tables.children, pairs.gather(1, chosen.clamp(max=size - 1))).unbind(-1)
    grad = sweep.adjoints[:, node : node + 1] * (chosen < size).unsqueeze(-1)
    cells = take(tables.states, left)[..., width:], take(tables.states, right)[..., width:]
    gates = _gates(tables, left, right)
    own, g_left, g_right = compose_vjp(gates, *cells, grad[..., :width], grad[..., width:])
    g_gates.copy_(own[:, 0])
    return torch.cat([g_left, g_right], -1).view(runs, batch, -1)


def push(
    tables: Tables,
    sweep: Sweep,
    nodes: Tensor,
    pairs: Tensor,
    chosen: Tensor,
    layer: int,
    g_h: Tensor,
    g_cells: Tensor,
    delta: Tensor | None,
) -> None:
    """Go from a layer's next to its own nodes.

    `g_h` and `g_cells` ``(R, B, 2d)`` are the gradients of the merged pair's children, with which their
    adjoints begin. `delta` ``(R, B, L)`` is that of the layer's scores: all pairs' weights and inner products
    change with it.
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
    delta = delta.transpose(1, 2).unsqueeze(-1)
    sweep.weights.view(-1)[pairs] += delta[..., 0]
    change = take(sweep.own, pairs) * delta
    between = take(sweep.links, nodes[:, 1:-1])
    change[:, 1:, :, :2] += between[..., :2] * delta[:, :-1]
    change[:, :-1, :, 2:] += between[..., 2:] * delta[:, 1:]
    sweep.gains.flatten(0, 2)[pairs] += change


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


def totals(score_gates: Tensor, weights: Tensor, merged_at: Tensor, selected: Tensor) -> Tensor:
    """Gradients of all pairs' gates: those of their scores times `weights`, and the merged ones' own.

    `selected` ``(R, M - 1, B, 5d)`` holds the latter, layer by layer.
    """
    # Line of (run, 0, batch) in `selected`, then down by the layer.
    own = take(selected, lines(selected, 0, 1) + merged_at.clamp(min=0) * selected.shape[2])
    return score_gates * weights.unsqueeze(-1) + own * (merged_at >= 0).unsqueeze(-1)


def advance(gates: Tensor, inputs: Tensor, before: Tensor, after: Tensor) -> None:
    """Add `inputs` to the recurrent part in `gates`, both ``(R, B, 4d)``, and write the state `after`."""
    width = gates.shape[-1] // 4
    gates += inputs
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * before[..., width:] + i.sigmoid() * g.tanh()
    after[..., width:] = c
    after[..., :width] = o.sigmoid() * c.tanh()


def retreat(gates: Tensor, before: Tensor, own: Tensor, grad_h: Tensor, grad_c: Tensor, out: Tensor) -> None:
    """Write the gradient of the gates to `out`, and that of the cell before in the place of `grad_c`.

    `own` ``(R, B, 2d)`` is the gradient of the state itself, `grad_h` and `grad_c` are from the step after.
    """
    width = gates.shape[-1] // 4
    before = before[..., width:]
    grad_h, total = own[..., :width] + grad_h, own[..., width:] + grad_c
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    top = (f * before + i * g).tanh()
    total = total + grad_h * o * (1 - top * top)
    parts = (
        total * g * i * (1 - i),
        total * before * f * (1 - f),
        total * i * (1 - g * g),
        grad_h * top * o * (1 - o),
    )
    out.copy_(torch.cat(parts, -1))
    grad_c.copy_(total * f)
