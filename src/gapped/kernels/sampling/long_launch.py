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


def backward(rows: Rows, grads: Rows, mode: str, call: Call, *, in_place: bool) -> None:
    """Write gradients; `in_place` says that those of contiguous rows are written over the logits."""
    if rows.inner > 1:
        _backward_strips(rows, grads, mode, call)
        return
    from gapped.kernels.sampling import long_rows, split_rows

    call = call._replace(numbers=(*call.numbers, call.first))
    where = (rows.tensor.shape[-1], rows.stride, grads.stride, *call.every)
    segments, sizes = split_rows.segments_of(rows.tensor, mode)
    if segments <= split_rows.most_segments(rows.tensor.device):
        _share(split_rows.split_backward_kernel, rows.number, where, call, sizes)
        return
    sizes = {"BLOCK": long_rows.BACKWARD_CHUNK, "num_warps": long_rows.BACKWARD_WARPS, "IN_PLACE": in_place}
    kernel, flags = long_rows.streamed_backward_kernel, call.flags | sizes
    run(kernel, rows.number, call.pointers, where, call.numbers, flags)


def _backward_strips(rows: Rows, grads: Rows, mode: str, call: Call) -> None:
    """Write gradients of rows side by side."""
    from gapped.kernels.sampling.strip_tiles import tile_backward_kernel

    device, categories = rows.tensor.device, rows.tensor.shape[-1]
    programs, lag, sizes = strip_sizes.backward_sizes(
        rows.number, categories, rows.tensor.element_size(), mode
    )
    # Tiles exchange sums; a strip that is a single tile has none to exchange.
    strips = -(-rows.number // sizes["STRIP"]) if lag else 0
    shape = (strips, sizes["SEGMENTS"], sizes["SUMS"], sizes["STRIP"])
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    done = torch.zeros(strips, dtype=torch.int32, device=device)
    where = (rows.number, categories, *rows[2:], grads.stride, grads.step, lag, *call.every)
    run(tile_backward_kernel, programs, (*call.pointers, sums, done), where, call.numbers, call.flags | sizes)


def _share(kernel: Any, rows: int, where: tuple[int, ...], call: Call, sizes: dict[str, Any]) -> None:
    """Launch programs that share rows and exchange sums."""
    segments, device = sizes["SEGMENTS"], call.pointers[0].device
    # A word for the sums of each segment of a row, and one more that only ReinMax needs.
    words = torch.zeros((rows if segments > 1 else 0, 2, segments), dtype=torch.int64, device=device)
    # The interpreter runs one program after the other: there, all publish before any waits.
    for waits in (True,) if device.type == "cuda" else (False, True):
        flags = call.flags | sizes | {"WAITS": waits}
        run(kernel, rows * segments, (*call.pointers, words), where, call.numbers, flags)
