"""Launching the kernel of flows: when it applies, and the gradient of a sample's logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gapped.gradient import Points, Weights
from gapped.kernels.runner import power, run
from gapped.kernels.sampling import launch
from gapped.kernels.sampling.launch import Forward, Fused
from gapped.kernels.sampling.row_layout import row_matrix

LONGEST = 128
"""The most categories: a program holds a matrix of their weights in its registers."""
# Weights of a program of several rows, and those that a warp holds: 128 for each of its threads. So a
# row of 64 categories belongs to one warp, which waits for no other.
BLOCK, PER_WARP = 512, 4096
# The most steps of conjugate gradients, and the part of the first residual's square at which they end.
STEPS, LEFT = 8, 1e-13
# Whose law and draw the sample has.
_DRAW = Fused("straight-through", 1.0)


def refusal(logits: Tensor) -> str | None:
    """Why the kernel cannot be used for these logits; None if it can."""
    if torch.compiler.is_compiling():
        return "MVE has no kernel in compiled code"
    if not 2 <= logits.shape[-1] <= LONGEST:
        return f"the rows have {logits.shape[-1]} categories, the kernel takes 2 to {LONGEST}"
    return launch.refusal(logits, _DRAW)


def draw(logits: Tensor, generator: torch.Generator | None, dense: bool) -> Forward:
    """A sample of the softmax of ``(*rows, K)`` logits; its index alone unless `dense`."""
    return launch.forward(logits, launch.draw_key(logits, generator), _DRAW, dense=dense)


def points(logits: Tensor, index: Tensor, tau: float | Tensor, smoothing: float | Tensor) -> Points:
    """What carries the gradient of a sample of these logits: themselves, and the kernel as the product."""
    return Points(logits.unsqueeze(0), 1.0, partial(_product, index=index, levels=(tau, smoothing)))


def _product(
    grad: Tensor,
    points: Tensor,
    weights: Weights,
    *,
    index: Tensor,
    levels: tuple[float | Tensor, float | Tensor],
) -> Tensor:
    return backward(points[0], index, grad, *levels)


def backward(
    logits: Tensor, index: Tensor, grad: Tensor, tau: float | Tensor, smoothing: float | Tensor
) -> Tensor:
    """The gradient of the logits for one of the sample whose flat `index` this is."""
    from gapped.kernels.flows.flow_kernels import flow_kernel

    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    rows, count, stride = row_matrix(logits)
    if count == 0:
        return out
    # The smoothing takes the place of a gap, of which it has the form: a number, or a tensor by rows.
    levels = Fused("mve", tau, smoothing)
    (taus, smoothings, _), every = launch.level_tensors(levels, logits)
    grads, _, grad_stride = row_matrix(grad.to(logits.dtype))
    columns = power(logits.shape[-1])
    height = max(BLOCK // columns**2, 1)
    flags: dict[str, Any] = {
        "TAU_PER_ROW": every[0] > 0,
        "SMOOTHING_PER_ROW": every[1] > 0,
        "STEPS": STEPS,
        "LEFT": LEFT,
        "FAST": logits.is_cuda,
        "BLOCK_ROWS": height,
        "BLOCK_COLUMNS": columns,
        "num_warps": max(height * columns**2 // PER_WARP, 1),
    }
    sizes = (count, logits.shape[-1], stride, grad_stride, *every[:2])
    tensors = (rows, index, grads, taus, smoothings, out)
    run(flow_kernel, -(-count // height), tensors, sizes, levels.numbers[:2], flags)
    return out
