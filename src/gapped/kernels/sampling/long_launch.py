"""Launching the kernels of rows too long for a block, which lie one after the other or side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped.kernels.runner import run
from gapped.kernels.sampling import strip_sizes
from gapped.kernels.sampling.row_layout import Rows


class Call(NamedTuple):
    """What a kernel is launched with, besides the geometry of its rows."""

    pointers: tuple[Tensor, ...]
    every: tuple[int, ...]
    """How many rows share an entry of each temperature or gap."""
    numbers: tuple[float, ...]
    flags: dict[str, Any]
    first: int = 0
    """The number of the first row among those that share the key; 0 for rows side by side."""


def forward(rows: Rows, call: Call, law: Tensor | None) -> None:
    """Draw samples; with a `law`, of contiguous rows, that of each is written there."""
    categories = rows.tensor.shape[-1]
    if rows.inner > 1:
        from gapped.kernels.sampling.strips import strip_forward_kernel

        assert law is None
        assert call.first == 0
        programs, sizes = strip_sizes.forward_sizes(rows.number, categories, rows.tensor.element_size())
        geometry = (rows.number, categories, *rows[2:], *call.every)
        run(strip_forward_kernel, programs, call.pointers, geometry, call.numbers, call.flags | sizes)
        return
    from gapped.kernels.sampling import long_rows

    flags = call.flags | {"LAW": law is not None, **long_rows.chunk_sizes(rows.number, categories)}
    pointers = (*call.pointers, call.pointers[-1] if law is None else law)
    where, numbers = (categories, rows.stride, *call.every), (*call.numbers, call.first)
    run(long_rows.streamed_forward_kernel, rows.number, pointers, where, numbers, flags)


def backward(rows: Rows, grads: Rows, mode: str, call: Call, *, in_place: bool) -> bool:
    """Write gradients; False if rows side by side are too long for the programs that would share them.

    `in_place` says that they are written over the logits.
    """
    categories, device = rows.tensor.shape[-1], rows.tensor.device
    geometry: tuple[int, ...]
    if rows.inner > 1:
        strips, sizes = strip_sizes.backward_sizes(rows.number, categories, rows.tensor.element_size(), mode)
        if sizes["SEGMENTS"] > strip_sizes.most_segments(device):
            return False
        from gapped.kernels.sampling.split_strips import strip_backward_kernel as kernel

        geometry = (rows.number, categories, *rows[2:], grads.stride, grads.step)
        _share(kernel, strips, sizes["STRIP"], geometry, call, sizes)
        return True
    from gapped.kernels.sampling import long_rows, split_rows

    call = call._replace(numbers=(*call.numbers, call.first))
    geometry = (categories, rows.stride, grads.stride)
    segments, sizes = split_rows.segments_of(rows.tensor, mode)
    if segments <= split_rows.most_segments(device):
        _share(split_rows.split_backward_kernel, rows.number, 1, geometry, call, sizes)
        return True
    kernel, where = long_rows.streamed_backward_kernel, (*geometry, *call.every)
    sizes = {"BLOCK": long_rows.BACKWARD_CHUNK, "num_warps": long_rows.BACKWARD_WARPS, "IN_PLACE": in_place}
    run(kernel, rows.number, call.pointers, where, call.numbers, call.flags | sizes)
    return True


def _share(
    kernel: Any, groups: int, width: int, geometry: tuple[int, ...], call: Call, sizes: dict[str, Any]
) -> None:
    """Launch programs that share groups of rows, so many in each, and exchange sums."""
    segments, device = sizes["SEGMENTS"], call.pointers[0].device
    # A word for the sums of each segment of a row, and one more that only ReinMax needs.
    shape = (groups if segments > 1 else 0, 2, segments, width)
    words = torch.zeros(shape, dtype=torch.int64, device=device)
    # The interpreter runs one program after the other: there, all publish before any waits.
    for waits in (True,) if device.type == "cuda" else (False, True):
        flags = call.flags | sizes | {"WAITS": waits}
        pointers, where = (*call.pointers, words), (*geometry, *call.every)
        run(kernel, groups * segments, pointers, where, call.numbers, flags)
