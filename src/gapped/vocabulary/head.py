"""The logits of a linear layer in front of a choice, which exist for one chunk of rows at a time.

Between the passes nothing of their size is kept. The backward pass computes the logits of a chunk again, and
draws its noise again from a key. docs/vocabulary.md has the derivation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import without_autocast
from gapped.gradient import first_order, jacobian_product
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Pathwise
from gapped.simplex import row_entries, slices

# Bytes of the logits of one chunk in float32, where torch computes; four such tensors exist at a time.
CHUNK_BYTES = 1 << 23
GPU_CHUNK_BYTES = 1 << 25
# With fewer rows the products wait for the weight and for the sum of its gradients: on a CPU, at 32,000 x
# 256, chunks of 64, 32 and 16 rows take 1.08, 1.35 and 1.64 times as long as chunks of 128.
FEWEST_ROWS = 64
# Where kernels compute: bytes beyond the gradients, the result of `select` included, and what numbers per row
# and kernels need of them.
MEMORY, MARGIN = 1 << 28, 1 << 22
# Bytes of a mask that is broadcast over some of the rows, or not contiguous, as far as it exists at a time.
MASK_BYTES = 1 << 22
# Rows of a product come in multiples of this, as its tiles do.
TILE = 128
# On a GPU a half-precision gradient of the weight is rounded after each span of rows: no more than so often.
MOST_ROUNDINGS = 32
# Bytes of the float32 rows that are added up at a time.
SUM_BYTES = 1 << 25

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients of hidden states, weight and bias."""


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


class Chunk(NamedTuple):
    """Some rows, and what belongs to them."""

    rows: slice
    logits: Tensor
    estimator: Pathwise
    """The estimator with the temperatures of these rows."""
    key: Tensor
    """The seed of their noise."""
    first: int
    """The number of the first row among those that share the key."""


class Draws(NamedTuple):
    """The drawn categories of rows, and the few numbers per row that the backward pass keeps."""

    category: Tensor
    """The category: `V` in a row that has none, `V + 1` in one that holds a NaN or +inf."""
    stats: Tensor | None
    """Numbers that the kernels of long rows keep, ``(rows, 2)``; None where they do not draw."""
    law: Tensor | None
    """The logarithms of the category's probability, and of the sum of exponentials that the law is normalised
    by, ``(rows, 2)``; None until `log_prob` is read."""

    def of(self, rows: slice) -> Draws:
        """The draws of some rows."""
        return Draws(*(None if each is None else of_rows(each, rows) for each in self))  # type: ignore[arg-type]


class Vocabulary:
    """The categories of a layer, all of them here: how to draw one, and how to reduce rows over them.

    `gapped.vocabulary.sharded.Shard` is a part whose other categories are on other ranks.
    """

    first = 0
    """The number of the first category here."""

    def __init__(self, here: int) -> None:
        self.here = here
        """Number of categories here."""
        self.categories = here
        """Size of the whole vocabulary."""
        self.largest = here
        """Size of the largest part. Ranks derive the chunk size from it, so that all use the same."""

    def total(self, values: Tensor) -> Tensor:
        """The sum over all parts of the vocabulary, which may overwrite `values`."""
        return values

    def highest(self, values: Tensor) -> Tensor:
        """The maximum over all parts of the vocabulary, which may overwrite `values`."""
        return values

    def share(self, keys: Tensor) -> Tensor:
        """The keys of the first part, which all parts use; this may overwrite `keys`."""
        return keys

    def kernel(self, estimator: Pathwise, logits: Tensor) -> Fused | None:
        """The arguments of the kernels if they compute these rows, else None."""
        return estimator.kernel(logits)

    def draw(self, chunk: Chunk, draws: Draws) -> None:
        """Draw the categories of a chunk, and write them to `draws` with the numbers that are kept."""
        kernel = self.kernel(chunk.estimator, chunk.logits)
        if kernel is None:
            draws.category.copy_(self.index(chunk.estimator, chunk.logits, chunk.key))
        else:
            from gapped.kernels.sampling import launch

            if draws.stats is not None:
                to = launch.Streamed(*draws)  # type: ignore[arg-type]
                launch.stream(chunk.logits, chunk.key, kernel, to, first=chunk.first)
                return
            launch.forward(chunk.logits, chunk.key, kernel, dense=False, indices=draws.category)
        if draws.law is not None:
            self.write_law(chunk, draws)

    def write_law(self, chunk: Chunk, draws: Draws) -> None:
        """Write the law of categories that are known, drawn from this chunk or not: see `Draws`."""
        index, to, kernel = draws.category, draws.law, self.kernel(chunk.estimator, chunk.logits)
        assert to is not None
        if kernel is not None and draws.stats is not None:
            from gapped.kernels.sampling import launch

            # The sums that the kernel of a draw writes, which itself is dropped.
            unused = launch.Streamed(torch.empty_like(index), draws.stats, to)
            launch.stream(chunk.logits, chunk.key, kernel, unused, first=chunk.first)
        else:
            law, _ = chunk.estimator.law(simplex.computed(chunk.logits))
            to[:, 1] = self.log_partition(law)
        logit = simplex.computed(chunk.logits.gather(-1, self.place(index).unsqueeze(-1)))
        selected = chunk.estimator.law(logit)[0].squeeze(-1)
        selected = self.total(self.own(selected, index))
        # Not a difference of two infinities, where a given category is in a row without any.
        log_prob = torch.where(selected == -torch.inf, selected, selected - to[:, 1])
        to[:, 0] = torch.where(index == self.categories, 0.0, log_prob)

    def index(self, estimator: Pathwise, logits: Tensor, key: Tensor) -> Tensor:
        """The category of each row, drawn by torch with noise from `key`."""
        return estimator.outcome(logits, seeded(key), False, dense=False).category

    def pull(self, chunk: Chunk, draws: Draws, grad: Tensor, at_index: bool = False) -> None:
        """Write the gradient of the logits in their place, by that of the one-hot sample.

        It is dense or, with `at_index`, given for the selected entries only.
        """
        kernel = self.kernel(chunk.estimator, chunk.logits)
        if kernel is not None:
            from gapped.kernels.sampling import launch

            how: dict[str, Any] = {"at_index": at_index}
            if draws.stats is not None:
                how |= {"out": chunk.logits, "first": chunk.first}
            drawn = (draws.category, draws.stats, chunk.key, grad, kernel)
            gradient = launch.backward(chunk.logits, *drawn, **how)
        else:
            dense = self.at_index(grad, draws.category, chunk.logits) if at_index else grad
            gradient = self.gradient(chunk.estimator, chunk.logits, chunk.key, draws.category, dense)
        if gradient is not chunk.logits:
            chunk.logits.copy_(gradient)

    def gradient(
        self, estimator: Pathwise, logits: Tensor, key: Tensor, index: Tensor, grad: Tensor
    ) -> Tensor:
        """The gradient of the logits, computed by torch."""
        found = estimator.outcome(logits, seeded(key), True, dense=False, given=index).gradient
        assert found is not None
        points, weights, product = found
        return jacobian_product(grad, points, weights, logits, product)

    def pull_log_prob(self, chunk: Chunk, draws: Draws, grad: Tensor) -> None:
        """Write the gradient of the logits in their place, by that of the log-probabilities.

        d log p(i) = e_i - p, in rows that have a category which the mask allows.
        """
        assert draws.law is not None
        index = torch.where(draws.law[:, 0] == -torch.inf, self.categories, draws.category)
        kernel = self.kernel(chunk.estimator, chunk.logits)
        if kernel is not None and draws.stats is not None:
            from gapped.kernels.sampling import launch

            drawn = launch.Streamed(index, draws.stats, draws.law)
            launch.pull_log_prob(chunk.logits, drawn, grad, kernel)
            return
        p, _, slope = self.probabilities(chunk, draws.law[:, 1])
        grad = torch.where(index == self.categories, 0.0, grad)
        gradient = self.at_index(grad, index, p).addcmul_(p, grad.unsqueeze(-1), value=-1)
        chunk.logits.copy_(gradient.mul_(slope))

    def probabilities(
        self, chunk: Chunk, log_sum: Tensor | None = None
    ) -> tuple[Tensor, Tensor, float | Tensor]:
        """Probabilities, their logarithms, and the slope of the law in the logits.

        Both are 0 at categories that do not exist. `log_sum` is the law's `log_partition` if that is known.
        """
        law, slope = chunk.estimator.law(simplex.computed(chunk.logits))
        log_sum = self.log_partition(law) if log_sum is None else log_sum
        exists = law != -torch.inf
        log_p = torch.where(exists, law - log_sum.unsqueeze(-1), 0.0)
        return torch.where(exists, log_p.exp(), 0.0), log_p, slope

    def entropy(self, chunk: Chunk) -> Tensor:
        """The entropy of the law of each row."""
        p, log_p, _ = self.probabilities(chunk)
        return -self.total(p.mul_(log_p).sum(-1))

    def pull_entropy(self, chunk: Chunk, grad: Tensor) -> None:
        """Write the gradient of the logits in their place, by that of the entropies: dH = -p (log p + H)."""
        p, log_p, slope = self.probabilities(chunk)
        entropy = -self.total((p * log_p).sum(-1, keepdim=True))
        chunk.logits.copy_(p.mul_(log_p.add_(entropy)).mul_(-grad.unsqueeze(-1) * slope))

    def place(self, index: Tensor) -> Tensor:
        """Local index of each category; an arbitrary valid one if it belongs to another rank."""
        return (index - self.first).clamp_(0, self.here - 1)

    def own(self, values: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
        """`values` of the rows whose category is here, 0 in other rows, NaN where a row holds a NaN."""
        index = index.view(-1, *(1 for _ in values.shape[1:]))
        is_here = (index >= self.first) & (index < self.first + self.here)
        filling = torch.where(index > self.categories, torch.nan, 0.0).to(values.dtype)
        return torch.where(is_here, values, filling, out=out)

    def at_index(self, values: Tensor, index: Tensor, like: Tensor) -> Tensor:
        """Rows that have `values` at the selected categories and are zero elsewhere."""
        own = self.own(values.to(like.dtype), index).unsqueeze(-1)
        return torch.zeros_like(like).scatter_(-1, self.place(index).unsqueeze(-1), own)

    def log_partition(self, logits: Tensor) -> Tensor:
        """The logarithm of the sum of exponentials of each row; -inf in a row without categories."""
        top = self.highest(logits.amax(-1))
        top = torch.where(top == -torch.inf, 0.0, top)
        return top + self.total((logits - top.unsqueeze(-1)).exp_().sum(-1)).log()


class Head(NamedTuple):
    """How the logits of a layer are computed, and categories drawn from them."""

    part: Vocabulary
    estimator: Pathwise
    """Its levels that are tensors broadcast to `shape`."""
    shape: torch.Size
    """The shape of the rows."""
    dtype: torch.dtype
    """The dtype of the logits."""
    keys: Tensor
    """One for each chunk of `step` rows."""
    step: int
    """How many rows share a key."""
    streams: bool
    """Whether the kernels of long rows compute. Then all rows share one key, however they are divided."""
    keeps_law: bool
    """Whether the law of the categories is kept; else it is computed again where it is wanted."""
    least: int = 1
    """The least rows of a span: the steps of a rollout have few, but keys of their own."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the logits of a row."""
        return self.part.here * self.dtype.itemsize

    def chunk(self, rows: slice, logits: Tensor) -> Chunk:
        """A chunk whose logits are known."""
        estimator = self.estimator.of_rows(self.shape, rows)
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
        for block in slices(len(out), max(MASK_BYTES // categories, 1)):
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

    def draw(self, layer: Layer, given: Tensor | None = None) -> Draws:
        """Draw a category for each row, or compute the law of `given` ones."""
        layer = self.matrices(layer)
        hidden, is_given = layer.hidden, given is not None
        category = hidden.new_empty(hidden.shape[0], dtype=torch.int64) if given is None else given
        law = self._numbers(hidden, 2) if self.keeps_law or is_given else None
        draws = Draws(category, self._numbers(hidden, 2) if self.streams else None, law)
        for chunk in self._chunks(layer):
            (self.part.write_law if is_given else self.part.draw)(chunk, draws.of(chunk.rows))
        return draws

    def entropy(self, layer: Layer) -> Tensor:
        """The entropy of the law of each row."""
        layer = self.matrices(layer)
        entropy = self._numbers(layer.hidden)
        for chunk in self._chunks(layer):
            own = of_rows(entropy, chunk.rows)
            for rows, part in self.parts(chunk):
                own[rows] = self.part.entropy(part)
        return entropy

    def parts(self, chunk: Chunk) -> Iterator[tuple[slice, Chunk]]:
        """Parts of a chunk that torch can compute in float32 beside it, after their rows in it."""
        count = chunk.logits.shape[:1]
        for rows in slices(
            count[0], rows_of_a_chunk(self.estimator, self.part.largest, self.keys.device, True)
        ):
            estimator = chunk.estimator.of_rows(count, rows)
            yield rows, chunk._replace(logits=of_rows(chunk.logits, rows), estimator=estimator)

    def pull_entropy(self, chunk: Chunk, draws: Draws, grad: Tensor) -> None:
        """Write the gradient of the logits in their place, by that of the entropies."""
        for rows, part in self.parts(chunk):
            self.part.pull_entropy(part, of_rows(grad, rows))

    def _numbers(self, hidden: Tensor, *each: int) -> Tensor:
        """Room for a number, or several, per row."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return hidden.new_empty(hidden.shape[0], *each, dtype=dtype)

    def _chunks(self, layer: Layer) -> Iterator[Chunk]:
        """All rows of a layer that `matrices` returned; the next chunk overwrites the logits of the last."""
        rows, step = layer.hidden.shape[0], self.step
        if self.streams:
            step = equal_rows(rows, MEMORY // self.row_bytes)
        logits = layer.hidden.new_empty(min(step, rows), self.part.here)
        for own in slices(rows, step):
            room = of_rows(logits, slice(0, own.stop - own.start))
            yield self.chunk(own, self.write_logits(layer, own, room))

    def spans(self, weight: Tensor, spare: int, result: int, is_dense: bool) -> Spans:
        """How many rows a backward pass holds: see `spans_of_chunks` and `spans_of_kernels`."""
        rows, is_rounded = self.shape.numel(), _sum_dtype(weight).itemsize == 2
        least = max(least_rows(rows) if is_rounded else 1, self.least)
        if self.streams:
            spans = spans_of_kernels(rows, self.row_bytes, least, spare, result, is_dense)
            step = self.step
            return spans if len(self.keys) == 1 else Spans(step, max(spans.span // step, 1) * step)
        return spans_of_chunks(self.step, self.row_bytes, least, spare)

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
        for_weight = None
        if wanted[1]:
            for_weight = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
            # Without rows nothing is written.
            for_weight = for_weight if len(hidden) else for_weight.zero_()
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


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    if total.dtype != left.dtype:
        product = left @ right
        total = total.copy_(product) if is_first else total.add_(product)
    elif is_first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def rows_of_a_chunk(estimator: Pathwise, categories: int, device: torch.device, has_kernel: bool) -> int:
    """How many rows are computed at a time by torch, or, if `has_kernel`, by the kernels of short rows."""
    # Gumbel-Rao and ReinMax-Rao in torch have a point for each draw.
    samples = 1 if has_kernel else getattr(estimator, "samples", 1)
    most = GPU_CHUNK_BYTES if device.type == "cuda" else CHUNK_BYTES
    return max(most // (4 * categories * samples), FEWEST_ROWS // samples, 1)


class Spans(NamedTuple):
    """How many rows a backward pass holds."""

    part: int
    """Of incoming gradients at the sample, which exist beside their logits."""
    span: int
    """Of logits, whose gradients take their place before they are multiplied."""


def least_rows(rows: int) -> int:
    """The least rows of a span, of `rows` in all, if each span rounds the gradient of the weight."""
    return -(-rows // (MOST_ROUNDINGS * TILE)) * TILE


def spans_of_chunks(step: int, row_bytes: int, least: int, spare: int) -> Spans:
    """Rows of a backward pass in torch, whose noise belongs to chunks of `step` rows.

    The span has at least `least` rows and one chunk, and more where the logits of a row have `row_bytes` and
    there are `spare` bytes: the buffer of the table's gradient, reusable until it is filled.
    """
    return Spans(step, max(spare // (step * row_bytes), -(-least // step)) * step)


def spans_of_kernels(rows: int, row_bytes: int, least: int, spare: int, result: int, is_dense: bool) -> Spans:
    """Rows of a backward pass by kernels, whose noise does not depend on how `rows` are divided.

    As in `spans_of_chunks`; `result` are the bytes of the result, which the caller holds, and `is_dense` says
    whether the incoming gradient has a number for each logit, not one for each row.
    """
    free = max(MEMORY - MARGIN - result, MEMORY // 4)
    if not is_dense:
        span = equal_rows(rows, max(max(spare, free) // row_bytes, least))
        return Spans(span, span)
    # Without room to spare, a third is for the incoming gradient.
    most, rest = (spare, free) if 3 * spare >= 2 * free else (2 * free // 3, free // 3)
    span = equal_rows(rows, max(most // row_bytes, least))
    return Spans(equal_rows(span, rest // row_bytes), span)


def equal_rows(rows: int, most: int) -> int:
    """Rows of a chunk, if there are at most `most` in each and the chunks are as equal as tiles allow.

    >>> equal_rows(8192, 4096), equal_rows(8192, 700), equal_rows(100, 700), equal_rows(500, 90)
    (4096, 640, 100, 84)
    """
    tile = TILE if most >= TILE else 1
    most = max(most // tile * tile, 1)
    chunks = max(-(-rows // most), 1)
    each = -(-rows // chunks)
    return max(each if chunks == 1 else -(-each // tile) * tile, 1)


def of_rows(values: Tensor, rows: slice) -> Tensor:
    """Some rows; `values` as they are, if those are all: a view takes the host longer than it seems."""
    return values if rows.start == 0 and rows.stop == values.shape[0] else values[rows]


def add_rows(total: Tensor, place: Tensor, rows: Callable[[slice | Tensor], Tensor]) -> None:
    """Add rows to those of `total` ``(V, d)`` that `place` ``(n)`` names.

    `rows` returns those with the given numbers. In half precision, rows of one place are added up in float32
    and their sum is rounded: they are sorted by place, and only a sum that stands in several blocks of
    `SUM_BYTES` is rounded once for each of them.
    """
    dtype = simplex.computed(total[:0]).dtype
    step = max(SUM_BYTES // (dtype.itemsize * max(total.shape[1], 1)), 1)
    if total.dtype == dtype:
        for block in slices(len(place), step):
            total.index_add_(0, place[block], rows(block).to(dtype))
        return
    place, order = place.sort()
    for block in slices(len(place), step):
        own, values = place[block], rows(order[block]).to(dtype)
        # The number of each place in the block; numbers that are left over have a sum of zero.
        number = torch.zeros_like(own)
        torch.cumsum(own[1:] != own[:-1], 0, out=number[1:])
        sums = torch.zeros_like(values).index_add_(0, number, values)
        total.index_add_(0, own.scatter(0, number, own), sums.to(total.dtype))


def seeded(key: Tensor) -> torch.Generator:
    """A generator whose numbers are determined by `key`."""
    return torch.Generator(key.device).manual_seed(int(key))


Pull = Callable[[Chunk, Draws, Tensor], None]
"""Writes the gradient of a chunk's logits in their place, by that of its rows of a result."""


def matrix(values: Tensor) -> Tensor:
    """`values` with all axes but the first made one."""
    return values.unsqueeze(-1).flatten(1)


def attach(value: Tensor, pull: Pull, head: Head, draws: Draws, layer: Layer, table: Tensor | None) -> Tensor:
    """Return `value`, which is given away, with the gradients of layer and table that `pull` leads to."""
    # A table that is the weight needs no gradient of its own beside that of the weight.
    is_tied = table is layer.weight
    if value._is_view():
        # What is computed from a tensor of a subclass is one, which autograd does not let us give away.
        with torch._C.DisableTorchFunctionSubclass():
            value = value.clone()
    result, _ = _Attached.apply(value, pull, head, draws, is_tied, None if is_tied else table, *layer)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


class _Attached(torch.autograd.Function):
    """What a use of a choice returns, with gradients to the layer and to the table."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        pull: Pull,
        head: Head,
        draws: Draws,
        is_tied: bool,
        table: Tensor | None,
        *layer: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(value)
        # Not the choice itself: what offloads or recomputes saved tensors must see all that are large.
        ctx.pull, ctx.is_dense, ctx.head, ctx.is_tied = pull, is_tied or table is not None, head, is_tied
        # An output without entries, for the backward pass: what depends on it depends on the layer.
        anchor = value.new_empty(0)
        # Levels too, so that autograd notices if they are changed before the backward pass.
        ctx.save_for_backward(anchor, *draws, table, *layer, *head.estimator.tensors)
        return value, anchor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        anchor, index, stats, law, table, *tensors = ctx.saved_tensors
        draws, layer = Draws(index, stats, law), Layer(*tensors[: len(Layer._fields)])
        with without_autocast(grad.device):
            gradients = first_order(_gradients, anchor, grad, ctx, draws, layer, table)
        return None, None, None, None, None, *gradients, None


def _gradients(
    grad: Tensor, ctx: Any, draws: Draws, layer: Layer, table: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of table, hidden states, weight and bias."""
    part: Vocabulary = ctx.head.part
    wants_table = table is not None and ctx.needs_input_grad[5]
    # Whatever holds logits is free again before the gradient of the table is made, in the same room.
    spare = table.nbytes if table is not None and wants_table else 0
    for_hidden, for_weight, for_bias = _layer_gradients(ctx, draws, layer, table, grad, spare)
    for_table = None
    if table is not None and wants_table:
        for_table = torch.zeros_like(matrix(table), memory_format=torch.contiguous_format)
    into = for_weight if ctx.is_tied else for_table
    if into is not None:
        add_rows(into, part.place(draws.category), lambda n: part.own(grad[n], draws.category[n]))
    gradients = zip((for_table, for_hidden, for_weight, for_bias), (table, *layer[:3]), strict=True)
    return tuple(None if each is None else each.view(like.shape).to(like.dtype) for each, like in gradients)  # type: ignore[union-attr]


def _layer_gradients(
    ctx: Any, draws: Draws, layer: Layer, table: Tensor | None, grad: Tensor, spare: int
) -> Gradients:
    """The gradients of hidden states, weight and bias, in at least `spare` bytes of room."""
    head: Head = ctx.head
    wanted = ctx.needs_input_grad[6:9]
    if not any(wanted):
        return None, None, None
    spans = head.spans(layer.weight, spare, grad.nbytes, ctx.is_dense)
    if ctx.is_dense:
        entries = matrix(layer.weight if table is None else table)
        rows = min(spans.part, head.shape.numel())
        dense = grad.new_empty((rows, head.part.here), dtype=head.dtype)

    def pull(chunk: Chunk) -> None:
        own = grad[chunk.rows]
        if ctx.is_dense:
            product = dense[: len(own)]
            if entries.dtype == product.dtype:
                torch.mm(own, entries.mT, out=product)
            else:
                product.copy_(own @ entries.mT)
            own = product
        ctx.pull(chunk, draws.of(chunk.rows), own)

    return head.gradients(layer, wanted, spans, spare, pull)
