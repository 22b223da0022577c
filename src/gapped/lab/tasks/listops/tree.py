r"""The latent tree in linear time, forward and backward, exact.

A merge changes two pairs of the sequence; all others keep their value. So nodes and pairs live in tables:
a node's products with the cell's weights are computed once, when it appears, and a pair's state and score
once, when its second node appears. The sequence is an array of places in these tables.

Backward, from the last layer to the first, with the adjoints :math:`a` of the nodes:

- the sample's gradient takes inner products of adjoints with two directions of every pair, its new state
  less its right child and its right child less its left; the estimator turns it into the gradient
  :math:`\delta` of the scores;
- a pair that is not selected acts through its score alone, so it adds :math:`\delta_p v_p` to its children,
  with :math:`v_p = \partial\,\mathrm{score}_p / \partial(h_l, c_l, h_r, c_r)`, fixed while the pair lives.
  The inner products follow by numbers that are known beforehand; the vectors are added once, in the layer
  that formed the pair, with the sum of its :math:`\delta_p`;
- the selected pair's adjoint goes through its cell, beside the sample's gradient, which it does not need.

All :math:`v_p` are one large product before the sweep, all gradients of the weights one after it.
`gapped.lab.tasks.listops.reference` is the definition; docs/listops.md has the derivation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped.errors import reject
from gapped.lab.tasks.listops.parts import parts_for
from gapped.lab.tasks.listops.sampler import Sampler
from gapped.lab.tasks.listops.sweep import Sweep
from gapped.lab.tasks.listops.tables import Tables, lines


def latent_tree(
    leaves: Tensor,
    weight: Tensor,
    bias: Tensor,
    query: Tensor,
    lengths: Tensor,
    sampler: Sampler,
    generator: torch.Generator | None = None,
    *,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Root vectors as `reference_tree` gives them, and the merges, int64 ``(R, B, M - 1)``.

    A merge is the place of the left partner in its layer, -1 once an expression has become one node.
    `fused` lets kernels do the work of a layer where they can: in float32, on a GPU.
    """
    if not sampler.hard:
        raise reject(
            "sampler", "one with soft samples", "hard samples: mixtures of states need reference_tree"
        )
    if leaves.shape[2] == 1:  # no pair, but weights that must get a gradient, zero
        padded = torch.nn.functional.pad(leaves, (0, 0, 0, 1))
        root, merges = latent_tree(padded, weight, bias, query, lengths, sampler, generator, fused=fused)
        return root, merges[..., :0]
    inputs = (leaves, weight, bias, query)
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    return _Tree.apply(*inputs, lengths, sampler, generator, fused, differentiable)  # type: ignore[no-any-return, no-untyped-call]


class _Layer(NamedTuple):
    """What the backward pass must know of a layer of L pairs."""

    nodes: Tensor
    """Lines of the nodes in their table, ``(R, L + 1, B)``."""
    pairs: Tensor
    """Lines of the pairs in their table, ``(R, L, B)``."""
    scores: Tensor | None
    sample: Tensor | None
    """The sample, as a function of `scores`, both ``(R, B, L)``; None where it carries no gradient."""


class _Tree(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        leaves: Tensor,
        weight: Tensor,
        bias: Tensor,
        query: Tensor,
        lengths: Tensor,
        sampler: Sampler,
        generator: torch.Generator | None,
        fused: bool,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        runs, batch, count, double = leaves.shape
        width = double // 2
        parts = parts_for(leaves, fused)
        tables = _tables(leaves, bias, query, lengths)
        _project(parts, tables, weight, 0, count)
        parts.form(tables, 0, count - 1)
        nodes, pairs = lines(tables.states, 0, count), lines(tables.pair_scores, 0, count - 1)
        layers = []
        for layer in range(count - 1):
            size = count - 1 - layer
            scores, sample = None, None
            if size == 1:  # nothing to choose
                drawn = leaves.new_ones(runs, batch, 1)
            else:
                scores = parts.scores(tables, pairs, layer)
                with torch.set_grad_enabled(differentiable):
                    scores.requires_grad_(differentiable)
                    drawn = sampler.sample(scores, generator=generator)
                sample = drawn if drawn.requires_grad else None
            before = nodes, pairs
            nodes, pairs = parts.merge(tables, nodes, pairs, drawn.detach(), layer)
            if differentiable:
                layers.append(_Layer(*before, scores, sample))
            if size > 1:
                _project(parts, tables, weight, count + layer, count + layer + 1)
                parts.form(tables, count - 1 + 2 * layer, 2)
        root = tables.states.flatten(0, 2)[nodes[:, 0], :width]
        ctx.tables, ctx.layers, ctx.parts, ctx.root = tables, layers, parts, nodes[:, 0]
        ctx.save_for_backward(weight)
        merges = tables.merges.transpose(1, 2)
        ctx.mark_non_differentiable(merges)
        return root, merges

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        tables: Tables = ctx.tables
        parts = ctx.parts
        (weight,) = ctx.saved_tensors
        runs, batch, width = grad.shape
        back = weight.transpose(1, 2)
        score_gates, score_cells, children_h = parts.slopes(tables)
        score_h = torch.bmm(score_gates.flatten(1, 2), back).view_as(children_h)
        sweep = _sweep(tables, score_h, score_cells)
        sweep.adjoints.flatten(0, 2)[ctx.root, :width] = grad
        parts.relate(tables, sweep)
        selected = grad.new_empty(runs, len(ctx.layers), batch, 5 * width)
        for number, layer in reversed(list(enumerate(ctx.layers))):
            upstream = parts.pull(tables, sweep, layer.pairs, number)
            delta = None
            if layer.sample is not None:
                (delta,) = torch.autograd.grad(layer.sample, layer.scores, upstream)
            g_gates = selected[:, number]
            g_cells = parts.select(tables, sweep, layer.pairs, number, g_gates)
            g_h = grad.new_empty(runs, batch, 2 * width)
            parts.product(g_gates, weight, g_h, transposed=True)
            parts.push(tables, sweep, layer.nodes, layer.pairs, number, g_h, g_cells, delta)
        leaves, weights = parts.collect(sweep, len(ctx.layers) + 1), sweep.weights
        ctx.tables = ctx.layers = None
        total = parts.totals(score_gates, weights, tables.merged_at, selected).flatten(1, 2)
        grad_weight = torch.bmm(children_h.flatten(1, 2).transpose(1, 2), total)
        pair_h = tables.pair_states.flatten(1, 2)[..., :width]
        grad_query = torch.bmm(weights.view(runs, 1, -1), pair_h) / math.sqrt(width)
        grad_bias = total.sum(1, keepdim=True)
        return leaves.transpose(1, 2), grad_weight, grad_bias, grad_query, *(None,) * 5


def _tables(leaves: Tensor, bias: Tensor, query: Tensor, lengths: Tensor) -> Tables:
    """Tables with the leaves and their pairs' children entered."""
    runs, batch, count, double = leaves.shape
    width, nodes, pairs = double // 2, 2 * count - 1, 3 * count - 5
    states = leaves.new_empty(runs, nodes, batch, double)
    states[:, :count] = leaves.transpose(1, 2)
    leaf = lines(states, 0, count)
    children = leaf.new_empty(runs, pairs, batch, 2)
    children[:, : count - 1] = torch.stack([leaf[:, :-1], leaf[:, 1:]], -1)
    return Tables(
        states,
        leaves.new_empty(runs, nodes, batch, 10 * width),
        leaves.new_empty(runs, pairs, batch, double),
        leaves.new_empty(runs, pairs, batch),
        children,
        leaf.new_full((runs, pairs, batch), -1),
        leaf.new_empty(runs, count - 1, batch),
        leaf.new_empty(runs, count - 1, batch, 11),
        lengths.contiguous(),
        bias.contiguous(),
        query / math.sqrt(width),
    )


def _sweep(tables: Tables, score_h: Tensor, score_cells: Tensor) -> Sweep:
    """A sweep at its beginning: no pair has a weight, no node an adjoint."""
    runs, layers, batch = tables.merges.shape
    nodes, pairs = tables.states.shape[1], tables.pair_scores.shape[1]
    zeros = tables.states.new_zeros
    return Sweep(
        score_h,
        score_cells,
        torch.zeros_like(tables.states),
        torch.zeros_like(tables.pair_scores),
        zeros(runs, pairs, batch, 4),
        zeros(runs, pairs, batch, 4),
        tables.states.new_empty(runs, layers, batch, 4, 4),
        zeros(runs, nodes, batch, 4),
    )


def _project(parts: Any, tables: Tables, weight: Tensor, start: int, stop: int) -> None:
    """Enter the products of nodes with both halves of the weight."""
    h = tables.states[:, start:stop].flatten(1, 2)[..., : weight.shape[1] // 2]
    parts.product(h, weight, tables.products[:, start:stop].flatten(1, 2))
