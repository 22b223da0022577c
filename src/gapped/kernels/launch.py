"""Launching the fused kernels: one autograd Function, and the rule for when it applies."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Fused", "applies", "available", "sample"]

LONGEST_ROW = 1024
_ELEMENTS = 2048
# The loop over draws keeps much in registers: smaller blocks were fastest (benchmarks/bench_rao.py).
_RAO_ELEMENTS = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

launches = 0
"""How many samples the kernels have drawn in this process; tests look here to see which branch ran."""


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


@functools.cache
def available() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def applies(logits: Tensor) -> bool:
    """Whether the kernels can and should be used: on a GPU, in eager mode, for rows that fit into a block."""
    return (
        logits.device.type == "cuda"
        and logits.numel() > 0
        and logits.shape[-1] <= LONGEST_ROW
        and logits.dtype in _DTYPES
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and available()
    )


def sample(logits: Tensor, fused: Fused, generator: torch.Generator | None) -> Tensor:
    """A hard sample of ``(*rows, K)`` logits that carries the gradient of the estimator `fused`."""
    global launches
    launches += 1
    # The key is drawn on the device: a captured graph draws a new one at every replay.
    key = torch.randint(2**62, (1,), device=logits.device, generator=generator)
    return _Sample.apply(logits, key, fused)  # type: ignore[no-any-return, no-untyped-call]


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
        value, index = forward(logits, key, fused)
        ctx.fused = fused
        ctx.save_for_backward(logits, index, key)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, index, key = ctx.saved_tensors
        return backward(logits, index, key, grad, ctx.fused), None, None


def forward(logits: Tensor, key: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
    """The one-hot sample and its index, int32, one past the last category where a row has none."""
    from gapped.kernels.fused import MODES, forward_kernel

    rows, stride = _rows(logits)
    count, categories = rows.shape
    value = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    index = torch.empty(count, dtype=torch.int32, device=logits.device)
    levels, number, per_row = _level(fused.tau_forward, logits)
    grid, blocks = _blocks(count, categories)
    forward_kernel[grid](
        rows, key, levels, value, index, count, categories, stride, number,
        MODE=MODES[fused.mode], TAU_FORWARD_PER_ROW=per_row, **blocks,
    )  # fmt: skip
    return value, index


def backward(logits: Tensor, index: Tensor, key: Tensor, grad: Tensor, fused: Fused) -> Tensor:
    """The gradient of the logits."""
    from gapped.kernels.fused import MODES, backward_kernel

    rows, stride = _rows(logits)
    grads, grad_stride = _rows(grad)
    count, categories = rows.shape
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    taus, tau, tau_per_row = _level(fused.tau, logits)
    gaps, gap, gap_per_row = _level(1.0 if fused.gap is None else fused.gap, logits)
    grid, blocks = _blocks(count, categories, _RAO_ELEMENTS if fused.mode == "gumbel-rao" else _ELEMENTS)
    backward_kernel[grid](
        rows, index, grads, key, taus, gaps, out,
        count, categories, stride, grad_stride, tau, gap, fused.samples,
        MODE=MODES[fused.mode], TAU_PER_ROW=tau_per_row, GAP_PER_ROW=gap_per_row,
        EXPECTED_GAP=fused.gap is None, DETACHED=fused.detach, **blocks,
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` as a matrix whose categories are adjacent in memory, and the distance of its rows."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    matrix = x.reshape(-1, x.shape[-1])
    return matrix, matrix.stride(0)


def _level(level: float | Tensor, logits: Tensor) -> tuple[Tensor, float, bool]:
    """A temperature or gap as the kernels take it: a tensor, a number, and which of the two counts."""
    if not isinstance(level, Tensor):
        return logits, float(level), False
    rows = level.to(logits.device, torch.float32).expand(logits.shape[:-1])
    return rows.contiguous(), 0.0, True


def _blocks(rows: int, categories: int, elements: int = _ELEMENTS) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and block sizes that give each program about `elements` elements."""
    columns = max(1 << (categories - 1).bit_length(), 2)
    height = max(elements // columns, 1)
    return (-(-rows // height),), {"BLOCK_ROWS": height, "BLOCK_COLUMNS": columns}
