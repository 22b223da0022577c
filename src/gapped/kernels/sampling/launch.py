"""Launching the kernels: the rule for when they apply, and a sample that carries its gradient."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped.gradient import first_order
from gapped.kernels.runner import Launch, partition, run
from gapped.kernels.sampling import flow_sizes, long_launch, rao_sizes, strip_sizes
from gapped.kernels.sampling.long_launch import Call
from gapped.kernels.sampling.row_layout import Rows, empty_rows, inner_axes, row_matrix, rows_of

BACKENDS = ("auto", "torch", "triton")
LONGEST_BLOCK = 4096
"""Rows up to this length are held by one program at once; longer ones are read in chunks."""
AVERAGED = frozenset({"gumbel-rao", "reinmax-rao"})
"""The modes whose gradient is a mean over noise that is drawn once the category is known."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SHORT = torch.iinfo(torch.int16).max
_INSTALLED = find_spec("triton") is not None

_used: str | None = None

_Kind = tuple[str, bool, bool]
"""The mode, whether its gap is the expected one, whether it runs on a GPU."""
_Every = tuple[int, int, int]
"""How many rows share an entry of temperature, gap and forward temperature; 0 for a number."""


@dataclass(frozen=True)
class Fused:
    """What the kernels need to know of an estimator."""

    mode: str
    """Its registered name."""
    tau: float | Tensor
    gap: float | Tensor | None = None
    """The gap of GST; None for Lemma 1's expected gap. The smoothing of MVE; None for none."""
    detach: bool = True
    """Whether GST's perturbation is a constant."""
    tau_forward: float | Tensor = 1.0
    samples: int = 1
    soft: bool = False
    """Whether the sample is the surrogate itself."""
    argmax: bool = False
    """Whether the category is that of the largest logit."""

    @cached_property
    def numbers(self) -> tuple[float, float, float]:
        """Temperature, gap and forward temperature; 0 for one that is a tensor, or no gap."""
        # As floats: a whole number would be compiled as such, and the next one that is not be cut.
        tau, gap, tau_forward = (
            0.0 if level is None or isinstance(level, Tensor) else float(level)
            for level in (self.tau, self.gap, self.tau_forward)
        )
        return tau, gap, tau_forward

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of them that are tensors."""
        return tuple(level for level in (self.tau, self.gap, self.tau_forward) if isinstance(level, Tensor))

    def at_argmax(self) -> Fused | None:
        """The same estimator given the category of the largest logit; None if that has no kernel."""
        if self.mode == "decoupled":
            return None
        # Gumbel noise given its winner is what Gumbel-Rao draws.
        given = "gumbel-rao" if self.mode == "gumbel-softmax" else self.mode
        return replace(self, mode=given, argmax=True)


class Forward(NamedTuple):
    """What a forward pass returns."""

    value: Tensor
    """The sample; empty if only its index is wanted."""
    indices: Tensor
    """The rows' indices, flat, int16 or int32: one past the last category where a row has none, two past it
    where it holds a NaN or +inf."""
    stats: Tensor | None
    """Two numbers per row that the backward pass of long rows needs, ``(rows, 2)``; None for short rows."""


def has_stats(categories: int, axes: int) -> bool:
    """Whether rows are long; `axes` says how they lie (`row_layout`)."""
    return categories > (strip_sizes.LONGEST_BLOCK if axes else LONGEST_BLOCK)


def axes_of(logits: Tensor, fused: Fused) -> int:
    """How many row axes the kernels see inside of the category axis; 0 if they read row after row."""
    if fused.mode in AVERAGED or fused.mode == "mve":
        return 0
    if not (fused.detach or logits.shape[-1] <= strip_sizes.LONGEST_BLOCK):
        return 0
    return inner_axes(logits)


def readable(logits: Tensor, fused: Fused) -> Tensor:
    """The logits, or a copy whose rows lie as the kernels read them."""
    if logits.is_contiguous():
        return logits
    axes = axes_of(logits, fused)
    if axes:
        return rows_of(logits, axes).tensor
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def backend_used() -> str | None:
    """The backend that drew the last sample outside of compiled code.

    Returns:
        "torch" or "triton"; None if nothing was drawn yet.
    """
    return _used


def note_backend(name: str) -> None:
    """Remember which backend drew the last sample."""
    global _used
    if not torch.compiler.is_compiling():
        _used = name


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs kernels on `device`: a GPU, or any device in its interpreter."""
    return _INSTALLED and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def refusal(logits: Tensor, fused: Fused | None) -> str | None:
    """Why the kernels cannot sample these logits; None if they can."""
    if fused is None:
        return "this estimator, or this option of it, has no kernel"
    if not _INSTALLED:
        return "Triton is not installed (pip install triton)"
    if not logits.is_cuda and not runs_on(logits.device):
        return f"the logits are on {logits.device.type}, the kernels run on cuda"
    if logits.dtype not in _DTYPES:
        return f"the logits are {logits.dtype}, the kernels take float32, bfloat16 and float16"
    if not fused.detach and logits.shape[-1] > LONGEST_BLOCK:
        return f"detach=False has no kernel for rows longer than {LONGEST_BLOCK}"
    if fused.mode == "mve" and not 2 <= logits.shape[-1] <= flow_sizes.LONGEST:
        return f"MVE's kernel takes 2 to {flow_sizes.LONGEST} categories, not {logits.shape[-1]}"
    if fused.mode == "reinmax-rao" and logits.shape[-1] > LONGEST_BLOCK:
        return f"ReinMax-Rao has no kernel for rows longer than {LONGEST_BLOCK}"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "the call is inside of a function transform such as vmap"
    return None


def index_dtype(categories: int) -> torch.dtype:
    """The smallest dtype that suffices: beside short rows, indices count too. `categories + 1` must fit."""
    return torch.int16 if categories < _SHORT else torch.int32


def draw_key(logits: Tensor, generator: torch.Generator | None, count: int = 1) -> Tensor:
    """A random key for a call's noise, drawn on the device: a CUDA graph draws a new one at every replay."""
    return torch.randint(2**62, (count,), device=logits.device, generator=generator)


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
    return _Sample.apply(logits, key, fused)  # type: ignore[no-any-return, no-untyped-call]


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


def sample_side_by_side(
    logits: Tensor, sizes: list[int], estimators: Sequence[Fused], generator: torch.Generator | None
) -> Tensor:
    """A sample of short rows, split along the first axis: `sizes` says how much of it each estimator draws.

    Samples and gradients are written where they belong, without concatenating them afterwards.
    """
    keys = draw_key(logits, generator, len(estimators))
    return _SideBySide.apply(logits, keys, sizes, estimators)  # type: ignore[no-any-return, no-untyped-call]


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, keys: Tensor, sizes: list[int], estimators: Sequence[Fused]
    ) -> Tensor:
        value = empty_rows(logits, 0)
        shares = torch.split(logits, sizes), torch.split(keys, 1), estimators, torch.split(value, sizes)
        indices = [
            forward(rows, key, fused, out=out).indices for rows, key, fused, out in zip(*shares, strict=True)
        ]
        ctx.sizes, ctx.estimators = sizes, estimators
        levels = (level for fused in estimators for level in fused.tensors)
        ctx.save_for_backward(logits, keys, *indices, *levels)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, keys, *rest = ctx.saved_tensors
        indices = rest[: len(ctx.sizes)]

        def product(grad: Tensor) -> Tensor:
            gradient = empty_rows(logits, 0)
            rows, grads, outs = (torch.split(each, ctx.sizes) for each in (logits, grad, gradient))
            shares = rows, indices, torch.split(keys, 1), grads, ctx.estimators, outs
            for share, index, key, own, fused, out in zip(*shares, strict=True):
                backward(share, index, None, key, own, fused, out=out)
            return gradient

        return first_order(product, logits, grad), None, None, None


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
    `axes` says (`row_layout`), by default as the logits do.
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
        tensors, every = level_tensors(fused, logits)
        kind = (fused.mode, fused.gap is None, logits.is_cuda)
        how = (fused.argmax, fused.soft, dense and not averages)
        launch = _forward(kind, *how, every, (rows.number, categories, *rows[2:]))
        launch((rows.tensor, key, *tensors, value, index), fused.numbers)
    else:
        written = value if dense and not averages else None
        stream(logits, key, fused, Streamed(index, stats), written, axes=axes)
    if averages:
        _average_draws(logits, index, stats, key, None, fused, value)
    return Forward(value, index, stats)


class Streamed(NamedTuple):
    """What a forward pass of long rows leaves of each row."""

    indices: Tensor
    """The rows' indices, flat, in any integer dtype that holds them."""
    stats: Tensor
    """Two numbers that the backward pass needs, ``(rows, 2)`` in float32."""
    law: Tensor | None = None
    """If wanted, the log-probability of the index, 0 in a row without categories, and the logarithm of the
    sum of exponentials that the law is normalised by; ``(rows, 2)`` in float32."""


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
    rows = rows_of(logits, axes)
    if rows.number == 0:
        return
    tensors, every = level_tensors(fused, logits)
    kind = (fused.mode, fused.gap is None, logits.is_cuda)
    flags = _forward_flags(kind, fused.argmax, fused.soft, value is not None, every)
    pointers = (rows.tensor, key, *tensors, rows.tensor if value is None else value, to.indices, to.stats)
    long_launch.forward(rows, Call(pointers, every, fused.numbers, flags, first), to.law)


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
    """The gradient of the logits; with `at_index` that of the sample is given for the selected entries only.

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
    (taus, gaps, _), every = level_tensors(fused, logits)
    tau, gap, _ = fused.numbers
    kind = (fused.mode, fused.gap is None, logits.is_cuda)
    if not is_long:
        sizes = (rows.number, categories, *rows[2:], grads.stride, grads.step)
        launch = _backward(kind, fused.detach, at_index, every, sizes)
        launch((rows.tensor, index, grads.tensor, key, taus, gaps, out), (tau, gap))
        return out
    assert stats is not None
    flags = _flags(kind, every) | {"AT_INDEX": at_index}
    pointers = (rows.tensor, index, stats, grads.tensor, key, taus, gaps, out)
    call = Call(pointers, every[:2], (tau, gap), flags, first)
    long_launch.backward(rows, grads, fused.mode, call, in_place=out is logits)
    return out


def pull_log_prob(logits: Tensor, drawn: Streamed, grad: Tensor, fused: Fused) -> None:
    """Write the gradient of long rows of logits in their place, by that of the drawn log-probabilities."""
    from gapped.kernels.sampling import log_prob_rows

    assert drawn.law is not None
    count, categories = logits.shape
    if count == 0:
        return
    (_, _, taus), (_, _, every) = level_tensors(fused, logits)
    blocks = -(-categories // log_prob_rows.BLOCK)
    block = {"BLOCK": log_prob_rows.BLOCK, "num_warps": log_prob_rows.WARPS}
    flags = {"TAU_FORWARD_PER_ROW": every > 0, "FAST": logits.is_cuda, **block}
    pointers = (logits, drawn.indices, drawn.law, grad.contiguous(), taus)
    sizes, numbers = (categories, blocks, every), fused.numbers[2:]
    run(log_prob_rows.log_prob_backward_kernel, count * blocks, pointers, sizes, numbers, flags)


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
    (taus, *_), (every, *_) = level_tensors(fused, logits)
    numbers = (fused.numbers[0], fused.samples)
    kind = (_power(fused.tau), grad is None, at_index, logits.is_cuda)
    sizes = (logits.shape[-1], stride, grad_stride, every)
    if logits.shape[-1] <= LONGEST_BLOCK:
        how = (fused.mode == "reinmax-rao", fused.samples % 4, logits.element_size())
        launch = _rao(kind, *how, (count, *sizes))
        launch((rows, index, grads, key, taus, out), numbers)
        return
    assert stats is not None
    assert fused.mode == "gumbel-rao"
    from gapped.kernels.sampling.rao_chunks import streamed_rao_kernel

    batches, flags = rao_sizes.batches_of(fused.samples)
    draws = torch.empty((count, batches * flags["BATCH"], 3), dtype=torch.float32, device=logits.device)
    pointers = (rows, index, stats, grads, key, taus, draws, out)
    flags |= _rao_flags(kind, every) | {"IN_PLACE": out is logits}
    run(streamed_rao_kernel, count, pointers, sizes, (*numbers, first), flags)


def _power(tau: float | Tensor) -> int:
    """1/tau where that is 1 or 2: then weights are powers of a reciprocal. Else 0."""
    return {1.0: 1, 0.5: 2}.get(tau, 0) if isinstance(tau, (int, float)) else 0


def _gradient_rows(grad: Tensor, at_index: bool) -> tuple[Tensor, int]:
    """The gradient of the sample as `row_matrix` gives it; `at_index` says that rows have one entry."""
    if at_index:
        return grad.contiguous(), 1
    rows, _, stride = row_matrix(grad)
    return rows, stride


# Launches are kept: working out how to launch takes the host longer than a small kernel runs.
@lru_cache(maxsize=1024)
def _forward(
    kind: _Kind, argmax: bool, soft: bool, dense: bool, every: _Every, sizes: tuple[int, ...]
) -> Launch:
    """The launch of `forward` for short rows."""
    from gapped.kernels.sampling.short_rows import forward_kernel

    programs, block = partition(sizes[0], sizes[1])
    flags = _forward_flags(kind, argmax, soft, dense, every) | block
    return Launch(forward_kernel, programs, (*sizes, *every), flags)


@lru_cache(maxsize=1024)
def _backward(kind: _Kind, detach: bool, at_index: bool, every: _Every, sizes: tuple[int, ...]) -> Launch:
    """The launch of `backward` for short rows."""
    flags = {**_flags(kind, every), "AT_INDEX": at_index}
    if kind[0] == "mve":
        from gapped.kernels.sampling.flow_rows import flow_kernel as kernel

        programs, block = flow_sizes.block_of(sizes[0], sizes[1])
        del flags["MODE"]
        block["SMOOTH"] = not flags.pop("EXPECTED_GAP")
    else:
        from gapped.kernels.sampling.short_rows import backward_kernel as kernel

        programs, block = partition(sizes[0], sizes[1])
        block["DETACHED"] = detach
    return Launch(kernel, programs, (*sizes, *every[:2]), flags | block)


_RaoKind = tuple[int, bool, bool, bool]
"""The power, whether the sample is wanted, whether the gradient is at the index, whether it runs on a GPU."""


@lru_cache(maxsize=1024)
def _rao(
    kind: _RaoKind, reinmax: bool, left: int, size: int, sizes: tuple[int, int, int, int, int]
) -> Launch:
    """The launch of `_average_draws` for short rows."""
    from gapped.kernels.sampling.rao_rows import rao_kernel

    programs, block = rao_sizes.block_of(*sizes[:2], size)
    flags = _rao_flags(kind, sizes[-1]) | {"REINMAX": reinmax, "LEFT": left, **block}
    return Launch(rao_kernel, programs, sizes, flags)


def _rao_flags(kind: _RaoKind, every: int) -> dict[str, Any]:
    exponent, soft, at_index, fast = kind
    return {"TAU_PER_ROW": every > 0, "POWER": exponent, "SOFT": soft, "AT_INDEX": at_index, "FAST": fast}


def _flags(kind: _Kind, every: _Every) -> dict[str, Any]:
    """The flags that all kernels have."""
    from gapped.kernels.sampling.surrogates import MODES

    mode, expected_gap, fast = kind
    levels = {"TAU_PER_ROW": every[0] > 0, "GAP_PER_ROW": every[1] > 0, "EXPECTED_GAP": expected_gap}
    return {"MODE": MODES[mode], "FAST": fast, **levels}


def _forward_flags(kind: _Kind, argmax: bool, soft: bool, dense: bool, every: _Every) -> dict[str, Any]:
    flags = {"TAU_FORWARD_PER_ROW": every[2] > 0, "ARGMAX": argmax, "SOFT": soft, "DENSE": dense}
    return _flags(kind, every) | flags


def level_tensors(fused: Fused, logits: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], _Every]:
    """Temperature, gap and forward temperature as tensors; the logits stand in for those that are numbers."""
    if not fused.tensors:
        return (logits, logits, logits), (0, 0, 0)
    (tau, a), (gap, b), (tau_forward, c) = (
        _per_row(level, logits) if isinstance(level, Tensor) else (logits, 0)
        for level in (fused.tau, fused.gap, fused.tau_forward)
    )
    return (tau, gap, tau_forward), (a, b, c)


def _per_row(level: Tensor, logits: Tensor) -> tuple[Tensor, int]:
    """A level as a contiguous tensor, and how many consecutive rows share each of its entries.

    A fleet has one entry for each run, which is used as it is, without expanding it to all rows.
    """
    level, rows = level.to(logits.device, torch.float32), logits.shape[:-1]
    shape = (*(1,) * (len(rows) - level.dim()), *level.shape)
    same = next((axis for axis, (n, m) in enumerate(zip(shape, rows, strict=True)) if n != m), len(rows))
    if any(n != 1 for n in shape[same:]):
        return level.expand(rows).contiguous(), 1
    return level.contiguous(), math.prod(rows[same:])
