r"""The latent tree in linear time, forward and backward, exact.

A merge changes two pairs of the sequence; all others keep their value. So nodes and pairs live in tables:
a node's products with the cell's weights are computed once, when it appears, and a pair's state and score
once, when its second node appears. The sequence is an array of places in these tables.

Backward, from the last layer to the first, with the adjoint :math:`a` of the layer's states:

- the sample's gradient takes three inner products per place, :math:`\langle a_i, s_i\rangle`,
  :math:`\langle a_i, s_{i+1}\rangle` and :math:`\langle a_i, \mathrm{new}_i\rangle`; the estimator turns it
  into the gradient :math:`\delta` of the scores;
- a pair that is not selected acts through its score alone, so it adds :math:`\delta_p v_p` to its children,
  with :math:`v_p = \partial\,\mathrm{score}_p / \partial(h_l, c_l, h_r, c_r)`, fixed while the pair lives;
- the selected pair's adjoint goes through its cell.

All :math:`v_p` are one large product before the sweep, all gradients of the weights one after it.
`gapped.tasks.listops.reference` is the definition; docs/listops.md has the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped.errors import reject
from gapped.tasks.listops.cell import compose, compose_vjp
from gapped.tasks.listops.sampler import Sampler, allowed_pairs

__all__ = ["latent_tree"]


def latent_tree(
    leaves: Tensor,
    weight: Tensor,
    bias: Tensor,
    query: Tensor,
    lengths: Tensor,
    sampler: Sampler,
    generator: torch.Generator | None = None,
    *,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Root vectors as `reference_tree` gives them, and the merges, int64 ``(R, B, M - 1)``.

    A merge is the place of the left partner in its layer, -1 once an expression has become one node.
    `compiled` fuses the elementwise work of each layer.
    """
    if not sampler.hard:
        raise reject(
            "sampler", "one with soft samples", "hard samples: mixtures of states need reference_tree"
        )
    if leaves.shape[2] == 1:  # no pair, but weights that must get a gradient, zero
        padded = torch.nn.functional.pad(leaves, (0, 0, 0, 1))
        root, merges = latent_tree(
            padded, weight, bias, query, lengths, sampler, generator, compiled=compiled
        )
        return root, merges[..., :0]
    inputs = (leaves, weight, bias, query)
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    return _Tree.apply(*inputs, lengths, sampler, generator, compiled, differentiable)  # type: ignore[no-any-return, no-untyped-call]


class _Layer(NamedTuple):
    """What the backward pass must know of a layer of L pairs."""

    nodes: Tensor
    """Places of the nodes in their table, ``(N, L + 1)``."""
    pairs: Tensor
    """Places of the pairs in their table, ``(N, L)``."""
    chosen: Tensor
    """The pair merged, ``(N, 1)``; L + 1 where none was."""
    scores: Tensor | None
    sample: Tensor | None
    """The sample, as a function of `scores`, both ``(R, B, L)``; None where it carries no gradient."""


@dataclass
class _Forest:
    """The tables of N = R * B trees with M leaves each, and the layers so far.

    Nodes: the leaves, then one for each merge. Pairs: those of the leaves, then two for each merge, the new
    node with its left and with its right neighbour. Where there is no such neighbour, or no merge, a place
    holds numbers that nothing refers to.
    """

    weight: Tensor
    query: Tensor
    states: Tensor
    """h and c of the nodes, ``(N, 2M - 2, 2d)``."""
    projections: Tensor
    """The nodes' products with both halves of the weight, the left with bias, ``(R, 2, B, 2M - 2, 5d)``."""
    pair_states: Tensor
    """``(N, 3M - 5, 2d)`` for M > 2."""
    pair_scores: Tensor
    children: Tensor
    """The nodes of each pair, ``(N, pairs, 2)``."""
    offset: Tensor
    """Bias in the form that `project` adds, ``(2R, 1, 5d)``."""
    layers: list[_Layer] = field(default_factory=list)

    @classmethod
    def of(cls, leaves: Tensor, weight: Tensor, bias: Tensor, query: Tensor) -> _Forest:
        runs, batch, count, double = leaves.shape
        rows, width = runs * batch, double // 2
        pairs = count - 1 + 2 * (count - 2)
        offset = torch.stack([bias, torch.zeros_like(bias)], 1).view(2 * runs, 1, -1)
        per_row = query.expand(runs, batch, width).reshape(rows, 1, width)
        forest = cls(
            weight,
            per_row / math.sqrt(width),
            leaves.new_empty(rows, 2 * count - 2, double),
            leaves.new_empty(runs, 2, batch, 2 * count - 2, 5 * width),
            leaves.new_empty(rows, pairs, double),
            leaves.new_empty(rows, pairs),
            torch.empty(rows, pairs, 2, dtype=torch.int64, device=leaves.device),
            offset,
        )
        forest.states[:, :count] = leaves.reshape(rows, count, double)
        projected = forest.project(leaves[..., :width].reshape(runs, batch * count, width))
        forest.projections[:, :, :, :count] = projected.view(runs, 2, batch, count, -1)
        place = torch.arange(count, device=leaves.device)
        forest.children[:, : count - 1] = torch.stack([place[:-1], place[1:]], -1)
        gates = forest.projections[:, 0, :, : count - 1] + forest.projections[:, 1, :, 1:count]
        cells = forest.states[:, :count, width:]
        h, c = compose(gates.view(rows, count - 1, -1), cells[:, :-1], cells[:, 1:])
        forest.pair_states[:, : count - 1] = torch.cat([h, c], -1)
        forest.pair_scores[:, : count - 1] = (h * forest.query).sum(-1)
        return forest

    def project(self, h: Tensor) -> Tensor:
        """Products of ``(R, n, d)`` with both halves of the weight, ``(R, 2, n, 5d)``."""
        runs, count, width = h.shape
        halves = self.weight.view(2 * runs, width, -1)
        twice = h.unsqueeze(1).expand(runs, 2, count, width).reshape(2 * runs, count, width)
        return torch.baddbmm(self.offset, twice, halves).view(runs, 2, count, -1)

    def grow(self, layer: _Layer, node: int, pair: int, parts: _Parts) -> None:
        """Enter the merged node at `node`, and its pairs with its neighbours at `pair` and `pair + 1`."""
        runs, _, batch = self.projections.shape[:3]
        width = self.query.shape[-1]
        state = parts.pick(self.pair_states, layer.pairs, layer.chosen)
        self.states[:, node : node + 1] = state
        own = self.project(state[:, 0, :width].reshape(runs, batch, width))
        self.projections[:, :, :, node] = own
        values = parts.new_pairs(
            self.states, self.projections, own, state, layer.nodes, layer.chosen, self.query, node
        )
        place = slice(pair, pair + 2)
        self.pair_states[:, place], self.pair_scores[:, place], self.children[:, place] = values

    def gates(self) -> Tensor:
        """Gates of all pairs, ``(N, pairs, 5d)``."""
        left, right = self.children.unbind(-1)
        return take_half(self.projections, left, 0) + take_half(self.projections, right, 1)


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
        compiled: bool,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        parts = _parts(compiled)
        runs, batch, count, double = leaves.shape
        forest = _Forest.of(leaves, weight, bias, query)
        nodes = torch.arange(count, device=leaves.device).repeat(runs * batch, 1)
        pairs, merges = nodes[:, :-1].contiguous(), []
        for step in range(count - 1):
            size = count - 1 - step
            mask = allowed_pairs(lengths, step, size)
            scores = sample = None
            if size == 1:
                chosen = torch.zeros_like(nodes[:, :1])
            else:
                scores = forest.pair_scores.gather(1, pairs).view(runs, batch, size)
                with torch.set_grad_enabled(differentiable):
                    scores.requires_grad_(differentiable)
                    sample = sampler.sample(scores, mask=mask, generator=generator)
                chosen = sample.detach().argmax(-1).view(-1, 1)
                sample = sample if sample.requires_grad else None
            alive = mask[..., 0].reshape(-1, 1)
            layer = _Layer(nodes, pairs, torch.where(alive, chosen, size + 1), scores, sample)
            merges.append(torch.where(alive, chosen, -1))
            if differentiable:
                forest.layers.append(layer)
            if size > 1:
                node, pair = count + step, count - 1 + 2 * step
                forest.grow(layer, node, pair, parts)
                nodes, pairs = parts.advance(nodes, pairs, layer.chosen, node, pair)
        # `alive` and `pairs` are those of the last layer, which has one place.
        root = torch.where(
            alive.unsqueeze(-1), take(forest.pair_states, pairs), take(forest.states, nodes[:, :1])
        )
        ctx.forest, ctx.parts, ctx.shape = forest, parts, (runs, batch, count, double // 2)
        chosen_pairs = torch.cat(merges, 1).view(runs, batch, count - 1)
        ctx.mark_non_differentiable(chosen_pairs)
        return root[:, 0, : double // 2].reshape(runs, batch, -1), chosen_pairs

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        runs, batch, count, width = ctx.shape
        rows = runs * batch
        forest: _Forest = ctx.forest
        parts: _Parts = ctx.parts
        gates, left, right = forest.gates(), *(take(forest.states, forest.children[..., i]) for i in (0, 1))
        cells = left[..., width:], right[..., width:]
        # Of every pair: the gradient of its score in its gates, and v, in its children.
        score_gates, *score_cells = parts.compose_vjp(gates, *cells, forest.query, 0.0)
        back = forest.weight.transpose(1, 2)
        score_h = torch.bmm(score_gates.view(runs, -1, 5 * width), back).view(rows, -1, 2 * width)
        slopes = [torch.cat([h, c], -1) for h, c in zip(score_h.chunk(2, -1), score_cells, strict=True)]
        weights = torch.zeros_like(forest.pair_scores)
        selected, through = [], []
        adjoint = torch.cat([grad.reshape(rows, 1, width), grad.new_zeros(rows, 1, width)], -1)
        for layer in reversed(forest.layers):
            size = layer.pairs.shape[1]
            delta = None
            if layer.sample is not None and layer.scores is not None:
                direct, shifted = parts.pull(
                    adjoint, forest.states, forest.pair_states, layer.nodes, layer.pairs
                )
                upstream = (direct + shifted.flip(-1).cumsum(-1).flip(-1)).view(runs, batch, size)
                (delta,) = torch.autograd.grad(layer.sample, layer.scores, upstream)
                delta = delta.view(rows, size)
                weights.scatter_add_(1, layer.pairs, delta)
            place = layer.pairs.gather(1, layer.chosen.clamp(max=size - 1))
            g_gates, g_left, g_right = parts.merged(adjoint, gates, *cells, place, layer.chosen)
            g_h = torch.bmm(g_gates.view(runs, batch, 5 * width), back).view(rows, 1, 2 * width)
            adjoint = parts.push(adjoint, g_h, g_left, g_right, layer.chosen, layer.pairs, delta, *slopes)
            selected.append(place)
            through.append(g_gates)
        # Each pair is selected at most once; where a layer merged nothing, zeros are added.
        total = score_gates * weights.unsqueeze(-1)
        where = flat(torch.cat(selected, 1), total.shape[1])
        total.view(-1, 5 * width).index_add_(0, where.view(-1), torch.cat(through, 1).view(-1, 5 * width))
        total = total.view(runs, -1, 5 * width)
        grad_weight = torch.cat(
            [
                torch.bmm(each[..., :width].reshape(runs, -1, width).transpose(1, 2), total)
                for each in (left, right)
            ],
            1,
        )
        grad_query = torch.bmm(
            weights.view(runs, 1, -1), forest.pair_states[..., :width].reshape(runs, -1, width)
        ) / math.sqrt(width)
        grad_leaves = adjoint.view(runs, batch, count, 2 * width)
        ctx.forest = None
        return grad_leaves, grad_weight, total.sum(1, keepdim=True), grad_query, None, None, None, None, None


class _Parts(NamedTuple):
    """The elementwise work of a layer, as functions of tensors alone."""

    pick: Callable[..., Any]
    new_pairs: Callable[..., Any]
    advance: Callable[..., Any]
    compose_vjp: Callable[..., Any]
    pull: Callable[..., Any]
    merged: Callable[..., Any]
    push: Callable[..., Any]


@cache
def _parts(compiled: bool) -> _Parts:
    plain = _Parts(pick, new_pairs, advance, compose_vjp, pull, merged, push)
    return _Parts(*(torch.compile(each, dynamic=True) for each in plain)) if compiled else plain


def flat(places: Tensor, size: int) -> Tensor:
    """Places ``(N, n)`` in tables of `size` rows as places in one long table."""
    return places + size * torch.arange(places.shape[0], device=places.device).unsqueeze(1)


def take(table: Tensor, places: Tensor) -> Tensor:
    """Rows ``(N, n, D)`` of the tables ``(N, size, D)`` at `places` ``(N, n)``."""
    rows, size, width = table.shape
    return table.reshape(rows * size, width)[flat(places, size)]


def pick(pair_states: Tensor, pairs: Tensor, chosen: Tensor) -> Tensor:
    """State ``(N, 1, 2d)`` of the pair that is merged."""
    return take(pair_states, pairs.gather(1, chosen.clamp(max=pairs.shape[1] - 1)))


def take_half(projections: Tensor, places: Tensor, half: int | Tensor) -> Tensor:
    """Projections ``(N, n, 5d)`` of the nodes at `places` ``(N, n)``, as left (0) or right (1) children."""
    runs, _, batch, size, width = projections.shape
    row = torch.arange(runs * batch, device=places.device).unsqueeze(1)
    line = ((row // batch * 2 + half) * batch + row % batch) * size + places
    return projections.view(-1, width)[line]


def new_pairs(
    states: Tensor,
    projections: Tensor,
    own: Tensor,
    state: Tensor,
    nodes: Tensor,
    chosen: Tensor,
    query: Tensor,
    node: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """State, score and children of the pairs that the merged node forms with its two neighbours."""
    width, last = query.shape[-1], nodes.shape[1] - 1
    near = nodes.gather(1, torch.cat([(chosen - 1).clamp(0, last), (chosen + 2).clamp(max=last)], 1))
    # The left neighbour is a left child, the right one a right child; the new node is the other one to each.
    beside = take_half(projections, near, torch.arange(2, device=nodes.device))
    within = own.flip(1).transpose(1, 2).reshape(beside.shape)
    c, c_near = state[..., width:], take(states, near)[..., width:]
    c_left = torch.cat([c_near[:, :1], c], 1)
    c_right = torch.cat([c, c_near[:, 1:]], 1)
    h, c = compose(beside + within, c_left, c_right)
    fresh = torch.full_like(near[:, :1], node)
    children = torch.stack([torch.cat([near[:, :1], fresh], 1), torch.cat([fresh, near[:, 1:]], 1)], -1)
    return torch.cat([h, c], -1), (h * query).sum(-1), children


def advance(nodes: Tensor, pairs: Tensor, chosen: Tensor, node: int, pair: int) -> tuple[Tensor, Tensor]:
    """The sequence after a merge: one node and one pair less, three places of the tables new."""
    place = torch.arange(pairs.shape[1], device=pairs.device)
    moved = torch.where(place < chosen, nodes[:, :-1], nodes[:, 1:])
    moved = torch.where(place == chosen, node, moved)
    place = place[:-1]
    kept = torch.where(place < chosen, pairs[:, :-1], pairs[:, 1:])
    kept = torch.where(place == chosen - 1, pair, kept)
    return moved, torch.where(place == chosen, pair + 1, kept)


def pull(
    adjoint: Tensor, states: Tensor, pair_states: Tensor, nodes: Tensor, pairs: Tensor
) -> tuple[Tensor, Tensor]:
    """The sample's gradient, in two parts ``(N, L)``: in z itself, and in its running sum."""
    here, after = take(states, nodes[:, :-1]), take(states, nodes[:, 1:])
    right = (adjoint * after).sum(-1)
    direct = (adjoint * take(pair_states, pairs)).sum(-1) - right
    return direct, right - (adjoint * here).sum(-1)


def merged(
    adjoint: Tensor, gates: Tensor, c_left: Tensor, c_right: Tensor, place: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the selected pair's gates and of its children's cells, ``(N, 1, ...)`` each."""
    size, width = adjoint.shape[1], c_left.shape[-1]
    grad = take(adjoint, chosen.clamp(max=size - 1)) * (chosen < size).unsqueeze(-1)
    return compose_vjp(
        take(gates, place), take(c_left, place), take(c_right, place), grad[..., :width], grad[..., width:]
    )


def push(
    adjoint: Tensor,
    g_h: Tensor,
    g_left: Tensor,
    g_right: Tensor,
    chosen: Tensor,
    pairs: Tensor,
    delta: Tensor | None,
    slope_left: Tensor,
    slope_right: Tensor,
) -> Tensor:
    """The adjoint ``(N, L + 1, 2d)`` of a layer's states, from that of the next layer's ``(N, L, 2d)``."""
    h_left, h_right = g_h.chunk(2, -1)
    place = torch.arange(pairs.shape[1] + 1, device=pairs.device).unsqueeze(-1)
    chosen = chosen.unsqueeze(-1)
    none = torch.zeros_like(adjoint[:, :1])
    below = torch.where(place < chosen + 1, torch.cat([adjoint, none], 1), torch.cat([none, adjoint], 1))
    below = torch.where(place == chosen, torch.cat([h_left, g_left], -1), below)
    below = torch.where(place == chosen + 1, torch.cat([h_right, g_right], -1), below)
    if delta is None:
        return below
    delta = delta.unsqueeze(-1)
    to_left, to_right = delta * take(slope_left, pairs), delta * take(slope_right, pairs)
    return below + torch.cat([to_left, none], 1) + torch.cat([none, to_right], 1)
