"""Samples of the pathwise estimators by kernels: launches, and a sample that carries its gradient.

Importing this file imports Triton: `fused.refusal` says before whether the kernels apply.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped.gradient import apply_in_eager_mode, first_order
from gapped.kernels import runner
from gapped.kernels.runner import ROW_BLOCKS, Launch, partition, power, run
from gapped.kernels.sampling import long, rao, short, strips
from gapped.kernels.sampling.fused import AVERAGED, Fused
from gapped.kernels.sampling.layout import Rows, empty_rows, inner_axes, row_matrix, rows_of
from gapped.kernels.sampling.surrogates import MODES
from gapped.simplex import draw_key

_SHORT = torch.iinfo(torch.int16).max

_Kind = tuple[str, bool, bool]
"""The mode, whether its gap is the expected one, whether it runs on a GPU."""


class Forward(NamedTuple):
    """The results of a forward pass."""

    value: Tensor
    """The sample; empty if only its index is wanted."""
    indices: Tensor
    """The rows' indices, flat, int16 or int32: one past the last category where a row has none, two past it
    where it holds a NaN or +inf."""
    stats: Tensor | None
    """Two numbers per row that the backward pass of long rows needs, ``(rows, 2)``; None for short rows."""


class Streamed(NamedTuple):
    """The results of a forward pass of long rows, besides the sample."""

    indices: Tensor
    """The rows' indices, flat, in any integer dtype that holds them."""
    stats: Tensor
    """Two numbers that the backward pass needs, ``(rows, 2)`` in float32."""
    law: Tensor | None = None
    """If wanted, the log-probability of the index, 0 in a row without categories, and the logarithm of the
    sum of exponentials that the law is normalised by; ``(rows, 2)`` in float32."""


def has_stats(categories: int, axes: int) -> bool:
    """Whether rows are long; `axes` says how they lie (`layout`)."""
    return categories > (strips.LONGEST_HELD if axes else runner.LONGEST_BLOCK)


def axes_of(logits: Tensor, fused: Fused) -> int:
    """How many row axes the kernels see inside of the category axis; 0 if they read row after row."""
    if fused.mode in AVERAGED or not (fused.detach or logits.shape[-1] <= strips.LONGEST_HELD):
        return 0
    return inner_axes(logits)


def index_dtype(categories: int) -> torch.dtype:
    """The smallest dtype that suffices: beside short rows, indices count too. `categories + 1` must fit."""
    return torch.int16 if categories < _SHORT else torch.int32


def forward(
    logits: Tensor,
    key: Tensor,
    fused: Fused,
    *,
    dense: bool = True,
    out: Tensor | None = None,
    indices: Tensor | None = None,
    axes: int | None = None,
) -> Forward:
    """Draw a sample; without `dense` only its index. Contiguous short rows may be written to `out`.

    Indices may be written to a flat tensor `indices` of any integer dtype that holds them. The sample lies as
    `axes` says (`layout`), by default as the logits do.
    """
    if axes is None:
        axes = axes_of(logits, fused) if out is None else 0
    rows, categories = rows_of(logits, axes), logits.shape[-1]
    is_long = has_stats(categories, axes)
    # A soft sample of Gumbel-Rao is made once the category is known.
    averages = dense and fused.soft and fused.mode == "gumbel-rao"
    assert out is None or not is_long
    value = out
    if value is None:
        value = empty_rows(logits, axes) if dense else logits.new_empty(0)
    index = indices
    if index is None:
        index = torch.empty(rows.number, dtype=index_dtype(categories), device=logits.device)
    stats = torch.empty((rows.number, 2), dtype=torch.float32, device=logits.device) if is_long else None
    if rows.number == 0:
        return Forward(value, index, stats)
    if stats is None:
        tensors, every = fused.level_tensors(logits)
        how = (fused.argmax, fused.soft, dense and not averages)
        launch = _forward(_kind(logits, fused), *how, every, (rows.number, categories, *rows[2:]))
        launch((rows.tensor, key, *tensors, value, index), fused.numbers)
    else:
        written = value if dense and not averages else None
        stream(logits, key, fused, Streamed(index, stats), written, axes=axes)
    if averages:
        _average_draws(logits, index, stats, key, None, fused, value)
    return Forward(value, index, stats)


def stream(
    logits: Tensor,
    key: Tensor,
    fused: Fused,
    to: Streamed,
    value: Tensor | None = None,
    *,
    first: int = 0,
    axes: int = 0,
) -> None:
    """Draw categories of long rows, and write the sample to `value` if there is one.

    `first` is the number of the first row among those that share the key. Rows lie as `axes` says; only
    contiguous ones may be numbered from another, or give their `law`.
    """
    rows, categories = rows_of(logits, axes), logits.shape[-1]
    if rows.number == 0:
        return
    tensors, every = fused.level_tensors(logits)
    how = (fused.argmax, fused.soft, value is not None, every)
    pointers = (rows.tensor, key, *tensors, rows.tensor if value is None else value, to.indices, to.stats)
    if rows.inner > 1:
        assert to.law is None
        assert first == 0
        programs, sizes = strips.forward_sizes(rows.number, categories, logits.element_size())
        where = (rows.number, categories, *rows[2:], *every)
        flags = _forward_flags(_kind(logits, fused), *how) | sizes
        run(strips.strip_forward_kernel, programs, pointers, where, fused.numbers, flags)
        return
    pointers = (*pointers, to.stats if to.law is None else to.law)
    chunks = tuple(long.chunk_sizes(rows.number, categories).items())
    where = (categories, rows.stride, *every)
    launch = _stream(_kind(logits, fused), *how, rows.number, where, to.law is not None, chunks)
    launch(pointers, (*fused.numbers, first))


def backward(
    logits: Tensor,
    index: Tensor,
    stats: Tensor | None,
    key: Tensor,
    grad: Tensor,
    fused: Fused,
    *,
    at_index: bool = False,
    out: Tensor | None = None,
    first: int = 0,
    axes: int | None = None,
) -> Tensor:
    """The gradient of the logits; with `at_index`, `grad` has the selected entries only.

    It may be written to `out` where rows are contiguous, which may be the logits themselves if they are long.
    Of long rows, `first` is the number of the first among those that share the key. The gradient lies as
    `axes` says, as in `forward`.
    """
    if axes is None:
        axes = axes_of(logits, fused) if out is None else 0
    categories = logits.shape[-1]
    is_long = has_stats(categories, axes)
    assert is_long or (out is not logits and first == 0)
    if out is None:
        out = empty_rows(logits, axes)
    if fused.mode in AVERAGED:
        _average_draws(logits, index, stats, key, grad, fused, out, at_index=at_index, first=first)
        return out
    rows = rows_of(logits, axes)
    grads = Rows(grad.contiguous(), rows.number, 1, 1, 1) if at_index else rows_of(grad, axes)
    if rows.number == 0:
        return out
    (taus, gaps, _), every = fused.level_tensors(logits)
    numbers, kind = fused.numbers[:2], _kind(logits, fused)
    if not is_long:
        sizes = (rows.number, categories, *rows[2:], grads.stride, grads.step)
        launch = _backward(kind, fused.detach, at_index, every, sizes)
        launch((rows.tensor, index, grads.tensor, key, taus, gaps, out), numbers)
        return out
    assert stats is not None
    flags = _flags(kind, every) | {"AT_INDEX": at_index}
    pointers = (rows.tensor, index, stats, grads.tensor, key, taus, gaps, out)
    if rows.inner > 1:
        _backward_strips(rows, grads, fused.mode, pointers, every[:2], numbers, flags)
        return out
    where, numbers = (categories, rows.stride, grads.stride, *every[:2]), (*numbers, first)
    segments, block = long.segments_of(rows.tensor, fused.mode)
    if segments <= long.most_segments(logits.device):
        _split(rows.number, pointers, where, numbers, flags | block)
        return out
    flags |= {"BLOCK": long.BACKWARD_CHUNK, "num_warps": long.BACKWARD_WARPS, "IN_PLACE": out is logits}
    run(long.streamed_backward_kernel, rows.number, pointers, where, numbers, flags)
    return out


def _split(
    rows: int, pointers: tuple[Tensor, ...], where: tuple[int, ...], numbers: tuple[float, ...], flags: Any
) -> None:
    """Write gradients by programs that share rows and exchange sums."""
    segments, device = flags["SEGMENTS"], pointers[0].device
    # A word for the sums of each segment of a row, and one more for those with two points.
    words = torch.zeros((rows if segments > 1 else 0, 2, segments), dtype=torch.int64, device=device)
    # The interpreter runs one program after the other: there, all publish before any waits.
    for waits in (True,) if device.type == "cuda" else (False, True):
        kernel, own = long.split_backward_kernel, flags | {"WAITS": waits}
        run(kernel, rows * segments, (*pointers, words), where, numbers, own)


def _backward_strips(
    rows: Rows,
    grads: Rows,
    mode: str,
    pointers: tuple[Tensor, ...],
    every: tuple[int, ...],
    numbers: tuple[float, ...],
    flags: dict[str, Any],
) -> None:
    """Write gradients of long rows that lie side by side."""
    categories, device = rows.tensor.shape[-1], rows.tensor.device
    programs, lag, sizes = strips.backward_sizes(rows.number, categories, rows.tensor.element_size(), mode)
    # Tiles exchange sums; a strip that is a single tile has none to exchange.
    count = -(-rows.number // sizes["STRIP"]) if lag else 0
    shape = (count, sizes["SEGMENTS"], sizes["SUMS"], sizes["STRIP"])
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    done = torch.zeros(count, dtype=torch.int32, device=device)
    where = (rows.number, categories, *rows[2:], grads.stride, grads.step, lag, *every)
    run(strips.tile_backward_kernel, programs, (*pointers, sums, done), where, numbers, flags | sizes)


def pull_log_prob(logits: Tensor, drawn: Streamed, grad: Tensor, fused: Fused) -> None:
    """Overwrite long rows of logits by their gradient, for a gradient of the drawn log-probabilities."""
    assert drawn.law is not None
    count, categories = logits.shape
    if count == 0:
        return
    (_, _, taus), (_, _, every) = fused.level_tensors(logits)
    blocks = -(-categories // long.LAW_BLOCK)
    flags: dict[str, Any] = {"TAU_FORWARD_PER_ROW": every > 0, "FAST": logits.is_cuda}
    flags |= {"BLOCK": long.LAW_BLOCK, "num_warps": long.LAW_WARPS}
    pointers = (logits, drawn.indices, drawn.law, grad.contiguous(), taus)
    sizes = (categories, blocks, every)
    run(long.log_prob_backward_kernel, count * blocks, pointers, sizes, fused.numbers[2:], flags)


def _average_draws(
    logits: Tensor,
    index: Tensor,
    stats: Tensor | None,
    key: Tensor,
    grad: Tensor | None,
    fused: Fused,
    out: Tensor,
    *,
    at_index: bool = False,
    first: int = 0,
) -> None:
    """Write the mean of Gumbel-Rao's draws to `out`, or with `grad` the gradient of the logits.

    ReinMax-Rao has no such mean, and no kernel for long rows.
    """
    rows, count, stride = row_matrix(logits)
    if count == 0:
        return
    grads, grad_stride = (rows, stride) if grad is None else _gradient_rows(grad, at_index)
    (taus, *_), (every, *_) = fused.level_tensors(logits)
    numbers = (fused.numbers[0], fused.samples)
    kind = (rao.power_of(fused.tau), grad is None, at_index, logits.is_cuda)
    sizes = (logits.shape[-1], stride, grad_stride, every)
    if logits.shape[-1] <= runner.LONGEST_BLOCK:
        how = (fused.mode == "reinmax-rao", fused.samples % 4, logits.element_size())
        launch = _rao(kind, *how, (count, *sizes))
        launch((rows, index, grads, key, taus, out), numbers)
        return
    assert stats is not None
    assert fused.mode == "gumbel-rao"
    batches, flags = rao.batches_of(fused.samples)
    draws = torch.empty((count, batches * flags["BATCH"], 3), dtype=torch.float32, device=logits.device)
    pointers = (rows, index, stats, grads, key, taus, draws, out)
    flags |= _rao_flags(kind, every) | {"IN_PLACE": out is logits}
    run(rao.streamed_rao_kernel, count, pointers, sizes, (*numbers, first), flags)


def _gradient_rows(grad: Tensor, at_index: bool) -> tuple[Tensor, int]:
    """The gradient of the sample as `row_matrix` gives it; `at_index` says that rows have one entry."""
    if at_index:
        return grad.contiguous(), 1
    rows, _, stride = row_matrix(grad)
    return rows, stride


# Launches are kept: working out how to launch takes the host longer than a small kernel runs.
@lru_cache(maxsize=1024)
def _forward(
    kind: _Kind, argmax: bool, soft: bool, dense: bool, every: tuple[int, ...], sizes: tuple[int, ...]
) -> Launch:
    """The launch of `forward` for short rows."""
    programs, block = partition(sizes[0], sizes[1], ROW_BLOCKS.get(power(sizes[1])))
    flags = _forward_flags(kind, argmax, soft, dense, every) | block
    return Launch(short.forward_kernel, programs, (*sizes, *every), flags)


@lru_cache(maxsize=1024)
def _stream(
    kind: _Kind,
    argmax: bool,
    soft: bool,
    dense: bool,
    every: tuple[int, ...],
    rows: int,
    sizes: tuple[int, ...],
    law: bool,
    chunks: tuple[tuple[str, int], ...],
) -> Launch:
    """The launch of `stream` for rows that lie one after the other."""
    flags = _forward_flags(kind, argmax, soft, dense, every) | {"LAW": law, **dict(chunks)}
    return Launch(long.streamed_forward_kernel, rows, sizes, flags)


@lru_cache(maxsize=1024)
def _backward(
    kind: _Kind, detach: bool, at_index: bool, every: tuple[int, ...], sizes: tuple[int, ...]
) -> Launch:
    """The launch of `backward` for short rows."""
    programs, block = partition(sizes[0], sizes[1], ROW_BLOCKS.get(power(sizes[1])))
    flags = {**_flags(kind, every), "AT_INDEX": at_index, "DETACHED": detach, **block}
    return Launch(short.backward_kernel, programs, (*sizes, *every[:2]), flags)


_RaoKind = tuple[int, bool, bool, bool]
"""The power, whether the sample is wanted, whether the gradient is at the index, whether it runs on a GPU."""


@lru_cache(maxsize=1024)
def _rao(
    kind: _RaoKind, reinmax: bool, left: int, size: int, sizes: tuple[int, int, int, int, int]
) -> Launch:
    """The launch of `_average_draws` for short rows."""
    programs, block = rao.block_of(*sizes[:2], size)
    flags = _rao_flags(kind, sizes[-1]) | {"REINMAX": reinmax, "LEFT": left, **block}
    return Launch(rao.rao_kernel, programs, sizes, flags)


def _rao_flags(kind: _RaoKind, every: int) -> dict[str, Any]:
    exponent, soft, at_index, fast = kind
    return {"TAU_PER_ROW": every > 0, "POWER": exponent, "SOFT": soft, "AT_INDEX": at_index, "FAST": fast}


def _kind(logits: Tensor, fused: Fused) -> _Kind:
    return fused.mode, fused.gap is None, logits.is_cuda


def _flags(kind: _Kind, every: tuple[int, ...]) -> dict[str, Any]:
    """The flags that all kernels have."""
    mode, expected_gap, fast = kind
    levels = {"TAU_PER_ROW": every[0] > 0, "GAP_PER_ROW": every[1] > 0, "EXPECTED_GAP": expected_gap}
    return {"MODE": MODES[mode], "FAST": fast, **levels}


def _forward_flags(
    kind: _Kind, argmax: bool, soft: bool, dense: bool, every: tuple[int, ...]
) -> dict[str, Any]:
    flags = {"TAU_FORWARD_PER_ROW": every[2] > 0, "ARGMAX": argmax, "SOFT": soft, "DENSE": dense}
    return _flags(kind, every) | flags


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
        value, index, stats = forward(logits, key, fused)
        ctx.fused = fused
        # Temperatures and gaps too, so that autograd notices if they are changed before the backward pass.
        ctx.save_for_backward(logits, index, stats, key, *fused.tensors)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, index, stats, key, *_ = ctx.saved_tensors

        def product(grad: Tensor) -> Tensor:
            return backward(logits, index, stats, key, grad, ctx.fused)

        return first_order(product, logits, grad), None, None


def readable(logits: Tensor, fused: Fused) -> Tensor:
    """The logits, or a copy whose rows lie as the kernels read them."""
    if logits.is_contiguous():
        return logits
    axes = axes_of(logits, fused)
    if axes:
        return rows_of(logits, axes).tensor
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def key_of(logits: Tensor, fused: Fused, generator: torch.Generator | None) -> Tensor:
    """The key of a sample; where nothing is random, one that is not drawn."""
    if fused.argmax and fused.mode not in AVERAGED:
        return torch.zeros(1, dtype=torch.int64, device=logits.device)
    return draw_key(logits, generator)


def sample(logits: Tensor, fused: Fused, generator: torch.Generator | None) -> Tensor:
    """A sample of ``(*rows, K)`` logits that carries the gradient of the estimator `fused`."""
    logits = readable(logits, fused)
    key = key_of(logits, fused, generator)
    if torch.compiler.is_compiling():
        from gapped.kernels.sampling import operators

        return operators.sample(logits, key, fused)
    # `fused.refusal` knows of transforms.
    return apply_in_eager_mode(_Sample, logits, key, fused)  # type: ignore[no-any-return]
