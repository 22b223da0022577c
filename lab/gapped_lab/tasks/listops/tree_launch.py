"""`Tables`, `Sweep` and the steps of the leaf LSTM with kernels: one launch for each method or function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels.runner import power, run
from gapped_lab.tasks.listops import sweep_kernels, tree_kernels
from gapped_lab.tasks.listops.sweep import Sweep
from gapped_lab.tasks.listops.tree_tables import Layer, Tables

# Lines and columns of a block.
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
        # A line's score is a sum over all of its columns: they belong to one program.
        flags = _block() if items > _FEW else {"ROWS": 1, **_whole(self.width)}
        sizes = (items, batch, pairs, start, count)
        programs = -(-items // flags["ROWS"])
        _launch(tree_kernels.form_kernel, programs, sizes, vars(self), WIDTH=self.width, **flags)

    def scores(self, layer: Layer, lengths: Tensor) -> Tensor:
        runs, size, batch = layer.pairs.shape
        out = self.states.new_empty(runs, batch, size)
        tensors = vars(self) | {"pairs": layer.pairs, "out": out, "lengths": lengths}
        programs = -(-out.numel() // _PLACES)
        sizes = (out.numel(), batch, size, layer.number)
        _launch(tree_kernels.scores_kernel, programs, sizes, tensors, BLOCK=_PLACES, num_warps=4)
        return out

    def merge(self, layer: Layer, sample: Tensor) -> Layer:
        number, nodes, pairs = layer
        runs, size, batch = pairs.shape
        following = Layer(number + 1, *(pairs.new_empty(runs, count, batch) for count in (size, size - 1)))
        tensors = vars(self) | {"sample": sample.contiguous(), "nodes": nodes, "pairs": pairs}
        tensors |= {"next_nodes": following.nodes, "next_pairs": following.pairs}
        flags = {"WIDTH": self.width, **_places(self), **_whole(2 * self.width)}
        _launch(tree_kernels.merge_kernel, runs * batch, (batch, size, number), tensors, **flags)
        return following

    def slopes(self) -> tuple[Tensor, Tensor, Tensor]:
        runs, pairs, batch = self.pair_scores.shape
        gates = self.states.new_empty(runs, pairs, batch, 5 * self.width)
        cells, h = torch.empty_like(self.pair_states), torch.empty_like(self.pair_states)
        tensors = vars(self) | {"gates": gates, "cells": cells, "h": h}
        _over(tree_kernels.slopes_kernel, runs * pairs * batch, self.width, (batch, pairs), tensors)
        return gates, cells, h


class FusedSweep(Sweep):
    """The backward pass with kernels."""

    def relate(self) -> None:
        rows, flags = 4 * self.tables.merges.numel(), {"COLUMNS": _COLUMNS, "num_warps": 1}
        _launch(sweep_kernels.relate_kernel, rows, (), self._tensors(), WIDTH=self.tables.width, **flags)

    def pull(self, layer: Layer) -> Tensor:
        runs, size, batch = layer.pairs.shape
        out = self.adjoints.new_empty(runs, batch, size)
        self._by_row(sweep_kernels.pull_kernel, layer, self._tensors(pairs=layer.pairs, out=out))
        return out

    def select(self, layer: Layer, g_gates: Tensor) -> Tensor:
        runs, _, batch = layer.pairs.shape
        width = self.tables.width
        cells = g_gates.new_empty(runs, batch, 2 * width)
        tensors = self._tensors(pairs=layer.pairs, gates=g_gates, cells=cells)
        _over(tree_kernels.select_kernel, runs * batch, width, self._sizes(layer), tensors)
        return cells

    def push(self, layer: Layer, g_h: Tensor, g_cells: Tensor, delta: Tensor | None) -> None:
        tensors = self._tensors(
            nodes=layer.nodes,
            pairs=layer.pairs,
            g_h=g_h,
            g_cells=g_cells,
            delta=self.weights if delta is None else delta.contiguous(),
        )
        self._by_row(sweep_kernels.push_kernel, layer, tensors, SCORED=delta is not None)

    def collect(self) -> Tensor:
        runs, _, batch, double = self.adjoints.shape
        count = self.tables.leaf_count
        out = self.adjoints.new_empty(runs, count, batch, double)
        rows, tensors = runs * count * batch, self._tensors(out=out)
        flags = {"WIDTH": double // 2, "COLUMNS": _COLUMNS, "num_warps": 1}
        _launch(sweep_kernels.collect_kernel, rows, (batch, count), tensors, **flags)
        return out

    def totals(self, score_gates: Tensor, selected: Tensor) -> Tensor:
        _, pairs, batch, width = score_gates.shape
        tensors = self._tensors(gates=score_gates, selected=selected)
        sizes = (batch, pairs, selected.shape[1])
        _over(tree_kernels.totals_kernel, self.weights.numel(), width, sizes, tensors)
        return score_gates

    def _tensors(self, **others: Tensor) -> dict[str, Tensor]:
        return vars(self.tables) | vars(self) | others

    def _sizes(self, layer: Layer) -> tuple[int, ...]:
        _, size, batch = layer.pairs.shape
        return batch, size, self.tables.merges.shape[1], layer.number

    def _by_row(self, kernel: Any, layer: Layer, tensors: dict[str, Tensor], **flags: Any) -> None:
        """Launch a kernel with a program for each row of a layer."""
        runs, _, batch = layer.pairs.shape
        width = self.tables.width
        flags |= {"WIDTH": width, **_places(self.tables), **_whole(width)}
        _launch(kernel, runs * batch, self._sizes(layer), tensors, **flags)


def advance(gates: Tensor, inputs: Tensor, before: Tensor, after: Tensor) -> None:
    _step(tree_kernels.advance_kernel, gates=gates, inputs=inputs, before=before, after=after)


def retreat(gates: Tensor, before: Tensor, own: Tensor, grad_h: Tensor, grad_c: Tensor, out: Tensor) -> None:
    contiguous = {"grad_h": grad_h, "grad_c": grad_c}
    _step(tree_kernels.retreat_kernel, contiguous, gates=gates, before=before, own=own, out=out)


def _step(kernel: Any, contiguous: dict[str, Tensor] | None = None, /, **tensors: Tensor) -> None:
    """Launch a kernel of the leaf LSTM, which is told how the tensors that are not `contiguous` lie."""
    runs, batch, four = tensors["gates"].shape
    sizes = [batch]
    for name, x in tensors.items():
        length = x.shape[-1]
        if x.stride(2) != 1 or x.stride(0) % length or x.stride(1) % length:
            # It does not consist of lines, as only a gradient from outside may.
            x = tensors[name] = x.contiguous()
        sizes += [x.stride(0) // length, x.stride(1) // length]
    _over(kernel, runs * batch, four // 4, tuple(sizes), tensors | (contiguous or {}))


def _over(kernel: Any, items: int, width: int, sizes: tuple[int, ...], tensors: dict[str, Tensor]) -> None:
    """Launch a kernel over `items` lines of `width` columns; its first size is their number."""
    programs = -(-items // _ROWS) * -(-width // _COLUMNS)
    _launch(kernel, programs, (items, *sizes), tensors, WIDTH=width, **_block())


def _launch(
    kernel: Any, programs: int, sizes: tuple[int, ...], tensors: dict[str, Any], **flags: Any
) -> None:
    """Launch a kernel, whose argument ``p_name`` is the tensor `name`."""
    pointers = tuple(tensors[name[2:]] for name in kernel.arg_names if name.startswith("p_"))
    run(kernel, programs, pointers, sizes, (), flags)


def _block() -> dict[str, int]:
    """One warp for each line, and four adjacent columns for each thread."""
    return {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _ROWS}


def _whole(width: int) -> dict[str, int]:
    """A row of `width` columns at once, for kernels with so few rows that they wait for memory."""
    return {"COLUMNS": power(width), "num_warps": 4}


def _places(tables: Tables) -> dict[str, int]:
    """Places for the first layer, in every layer: each size would have to be compiled for."""
    return {"PLACES": power(tables.leaf_count)}
