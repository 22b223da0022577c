"""The logits of a linear layer in front of a choice, which exist for one chunk of rows at a time.

Between the passes nothing of their size is kept. The backward pass computes the logits of a chunk again, and
draws its noise again from the chunk's key. docs/vocabulary.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.gradient import jacobian_product
from gapped.kernels.sampling import launch

# Bytes of the logits of one chunk in float32; four tensors of that size exist at a time.
CHUNK_BYTES = 1 << 23
GPU_CHUNK_BYTES = 1 << 28
# With fewer rows the products wait for the weight and for the sum of its gradients: on a CPU, at 32,000 x
# 256, chunks of 64, 32 and 16 rows take 1.08, 1.35 and 1.64 times as long as chunks of 128.
FEWEST_ROWS = 64


class Whole:
    """The categories of a vocabulary that is all here: how to draw one, and what rows are reduced with."""

    first = 0
    """The number of the first category here."""

    def __init__(self, here: int) -> None:
        self.here = here
        """How many categories are here."""
        self.categories = here
        """How many there are."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over all parts of the vocabulary, which may overwrite `values`."""
        return values

    def highest(self, values: Tensor) -> Tensor:
        """The maximum over all parts of the vocabulary, which may overwrite `values`."""
        return values

    def agreed(self, keys: Tensor) -> Tensor:
        """Keys that all parts of the vocabulary share, which may overwrite `keys`."""
        return keys

    def draw(self, estimator: Any, logits: Tensor, key: Tensor) -> Tensor:
        """The category of each row, drawn with noise from `key`."""
        kernel = estimator.kernel(logits)
        launch.note_backend("torch" if kernel is None else "triton")
        if kernel is not None:
            return launch.forward(logits, key, kernel, dense=False).indices.long()
        index: Tensor = estimator.outcome(logits, seeded(key), False, dense=False).category
        return index

    def pull(self, estimator: Any, logits: Tensor, key: Tensor, index: Tensor, grad: Tensor) -> Tensor:
        """The gradient of the logits, where `grad` is that of the one-hot sample that `draw` drew."""
        kernel = estimator.kernel(logits)
        if kernel is not None:
            _, indices, stats = launch.forward(logits, key, kernel, dense=False)
            return launch.backward(logits, indices, stats, key, grad, kernel)
        points, weights, product = estimator.outcome(logits, seeded(key), True, dense=False).gradient
        return jacobian_product(grad, points, weights, logits, product)

    def place(self, index: Tensor) -> Tensor:
        """Where the categories of these rows stand here; anywhere, if they do not."""
        return (index - self.first).clamp(0, self.here - 1)

    def own(self, values: Tensor, index: Tensor) -> Tensor:
        """`values` of the rows whose category is here, 0 in other rows, NaN where a row holds a NaN."""
        index = index.view(-1, *(1 for _ in values.shape[1:]))
        is_here = (index >= self.first) & (index < self.first + self.here)
        return torch.where(index > self.categories, torch.nan, torch.where(is_here, values, 0.0))

    def log_partition(self, logits: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials of each row; -inf in a row without categories."""
        top = self.highest(logits.amax(-1))
        top = torch.where(top == -torch.inf, 0.0, top)
        return top + self.total((logits - top.unsqueeze(-1)).exp_().sum(-1)).log()


def seeded(key: Tensor) -> torch.Generator:
    """A generator whose numbers are determined by `key`."""
    return torch.Generator(key.device).manual_seed(int(key))


class Chunk(NamedTuple):
    """Some rows, and what belongs to them."""

    rows: slice
    logits: Tensor
    estimator: Any
    """The estimator with the temperatures of these rows."""
    key: Tensor
    """What their noise is drawn from."""


class Draws(NamedTuple):
    """What is known of rows once their categories are drawn: one number of each kind per row."""

    category: Tensor
    """The category: `V` in a row that has none, `V + 1` in one that holds a NaN or +inf."""
    log_sum: Tensor
    """The logarithm of the sum of exponentials that the law is normalised by."""


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


@dataclass(frozen=True)
class Head:
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
    """One for each chunk."""
    step: int
    """Rows of a chunk."""

    def chunks(self, layer: Layer) -> Iterator[Chunk]:
        """The chunks, one after the other, of a layer that `matrices` returned."""
        hidden, weight, bias, mask = layer
        for number, start in enumerate(range(0, len(hidden), self.step)):
            rows = slice(start, min(start + self.step, len(hidden)))
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            if mask is not None:
                logits.masked_fill_(~self._entries(mask, rows, 1), -torch.inf)
            levels = {name: self._entries(level, rows, 0) for name, level in self.levels.items()}
            estimator = replace(self.estimator, **levels) if levels else self.estimator
            yield Chunk(rows, logits, estimator, self.keys[number : number + 1])

    def _entries(self, values: Tensor, rows: slice, further: int) -> Tensor:
        """The entries of these rows in a tensor that broadcasts to ``(*shape, ...)``, `further` axes more."""
        values = values[(None,) * (len(self.shape) + further - values.dim())]
        every = values.expand(*self.shape, *values.shape[len(self.shape) :])
        numbers = torch.arange(rows.start, rows.stop, device=values.device)
        return every[torch.unravel_index(numbers, self.shape)] if self.shape else every.unsqueeze(0)

    def matrices(self, layer: Layer) -> Layer:
        """The layer in the dtype of the logits, with the rows on one axis."""
        hidden, weight, bias, mask = layer
        rows = hidden.to(self.dtype).reshape(-1, hidden.shape[-1])
        return Layer(rows, weight.to(self.dtype), None if bias is None else bias.to(self.dtype), mask)

    def draw(self, layer: Layer) -> tuple[Draws, Tensor]:
        """Draw a category for each row; the second result is the logarithm of its probability."""
        layer, part = self.matrices(layer), self.part
        index = torch.empty(len(layer.hidden), dtype=torch.int64, device=layer.hidden.device)
        log_prob = torch.empty_like(index, dtype=simplex.computed(layer.hidden[:0]).dtype)
        draws = Draws(index, torch.empty_like(log_prob))
        for rows, logits, estimator, key in self.chunks(layer):
            index[rows] = own = part.draw(estimator, logits, key)
            law, _ = estimator.law(simplex.computed(logits))
            draws.log_sum[rows] = part.log_partition(law)
            selected = law.gather(-1, part.place(own).unsqueeze(-1)).squeeze(-1)
            log_prob[rows] = part.total(part.own(selected, own)) - draws.log_sum[rows]
        return draws, torch.where(index == part.categories, 0.0, log_prob)

    def gradients(
        self, layer: Layer, wanted: tuple[bool, bool, bool], pull: Callable[[Chunk], Tensor]
    ) -> Gradients:
        """The gradients of the layer, where `pull` returns that of a chunk's logits.

        Sums over chunks are kept in float32 or float64.
        """
        layer, sums = self.matrices(layer), simplex.computed(layer.weight[:0, :0])
        hidden, weight = layer.hidden, layer.weight
        for_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        for_weight = sums.new_zeros(weight.shape) if wanted[1] else None
        for_bias = sums.new_zeros(len(weight)) if wanted[2] else None
        for chunk in self.chunks(layer):
            gradient = pull(chunk)
            if for_hidden is not None:
                for_hidden[chunk.rows] = self.part.total(gradient @ weight)
            if for_weight is not None:
                _add_product(for_weight, gradient.mT, hidden[chunk.rows])
            if for_bias is not None:
                for_bias += gradient.sum(0, dtype=for_bias.dtype)
        return for_hidden, for_weight, for_bias


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def rows_of_a_chunk(estimator: Any, categories: int, device: torch.device) -> int:
    """How many rows are computed at a time."""
    # Gumbel-Rao in torch has a point for each draw.
    in_torch = device.type != "cuda" or estimator.fused() is None
    samples = getattr(estimator, "samples", 1) if in_torch else 1
    most = GPU_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES
    return max(most // (4 * categories * samples), FEWEST_ROWS // samples, 1)
