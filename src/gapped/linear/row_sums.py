"""Sums of rows that belong to the same category, without a float32 copy of all categories."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gapped import simplex
from gapped.linear.chunk_sizes import slices

# Bytes of the float32 rows that are added up at a time.
SUM_BYTES = 1 << 25


def add_rows(total: Tensor, place: Tensor, rows: Callable[[slice | Tensor], Tensor]) -> None:
    """Add rows to those of `total` ``(V, d)`` that `place` ``(n)`` names.

    `rows` returns those with the given numbers. In half precision, rows of one place are added up in float32
    and their sum is rounded: they are sorted by place, and only a sum that stands in several blocks of
    `SUM_BYTES` is rounded once for each of them.
    """
    dtype = simplex.computed(total[:0]).dtype
    step = max(SUM_BYTES // (dtype.itemsize * max(total.shape[1], 1)), 1)
    if total.dtype == dtype:
        for block in slices(len(place), step):
            total.index_add_(0, place[block], rows(block).to(dtype))
        return
    place, order = place.sort()
    for block in slices(len(place), step):
        own, values = place[block], rows(order[block]).to(dtype)
        # The number of each place in the block; numbers that are left over have a sum of zero.
        number = torch.zeros_like(own)
        torch.cumsum(own[1:] != own[:-1], 0, out=number[1:])
        sums = torch.zeros_like(values).index_add_(0, number, values)
        total.index_add_(0, own.scatter(0, number, own), sums.to(total.dtype))
