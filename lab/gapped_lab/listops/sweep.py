"""The backward pass over the tables of the tree. docs/listops.md has the mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from gapped_lab.listops.tables import Layer, Tables, allowed_pairs, compose_vjp, lines, take


@dataclass(frozen=True)
class Sweep:
    """State of the backward pass between two layers, and its steps: `pull`, `select`, `push`.

    A pair :math:`p` with the state P and the children l and r matters by two directions, e = P - r and
    f = r - l. docs/listops.md explains why.
    """

    tables: Tables
    score_h: Tensor
    """The slopes of every pair's score, in h of its left and of its right child, ``(R, 3M - 5, B, 2d)``."""
    score_cells: Tensor
    """The slopes of every pair's score in c of its children, ``(R, 3M - 5, B, 2d)``."""
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

    @classmethod
    def of(cls, tables: Tables, score_h: Tensor, score_cells: Tensor) -> Self:
        """A sweep at its beginning: no pair has a weight, no node an adjoint."""
        runs, layers, batch = tables.merges.shape
        nodes, pairs = tables.states.shape[1], tables.pair_scores.shape[1]
        zeros = tables.states.new_zeros
        return cls(
            tables,
            score_h,
            score_cells,
            adjoints=torch.zeros_like(tables.states),
            weights=torch.zeros_like(tables.pair_scores),
            gains=zeros(runs, pairs, batch, 4),
            own=zeros(runs, pairs, batch, 4),
            cross=tables.states.new_empty(runs, layers, batch, 4, 4),
            links=zeros(runs, nodes, batch, 4),
        )

    def relate(self) -> None:
        """Enter `own` and `cross`: what the weights of pairs will do to the inner products of the sweep."""
        nodes, pairs = self.tables.around[..., :6], self.tables.around[..., 6:]
        states, exists = take(self.tables.states, nodes.clamp(min=0)), (pairs >= 0).unsqueeze(-1)
        pairs = pairs.clamp(min=0)
        e = take(self.tables.pair_states, pairs) - states[..., 1:, :]
        f = states[..., 1:, :] - states[..., :-1, :]
        left, right = (self._slope(pairs, side) for side in (0, 1))

        def products(v: Tensor, of: slice, along: slice) -> list[Tensor]:
            return [(v[..., of, :] * each[..., along, :]).sum(-1) for each in (e, f)]

        middle = slice(1, 4)
        own = torch.stack(products(left, middle, middle) + products(right, middle, middle), -1)
        _add(self.own, pairs[..., middle], own, exists[..., middle, :])
        first, second = slice(0, 4), slice(1, 5)
        cross = torch.stack(products(right, first, second) + products(left, second, first), -1)
        self.cross.copy_(torch.where(exists[..., first, :] & exists[..., second, :], cross, 0.0))

    def pull(self, layer: Layer) -> Tensor:
        """The sample's gradient ``(R, B, L)``; completes the adjoint of the node that the layer made.

        The two pairs that the layer made have come to their first layer: their shares are added for good.
        With the layer's own pairs beside the merge begin the inner products of its neighbours.
        """
        tables, number, pairs = self.tables, layer.number, layer.pairs
        size, near = pairs.shape[1], tables.neighbours(number)
        new = lines(tables.states, tables.new_node(number), tables.new_node(number) + 1)[:, 0]
        if size > 1:
            at = tables.new_pair(number)
            on_left, on_right = lines(tables.pair_scores, at, at + 2).unbind(1)
            for node, pair, side, exists in (
                (near.near_left, on_left, 0, near.near_left),
                (new, on_left, 1, near.near_left),
                (new, on_right, 0, near.near_right),
                (near.near_right, on_right, 1, near.near_right),
            ):
                _add(self.adjoints, node, self._share(pair, side), exists >= 0)
        a_left = take(self.adjoints, near.near_left.clamp(min=0)) + self._share(near.far_left_pair, 1)
        a_right = take(self.adjoints, near.near_right.clamp(min=0)) + self._share(near.far_right_pair, 0)
        none = torch.zeros_like(a_left[..., :2])
        on_left = self._along(a_left, near.left_pair, near.near_left, near.left)
        on_right = self._along(a_right, near.right_pair, near.right, near.near_right)
        _add(self.gains, near.left_pair, torch.cat([on_left, none], -1), near.left_pair >= 0)
        _add(self.gains, near.right_pair, torch.cat([none, on_right], -1), near.right_pair >= 0)
        own = self._along(take(self.adjoints, new), near.merged_pair, near.left, near.right)
        place = torch.arange(size, device=pairs.device).view(-1, 1)
        gains, merge = take(self.gains, pairs), tables.merges[:, number : number + 1]
        # Left of the merge the pair's left child stays at its place, right of it its right child comes there.
        either = torch.where((place < merge).unsqueeze(-1), gains[..., :2], gains[..., 2:])
        direct, moved = torch.where((place == merge).unsqueeze(-1), own.unsqueeze(1), either).unbind(-1)
        return (direct + moved.flip(1).cumsum(1).flip(1)).transpose(1, 2)

    def select(self, layer: Layer, g_gates: Tensor) -> Tensor:
        """Write the gradient of the merged pair's gates, ``(R, B, 5d)``; returns its children's cells'.

        The latter is ``(R, B, 2d)``, left and right side by side; both are zero where nothing was merged.
        """
        tables, width = self.tables, self.tables.width
        node = tables.new_node(layer.number)
        merge = tables.merges[:, layer.number : layer.number + 1]
        left, right = take(tables.children, layer.pairs.gather(1, merge.clamp(min=0))).unbind(-1)
        grad = self.adjoints[:, node : node + 1] * (merge >= 0).unsqueeze(-1)
        cells = take(tables.states, left)[..., width:], take(tables.states, right)[..., width:]
        own, g_left, g_right = compose_vjp(
            tables.gates(left, right), *cells, grad[..., :width], grad[..., width:]
        )
        g_gates.copy_(own[:, 0])
        return torch.cat([g_left, g_right], -1).squeeze(1)

    def push(self, layer: Layer, g_h: Tensor, g_cells: Tensor, delta: Tensor | None) -> None:
        """Go from a layer's next to its own nodes.

        `g_h` and `g_cells` ``(R, B, 2d)`` are the gradients of the merged pair's children, with which their
        adjoints begin. `delta` ``(R, B, L)`` is that of the layer's scores: all pairs' weights and inner
        products change with it, as far as the expression goes.
        """
        tables, (number, nodes, pairs) = self.tables, layer
        near = tables.neighbours(number)
        to_left, to_right = (
            torch.cat(halves, -1) for halves in zip(g_h.chunk(2, -1), g_cells.chunk(2, -1), strict=True)
        )
        _add(self.adjoints, near.left, to_left, near.left >= 0)
        _add(self.adjoints, near.right, to_right, near.right >= 0)
        none = torch.zeros_like(to_left[..., :2])
        merged = [self._along(each, near.merged_pair, near.left, near.right) for each in (to_left, to_right)]
        for pair, gains in (
            (near.left_pair, [none, self._along(to_left, near.left_pair, near.near_left, near.left)]),
            (near.merged_pair, merged),
            (near.right_pair, [self._along(to_right, near.right_pair, near.right, near.near_right), none]),
        ):
            _add(self.gains, pair, torch.cat(gains, -1), pair >= 0)
        # The node that the layer made is gone: its line is the target of all that nothing refers to.
        node = tables.new_node(number)
        gone = lines(tables.states, node, node + 1)[:, 0].unsqueeze(-1)
        middle = tables.around[:, number, :, 1:5]
        self.links.flatten(0, 2)[torch.where(middle >= 0, middle, gone)] = self.cross[:, number]
        if delta is None:
            return
        # Estimators may return anything, NaN included, for a place beyond the expression.
        here = allowed_pairs(tables.lengths, number, pairs.shape[1]).transpose(1, 2).unsqueeze(-1)
        delta = torch.where(here, delta.transpose(1, 2).unsqueeze(-1), 0.0)
        self.weights.view(-1)[pairs] += delta[..., 0]
        change = take(self.own, pairs) * delta
        between = take(self.links, nodes[:, 1:-1])
        change[:, 1:, :, :2] += between[..., :2] * delta[:, :-1]
        change[:, :-1, :, 2:] += between[..., 2:] * delta[:, 1:]
        self.gains.flatten(0, 2)[pairs] += torch.where(here, change, 0.0)

    def collect(self) -> Tensor:
        """The adjoints of the leaves, ``(R, M, B, 2d)``, with the shares of their own pairs."""
        count = self.tables.leaf_count
        pairs = lines(self.weights, 0, count - 1)
        out = self.adjoints[:, :count].clone()
        out[:, :-1] += self._share(pairs, 0)
        out[:, 1:] += self._share(pairs, 1)
        return out

    def totals(self, score_gates: Tensor, selected: Tensor) -> Tensor:
        """Gradients of all pairs' gates: those of their scores times `weights`, and the merged ones' own.

        `selected` ``(R, M - 1, B, 5d)`` holds the latter, layer by layer. `score_gates` may be overwritten.
        """
        merged_at = self.tables.merged_at
        # Line of (run, 0, batch) in `selected`, then down by the layer.
        own = take(selected, lines(selected, 0, 1) + merged_at.clamp(min=0) * selected.shape[2])
        return score_gates * self.weights.unsqueeze(-1) + own * (merged_at >= 0).unsqueeze(-1)

    def _slope(self, pairs: Tensor, side: int) -> Tensor:
        """The slopes of scores in h and c of the left (0) or right (1) child."""
        slopes = (self.score_h, self.score_cells)
        return torch.cat([take(each, pairs).chunk(2, -1)[side] for each in slopes], -1)

    def _share(self, pairs: Tensor, side: int) -> Tensor:
        """The part of a child's adjoint from its pairs so far; zero from one that does not exist."""
        line = pairs.clamp(min=0)
        share = self._slope(line, side) * take(self.weights, line).unsqueeze(-1)
        return share.masked_fill((pairs < 0).unsqueeze(-1), 0.0)

    def _along(self, adjoint: Tensor, pair: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Inner products of an adjoint with the two directions of a pair, ``(..., 2)``."""
        l_state, r_state = (take(self.tables.states, each.clamp(min=0)) for each in (left, right))
        e = take(self.tables.pair_states, pair.clamp(min=0)) - r_state
        return torch.stack([(adjoint * each).sum(-1) for each in (e, r_state - l_state)], -1)


def _add(table: Tensor, where: Tensor, values: Tensor, exists: Tensor) -> None:
    """Add to lines of a table, each of them named once; what does not `exist` has no line."""
    exists = exists if exists.dim() == values.dim() else exists.unsqueeze(-1)
    values = torch.where(exists, values, 0.0)
    table.flatten(0, 2).index_add_(0, where.clamp(min=0).flatten(), values.flatten(0, -2))
