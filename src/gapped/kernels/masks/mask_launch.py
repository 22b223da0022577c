"""Launching the kernels: the rule for when they apply, and a sample that carries its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped.gradient import first_order
from gapped.kernels.runner import partition, run
from gapped.kernels.sampling.launch import Fused, draw_key, note_backend, refusal

LARGEST_GROUP = 8
"""A subset of a group fits into a byte, and all of them can be enumerated."""
# Elements of a block and warps that share it; None for those of other kernels. Not yet chosen by measurement.
BLOCK: tuple[int, int] | None = None
# The rule for samples holds here, too; a plain one stands for all.
_PLAIN = Fused("straight-through", 1.0)


class Options(NamedTuple):
    """What the kernels need to know of a call."""

    k: int
    """How many elements of a group are selected."""
    tau: float
    gap: float | None
    """The gap of GST; None for SIMPLE."""
    soft: bool = False
    """Whether the sample is the surrogate itself."""


def applies(rows: Tensor, tau: float | Tensor, gap: object) -> bool:
    """Whether the kernels take the place of torch for groups ``(*rows, m)``."""
    if not rows.is_cuda or rows.shape[-1] > LARGEST_GROUP:
        return False
    if isinstance(tau, Tensor) or isinstance(gap, Tensor):
        return False
    return refusal(rows, _PLAIN) is None


def sample(rows: Tensor, options: Options, generator: torch.Generator | None) -> Tensor:
    """A sample of groups ``(*rows, m)`` that carries its gradient."""
    key = draw_key(rows, generator)
    note_backend("triton")
    if torch.compiler.is_compiling():
        from gapped.kernels.masks import mask_operators

        return mask_operators.sample(rows, key, options)
    return _Sample.apply(rows, key, options)  # type: ignore[no-any-return, no-untyped-call]


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, key: Tensor, options: Options) -> Tensor:
        value, chosen = forward(rows, key, options)
        ctx.options = options
        ctx.save_for_backward(rows, chosen)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows, chosen = ctx.saved_tensors

        def product(grad: Tensor) -> Tensor:
            return backward(rows, chosen, grad, ctx.options)

        return first_order(product, rows, grad), None, None


def forward(rows: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """A sample, and the subsets as bytes, ``(groups,)``: bit `j` stands for element `j`."""
    from gapped.kernels.masks.mask_kernels import mask_forward_kernel

    value = torch.empty_like(rows, memory_format=torch.contiguous_format)
    chosen = torch.empty(rows.shape[:-1].numel(), dtype=torch.uint8, device=rows.device)
    pointers = (rows.contiguous(), key, value, chosen)
    _run(mask_forward_kernel, pointers, options, SOFT=options.soft)
    return value, chosen


def backward(rows: Tensor, chosen: Tensor, grad: Tensor, options: Options) -> Tensor:
    """The gradient of the logits."""
    from gapped.kernels.masks.mask_kernels import mask_backward_kernel

    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _run(mask_backward_kernel, (rows.contiguous(), chosen, grad.contiguous(), out), options)
    return out


def _run(kernel: Any, pointers: tuple[Tensor, ...], options: Options, **flags: bool) -> None:
    """Launch a kernel over the groups of its first tensor, if there are any."""
    groups, size = pointers[0].shape[:-1].numel(), pointers[0].shape[-1]
    if groups:
        programs, block = partition(groups, size, BLOCK)
        # Groups come in pairs that share their noise.
        block["BLOCK_ROWS"] = max(block["BLOCK_ROWS"], 2)
        # As floats: a whole number would be compiled as such.
        numbers = float(options.tau), float(options.gap or 0.0)
        named = {"N": options.k, "M": size, "GAPPED": options.gap is not None, **flags}
        named |= {"FAST": pointers[0].is_cuda, **block}
        run(kernel, programs, pointers, (groups,), numbers, named)
