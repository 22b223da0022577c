"""The work of the tree and of the leaf LSTM, in torch: the definition.

`gapped.lab.tasks.listops.fused` has the same functions as kernels. `Tables` and `Sweep` say what of,
docs/listops.md has the mathematics.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from gapped.kernels.sampling import launch
from gapped.lab.tasks.listops.cell import compose, compose_vjp
from gapped.lab.tasks.listops.sampler import allowed_pairs
from gapped.lab.tasks.listops.sweep import Sweep
from gapped.lab.tasks.listops.sweep import collect as collect
from gapped.lab.tasks.listops.sweep import pull as pull
from gapped.lab.tasks.listops.sweep import push as push
from gapped.lab.tasks.listops.sweep import relate as relate
from gapped.lab.tasks.listops.tables import Tables, lines, near, take


def parts_for(x: Tensor, fused: bool) -> Any:
    """The module that does the work: this one, or its twin of kernels if asked for and able to."""
    if fused and x.dtype == torch.float32 and launch.runs_on(x.device):
        from gapped.lab.tasks.listops import fused as kernels

        return kernels
    return sys.modules[__name__]


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


def merge(tables: Tables, nodes: Tensor, pairs: Tensor, sample: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Enter the node that `sample` ``(R, B, L)`` merges, and the children of its new pairs.

    Returns the nodes and pairs of the next layer.
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
    return moved, torch.where(at == chosen, formed[:, 1:], kept)


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


def select(tables: Tables, sweep: Sweep, pairs: Tensor, layer: int, g_gates: Tensor) -> Tensor:
    """Write the gradient of the merged pair's gates, ``(R, B, 5d)``; returns its children's cells'.

    The latter is ``(R, B, 2d)``, left and right side by side; both are zero where nothing was merged.
    """
    runs, _, batch = pairs.shape
    width = tables.query.shape[-1]
    node = tables.merges.shape[1] + 1 + layer
    merge = tables.merges[:, layer : layer + 1]
    left, right = take(tables.children, pairs.gather(1, merge.clamp(min=0))).unbind(-1)
    grad = sweep.adjoints[:, node : node + 1] * (merge >= 0).unsqueeze(-1)
    cells = take(tables.states, left)[..., width:], take(tables.states, right)[..., width:]
    gates = _gates(tables, left, right)
    own, g_left, g_right = compose_vjp(gates, *cells, grad[..., :width], grad[..., width:])
    g_gates.copy_(own[:, 0])
    return torch.cat([g_left, g_right], -1).view(runs, batch, -1)


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
