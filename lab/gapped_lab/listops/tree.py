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
`tests/reference_tree.py` is the definition; docs/listops.md has the derivation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gapped.errors import reject
from gapped_lab.listops.sweep import Sweep
from gapped_lab.listops.tables import Layer, Sampler, Tables, lines, sampled_lengths


def latent_tree(
    leaves: Tensor,
    weight: Tensor,
    bias: Tensor,
    query: Tensor,
    lengths: Tensor,
    sampler: Sampler,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Root vectors ``(R, B, d)`` of leaves ``(R, B, M, 2d)``, and the merges, int64 ``(R, B, M - 1)``.

    Leaves hold h and c side by side. Shapes: `weight` ``(R, 2d, 5d)``, `bias` ``(R, 1, 5d)``, `query`
    ``(R, 1, d)``, `lengths` ``(R, B)``. An expression that has no pair left keeps its state.
    A merge is the place of the left partner in its layer, -1 once an expression has become one node.
    """
    if not sampler.hard:
        raise reject("sampler", "one with soft samples", "hard samples: states are not mixed")
    if leaves.shape[2] == 1:  # no pair, but weights that must get a gradient, zero
        padded = torch.nn.functional.pad(leaves, (0, 0, 0, 1))
        root, merges = latent_tree(padded, weight, bias, query, lengths, sampler, generator)
        return root, merges[..., :0]
    inputs = (leaves, weight, bias, query)
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    return _Tree.apply(*inputs, lengths, sampler, generator, differentiable)  # type: ignore[no-any-return, no-untyped-call]


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
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        runs, batch, count, double = leaves.shape
        tables, shown = Tables.of(leaves, bias, query, lengths), sampled_lengths(sampler, lengths)
        tables.project(weight, 0, count)
        tables.form(0, count - 1)
        layer = Layer(0, lines(tables.states, 0, count), lines(tables.pair_scores, 0, count - 1))
        # For the backward pass: layers, their scores, and the samples as functions of these; None for a
        # sample that carries no gradient.
        choices: list[tuple[Layer, Tensor | None, Tensor | None]] = []
        for number in range(count - 1):
            scores, differentiable_sample = None, None
            last = number == count - 2
            if last:  # nothing to choose
                sample = leaves.new_ones(runs, batch, 1)
            else:
                scores = tables.scores(layer, tables.lengths if shown is None else shown)
                mask = None if shown is None else tables.allowed(layer, lengths)
                with torch.set_grad_enabled(differentiable):
                    scores.requires_grad_(differentiable)
                    sample = sampler.sample(scores, mask=mask, generator=generator)
                differentiable_sample = sample if sample.requires_grad else None
            if differentiable:
                choices.append((layer, scores, differentiable_sample))
            layer = tables.merge(layer, sample.detach())
            if not last:
                tables.project(weight, tables.new_node(number), tables.new_node(number) + 1)
                tables.form(tables.new_pair(number), 2)
        root = layer.nodes[:, 0]
        ctx.tables, ctx.choices, ctx.root = tables, choices, root
        ctx.save_for_backward(weight)
        merges = tables.merges.transpose(1, 2)
        ctx.mark_non_differentiable(merges)
        return tables.states.flatten(0, 2)[root, : double // 2], merges

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        tables: Tables = ctx.tables
        (weight,) = ctx.saved_tensors
        runs, batch, width = grad.shape
        back = weight.transpose(1, 2)
        score_gates, score_cells, children_h = tables.slopes()
        score_h = torch.bmm(score_gates.flatten(1, 2), back).view_as(children_h)
        sweep = Sweep.of(tables, score_h, score_cells)
        sweep.adjoints.flatten(0, 2)[ctx.root, :width] = grad
        sweep.relate()
        selected = grad.new_empty(runs, len(ctx.choices), batch, 5 * width)
        for layer, scores, sample in reversed(ctx.choices):
            upstream = sweep.pull(layer)
            delta = None
            if sample is not None:
                (delta,) = torch.autograd.grad(sample, scores, upstream)
            g_gates = selected[:, layer.number]
            g_cells = sweep.select(layer, g_gates)
            sweep.push(layer, torch.bmm(g_gates, back), g_cells, delta)
        leaves = sweep.collect()
        ctx.tables = ctx.choices = None
        total = sweep.totals(score_gates, selected).flatten(1, 2)
        grad_weight = torch.bmm(children_h.flatten(1, 2).transpose(1, 2), total)
        pair_h = tables.pair_states.flatten(1, 2)[..., :width]
        grad_query = torch.bmm(sweep.weights.view(runs, 1, -1), pair_h) / math.sqrt(width)
        grad_bias = total.sum(1, keepdim=True)
        return leaves.transpose(1, 2), grad_weight, grad_bias, grad_query, *(None,) * 4
