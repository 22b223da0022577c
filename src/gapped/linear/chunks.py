"""The logits of a linear layer in front of a choice, which exist for one chunk of rows at a time.

Between the passes nothing of their size is kept. The backward pass computes the logits of a chunk again, and
draws its noise again from a key. docs/vocabulary.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.linear import chunk_sizes
from gapped.linear.chunk_sizes import Pass, Spans, of_rows, slices
from gapped.linear.parts import Chunk, Draws, Whole
from gapped.linear.row_entries import row_entries


class Layer(NamedTuple):
    """The tensors that logits are computed from."""

    hidden: Tensor
    """``(*rows, d)``"""
    weight: Tensor
    """``(V, d)``"""
    bias: Tensor | None
    """``(V)``"""
    mask: Tensor | None
    """The categories that exist, in a shape that broadcasts to ``(*rows, V)``."""


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Those of hidden states, weight and bias."""


class Head(NamedTuple):
    """How the logits of a layer are computed, and categories drawn from them."""

    part: Whole
    estimator: Any
    """A `gapped.Pathwise`."""
    levels: Mapping[str, Tensor]
    """Its temperatures and gaps that are tensors, in shapes that broadcast to `shape`."""
    shape: torch.Size
    """That of the rows."""
    dtype: torch.dtype
    """That of the logits."""
    keys: Tensor
    """One for each chunk of `step` rows."""
    step: int
    """How many rows share a key."""
    streams: bool
    """Whether the kernels of long rows compute. Then all rows share one key, however they are divided."""
    keeps_law: bool
    """Whether the law of the categories is kept; else it is computed again where it is wanted."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the logits of a row."""
        return self.part.here * self.dtype.itemsize

    def chunk(self, rows: slice, logits: Tensor) -> Chunk:
        """A chunk whose logits are known."""
        levels = {name: row_entries(level, self.shape, rows) for name, level in self.levels.items()}
        estimator = replace(self.estimator, **levels) if levels else self.estimator
        number, first = divmod(rows.start, self.step)
        return Chunk(rows, logits, estimator, of_rows(self.keys, slice(number, number + 1)), first)

    def write_logits(self, layer: Layer, rows: slice, out: Tensor) -> Tensor:
        """Write the logits of some rows of a layer that `matrices` returned to `out`."""
        hidden, weight, bias, mask = layer
        if bias is None:
            torch.mm(of_rows(hidden, rows), weight.mT, out=out)
        else:
            torch.addmm(bias, of_rows(hidden, rows), weight.mT, out=out)
        if mask is not None:
            self._write_mask(mask, rows, out)
        return out

    def _write_mask(self, mask: Tensor, rows: slice, out: Tensor) -> None:
        """Write -inf where a category does not exist, without a mask of the size of the logits."""
        categories, nothing = out.shape[-1], out.new_full((), -torch.inf)
        if mask.shape[-1:] == (categories,) and mask.numel() == categories:
            torch.where(mask.reshape(-1), out, nothing, out=out)
            return
        for block in slices(len(out), max(chunk_sizes.MASK_BYTES // categories, 1)):
            own = out[block]
            own_rows = slice(rows.start + block.start, rows.start + block.stop)
            exists = row_entries(mask, self.shape, own_rows, 1)
            torch.where(exists, own, nothing, out=own)

    def matrices(self, layer: Layer) -> Layer:
        """The layer in the dtype of the logits, with the rows on one axis."""
        hidden, weight, bias, mask = layer
        rows = _in_dtype(hidden, self.dtype)
        rows = rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1])
        bias = None if bias is None else _in_dtype(bias, self.dtype)
        return Layer(rows, _in_dtype(weight, self.dtype), bias, mask)

    def draw(self, layer: Layer) -> Draws:
        """Draw a category for each row."""
        layer = self.matrices(layer)
        hidden, rows = layer.hidden, layer.hidden.shape[0]
        law = self._empty_law(hidden) if self.keeps_law else None
        stats = self._empty_law(hidden) if self.streams else None
        draws = Draws(hidden.new_empty(rows, dtype=torch.int64), law, stats)
        for chunk in self._chunks(layer):
            self.part.draw(chunk, draws.of(chunk.rows))
        return draws

    def law(self, layer: Layer, category: Tensor) -> Tensor:
        """The law of categories that were drawn and did not keep it: see `Draws`."""
        layer = self.matrices(layer)
        law = self._empty_law(layer.hidden)
        for chunk in self._chunks(layer):
            self.part.write_law(chunk, of_rows(category, chunk.rows), of_rows(law, chunk.rows))
        return law

    def _empty_law(self, hidden: Tensor) -> Tensor:
        """Room for two numbers per row."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return hidden.new_empty(hidden.shape[0], 2, dtype=dtype)

    def _chunks(self, layer: Layer) -> Iterator[Chunk]:
        """All rows of a layer that `matrices` returned; the next chunk overwrites the logits of the last."""
        rows, step = layer.hidden.shape[0], self.step
        if self.streams:
            step = chunk_sizes.equal_rows(rows, chunk_sizes.MEMORY // self.row_bytes)
        logits = layer.hidden.new_empty(min(step, rows), self.part.here)
        for own in slices(rows, step):
            room = of_rows(logits, slice(0, own.stop - own.start))
            yield self.chunk(own, self.write_logits(layer, own, room))

    def spans(self, weight: Tensor, spare: int, result: int, is_dense: bool) -> Spans:
        """How many rows a backward pass holds: see `chunk_sizes.Pass`."""
        is_rounded = _sum_dtype(weight).itemsize == 2
        this = Pass(self.shape.numel(), self.row_bytes, spare, result, is_dense, is_rounded)
        if self.streams:
            return chunk_sizes.spans_of_kernels(this)
        return chunk_sizes.spans_of_chunks(this, self.step)

    def gradients(
        self, layer: Layer, wanted: tuple[bool, ...], spans: Spans, spare: int, pull: Callable[[Chunk], None]
    ) -> Gradients:
        """The gradients of the layer, where `pull` writes that of a chunk's logits in their place.

        Logits are in a buffer of at least `spare` bytes, which another gradient may have when this returns.
        """
        dtype = _sum_dtype(layer.weight)
        layer = self.matrices(layer)
        hidden, weight = layer.hidden, layer.weight
        held = min(spans.span, len(hidden))
        buffer = hidden.new_empty(max(spare, held * self.row_bytes), dtype=torch.uint8)
        logits = buffer[: held * self.row_bytes].view(self.dtype).view(held, self.part.here)
        for_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        for_weight = _sum_like(weight, dtype, hidden) if wanted[1] else None
        for_bias = simplex.computed(weight[:0]).new_zeros(len(weight)) if wanted[2] else None
        for rows in slices(len(hidden), spans.span):
            own = self.write_logits(layer, rows, logits[: rows.stop - rows.start])
            for part in slices(len(own), spans.part):
                pull(self.chunk(slice(rows.start + part.start, rows.start + part.stop), own[part]))
            if for_hidden is not None:
                product = torch.mm(own, weight, out=for_hidden[rows])
                total = self.part.total(product)
                if total is not product:
                    product.copy_(total)
            if for_weight is not None:
                _add_product(for_weight, own.mT, hidden[rows], rows.start == 0)
            if for_bias is not None:
                for_bias += own.sum(0, dtype=for_bias.dtype)
        return for_hidden, for_weight, for_bias


def _in_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    # Not `to` alone: it takes the host as long to find that there is nothing to convert as to make a view.
    return values if values.dtype == dtype else values.to(dtype)


def _sum_dtype(weight: Tensor) -> torch.dtype:
    """The dtype that the weight's gradient is added up in: on a GPU its own, to need no copy in float32."""
    return weight.dtype if weight.is_cuda else simplex.computed(weight[:0]).dtype


def _sum_like(weight: Tensor, dtype: torch.dtype, hidden: Tensor) -> Tensor:
    """Room for a sum over rows, which is zero if there are none."""
    total = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    return total if len(hidden) else total.zero_()


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    if total.dtype != left.dtype:
        product = left @ right
        total = total.copy_(product) if is_first else total.add_(product)
    elif is_first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)
