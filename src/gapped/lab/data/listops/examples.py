"""What the loaded set is."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch

from gapped.lab.data.listops.expression import Expression
from gapped.lab.data.listops.tokens import PADDING


@dataclass(frozen=True, eq=False)
class Split:
    """N expressions of at most L tokens, padded at the end.

    `tokens` is uint8 of shape (N, L), padding is 0; `lengths` and `labels` are int64 of shape (N,). `spans`,
    int16 of shape (N, max(L - 1, 0), 2), holds the true binary tree: for an expression of n tokens the first
    n - 1 rows are its inner nodes, children before parents, as half-open ranges of tokens, the other rows
    are (0, 0).

    `official` tells the published examples from generated ones. `complete` counts the expressions before
    the long ones were left out.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    spans: torch.Tensor
    official: bool
    complete: int

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class ListOps:
    """Three disjoint splits, of expressions with fewer than `max_tokens` tokens. `seed` drew those splits
    that are not official; the training split never is."""

    name: str
    train: Split
    valid: Split
    test: Split
    seed: int
    max_tokens: int


def stack(expressions: Iterable[Expression], official: bool, complete: int) -> Split:
    """`expressions` as padded tensors."""
    # Compact at once: the spans of 80,000 expressions are two million pairs.
    rows, trees, labels = [], [], []
    for each in expressions:
        rows.append(each.tokens)
        trees.append(array("h", chain.from_iterable(each.spans)))
        labels.append(each.value)
    lengths = [len(row) for row in rows]
    longest = max(lengths, default=0)
    nodes = max(longest - 1, 0)
    # Writable buffers, which is what torch asks of memory that it shares.
    tokens = bytearray().join(row.ljust(longest, bytes([PADDING])) for row in rows)
    spans = bytearray().join(tree.tobytes().ljust(4 * nodes, b"\0") for tree in trees)
    return Split(
        _tensor(tokens, torch.uint8).reshape(len(rows), longest),
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(labels, dtype=torch.int64),
        _tensor(spans, torch.int16).reshape(len(rows), nodes, 2),
        official,
        complete,
    )


def _tensor(raw: bytearray, dtype: torch.dtype) -> torch.Tensor:
    """torch.frombuffer refuses empty buffers."""
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
