"""Launching the kernels of tables: when they apply, the selected rows, and the gradient of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.checks import in_eager_mode
from gapped.kernels.runner import power, run

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Numbers of a program's block, the most of them in a row, and warps. Not yet chosen by measurement.
BLOCK = 2048
WIDEST = 512
WARPS = 4


def applies(table: Tensor, index: Tensor) -> bool:
    """Whether the kernels look up rows of `table`: if the index is as a kernel wrote it, on that device."""
    return (
        index.dtype != torch.int64
        and table.dtype in _DTYPES
        and table.get_device() == index.get_device()
        and table.numel() > 0
        and in_eager_mode()
    )


def select(table: Tensor, index: Tensor, categories: int) -> Tensor:
    """The rows of tables ``(G * K, *rest)`` that indices ``(..., G)`` select, ``(..., G, *rest)``."""
    from gapped.kernels.tables.table_kernels import table_select_kernel

    out = torch.empty((*index.shape, *table.shape[1:]), dtype=table.dtype, device=table.device)
    _run(table_select_kernel, (table.contiguous(), index, out), table, categories)
    return out


def gradient(grad: Tensor, index: Tensor, table: Tensor, categories: int) -> Tensor:
    """The gradient of such tables by that of the selected rows: sums in float32, added in any order."""
    from gapped.kernels.tables.table_kernels import table_sum_kernel

    sums = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
    _run(table_sum_kernel, (grad.contiguous(), index, sums), table, categories)
    return sums.to(table.dtype)


def _run(kernel: Any, pointers: tuple[Tensor, Tensor, Tensor], table: Tensor, categories: int) -> None:
    """Launch a kernel over all numbers of the selected rows, if there are any."""
    if rows := pointers[1].numel():
        width = table.numel() // len(table)
        part = min(power(width), WIDEST)
        height = max(BLOCK // part, 1)
        sizes = (rows, len(table) // categories, categories, width)
        flags = {"ROWS": height, "WIDTH": part, "num_warps": WARPS}
        run(kernel, -(-rows // height) * -(-width // part), pointers, sizes, (), flags)
