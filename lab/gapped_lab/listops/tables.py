"""The tables that hold all nodes and pairs of a batch of trees, and the forward pass over them; samplers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from gapped import simplex


class Sampler(Protocol):
    """Chooses one pair of each layer."""

    @property
    def hard(self) -> bool:
        """Whether samples are one-hot."""

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor: ...


class Greedy:
    """The sampler of evaluation: always the pair with the highest score, without a gradient."""

    hard = True

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        scores = simplex.masked(logits.detach(), mask)
        return simplex.one_hot(simplex.argmax_index(scores), scores.shape[-1], scores.dtype)


def sampled_lengths(sampler: Sampler, lengths: Tensor) -> Tensor | None:
    """How far the scores go that a sampler is shown, ``(R, B)``; None for the expressions' own `lengths`.

    One that masks late sees the padding too, up to the longest expression of its run's batch, and a mask.
    """
    if not getattr(sampler, "masks_late", False):
        return None
    return lengths.amax(-1, keepdim=True).expand_as(lengths).contiguous()


class Layer(NamedTuple):
    """The sequence of a layer, which has L pairs: lines of the tables."""

    number: int
    """Counted from 0, the layer of the leaves."""
    nodes: Tensor
    """``(R, L + 1, B)``."""
    pairs: Tensor
    """``(R, L, B)``."""


class Neighbours(NamedTuple):
    """Lines of six nodes and five pairs around a merge, from left to right, each ``(R, B)``; -1 for none."""

    far_left: Tensor
    near_left: Tensor
    left: Tensor
    """The merged pair's left child."""
    right: Tensor
    near_right: Tensor
    far_right: Tensor
    far_left_pair: Tensor
    """Of `far_left` and `near_left`."""
    left_pair: Tensor
    merged_pair: Tensor
    right_pair: Tensor
    far_right_pair: Tensor


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
    """The `Neighbours` of each merge, ``(R, M - 1, B, 11)``."""
    lengths: Tensor
    bias: Tensor
    query: Tensor
    """``(R, 1, d)``, with the scores' factor."""

    @classmethod
    def of(cls, leaves: Tensor, bias: Tensor, query: Tensor, lengths: Tensor) -> Self:
        """Tables with the leaves ``(R, B, M, 2d)`` and their pairs' children entered."""
        runs, batch, count, double = leaves.shape
        width, nodes, pairs = double // 2, 2 * count - 1, 3 * count - 5
        states = leaves.new_empty(runs, nodes, batch, double)
        states[:, :count] = leaves.transpose(1, 2)
        leaf = lines(states, 0, count)
        children = leaf.new_empty(runs, pairs, batch, 2)
        children[:, : count - 1] = torch.stack([leaf[:, :-1], leaf[:, 1:]], -1)
        return cls(
            states=states,
            products=leaves.new_empty(runs, nodes, batch, 10 * width),
            pair_states=leaves.new_empty(runs, pairs, batch, double),
            pair_scores=leaves.new_empty(runs, pairs, batch),
            children=children,
            merged_at=leaf.new_full((runs, pairs, batch), -1),
            merges=leaf.new_empty(runs, count - 1, batch),
            around=leaf.new_empty(runs, count - 1, batch, len(Neighbours._fields)),
            lengths=lengths.contiguous(),
            bias=bias.contiguous(),
            query=query / math.sqrt(width),
        )

    @property
    def width(self) -> int:
        return self.query.shape[-1]

    @property
    def leaf_count(self) -> int:
        return self.merges.shape[1] + 1

    def new_node(self, layer: int) -> int:
        """The place of the node that a layer makes."""
        return self.leaf_count + layer

    def new_pair(self, layer: int) -> int:
        """The place of the first of the two pairs that a layer makes."""
        return self.leaf_count - 1 + 2 * layer

    def neighbours(self, layer: int) -> Neighbours:
        """The surroundings of a layer's merge."""
        return Neighbours(*self.around[:, layer].unbind(-1))

    def gates(self, left: Tensor, right: Tensor) -> Tensor:
        """Gates ``(R, n, B, 5d)`` of pairs of nodes."""
        half = self.bias.shape[-1]
        products = take(self.products, left)[..., :half] + take(self.products, right)[..., half:]
        return products + self.bias.unsqueeze(1)

    def project(self, weight: Tensor, start: int, stop: int) -> None:
        """Enter the products of nodes with both halves of the weight ``(R, 2d, 5d)``."""
        h = self.states[:, start:stop].flatten(1, 2)[..., : self.width]
        products = self.products[:, start:stop].flatten(1, 2)
        for half, columns in zip(weight.chunk(2, 1), products.chunk(2, 2), strict=True):
            torch.bmm(h, half, out=columns)

    def form(self, start: int, count: int) -> None:
        """Enter state and score of `count` pairs whose children are known."""
        left, right = self.children[:, start : start + count].unbind(-1)
        c_left, c_right = (take(self.states, each)[..., self.width :] for each in (left, right))
        h, c = compose(self.gates(left, right), c_left, c_right)
        self.pair_states[:, start : start + count] = torch.cat([h, c], -1)
        self.pair_scores[:, start : start + count] = (h * self.query.unsqueeze(1)).sum(-1)

    def scores(self, layer: Layer, lengths: Tensor) -> Tensor:
        """Scores ``(R, B, L)`` of a layer's pairs, -inf beyond the `lengths` ``(R, B)``."""
        values = take(self.pair_scores, layer.pairs).transpose(1, 2)
        return values.masked_fill(~self.allowed(layer, lengths), -torch.inf)

    def allowed(self, layer: Layer, lengths: Tensor) -> Tensor:
        """Which places of a layer hold pairs within the `lengths`, ``(R, B, L)``."""
        return allowed_pairs(lengths, layer.number, layer.pairs.shape[1])

    def merge(self, layer: Layer, sample: Tensor) -> Layer:
        """Enter the node that `sample` ``(R, B, L)`` merges, and the children of its new pairs.

        Returns the next layer.
        """
        number, nodes, pairs = layer
        size = pairs.shape[1]
        place = sample.detach().argmax(-1).unsqueeze(1)
        alive = self.lengths.unsqueeze(1) > number + 1
        self.merges[:, number : number + 1] = torch.where(alive, place, -1)
        merge = torch.where(alive, place, size + 1)
        pair = pairs.gather(1, merge.clamp(max=size - 1))
        merged_at = self.merged_at.view(-1)
        merged_at[pair] = torch.where(alive, number, merged_at[pair])
        here = self.lengths.unsqueeze(1) - number
        around = self.around[:, number]
        for sequence, out, left in ((nodes, around[..., :6], here), (pairs, around[..., 6:], here - 1)):
            at = merge + torch.arange(-2, out.shape[-1] - 2, device=pairs.device).view(-1, 1)
            near = sequence.gather(1, at.clamp(0, sequence.shape[1] - 1))
            out.copy_(torch.where(alive & (at >= 0) & (at < left), near, -1).transpose(1, 2))
        new_node, new_pair = self.new_node(number), self.new_pair(number)
        self.states[:, new_node : new_node + 1] = take(self.pair_states, pair)
        node = lines(self.states, new_node, new_node + 1)
        on_left, on_right = lines(self.pair_scores, new_pair, new_pair + 2).chunk(2, 1)
        if size > 1:
            left = nodes.gather(1, (merge - 1).clamp(0, size))
            right = nodes.gather(1, (merge + 2).clamp(max=size))
            children = torch.stack([torch.cat([left, node], 1), torch.cat([node, right], 1)], -1)
            self.children[:, new_pair : new_pair + 2] = children
        at = torch.arange(size, device=pairs.device).unsqueeze(-1)
        nodes = torch.where(at < merge, nodes[:, :-1], nodes[:, 1:])
        nodes = torch.where(at == merge, node, nodes)
        at = at[:-1]
        pairs = torch.where(at < merge, pairs[:, :-1], pairs[:, 1:])
        pairs = torch.where(at == merge - 1, on_left, pairs)
        return Layer(number + 1, nodes, torch.where(at == merge, on_right, pairs))

    def slopes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of every pair: the gradient of its score in its gates and in its children's cells, and their h."""
        width = self.width
        left, right = self.children.unbind(-1)
        l_state, r_state = take(self.states, left), take(self.states, right)
        cells = l_state[..., width:], r_state[..., width:]
        g_gates, g_left, g_right = compose_vjp(self.gates(left, right), *cells, self.query.unsqueeze(1), 0.0)
        h = torch.cat([l_state[..., :width], r_state[..., :width]], -1)
        return g_gates, torch.cat([g_left, g_right], -1), h


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


def allowed_pairs(lengths: Tensor, layer: int, pairs: int) -> Tensor:
    """Which of the `pairs` places of a layer hold nodes of the expression, ``(*lengths.shape, pairs)``."""
    left = lengths.unsqueeze(-1) - 1 - layer
    return torch.arange(pairs, device=lengths.device) < left


def compose(gates: Tensor, c_left: Tensor, c_right: Tensor) -> tuple[Tensor, Tensor]:
    r"""State of a node from the gates ``(..., 5d)`` and the cells ``(..., d)`` of its children.

    .. math:: c = \sigma(f_l + 1)\, c_l + \sigma(f_r + 1)\, c_r + \sigma(i) \tanh(u), \qquad
              h = \sigma(o) \tanh(c).
    """
    i, f_left, f_right, u, o = gates.chunk(5, -1)
    c = (f_left + 1).sigmoid() * c_left + (f_right + 1).sigmoid() * c_right + i.sigmoid() * u.tanh()
    return o.sigmoid() * c.tanh(), c


def compose_vjp(
    gates: Tensor, c_left: Tensor, c_right: Tensor, grad_h: Tensor, grad_c: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates and of both children's cells, from those of the node's ``h`` and ``c``."""
    i, f_left, f_right, u, o = gates.chunk(5, -1)
    i, f_left, f_right = i.sigmoid(), (f_left + 1).sigmoid(), (f_right + 1).sigmoid()
    u, o = u.tanh(), o.sigmoid()
    top = (f_left * c_left + f_right * c_right + i * u).tanh()
    grad_c = grad_c + grad_h * o * (1 - top * top)
    slopes = (
        grad_c * u * i * (1 - i),
        grad_c * c_left * f_left * (1 - f_left),
        grad_c * c_right * f_right * (1 - f_right),
        grad_c * i * (1 - u * u),
        grad_h * top * o * (1 - o),
    )
    return torch.cat(slopes, -1), grad_c * f_left, grad_c * f_right
