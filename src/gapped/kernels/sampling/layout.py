"""Where rows of categories lie in memory: one after the other, or side by side.

Kernels take ``(*rows, K)`` tensors, the categories last. Where that axis was moved there from before others,
as from ``(B, K, H, W)``, neighbouring rows lie side by side and the categories of a row far apart. Kernels
read such rows as they lie, and write in the same order; they need to know how many of the last row axes are
inside of the category axis in memory, here two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows as kernels find them: number `r` begins at ``r // inner * stride + r % inner``."""

    tensor: Tensor
    number: int
    inner: int
    """How many lie side by side."""
    stride: int
    """From one group of such rows to the next."""
    step: int
    """From one category of a row to the next."""


def inner_axes(x: Tensor) -> int:
    """How many of the last row axes are inside of the category axis; 0 if rows do not lie side by side."""
    if x.is_contiguous() or x.stride(-1) == 1:
        return 0
    axes, span = 0, 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size != 1 and stride != span:
            break
        axes, span = axes + 1, span * size
    return axes if 1 < span <= x.stride(-1) else 0


def rows_of(x: Tensor, axes: int) -> Rows:
    """The rows of `x`, copied only if they do not lie as `axes` says."""
    if axes == 0:
        matrix, number, pitch = row_matrix(x)
        return Rows(matrix, number, 1, pitch, 1)
    first = x.dim() - 1 - axes
    stride = _common_stride(x.shape[:first], x.stride()[:first])
    if stride is None or _common_stride(x.shape[first:-1], x.stride()[first:-1]) != 1:
        return rows_of(x.movedim(-1, first).contiguous().movedim(first, -1), axes)
    inner = math.prod(x.shape[first:-1])
    return Rows(x, x.numel() // x.shape[-1], inner, stride, x.stride(-1))


def row_matrix(x: Tensor) -> tuple[Tensor, int, int]:
    """`x` as a matrix with contiguous rows at a constant stride; their number; that stride."""
    categories = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // categories, categories
    matrix = (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, categories)
    return matrix, len(matrix), matrix.stride(0)


def empty_rows(like: Tensor, axes: int) -> Tensor:
    """A tensor of that shape with nothing between its rows, which lie as `axes` says."""
    if axes == 0:
        # `torch.empty` takes longer to parse its arguments.
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    first = like.dim() - 1 - axes
    shape = (*like.shape[:first], like.shape[-1], *like.shape[first:-1])
    return torch.empty(shape, dtype=like.dtype, device=like.device).movedim(first, -1)


def _common_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of these axes as a single one, 0 if that has one entry; None if they are no single one."""
    count, step = 1, 0
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            step = stride if count == 1 else step
            if stride != step * count:
                return None
            count *= size
    return step
