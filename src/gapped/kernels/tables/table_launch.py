"""Launching the kernels of tables: when they apply, the selected rows, and the gradient of the table."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gapped.checks import in_eager_mode
from gapped.kernels.runner import Launch, power

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


def select(table: Tensor, index: Tensor, categories: int, is_grouped: bool) -> Tensor:
    """The rows of a table that indices select.

    A table ``(K, *rest)`` and indices ``(*rows)`` give ``(*rows, *rest)``; where there is one for each group,
    ``(G, K, *rest)`` and ``(..., G)`` give ``(..., G, *rest)``.
    """
    out = table.new_empty((*index.shape, *table.shape[1 + is_grouped :]))
    _run("select", (table.contiguous(), index, out), table, categories, is_grouped)
    return out


def gradient(grad: Tensor, index: Tensor, table: Tensor, categories: int, is_grouped: bool) -> Tensor:
    """The gradient of such a table by that of the selected rows: sums in float32, added in any order."""
    sums = torch.zeros_like(table, dtype=torch.float32, memory_format=torch.contiguous_format)
    _run("sum", (grad.contiguous(), index, sums), table, categories, is_grouped)
    return sums.to(table.dtype)


def _run(
    what: str, pointers: tuple[Tensor, Tensor, Tensor], table: Tensor, categories: int, is_grouped: bool
) -> None:
    """Launch a kernel over all numbers of the selected rows, if there are any."""
    if rows := pointers[1].numel():
        groups = table.shape[0] if is_grouped else 1
        _launch(what, rows, groups, categories, table.numel(), BLOCK, WIDEST)(pointers, ())


# Launches are kept: working out how to launch takes the host longer than a small kernel runs.
@lru_cache(maxsize=1024)
def _launch(
    what: str, rows: int, groups: int, categories: int, numbers: int, block: int, widest: int
) -> Launch:
    """The launch of a kernel for tables of so many numbers in all."""
    from gapped.kernels.tables.table_kernels import table_select_kernel, table_sum_kernel

    width = numbers // (groups * categories)
    part = min(power(width), widest)
    height = max(block // part, 1)
    kernel = table_select_kernel if what == "select" else table_sum_kernel
    flags = {"ROWS": height, "WIDTH": part, "num_warps": WARPS}
    programs = -(-rows // height) * -(-width // part)
    return Launch(kernel, programs, (rows, groups, categories, width), flags)
