"""A choice out of a whole vocabulary, from hidden states, without ever holding the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gapped.checks import check_linear, check_mask, without_autocast
from gapped.errors import reject
from gapped.gradient import first_order, versions
from gapped.kernels import backend, runner
from gapped.pathwise import Pathwise
from gapped.registry import resolve_pathwise
from gapped.vocabulary.head import (
    Chunk,
    Draws,
    Gradients,
    Head,
    Layer,
    Vocabulary,
    add_rows,
    rows_of_a_chunk,
    uncompiled,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_choice(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    estimator: Pathwise | str | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    group: ProcessGroup | None = None,
) -> LinearChoice:
    """Draw one of V categories per row, without a tensor of all their logits.

    For vocabularies, where a tensor of all logits takes more memory than the model. The rows go through the
    product in chunks, forward and once more backward; in between, the index and a few numbers per row are all
    that is kept. Index, values and gradients are those of `estimator.choose(hidden @ weight.T + bias)`.

    Arguments:
        hidden: `(*rows, d)`. Half precision, and what autocast makes of float32, is multiplied as it is and
            normalised in float32.
        weight: `(V, d)`.
        bias: `(V)`, or None.
        estimator: A pathwise one, as an object or as text; None is the recommended default. For a
            score-function gradient multiply `log_prob` with the reward.
        mask: Booleans that broadcast to `(*rows, V)`; categories where it is False do not exist.
        generator: Where random numbers come from; None is torch's default generator.
        group: A process group over whose ranks the vocabulary is split, lower ranks first. Then `weight`,
            `bias`, `mask` and tables are the rank's own part, `hidden` is the same on every rank, and so are
            the results: index, log-probability, selected rows, the gradient of `hidden`. Rank 0 of the group
            decides the noise. Every rank must make the same calls.

    Returns:
        An object with `index`, `(*rows)`; `select(table)` for the rows of a table such as an embedding, which
        may be `weight` itself; `gate()` for routers; and `log_prob`, `(*rows)`. Their gradients reach
        `hidden`, `weight`, `bias` and the table, and cannot be differentiated again.

    Each use costs one more pass over the chunks in its backward: with `select`, five products of the size
    rows × d × V in all. torch.compile leaves the function and the uses of its result to eager code.
    docs/vocabulary.md has the derivation, the measurements, and how sums are rounded.

    >>> g = torch.Generator().manual_seed(0)
    >>> hidden, embedding = torch.randn(2, 7, 16, requires_grad=True), torch.nn.Embedding(50_000, 16)
    >>> choice = linear_choice(hidden, embedding.weight, estimator="gst:tau=0.5", generator=g)
    >>> choice.index.shape, choice.log_prob.shape, choice.select(embedding.weight).shape
    (torch.Size([2, 7]), torch.Size([2, 7]), torch.Size([2, 7, 16]))
    """
    resolved = resolve_pathwise(estimator)
    if group is None:
        return resolved.choose_linear(hidden, weight, bias, mask=mask, generator=generator)
    from gapped.vocabulary.sharded import choose_sharded

    return choose_sharded(resolved, group, hidden, weight, bias, mask, generator)


@dataclass(frozen=True)
class LinearChoice:
    """One category per row of `hidden @ weight.T + bias`, and ways to use it: see `gapped.linear_choice`.

    With the one-hot sample D that is never written, as for a `gapped.choice.Choice`: `select` is D V for a
    table V, and `gate` is the entry D_i = 1. Besides there is `log_prob`.
    The backward pass of each use computes the logits once more.
    """

    _draws: Draws
    _head: Head
    _layer: Layer
    _versions: tuple[int, ...]
    """Versions of the tensors of layer and levels when the choice was drawn."""

    def __repr__(self) -> str:
        return f"LinearChoice(index={self.index})"

    @property
    def index(self) -> Tensor:
        """The selected categories, int64, `(*rows)`.

        A row without categories has index `V`, one with a NaN or +inf `V + 1`.
        """
        # A copy: what the caller writes into it must not change what was drawn. A tuple: torch reads its own
        # sizes slowly.
        return self._draws.category.view(tuple(self._head.shape)).clone()

    @property
    def log_prob(self) -> Tensor:
        """The log-probability of `index`, `(*rows)`, in float32 or float64, with its exact gradient.

        It is what a score-function estimator multiplies with a reward. It is 0 in a row without categories.
        Where kernels drew rows of up to 4,096 categories without a gradient, it takes one more product.

        >>> import gapped
        >>> hidden, weight = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3)
        >>> gapped.linear_choice(hidden, weight).log_prob.exp()
        tensor([0.2500, 0.2500], grad_fn=<ExpBackward0>)
        """

        def values() -> Tensor:
            law = self._draws.law
            if law is None:
                with without_autocast(self._draws.category.device):
                    law = self._head.law(self._layer, self._draws.category)
            return law[:, 0].clone()

        return self._used(_Use(values, _pull_log_prob))

    def select(self, table: Tensor) -> Tensor:
        """`table[index]` for a table of shape `(V, *rest)`, which may be the weight: `(*rows, *rest)`.

        >>> import gapped
        >>> hidden, weight = torch.tensor([[99.0, 0.0], [0.0, 99.0]]), torch.eye(2, requires_grad=True)
        >>> gapped.linear_choice(hidden, weight).select(weight).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        part, index = self._head.part, self._draws.category
        accepted = f"a floating-point tensor on {index.device} with {part.here} rows, one per category"
        if not isinstance(table, Tensor):
            raise reject("table", f"an object of type {type(table).__name__}", accepted)
        if table.shape[:1] != (part.here,) or not table.is_floating_point() or table.device != index.device:
            got = f"a tensor of shape {tuple(table.shape)} and {table.dtype} on {table.device}"
            raise reject("table", got, accepted)

        def rows() -> Tensor:
            entries = _matrix(table.detach()).index_select(0, part.place(index))
            return part.total(part.own(entries, index, out=entries))

        return self._used(_Use(rows, _pull_rows, is_dense=True), table)

    def gate(self) -> Tensor:
        """Ones, `(*rows)`, in the dtype of the logits; zero in a row without categories."""
        part, index = self._head.part, self._draws.category

        def ones() -> Tensor:
            return part.total(part.own(torch.ones_like(index, dtype=self._head.dtype), index))

        return self._used(_Use(ones, _pull_gates))

    @uncompiled
    def _used(self, use: _Use, table: Tensor | None = None) -> Tensor:
        _check_ordinary(self._layer.hidden)
        if self._versions != versions((*self._layer, *self._head.estimator.tensors)):
            what = "hidden states, weight, bias, mask, temperatures or gaps"
            raise RuntimeError(f"gapped: the {what} of a choice were changed after it was drawn")
        # A table that is the weight needs no gradient of its own beside that of the weight.
        is_tied = table is self._layer.weight
        result, _ = _Attached.apply(
            use, self._head, self._draws, is_tied, None if is_tied else table, *self._layer
        )  # type: ignore[no-untyped-call]
        rest = () if table is None else table.shape[1:]
        return result.view((*self._head.shape, *rest))  # type: ignore[no-any-return]


@uncompiled
def choose(
    estimator: Pathwise,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    generator: torch.Generator | None,
    part: Vocabulary | None = None,
) -> LinearChoice:
    """Draw one category per row: see `gapped.Pathwise.choose_linear`; `part` is the weight's own."""
    dtype, shape = check_linear(hidden, weight, bias), hidden.shape[:-1]
    estimator.check_choice()
    _check_ordinary(hidden)
    part = Vocabulary(len(weight)) if part is None else part
    # A stand-in for the logits, without entries of its own.
    logits = hidden.new_empty((), dtype=dtype).expand(*shape, part.here)
    check_mask(mask, logits)
    _, fitted = estimator.prepare(logits, -1, None, generator)
    has_kernel = part.kernel(fitted, logits) is not None
    streams = has_kernel and part.here > runner.LONGEST_BLOCK
    rows = shape.numel()
    step = max(rows, 1) if streams else rows_of_a_chunk(fitted, part.largest, hidden.device, has_kernel)
    keys = part.share(backend.draw_key(hidden, generator, -(-rows // step)))
    # The kernels of short rows do not write the law: decoding does not wait until torch has computed it.
    keeps_law = streams or not has_kernel or torch.is_grad_enabled()
    head = Head(part, fitted, shape, dtype, keys, step, streams, keeps_law)
    layer = Layer(hidden, weight, bias, mask)
    with torch.no_grad(), without_autocast(hidden.device):
        draws = head.draw(layer)
    if not torch.is_grad_enabled():
        layer = Layer(*(None if each is None else each.detach() for each in layer))  # type: ignore[arg-type]
    return LinearChoice(draws, head, layer, versions((*layer, *head.estimator.tensors)))


def _check_ordinary(hidden: Tensor) -> None:
    """Raise where chunks cannot be drawn from seeds, or drawn again by the backward pass."""
    if hidden.is_meta or torch._C._are_functorch_transforms_active():
        got = "a tensor on meta" if hidden.is_meta else "one inside of a transform such as torch.func.grad"
        accepted = "an ordinary tensor; elsewhere take GST().choose(logits), which holds the logits"
        raise reject("hidden", got, accepted)


class _Use(NamedTuple):
    """A way to use a choice."""

    value: Callable[[], Tensor]
    """The result, with the rows on one axis."""
    pull: Callable[[Head, Chunk, Draws, Tensor, _Matrices | None], None]
    """Writes the gradient of a chunk's logits in their place, by that of the result."""
    is_dense: bool = False
    """Whether that needs a gradient for every entry of the sample."""


class _Matrices(NamedTuple):
    """What a gradient at selected rows is multiplied with, and where the product is written."""

    table: Tensor
    """`(V, width)`"""
    product: Tensor
    """Room for the product of a part of the rows."""


def _pull_rows(head: Head, chunk: Chunk, draws: Draws, grad: Tensor, matrices: _Matrices | None) -> None:
    assert matrices is not None
    dense = matrices.product[: len(grad)]
    if matrices.table.dtype == dense.dtype:
        torch.mm(grad, matrices.table.mT, out=dense)
    else:
        dense.copy_(grad @ matrices.table.mT)
    head.part.pull(chunk, draws, dense)


def _pull_gates(head: Head, chunk: Chunk, draws: Draws, grad: Tensor, matrices: _Matrices | None) -> None:
    head.part.pull(chunk, draws, grad, at_index=True)


def _pull_log_prob(head: Head, chunk: Chunk, draws: Draws, grad: Tensor, matrices: _Matrices | None) -> None:
    head.part.pull_log_prob(chunk, draws, grad)


def _matrix(values: Tensor) -> Tensor:
    """`values` with all axes but the first made one."""
    return values.unsqueeze(-1).flatten(1)


class _Attached(torch.autograd.Function):
    """What a use of a choice returns, with gradients to the layer and to the table."""

    @staticmethod
    def forward(
        ctx: Any, use: _Use, head: Head, draws: Draws, is_tied: bool, table: Tensor | None, *layer: Any
    ) -> tuple[Tensor, Tensor]:
        # Not the choice itself: what offloads or recomputes saved tensors must see all that are large.
        ctx.pull, ctx.is_dense, ctx.head, ctx.is_tied = use.pull, use.is_dense, head, is_tied
        value = use.value()
        # An output without entries, for the backward pass: what depends on it depends on the layer.
        anchor = value.new_empty(0)
        # Levels too, so that autograd notices if they are changed before the backward pass.
        ctx.save_for_backward(anchor, *draws, table, *layer, *head.estimator.tensors)
        return value, anchor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        anchor, index, law, stats, table, *tensors = ctx.saved_tensors
        draws, layer = Draws(index, law, stats), Layer(*tensors[: len(Layer._fields)])
        with without_autocast(grad.device):
            gradients = first_order(_gradients, anchor, grad, ctx, draws, layer, table)
        return None, None, None, None, *gradients, None


def _gradients(
    grad: Tensor, ctx: Any, draws: Draws, layer: Layer, table: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of table, hidden states, weight and bias."""
    part: Vocabulary = ctx.head.part
    wants_table = table is not None and ctx.needs_input_grad[4]
    # Whatever holds logits is free again before the gradient of the table is made, in the same room.
    spare = table.nbytes if table is not None and wants_table else 0
    for_hidden, for_weight, for_bias = _layer_gradients(ctx, draws, layer, table, grad, spare)
    for_table = None
    if table is not None and wants_table:
        for_table = torch.zeros_like(_matrix(table), memory_format=torch.contiguous_format)
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
    wanted = ctx.needs_input_grad[5:8]
    if not any(wanted):
        return None, None, None
    spans = head.spans(layer.weight, spare, grad.nbytes, ctx.is_dense)
    matrices = None
    if ctx.is_dense:
        used = layer.weight if table is None else table
        rows = min(spans.part, head.shape.numel())
        matrices = _Matrices(_matrix(used), grad.new_empty((rows, head.part.here), dtype=head.dtype))

    def pull(chunk: Chunk) -> None:
        ctx.pull(head, chunk, draws.of(chunk.rows), grad[chunk.rows], matrices)

    return head.gradients(layer, wanted, spans, spare, pull)
