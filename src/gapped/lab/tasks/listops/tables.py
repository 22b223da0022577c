"""The tables that hold all nodes and pairs of a batch of trees, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
