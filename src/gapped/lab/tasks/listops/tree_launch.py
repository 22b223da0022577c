"""`Tables`, `Sweep` and the steps of the leaf LSTM with kernels: one launch for each method or function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels.runner import power, run
from gapped.lab.tasks.listops import sweep_kernels, tree_kernels
from gapped.lab.tasks.listops.sweep import Sweep
from gapped.lab.tasks.listops.tree_tables import Layer, Tables

# A block: one warp for each line, and 128 columns, four adjacent ones for each thread.
_ROWS, _COLUMNS = 4, 128
# Up to so many lines, one of them for each program: nothing is left to wait for but the memory.
_FEW = 8192
# Elements of a block where nothing but places matters.
_PLACES = 256


class FusedTables(Tables):
    """The forward pass with kernels."""

    def form(self, start: int, count: int) -> None:
        runs, pairs, batch = self.pair_scores.shape
        items = runs * count * batch
        tensors = _pointers(tree_kernels.form_kernel, vars(self))
        sizes = (items, batch, pairs, start, count)
        # A line's score is a sum over all of its columns: they belong to one program.
        if items > _FEW:
            _over(tree_kernels.form_kernel, items, 1, tensors, sizes, WIDTH=self.width)
        else:
            flags = {"WIDTH": self.width, "ROWS": 1, **_whole(self.width)}
            _by_row(tree_kernels.form_kernel, items, tensors, sizes, **flags)

    def scores(self, layer: Layer) -> Tensor:
        runs, size, batch = layer.pairs.shape
        out = self.states.new_empty(runs, batch, size)
        tensors = _pointers(tree_kernels.scores_kernel, vars(self), pairs=layer.pairs, out=out)
        programs = -(-out.numel() // _PLACES)
        sizes = (out.numel(), batch, size, layer.number)
        run(tree_kernels.scores_kernel, programs, tensors, sizes, (), {"BLOCK": _PLACES, "num_warps": 4})
        return out

    def merge(self, layer: Layer, sample: Tensor) -> Layer:
        number, nodes, pairs = layer
        runs, size, batch = pairs.shape
        following = Layer(number + 1, *(pairs.new_empty(runs, count, batch) for count in (size, size - 1)))
        tensors = _pointers(
            tree_kernels.merge_kernel,
            vars(self),
            sample=sample.contiguous(),
            nodes=nodes,
            pairs=pairs,
            next_nodes=following.nodes,
            next_pairs=following.pairs,
        )
        columns = {"COLUMNS": power(2 * self.width), "num_warps": 4}
        flags = {"WIDTH": self.width, **_places(self), **columns}
        run(tree_kernels.merge_kernel, runs * batch, tensors, (batch, size, number), (), flags)
        return following

    def slopes(self) -> tuple[Tensor, Tensor, Tensor]:
        runs, pairs, batch = self.pair_scores.shape
        gates = self.states.new_empty(runs, pairs, batch, 5 * self.width)
        cells, h = torch.empty_like(self.pair_states), torch.empty_like(self.pair_states)
        tensors = _pointers(tree_kernels.slopes_kernel, vars(self), gates=gates, cells=cells, h=h)
        items = runs * pairs * batch
        sizes = (items, batch, pairs)
        _over(tree_kernels.slopes_kernel, items, self.width, tensors, sizes, WIDTH=self.width)
        return gates, cells, h


class FusedSweep(Sweep):
    """The backward pass with kernels."""

    def relate(self) -> None:
        tensors = self._pointers(sweep_kernels.relate_kernel)
        rows = 4 * self.tables.merges.numel()
        _by_row(sweep_kernels.relate_kernel, rows, tensors, (), WIDTH=self.tables.width)

    def pull(self, layer: Layer) -> Tensor:
        runs, size, batch = layer.pairs.shape
        out = self.adjoints.new_empty(runs, batch, size)
        tensors = self._pointers(sweep_kernels.pull_kernel, pairs=layer.pairs, out=out)
        _by_row(sweep_kernels.pull_kernel, runs * batch, tensors, self._sizes(layer), **self._flags())
        return out

    def select(self, layer: Layer, g_gates: Tensor) -> Tensor:
        runs, _, batch = layer.pairs.shape
        width = self.tables.width
        cells = g_gates.new_empty(runs, batch, 2 * width)
        kernel = tree_kernels.select_kernel
        tensors = self._pointers(kernel, pairs=layer.pairs, gates=g_gates, cells=cells)
        _over(kernel, runs * batch, width, tensors, (runs * batch, *self._sizes(layer)), WIDTH=width)
        return cells

    def push(self, layer: Layer, g_h: Tensor, g_cells: Tensor, delta: Tensor | None) -> None:
        runs, _, batch = layer.pairs.shape
        tensors = self._pointers(
            sweep_kernels.push_kernel,
            nodes=layer.nodes,
            pairs=layer.pairs,
            g_h=g_h,
            g_cells=g_cells,
            delta=self.weights if delta is None else delta.contiguous(),
        )
        flags = {"SCORED": delta is not None, **self._flags()}
        _by_row(sweep_kernels.push_kernel, runs * batch, tensors, self._sizes(layer), **flags)

    def collect(self) -> Tensor:
        runs, _, batch, double = self.adjoints.shape
        count = self.tables.leaf_count
        out = self.adjoints.new_empty(runs, count, batch, double)
        tensors = self._pointers(sweep_kernels.collect_kernel, out=out)
        rows = runs * count * batch
        _by_row(sweep_kernels.collect_kernel, rows, tensors, (batch, count), WIDTH=double // 2)
        return out

    def totals(self, score_gates: Tensor, selected: Tensor) -> Tensor:
        _, pairs, batch, width = score_gates.shape
        items = self.weights.numel()
        tensors = self._pointers(tree_kernels.totals_kernel, gates=score_gates, selected=selected)
        sizes = (items, batch, pairs, selected.shape[1])
        _over(tree_kernels.totals_kernel, items, width, tensors, sizes, WIDTH=width)
        return score_gates

    def _pointers(self, kernel: Any, **tensors: Tensor) -> tuple[Tensor, ...]:
        return _pointers(kernel, vars(self.tables), **vars(self), **tensors)

    def _sizes(self, layer: Layer) -> tuple[int, ...]:
        _, size, batch = layer.pairs.shape
        return batch, size, self.tables.merges.shape[1], layer.number

    def _flags(self) -> dict[str, int]:
        width = self.tables.width
        return {"WIDTH": width, **_places(self.tables), **_whole(width)}


def advance(gates: Tensor, inputs: Tensor, before: Tensor, after: Tensor) -> None:
    _step(tree_kernels.advance_kernel, gates, inputs, before, after)


def retreat(gates: Tensor, before: Tensor, own: Tensor, grad_h: Tensor, grad_c: Tensor, out: Tensor) -> None:
    _step(tree_kernels.retreat_kernel, gates, before, own, out, contiguous=(grad_h, grad_c))


def _step(kernel: Any, gates: Tensor, *others: Tensor, contiguous: tuple[Tensor, ...] = ()) -> None:
    """Launch a kernel of the leaf LSTM, which is told how the tensors that are not `contiguous` lie."""
    runs, batch, four = gates.shape
    tensors = [_in_lines(each) for each in (gates, *others)]
    sizes = (runs * batch, batch, *(stride for each in tensors for stride in _line_strides(each)))
    _over(kernel, runs * batch, four // 4, (*tensors, *contiguous), sizes, WIDTH=four // 4)


def _pointers(kernel: Any, tables: dict[str, Tensor], /, **tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors that the kernel's arguments ``p_name`` are named after, by name."""
    names = (name[2:] for name in kernel.arg_names if name.startswith("p_"))
    return tuple(tensors[name] if name in tensors else tables[name] for name in names)


def _over(
    kernel: Any, items: int, width: int, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], **flags: Any
) -> None:
    """Launch a kernel over `items` lines of `width` columns."""
    programs = -(-items // _ROWS) * -(-width // _COLUMNS)
    flags |= {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _ROWS}
    run(kernel, programs, tensors, sizes, (), flags)


def _by_row(
    kernel: Any, rows: int, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], **flags: Any
) -> None:
    """Launch a kernel with a program for each row; of one warp, unless `flags` say otherwise."""
    run(kernel, rows, tensors, sizes, (), {"COLUMNS": _COLUMNS, "num_warps": 1} | flags)


def _whole(width: int) -> dict[str, int]:
    """A row of `width` columns at once, for kernels with so few rows that they wait for memory."""
    return {"COLUMNS": power(width), "num_warps": 4}


def _places(tables: Tables) -> dict[str, int]:
    """Places for the first layer, in every layer: each size would have to be compiled for."""
    return {"PLACES": power(tables.leaf_count)}


def _in_lines(x: Tensor) -> Tensor:
    """A tensor ``(R, B, n)`` as it is, if it consists of lines of n elements; otherwise a contiguous copy.

    Only gradients that come from outside may need the copy.
    """
    runs, rows, step = x.stride()
    return x if step == 1 and runs % x.shape[-1] == 0 and rows % x.shape[-1] == 0 else x.contiguous()


def _line_strides(x: Tensor) -> tuple[int, int]:
    """How many lines runs and rows are apart."""
    return x.stride(0) // x.shape[-1], x.stride(1) // x.shape[-1]
