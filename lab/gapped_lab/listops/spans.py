"""Binary trees as sets of spans: from merges, their agreement with the true parse, trees of one branch."""

from __future__ import annotations

import torch
from torch import Tensor


def merged_spans(merges: Tensor) -> Tensor:
    """Half-open ranges of tokens, ``(..., T, 2)``, of the nodes that `merges` ``(..., T)`` built in turn.

    A merge is the place of its left partner in the sequence of its layer; -1 merges nothing, and its
    range is (0, 0), as in the padding of `Split.spans`.

    >>> merged_spans(torch.tensor([[1, 0]]))
    tensor([[[1, 3],
             [0, 3]]])
    """
    layers = merges.shape[-1]
    edges = torch.arange(layers + 2, device=merges.device).expand(*merges.shape[:-1], layers + 2)
    spans = []
    for step in range(layers):
        left = merges[..., step : step + 1]
        none = left < 0
        at = left.clamp(min=0)
        span = torch.cat([edges.gather(-1, at), edges.gather(-1, at + 2)], -1)
        spans.append(span.masked_fill(none, 0))
        # The edge between the partners goes; where there are none, the last one, which is padding.
        inner = torch.where(none, edges.shape[-1], at + 1)
        place = torch.arange(edges.shape[-1] - 1, device=merges.device)
        edges = torch.where(place < inner, edges[..., :-1], edges[..., 1:])
    return torch.stack(spans, -2) if spans else merges.new_empty(*merges.shape, 2)


def agreement(spans: Tensor, truth: Tensor, lengths: Tensor) -> Tensor:
    r"""Unlabelled bracketing F1 of binary trees, ``(..., B)``.

    `spans` ``(..., B, T, 2)`` and `truth` ``(B, T, 2)`` are inner nodes as ranges, (0, 0) being padding. The
    single tokens and the whole expression are in every tree and do not count. An expression of n tokens then
    has n - 2 spans in both trees, so precision, recall and F1 are one number. NaN for n < 3, where nothing
    is left to compare.
    """
    size = spans.shape[-2] + 2
    inner = (lengths - 2).clamp(min=0)

    def code(ranges: Tensor) -> Tensor:
        trivial = (ranges[..., 0] == 0) & (ranges[..., 1] == lengths.unsqueeze(-1))
        number = ranges[..., 0].long() * size + ranges[..., 1].long()
        return number.masked_fill(trivial, 0)

    true = torch.zeros(*truth.shape[:-2], size * size, dtype=torch.bool, device=truth.device)
    true.scatter_(-1, code(truth), True)
    true[..., 0] = False  # padding and the whole
    codes = code(spans)
    hits = true.expand(*codes.shape[:-1], -1).gather(-1, codes).sum(-1)
    return torch.where(inner > 0, hits / inner.clamp(min=1), torch.nan)


def left_branching(lengths: Tensor, layers: int) -> Tensor:
    """The merges ``(*lengths.shape, layers)`` that always take the first pair: the baseline for ListOps."""
    step = torch.arange(layers, device=lengths.device)
    return torch.where(step < lengths.unsqueeze(-1) - 1, 0, -1)
