"""A choice out of a whole vocabulary, from hidden states, without ever holding the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import Tensor

from gapped.checks import check_generator, check_level, check_linear, check_mask, holds, without_autocast
from gapped.choice import NoTensor
from gapped.docstrings import documented
from gapped.errors import reject
from gapped.gradient import versions
from gapped.kernels import runner
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.simplex import draw_key
from gapped.vocabulary.head import Draws, Head, Layer, Pull, Vocabulary, attach, matrix, rows_of_a_chunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that torch.compile leaves to eager code: the noise of a chunk needs a seed."""

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **options)

    return call


@documented
@uncompiled
def linear_choice(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    estimator: Pathwise | str | None = None,
    index: Tensor | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    group: ProcessGroup | None = None,
) -> LinearChoice:
    """Draw one of V categories per row, or score given ones, without all logits.

    For vocabularies, where a tensor of all logits takes more memory than the model. The rows go through the
    product in chunks, forward and once more backward; in between, the index and a few numbers per row are all
    that is kept. Index, values and gradients are those of `estimator.choose(hidden @ weight.T + bias)`.

    Arguments:
        index: Categories `(*rows)` to score instead of drawing, int64: they have `log_prob` and `entropy`. V
            stands for no category, with a log-probability of 0. One that the mask forbids has -inf and no
            gradient.
        temperature: Divides the logits, for law and gradient alike: a positive number.
        mask: Booleans that broadcast to `(*rows, V)`; categories where it is False do not exist.
        group: A process group over whose ranks the vocabulary is split, lower ranks first. Then `weight`,
            `bias`, `mask` and tables are the rank's own part, `hidden` is the same on every rank, and so are
            the results: index, log-probability, selected rows, the gradient of `hidden`. Rank 0 of the group
            decides the noise. Every rank must make the same calls.

    Returns:
        An object with `index`, `(*rows)`; `select(table)` for the rows of a table such as an embedding, which
        may be `weight` itself; `gate()` for routers; and `log_prob` and `entropy`, `(*rows)`. Their gradients
        reach `hidden`, `weight`, `bias` and the table, and cannot be differentiated again.

    For a score-function gradient multiply `log_prob` with the reward. Each use costs one more pass over the
    chunks in its backward: with `select`, five products of the size rows × d × V in all. torch.compile leaves
    the function and the uses of its result to eager code. docs/vocabulary.md has the derivation, the
    measurements, and how sums are rounded.

    >>> g = torch.Generator().manual_seed(0)
    >>> hidden, embedding = torch.randn(2, 7, 16, requires_grad=True), torch.nn.Embedding(50_000, 16)
    >>> choice = linear_choice(hidden, embedding.weight, estimator="gst:tau=0.5", generator=g)
    >>> choice.index.shape, choice.log_prob.shape, choice.select(embedding.weight).shape
    (torch.Size([2, 7]), torch.Size([2, 7]), torch.Size([2, 7, 16]))
    >>> again = linear_choice(hidden, embedding.weight, index=choice.index)
    >>> torch.equal(again.log_prob, choice.log_prob)
    True
    """
    if isinstance(temperature, Tensor):
        raise reject("temperature", "a tensor", "a positive number")
    check_level("temperature", temperature, positive=True)
    if temperature != 1:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    resolved = resolve_pathwise(estimator)
    dtype, shape = check_linear(hidden, weight, bias), hidden.shape[:-1]
    resolved.check_choice()
    check_ordinary("hidden", hidden)
    part = Vocabulary(weight.shape[0])
    if group is not None:
        from gapped.vocabulary.sharded import shard_of

        part = shard_of(group, len(weight), resolved)
    # A stand-in for the logits, without entries of its own.
    logits = hidden.new_empty((), dtype=dtype).expand(*shape, part.here)
    if mask is not None:
        check_mask(mask, logits)
    given = None if index is None else _check_index(index, shape, part.categories, hidden)
    fitted = resolved
    if resolved.tensors:
        _, fitted = resolved.prepare(logits, -1, None, generator)
    else:
        check_generator(generator, hidden)
    has_kernel = part.kernel(fitted, logits) is not None
    streams = has_kernel and part.here > runner.LONGEST_BLOCK
    rows = shape.numel()
    step = max(rows, 1) if streams else rows_of_a_chunk(fitted, part.largest, hidden.device, has_kernel)
    count = -(-rows // step)
    if given is None:
        keys = part.share(draw_key(hidden, generator, count))
    else:
        keys = torch.zeros(count, dtype=torch.int64, device=hidden.device)
    # The kernels of short rows do not write the law: decoding does not wait until torch has computed it.
    keeps_law = streams or not has_kernel or torch.is_grad_enabled()
    head = Head(part, fitted, shape, dtype, keys, step, streams, keeps_law)
    layer = Layer(hidden, weight, bias, mask)
    with torch.no_grad(), without_autocast(hidden.device):
        draws = head.draw(layer, given)
    return choice_of(draws, head, layer, given is not None)


def choice_of(draws: Draws, head: Head, layer: Layer, is_given: bool = False) -> LinearChoice:
    """What was drawn as an object; without a gradient where autograd is off."""
    if not torch.is_grad_enabled():
        layer = Layer(*(None if each is None else each.detach() for each in layer))  # type: ignore[arg-type]
    return LinearChoice(draws, head, layer, versions((*layer, *head.estimator.tensors)), is_given)


@dataclass(frozen=True, eq=False)
class LinearChoice(NoTensor):
    """One category per row out of a vocabulary, with a gradient.

    `gapped.linear_choice(hidden, weight)` returns it. Its logits, `hidden @ weight.T + bias`, are never
    written, and the backward pass of each use computes them once more. Categories that were given, by
    `index=`, have `log_prob` and `entropy` alone.
    """

    _draws: Draws
    _head: Head
    _layer: Layer
    _versions: tuple[int, ...]
    """Versions of the tensors of layer and levels when the choice was drawn."""
    _is_given: bool = False

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
    @uncompiled
    def log_prob(self) -> Tensor:
        """The log-probability of `index`, `(*rows)`, in float32 or float64, with its exact gradient.

        It is what a score-function estimator multiplies with a reward. It is 0 in a row without categories.
        Where kernels drew rows of up to 4,096 categories without a gradient, it takes one more product.

        >>> import gapped
        >>> hidden, weight = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3)
        >>> gapped.linear_choice(hidden, weight).log_prob.exp()
        tensor([0.2500, 0.2500], grad_fn=<ExpBackward0>)
        """

        law = self._draws.law
        if law is None:
            with torch.no_grad(), without_autocast(self._draws.category.device):
                law = self._head.draw(self._layer, self._draws.category).law
            assert law is not None
        return self._attached(law[:, 0].clone(), self._head.part.pull_log_prob)

    @property
    @uncompiled
    def entropy(self) -> Tensor:
        """The entropy of each row's law in nats, `(*rows)`, in float32 or float64, with its exact gradient.

        It does not depend on `index`. It is 0 in a row without categories. It takes one more product.

        >>> import gapped
        >>> hidden, weight = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3)
        >>> gapped.linear_choice(hidden, weight).entropy.exp()
        tensor([4., 4.], grad_fn=<ExpBackward0>)
        """
        with torch.no_grad(), without_autocast(self._draws.category.device):
            entropy = self._head.entropy(self._layer)
        return self._attached(entropy, self._head.pull_entropy)

    @uncompiled
    def select(self, table: Tensor) -> Tensor:
        """`table[index]` for a table of shape `(V, *rest)`, which may be the weight: `(*rows, *rest)`.

        >>> import gapped
        >>> hidden, weight = torch.tensor([[99.0, 0.0], [0.0, 99.0]]), torch.eye(2, requires_grad=True)
        >>> gapped.linear_choice(hidden, weight).select(weight).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        self._check_drawn()
        part, index = self._head.part, self._draws.category
        accepted = f"a floating-point tensor on {index.device} with {part.here} rows, one per category"
        if not isinstance(table, Tensor):
            raise reject("table", f"an object of type {type(table).__name__}", accepted)
        if table.shape[:1] != (part.here,) or not table.is_floating_point() or table.device != index.device:
            got = f"a tensor of shape {tuple(table.shape)} and {table.dtype} on {table.device}"
            raise reject("table", got, accepted)

        with torch.no_grad():
            entries = matrix(table).index_select(0, part.place(index))
            entries = part.total(part.own(entries, index, out=entries))
        return self._attached(entries, part.pull, table)

    @uncompiled
    def gate(self) -> Tensor:
        """Ones, `(*rows)`, in the dtype of the logits; zero in a row without categories."""
        self._check_drawn()
        part, index = self._head.part, self._draws.category
        ones = part.own(torch.ones_like(index, dtype=self._head.dtype), index)
        return self._attached(part.total(ones), partial(part.pull, at_index=True))

    def _check_drawn(self) -> None:
        if self._is_given:
            raise reject(
                "index", "given categories", "None for select and gate, which estimate a drawn one's gradient"
            )

    def _attached(self, value: Tensor, pull: Pull, table: Tensor | None = None) -> Tensor:
        check_ordinary("hidden", self._layer.hidden)
        if self._versions != versions((*self._layer, *self._head.estimator.tensors)):
            what = "hidden states, weight, bias, mask, temperatures or gaps"
            advice = "read what you need before the optimiser's step"
            raise RuntimeError(f"gapped: the {what} of a choice were changed after it was drawn; {advice}")
        rest = () if table is None else table.shape[1:]
        return attach(value, pull, self._head, self._draws, self._layer, table).view(
            (*self._head.shape, *rest)
        )


def _check_index(index: object, shape: torch.Size, categories: int, hidden: Tensor) -> Tensor:
    """Given categories, flat, in a tensor of their own."""
    accepted = f"an int64 tensor of shape {tuple(shape)} on {hidden.device}, as the rows of hidden"
    if not isinstance(index, Tensor):
        raise reject("index", f"an object of type {type(index).__name__}", accepted)
    if index.shape != shape or index.dtype != torch.int64 or index.device != hidden.device:
        got = f"a tensor of shape {tuple(index.shape)} and {index.dtype} on {index.device}"
        raise reject("index", got, accepted)
    if holds((index < 0) | (index > categories)):
        raise reject(
            "index", "values out of range", f"categories below {categories}, or {categories} for none"
        )
    return index.reshape(-1).clone()


def check_ordinary(name: str, hidden: Tensor) -> None:
    """Raise where chunks cannot be drawn from seeds, or drawn again by the backward pass."""
    if hidden.is_meta or torch._C._are_functorch_transforms_active():
        got = "a tensor on meta" if hidden.is_meta else "one inside of a transform such as torch.func.grad"
        accepted = "an ordinary tensor; elsewhere take GST().choose(logits), which holds the logits"
        raise reject(name, got, accepted)
