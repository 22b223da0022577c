"""Launching the fused kernels: the rule for when they apply, and a sample that carries its gradient."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = [
    "BACKENDS",
    "Fused",
    "Sampled",
    "backend_used",
    "backward",
    "draw_key",
    "forward",
    "index_dtype",
    "partition",
    "refusal",
    "row_matrix",
    "run",
    "runs_on",
    "sample",
    "sample_side_by_side",
]

BACKENDS = ("auto", "torch", "triton")
LONGEST_BLOCK = 4096
"""Rows up to this length are held by one program at once; longer ones are streamed."""
# Elements of a block and warps that share it: the fastest on an H200 (benchmarks/bench_blocks.py).
_BLOCK = (1024, 4)
_RAO_BLOCK = (256, 2)
# So many programs fill the GPU. Where there are fewer rows than that needs, blocks are smaller.
_PROGRAMS = 256
# The same for rows that are streamed.
_STREAM, _STREAM_WARPS = 4096, 16
# Backward a row is split over programs that hold so many bytes of its logits each. With so few registers one
# program more fits on a multiprocessor; only simple weights of half precision need no more.
_PART_BYTES, _PART_WARPS, _PART_REGISTERS = 16384, 8, 64
# A row's programs wait for each other: even a small GPU must have places for all of them.
_MOST_PARTS = 32
# Still longer rows are read twice. Few large programs leave them in the cache.
_STREAM_BACK, _STREAM_BACK_WARPS = 16384, 32
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INSTALLED = find_spec("triton") is not None

_used: str | None = None


@dataclass(frozen=True)
class Fused:
    """What the kernels need to know of an estimator."""

    mode: str
    """Its registered name."""
    tau: float | Tensor
    gap: float | Tensor | None = None
    """The gap of GST; None for Lemma 1's expected gap."""
    detach: bool = True
    """Whether GST's perturbation is a constant."""
    tau_forward: float | Tensor = 1.0
    samples: int = 1
    soft: bool = False
    """Whether the sample is the surrogate itself."""


class Sampled(NamedTuple):
    """What a forward pass leaves behind."""

    value: Tensor
    """The sample; empty if it was not asked for."""
    chosen: Tensor
    """The rows' indices, flat, int16 or int32: one past the last category where a row has none, two past it
    where it holds a NaN."""
    stats: Tensor
    """Two numbers per row that a streamed backward pass needs, ``(rows, 2)``; empty otherwise."""


def backend_used() -> str | None:
    """Which backend drew the last sample outside of compiled code: ``"torch"``, ``"triton"``, or None."""
    return _used


def note_backend(name: str) -> None:
    """Remember who drew the last sample."""
    global _used
    if not torch.compiler.is_compiling():
        _used = name


def runs_on(device: torch.device) -> bool:
    """Whether Triton is there and runs kernels on `device`: a GPU, or any in its interpreter."""
    return _INSTALLED and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def refusal(logits: Tensor, fused: Fused | None) -> str | None:
    """Why the kernels cannot sample these logits; None if they can."""
    if fused is None:
        return "this estimator, or this option of it, has no kernel"
    if not _INSTALLED:
        return "Triton is not installed (pip install triton)"
    if not runs_on(logits.device):
        return f"the logits are on {logits.device.type}, the kernels run on cuda"
    if logits.dtype not in _DTYPES:
        return f"the logits are {logits.dtype}, the kernels take float32, bfloat16 and float16"
    if not fused.detach and logits.shape[-1] > LONGEST_BLOCK:
        return f"detach=False has no kernel for rows longer than {LONGEST_BLOCK}"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "the call is inside of a function transform such as vmap"
    return None


def index_dtype(categories: int) -> torch.dtype:
    """Indices in few bytes: beside short rows even they count. Two more than the categories must fit."""
    return torch.int16 if categories < torch.iinfo(torch.int16).max else torch.int32


def draw_key(logits: Tensor, generator: torch.Generator | None, count: int = 1) -> Tensor:
    """The key of a call's noise, drawn on the device: a captured graph draws a new one at every replay."""
    return torch.randint(2**62, (count,), device=logits.device, generator=generator)


def sample(logits: Tensor, fused: Fused, generator: torch.Generator | None) -> Tensor:
    """A sample of ``(*rows, K)`` logits that carries the gradient of the estimator `fused`."""
    key = draw_key(logits, generator)
    if torch.compiler.is_compiling():
        from gapped.kernels import operators

        return operators.sample(logits, key, fused)
    return _Sample.apply(logits, key, fused)  # type: ignore[no-any-return, no-untyped-call]


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
        value, index, stats = forward(logits, key, fused)
        ctx.fused = fused
        ctx.save_for_backward(logits, index, stats, key)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, index, stats, key = ctx.saved_tensors
        return backward(logits, index, stats, key, grad, ctx.fused), None, None


def sample_side_by_side(
    logits: Tensor, sizes: list[int], every: Sequence[Fused], generator: torch.Generator | None
) -> Tensor:
    """A sample whose first so many entries along the first axis are of one estimator, the next of another.

    Samples and gradients are written where they belong, not put together afterwards.
    """
    keys = draw_key(logits, generator, len(every))
    return _SideBySide.apply(logits, keys, sizes, every)  # type: ignore[no-any-return, no-untyped-call]


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, keys: Tensor, sizes: list[int], every: Sequence[Fused]) -> Tensor:
        value = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        chosen = [
            forward(piece, key, fused, out=out).chosen
            for piece, key, fused, out in zip(
                torch.split(logits, sizes),
                torch.split(keys, 1),
                every,
                torch.split(value, sizes),
                strict=True,
            )
        ]
        ctx.sizes, ctx.every = sizes, every
        ctx.save_for_backward(logits, keys, *chosen)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, keys, *chosen = ctx.saved_tensors
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for piece, index, key, of, fused, out in zip(
            torch.split(logits, ctx.sizes),
            chosen,
            torch.split(keys, 1),
            torch.split(grad, ctx.sizes),
            ctx.every,
            torch.split(gradient, ctx.sizes),
            strict=True,
        ):
            backward(piece, index, index[:0], key, of, fused, out=out)
        return gradient, None, None, None


def forward(
    logits: Tensor, key: Tensor, fused: Fused, *, dense: bool = True, out: Tensor | None = None
) -> Sampled:
    """Draw a sample; without `dense` only its index. For rows in one block it may be written to `out`."""
    rows, stride = row_matrix(logits)
    count, categories = rows.shape
    streamed = categories > LONGEST_BLOCK
    # Conditional draws of a streamed row are added up in the sample itself.
    adds_up = streamed and fused.soft and fused.mode == "gumbel-rao"
    assert out is None or not streamed
    value = out
    if value is None:
        value = torch.empty(
            logits.shape if dense else (0,),
            dtype=torch.float32 if adds_up else logits.dtype,
            device=logits.device,
        )
    index = torch.empty(count, dtype=index_dtype(categories), device=logits.device)
    stats = torch.empty((count, 2), dtype=torch.float32, device=logits.device) if streamed else index[:0]
    tensors, every, numbers, flags = _levels(fused, logits)
    pointers: tuple[Tensor, ...]
    flags |= {"SOFT": fused.soft, "DENSE": dense}
    if count == 0:
        return Sampled(value, index, stats)
    if streamed:
        from gapped.kernels.streamed import streamed_forward_kernel

        flags |= {"PIECES": _power(-(-categories // _STREAM)), "BLOCK": _STREAM, "num_warps": _STREAM_WARPS}
        pointers = (rows, key, *tensors, value, index, stats)
        run(
            streamed_forward_kernel,
            count,
            pointers,
            (categories, stride, *every),
            (*numbers, fused.samples),
            flags,
        )
    else:
        from gapped.kernels.fused import forward_kernel

        programs, blocks = partition(count, categories, loops=fused.soft and fused.mode == "gumbel-rao")
        pointers = (rows, key, *tensors, value, index)
        sizes = (count, categories, stride, *every)
        run(forward_kernel, programs, pointers, sizes, (*numbers, fused.samples), flags | blocks)
    return Sampled(value.to(logits.dtype) if adds_up else value, index, stats)


def backward(
    logits: Tensor,
    index: Tensor,
    stats: Tensor,
    key: Tensor,
    grad: Tensor,
    fused: Fused,
    *,
    at_index: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits; with `at_index` that of the sample is given for the chosen entries only.

    For rows in one block it may be written to `out`.
    """
    rows, stride = row_matrix(logits)
    grads, grad_stride = (grad.contiguous(), 1) if at_index else row_matrix(grad)
    count, categories = rows.shape
    streamed = categories > LONGEST_BLOCK
    adds_up = streamed and fused.mode == "gumbel-rao"
    assert out is None or not streamed
    if out is None:
        dtype = torch.float32 if adds_up else logits.dtype
        out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    (taus, gaps, _), every, (tau, gap, _), flags = _levels(fused, logits)
    pointers: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    del flags["TAU_FORWARD_PER_ROW"]
    flags["AT_INDEX"] = at_index
    if count == 0:
        return out
    parts, blocks = _parts(logits, fused.mode)
    if streamed and not adds_up and parts <= _MOST_PARTS:
        from gapped.kernels.split import split_backward_kernel

        # A word for the sums of each part, and one more that only ReinMax needs.
        words = torch.zeros((count, 2, parts), dtype=torch.int64, device=logits.device)
        pointers = (rows, index, stats, grads, key, taus, gaps, out, words)
        sizes = (categories, stride, grad_stride, *every[:2])
        # The interpreter runs one program after the other: there, all publish their sums before any waits.
        for waits in (True,) if logits.is_cuda else (False, True):
            flags["WAITS"] = waits
            run(split_backward_kernel, count * parts, pointers, sizes, (tau, gap), flags | blocks)
    elif streamed:
        from gapped.kernels.streamed import streamed_backward_kernel

        flags |= {"BLOCK": _STREAM_BACK, "num_warps": _STREAM_BACK_WARPS}
        pointers = (rows, index, stats, grads, key, taus, gaps, out)
        sizes = (categories, stride, grad_stride, *every[:2])
        run(streamed_backward_kernel, count, pointers, sizes, (tau, gap, fused.samples), flags)
    else:
        from gapped.kernels.fused import backward_kernel

        programs, blocks = partition(count, categories, loops=fused.mode == "gumbel-rao")
        pointers = (rows, index, grads, key, taus, gaps, out)
        sizes = (count, categories, stride, grad_stride, *every[:2])
        flags |= {"DETACHED": fused.detach, **blocks}
        run(backward_kernel, programs, pointers, sizes, (tau, gap, fused.samples), flags)
    return out.to(logits.dtype) if adds_up else out


def row_matrix(x: Tensor) -> tuple[Tensor, int]:
    """`x` as a matrix whose categories are adjacent in memory, and the distance of its rows."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    matrix = x.reshape(-1, x.shape[-1])
    return matrix, matrix.stride(0)


def _levels(fused: Fused, logits: Tensor) -> tuple[list[Tensor], list[int], list[float], dict[str, Any]]:
    """Temperature, gap and forward temperature as the kernels take them.

    These are tensors, for how many rows one of their entries is, numbers, and flags.
    """
    from gapped.kernels.parts import MODES

    tau, gap, tau_forward = fused.tau, 1.0 if fused.gap is None else fused.gap, fused.tau_forward
    tensors, every, numbers = [logits, logits, logits], [1, 1, 1], [0.0, 0.0, 0.0]
    for place, level in enumerate((tau, gap, tau_forward)):
        if isinstance(level, Tensor):
            tensors[place], every[place] = _per_row(level, logits)
        else:
            numbers[place] = level
    flags = {
        "MODE": MODES[fused.mode],
        "TAU_PER_ROW": tensors[0] is not logits,
        "GAP_PER_ROW": tensors[1] is not logits,
        "TAU_FORWARD_PER_ROW": tensors[2] is not logits,
        "EXPECTED_GAP": fused.gap is None,
        "FAST": logits.is_cuda,
    }
    return tensors, every, numbers, flags


def _per_row(level: Tensor, logits: Tensor) -> tuple[Tensor, int]:
    """A level as a tensor without gaps, and for how many rows in a row each of its entries is.

    A fleet has one entry for each run: that is used as it is, without spreading it over all rows.
    """
    level, rows = level.to(logits.device, torch.float32), logits.shape[:-1]
    shape = (*(1,) * (len(rows) - level.dim()), *level.shape)
    same = next((axis for axis, (n, m) in enumerate(zip(shape, rows, strict=True)) if n != m), len(rows))
    if any(n != 1 for n in shape[same:]):
        return level.expand(rows).contiguous(), 1
    return level.contiguous(), math.prod(rows[same:])


def _power(count: int) -> int:
    """The next power of two, at least 2."""
    return max(1 << (count - 1).bit_length(), 2)


def partition(rows: int, categories: int, *, loops: bool = False) -> tuple[int, dict[str, int]]:
    """The number of programs, and the size of their blocks; `loops` if they loop over draws."""
    elements, warps = _RAO_BLOCK if loops else _BLOCK
    columns = _power(categories)
    height = max(min(elements // columns, 1 << (-(-rows // _PROGRAMS) - 1).bit_length()), 1)
    # A row that is longer than a block has more threads instead.
    warps = min(max(height * columns * warps // elements, 1), 16)
    return -(-rows // height), {"BLOCK_ROWS": height, "BLOCK_COLUMNS": columns, "num_warps": warps}


def _parts(logits: Tensor, mode: str) -> tuple[int, dict[str, Any]]:
    """Over how many programs a row is split in the backward pass, and how much of it each one holds."""
    categories, size = logits.shape[-1], logits.element_size()
    block = min(_power(categories), _PART_BYTES // size)
    parts = -(-categories // block)
    simple = size == 2 and mode in ("gst", "straight-through")
    flags = {"PARTS": parts, "LANES": _power(parts), "BLOCK": block, "num_warps": _PART_WARPS}
    return parts, flags | ({"maxnreg": _PART_REGISTERS} if simple else {})


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def run(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    numbers: tuple[float, ...],
    flags: dict[str, Any],
) -> None:
    """Launch a kernel on the device of its tensors.

    Triton finds out at every launch what a kernel has to be compiled for, which takes longer than a small
    kernel runs. Here that is done once for each combination of what it depends on.
    """
    arguments = (*pointers, *sizes, *numbers)
    if not pointers[0].is_cuda:
        kernel[(programs,)](*arguments, **flags)
        return
    device = pointers[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(kernel, programs, pointers, sizes, numbers, flags)
        return
    key = (
        id(kernel),
        device,
        *flags.values(),
        *[each.dtype for each in pointers],
        *[each.data_ptr() % 16 for each in pointers],
        *[each == 1 or 16 * (each % 16 == 0) for each in sizes],
    )
    known = _compiled.get(key)
    if known is None:
        made = kernel[(programs,)](*arguments, **flags)
        _compiled[key] = (made, tuple(flags[name] for name in kernel.arg_names[len(arguments) :]))
        return
    made, constants = known
    made[(programs, 1, 1)](*arguments, *constants)
