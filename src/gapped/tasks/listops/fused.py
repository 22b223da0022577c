"""The functions of `gapped.tasks.listops.parts` as kernels, one launch each: same names, same arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels import thin
from gapped.kernels.blocks import power
from gapped.kernels.runner import run
from gapped.tasks.listops import kernels, parts
from gapped.tasks.listops.parts import Tables

__all__ = [
    "advance",
    "form",
    "merge",
    "product",
    "pull",
    "push",
    "retreat",
    "scores",
    "select",
    "slopes",
    "totals",
]

# A block: one warp for each line, and 128 columns, four adjacent ones for each thread.
_ROWS, _COLUMNS = 4, 128
# Elements of a block where nothing but places matters.
_PLACES = 256


def product(x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool = False) -> None:
    few = x.shape[1] <= thin.MOST_ROWS and x.stride(-1) == out.stride(-1) == 1
    (thin if few else parts).product(x, weight, out, transposed=transposed)


def form(tables: Tables, start: int, count: int) -> None:
    runs, pairs, batch = tables.pair_scores.shape
    items = runs * count * batch
    pointers = (
        tables.products,
        tables.bias,
        tables.query,
        tables.states,
        tables.children,
        tables.pair_states,
        tables.pair_scores,
    )
    sizes = (items, batch, pairs, start, count)
    # A line's score is a sum over all of its columns: they belong to one program.
    _over(kernels.form_kernel, items, 1, pointers, sizes, WIDTH=tables.query.shape[-1])


def scores(tables: Tables, pairs: Tensor, layer: int) -> Tensor:
    runs, size, batch = pairs.shape
    out = tables.states.new_empty(runs, batch, size)
    pointers = (tables.pair_scores, pairs, tables.lengths, out)
    programs = -(-out.numel() // _PLACES)
    sizes = (out.numel(), batch, size, layer)
    run(kernels.scores_kernel, programs, pointers, sizes, (), {"BLOCK": _PLACES, "num_warps": 4})
    return out


def merge(
    tables: Tables, nodes: Tensor, pairs: Tensor, sample: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    runs, size, batch = pairs.shape
    width = tables.query.shape[-1]
    chosen, moved, kept = (pairs.new_empty(runs, places, batch) for places in (1, size, size - 1))
    pointers = (
        sample.contiguous(),
        nodes,
        pairs,
        tables.lengths,
        tables.pair_states,
        tables.states,
        tables.children,
        tables.merged_at,
        tables.merges,
        chosen,
        moved,
        kept,
    )
    # As large as the first layer: a kernel for each layer's size would have to be compiled for each.
    flags = {"WIDTH": width, "PLACES": power(size + 1 + layer), "COLUMNS": power(2 * width), "num_warps": 4}
    run(kernels.merge_kernel, runs * batch, pointers, (batch, size, layer), (), flags)
    return chosen, moved, kept


def slopes(tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    runs, pairs, batch = tables.pair_scores.shape
    width = tables.query.shape[-1]
    gates = tables.states.new_empty(runs, pairs, batch, 5 * width)
    cells, h = torch.empty_like(tables.pair_states), torch.empty_like(tables.pair_states)
    pointers = (
        tables.products,
        tables.bias,
        tables.query,
        tables.states,
        tables.children,
        gates,
        cells,
        h,
    )
    items = runs * pairs * batch
    _over(kernels.slopes_kernel, items, width, pointers, (items, batch, pairs), WIDTH=width)
    return gates, cells, h


def pull(tables: Tables, adjoint: Tensor, nodes: Tensor, pairs: Tensor) -> Tensor:
    runs, size, batch = pairs.shape
    out = adjoint.new_empty(runs, batch, size)
    pointers = (adjoint, tables.states, tables.pair_states, nodes, pairs, out)
    flags = {"WIDTH": tables.query.shape[-1], "ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _ROWS}
    run(kernels.pull_kernel, runs * batch, pointers, (batch, size), (), flags)
    return out


def select(tables: Tables, adjoint: Tensor, pairs: Tensor, chosen: Tensor, g_gates: Tensor) -> Tensor:
    runs, size, batch = pairs.shape
    width = tables.query.shape[-1]
    cells = adjoint.new_empty(runs, batch, 2 * width)
    pointers = (
        adjoint,
        tables.products,
        tables.bias,
        tables.states,
        tables.children,
        pairs,
        chosen,
        g_gates,
        cells,
    )
    layers = tables.merges.shape[1]
    sizes = (runs * batch, batch, size, layers)
    _over(kernels.select_kernel, runs * batch, width, pointers, sizes, WIDTH=width)
    return cells


def push(
    adjoint: Tensor,
    g_h: Tensor,
    g_cells: Tensor,
    chosen: Tensor,
    pairs: Tensor,
    delta: Tensor | None,
    score_h: Tensor,
    score_cells: Tensor,
    weights: Tensor,
) -> Tensor:
    runs, size, batch = pairs.shape
    width = g_h.shape[-1] // 2
    out = adjoint.new_empty(runs, size + 1, batch, 2 * width)
    given = weights if delta is None else delta.contiguous()
    pointers = (adjoint, g_h, g_cells, chosen, pairs, given, score_h, score_cells, weights, out)
    items = runs * (size + 1) * batch
    sizes = (items, batch, size)
    _over(kernels.push_kernel, items, width, pointers, sizes, SCORED=delta is not None, WIDTH=width)
    return out


def totals(score_gates: Tensor, weights: Tensor, merged_at: Tensor, selected: Tensor) -> Tensor:
    width = score_gates.shape[-1]
    sizes = (weights.numel(), weights.shape[2], weights.shape[1], selected.shape[1])
    pointers = (score_gates, weights, merged_at, selected)
    _over(kernels.totals_kernel, weights.numel(), width, pointers, sizes, WIDTH=width)
    return score_gates


def advance(gates: Tensor, inputs: Tensor, before: Tensor, after: Tensor) -> None:
    runs, batch, four = gates.shape
    tensors = [_in_lines(each) for each in (gates, inputs, before, after)]
    sizes = (runs * batch, batch, *(step for each in tensors for step in _steps(each)))
    _over(kernels.advance_kernel, runs * batch, four // 4, tuple(tensors), sizes, WIDTH=four // 4)


def retreat(gates: Tensor, before: Tensor, own: Tensor, grad_h: Tensor, grad_c: Tensor, out: Tensor) -> None:
    runs, batch, four = gates.shape
    tensors = [_in_lines(each) for each in (gates, before, own, out)]
    sizes = (runs * batch, batch, *(step for each in tensors for step in _steps(each)))
    pointers = (*tensors, grad_h, grad_c)
    _over(kernels.retreat_kernel, runs * batch, four // 4, pointers, sizes, WIDTH=four // 4)


def _over(
    kernel: Any, items: int, width: int, pointers: tuple[Tensor, ...], sizes: tuple[int, ...], **flags: Any
) -> None:
    """Launch a kernel over `items` lines of `width` columns."""
    programs = -(-items // _ROWS) * -(-width // _COLUMNS)
    run(
        kernel,
        programs,
        pointers,
        sizes,
        (),
        flags | {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _ROWS},
    )


def _in_lines(x: Tensor) -> Tensor:
    """A tensor ``(R, B, n)`` as it is, if it consists of lines of n elements; only a given one may not."""
    runs, rows, step = x.stride()
    return x if step == 1 and runs % x.shape[-1] == 0 and rows % x.shape[-1] == 0 else x.contiguous()


def _steps(x: Tensor) -> tuple[int, int]:
    """How many lines runs and rows are apart."""
    return x.stride(0) // x.shape[-1], x.stride(1) // x.shape[-1]
