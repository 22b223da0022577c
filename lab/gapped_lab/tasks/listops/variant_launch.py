"""The estimators in `tree_variants` with kernels, for float32 scores ``(*rows, L)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels.runner import power, run
from gapped_lab.tasks.listops import variant_kernels

# Elements of a block.
BLOCK = 1024


def shaped(shape: str, scores: Tensor, uniform: Tensor | None) -> Tensor:
    """Samples of a `TreeShape`; `uniform` ``(*rows)``, float64, if it is random."""
    scores, out = scores.contiguous(), torch.empty_like(scores, memory_format=torch.contiguous_format)
    number = getattr(variant_kernels, shape.upper())
    _run(variant_kernels.shape_kernel, (scores, out if uniform is None else uniform, out), (), SHAPE=number)
    return out


class LateMasked(torch.autograd.Function):
    """Samples of a `LateMaskGumbelSoftmax`.

    Shapes: `mask` and the exponential `noise` as `scores`; `tau` has an entry for so many rows in a row.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, noise: Tensor, tau: Tensor) -> Tensor:
        inputs = tuple(each.contiguous() for each in (scores, mask, noise, tau))
        ctx.save_for_backward(*inputs)
        out = torch.empty_like(inputs[0])
        _run(variant_kernels.late_forward_kernel, (*inputs, out), (_every(scores, tau),))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        scores, _, _, tau = inputs = ctx.saved_tensors
        out = torch.empty_like(scores)
        _run(variant_kernels.late_backward_kernel, (*inputs, grad.contiguous(), out), (_every(scores, tau),))
        return out, None, None, None


def _every(scores: Tensor, tau: Tensor) -> int:
    """How many rows share a temperature."""
    return scores[..., 0].numel() // tau.numel()


def _run(kernel: Any, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], **flags: Any) -> None:
    rows, places = tensors[0][..., 0].numel(), tensors[0].shape[-1]
    columns = power(places)
    block = {"ROWS": max(BLOCK // columns, 1), "PLACES": columns, "num_warps": 4}
    run(kernel, -(-rows // block["ROWS"]), tensors, (rows, places, *sizes), (), flags | block)
