"""The functions of `gapped.lab.tasks.listops.parts` as kernels: same names, same arguments, one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels.runner import power, run
from gapped.lab.tasks.listops import kernels
from gapped.lab.tasks.listops.leaf_kernels import advance_kernel, retreat_kernel
from gapped.lab.tasks.listops.parts import product as product
from gapped.lab.tasks.listops.sweep import Sweep
from gapped.lab.tasks.listops.sweep_kernels import collect_kernel, pull_kernel, push_kernel, relate_kernel
from gapped.lab.tasks.listops.tables import Tables

# A block: one warp for each line, and 128 columns, four adjacent ones for each thread.
_ROWS, _COLUMNS = 4, 128
# Up to so many lines, one of them for each program: nothing is left to wait for but the memory.
_FEW = 8192
# Elements of a block where nothing but places matters.
_PLACES = 256


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
    width = tables.query.shape[-1]
    if items > _FEW:
        _over(kernels.form_kernel, items, 1, pointers, sizes, WIDTH=width)
    else:
        _by_row(kernels.form_kernel, items, pointers, sizes, WIDTH=width, ROWS=1, **_whole(width))


def scores(tables: Tables, pairs: Tensor, layer: int) -> Tensor:
    runs, size, batch = pairs.shape
    out = tables.states.new_empty(runs, batch, size)
    pointers = (tables.pair_scores, pairs, tables.lengths, out)
    programs = -(-out.numel() // _PLACES)
    sizes = (out.numel(), batch, size, layer)
    run(kernels.scores_kernel, programs, pointers, sizes, (), {"BLOCK": _PLACES, "num_warps": 4})
    return out


def merge(tables: Tables, nodes: Tensor, pairs: Tensor, sample: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    runs, size, batch = pairs.shape
    width = tables.query.shape[-1]
    moved, kept = (pairs.new_empty(runs, places, batch) for places in (size, size - 1))
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
        tables.around,
        moved,
        kept,
    )
    flags = {"WIDTH": width, **_places(tables), "COLUMNS": power(2 * width), "num_warps": 4}
    run(kernels.merge_kernel, runs * batch, pointers, (batch, size, layer), (), flags)
    return moved, kept


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


def relate(tables: Tables, sweep: Sweep) -> None:
    pointers = (
        tables.around,
        tables.states,
        tables.pair_states,
        sweep.score_h,
        sweep.score_cells,
        sweep.own,
        sweep.cross,
    )
    _by_row(relate_kernel, 4 * tables.merges.numel(), pointers, (), WIDTH=tables.query.shape[-1])


def pull(tables: Tables, sweep: Sweep, pairs: Tensor, layer: int) -> Tensor:
    runs, size, batch = pairs.shape
    out = tables.states.new_empty(runs, batch, size)
    pointers = (
        tables.around,
        tables.states,
        tables.pair_states,
        pairs,
        tables.merges,
        sweep.score_h,
        sweep.score_cells,
        sweep.adjoints,
        sweep.weights,
        sweep.gains,
        out,
    )
    sizes = (batch, size, tables.merges.shape[1], layer)
    width = tables.query.shape[-1]
    flags = {"WIDTH": width, **_places(tables), **_whole(width)}
    _by_row(pull_kernel, runs * batch, pointers, sizes, **flags)
    return out


def select(tables: Tables, sweep: Sweep, pairs: Tensor, layer: int, g_gates: Tensor) -> Tensor:
    runs, size, batch = pairs.shape
    width = tables.query.shape[-1]
    cells = g_gates.new_empty(runs, batch, 2 * width)
    pointers = (
        sweep.adjoints,
        tables.products,
        tables.bias,
        tables.states,
        tables.children,
        pairs,
        tables.merges,
        g_gates,
        cells,
    )
    sizes = (runs * batch, batch, size, tables.merges.shape[1], layer)
    _over(kernels.select_kernel, runs * batch, width, pointers, sizes, WIDTH=width)
    return cells


def push(
    tables: Tables,
    sweep: Sweep,
    nodes: Tensor,
    pairs: Tensor,
    layer: int,
    g_h: Tensor,
    g_cells: Tensor,
    delta: Tensor | None,
) -> None:
    runs, size, batch = pairs.shape
    pointers = (
        tables.around,
        tables.states,
        tables.pair_states,
        tables.lengths,
        nodes,
        pairs,
        tables.merges,
        g_h,
        g_cells,
        sweep.weights if delta is None else delta.contiguous(),
        sweep.adjoints,
        sweep.weights,
        sweep.gains,
        sweep.own,
        sweep.cross,
        sweep.links,
    )
    sizes = (batch, size, tables.merges.shape[1], layer)
    width = tables.query.shape[-1]
    flags = {"SCORED": delta is not None, "WIDTH": width, **_places(tables), **_whole(width)}
    _by_row(push_kernel, runs * batch, pointers, sizes, **flags)


def collect(sweep: Sweep, count: int) -> Tensor:
    runs, _, batch, double = sweep.adjoints.shape
    out = sweep.adjoints.new_empty(runs, count, batch, double)
    pointers = (sweep.adjoints, sweep.weights, sweep.score_h, sweep.score_cells, out)
    _by_row(collect_kernel, runs * count * batch, pointers, (batch, count), WIDTH=double // 2)
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
    _over(advance_kernel, runs * batch, four // 4, tuple(tensors), sizes, WIDTH=four // 4)


def retreat(gates: Tensor, before: Tensor, own: Tensor, grad_h: Tensor, grad_c: Tensor, out: Tensor) -> None:
    runs, batch, four = gates.shape
    tensors = [_in_lines(each) for each in (gates, before, own, out)]
    sizes = (runs * batch, batch, *(step for each in tensors for step in _steps(each)))
    pointers = (*tensors, grad_h, grad_c)
    _over(retreat_kernel, runs * batch, four // 4, pointers, sizes, WIDTH=four // 4)


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


def _by_row(
    kernel: Any, rows: int, pointers: tuple[Tensor, ...], sizes: tuple[int, ...], **flags: Any
) -> None:
    """Launch a kernel with a program for each row; of one warp, unless `flags` know better."""
    run(kernel, rows, pointers, sizes, (), {"COLUMNS": _COLUMNS, "num_warps": 1} | flags)


def _whole(width: int) -> dict[str, int]:
    """A row of `width` columns at once, for kernels with so few rows that they wait for memory."""
    return {"COLUMNS": power(width), "num_warps": 4}


def _places(tables: Tables) -> dict[str, int]:
    """Places for the first layer, in every layer: each size would have to be compiled for."""
    return {"PLACES": power(tables.merges.shape[1] + 1)}


def _in_lines(x: Tensor) -> Tensor:
    """A tensor ``(R, B, n)`` as it is, if it consists of lines of n elements; only a given one may not."""
    runs, rows, step = x.stride()
    return x if step == 1 and runs % x.shape[-1] == 0 and rows % x.shape[-1] == 0 else x.contiguous()


def _steps(x: Tensor) -> tuple[int, int]:
    """How many lines runs and rows are apart."""
    return x.stride(0) // x.shape[-1], x.stride(1) // x.shape[-1]
