"""Rows of a tensor that broadcasts to a given shape, without a copy of all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def row_entries(values: Tensor, shape: torch.Size, rows: slice, further: int = 0) -> Tensor:
    """The entries that `values` have for some of the rows, which are `shape` in all and counted in order.

    `values` broadcast to ``(*shape, ...)``, with so many `further` axes behind those of the rows. Contiguous
    ones that have an entry for each row are not copied.

    >>> row_entries(torch.tensor([[1.0], [2.0]]), torch.Size([2, 3]), slice(1, 4))
    tensor([1., 1., 2.])
    """
    values = values[(None,) * (len(shape) + further - values.dim())]
    rest = values.shape[len(shape) :]
    if values.shape[: len(shape)] == shape and values.is_contiguous():
        return values.view(shape.numel(), *rest)[rows]
    every = values.expand(*shape, *rest)
    numbers = torch.arange(rows.start, rows.stop, device=values.device)
    return every[torch.unravel_index(numbers, shape)]
