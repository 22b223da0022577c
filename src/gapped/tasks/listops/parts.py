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
    "Tables",
    "advance",
    "form",
    "lines",
    "merge",
    "parts_for",
    "product",
    "pull",
    "push",
    "retreat",
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
    lengths: Tensor
    bias: Tensor
    query: Tensor
    """``(R, 1, d)``, with the scores' factor."""


def lines(table: Tensor, start: int, stop: int) -> Tensor:
    """Lines of the places from `start` to `stop`, ``(R, stop - start, B)``."""
    runs, size, batch = table.shape[:3]
    device = table.device
    run = torch.arange(runs, device=device).view(-1, 1, 1) * size
    return (run + torch.arange(start, stop, device=device).view(-1, 1)) * batch + torch.arange(
        batch, device=device
    )


def take(table: Tensor, where: Tensor) -> Tensor:
    """The lines `where` of a table."""
    return table.flatten(0, 2)[where]


def product(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool = False) -> None:
    """Write the products of rows ``(R, B, K)`` with each run's weight ``(R, K, N)`` to `out`.

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


def pull(tables: Tables, adjoint: Tensor, nodes: Tensor, pairs: Tensor) -> Tensor:
    """The sample's gradient ``(R, B, L)`` from the adjoint ``(R, L, B, 2d)`` of the next layer's states."""
    here, after = take(tables.states, nodes[:, :-1]), take(tables.states, nodes[:, 1:])
    direct = (adjoint * (take(tables.pair_states, pairs) - after)).sum(-1)
    moved = (adjoint * (after - here)).sum(-1)
    return (direct + moved.flip(1).cumsum(1).flip(1)).transpose(1, 2)


def select(tables: Tables, adjoint: Tensor, pairs: Tensor, chosen: Tensor, g_gates: Tensor) -> Tensor:
    """Write the gradient of the merged pair's gates, ``(R, B, 5d)``; returns its children's cells'.

    The latter is ``(R, B, 2d)``, left and right side by side; both are zero where nothing was merged.
    """
    runs, size, batch = pairs.shape
    width = tables.query.shape[-1]
    place = chosen.clamp(max=size - 1)
    left, right = take(tables.children, pairs.gather(1, place)).unbind(-1)
    grad = take(adjoint, lines(adjoint, 0, 1) + place * batch) * (chosen < size).unsqueeze(-1)
    cells = take(tables.states, left)[..., width:], take(tables.states, right)[..., width:]
    gates = _gates(tables, left, right)
    own, g_left, g_right = compose_vjp(gates, *cells, grad[..., :width], grad[..., width:])
    g_gates.copy_(own[:, 0])
    return torch.cat([g_left, g_right], -1).view(runs, batch, -1)


def push(
    adjoint: Tensor,
    g_h: Tensor,
    g_cells: Tensor,
    chosen: Tensor,
    pairs: Tensor,
    delta: Tensor | None,
    score_h: Tensor,
    score_cells: Tensor,
    weights: Tensor,
) -> Tensor:
    """The adjoint ``(R, L + 1, B, 2d)`` of a layer's states, from that of the next layer's.

    `g_h` and `g_cells` are the gradients of the merged pair's children, `delta` ``(R, B, L)`` that of the
    layer's scores, which is also added to the pairs' `weights`.
    """
    width = g_h.shape[-1] // 2
    place = torch.arange(pairs.shape[1] + 1, device=pairs.device).view(-1, 1, 1)
    chosen = chosen.unsqueeze(-1)
    none = torch.zeros_like(adjoint[:, :1])
    below = torch.where(place < chosen + 1, torch.cat([adjoint, none], 1), torch.cat([none, adjoint], 1))
    for side in (0, 1):
        half = slice(side * width, (side + 1) * width)
        own = torch.cat([g_h[..., half], g_cells[..., half]], -1).unsqueeze(1)
        below = torch.where(place == chosen + side, own, below)
    if delta is None:
        return below
    delta = delta.transpose(1, 2)
    weights.view(-1)[pairs] += delta
    h, cells = take(score_h, pairs), take(score_cells, pairs)
    to_left = torch.cat([h[..., :width], cells[..., :width]], -1) * delta.unsqueeze(-1)
    to_right = torch.cat([h[..., width:], cells[..., width:]], -1) * delta.unsqueeze(-1)
    return below + torch.cat([to_left, none], 1) + torch.cat([none, to_right], 1)


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
