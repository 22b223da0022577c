"""The one backward pass that all pathwise estimators share.

Each of them sends the incoming gradient `g` of its sample to the logits as

.. math:: \\sum_m w_m\\, J(q_m)\\, g, \\qquad J(q) = \\operatorname{diag}(q) - q q^\\top,

for some points `q_m` of the simplex and weights `w_m` that the forward pass has fixed. Straight-through
estimators have one point, their surrogate, with weight :math:`1/\\tau`; Gumbel-Rao has one per draw;
ReinMax has two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gapped.checks import in_eager_mode
from gapped.once import once

__all__ = ["Weights", "blocks", "carry", "jacobian_product"]

Weights = float | tuple[float, ...] | Tensor
"""Weights of points: one number for all, one for each, or a tensor that broadcasts against ``(*rows, K)``."""
# On a CPU, larger inputs are computed so many numbers at a time: what is needed in between stays in the cache
# and takes no memory to speak of.
BLOCK = 1 << 17


def carry(value: Tensor, logits: Tensor, points: Tensor, weights: Weights) -> Tensor:
    r"""Return `value`, bit for bit, as a function of `logits` with gradient :math:`\sum_m w_m J(q_m) g`.

    Shapes: `value` and `logits` ``(*rows, K)``, `points` ``(m, *rows, K)``. `value` must be the caller's to
    give away: outside of compilers and function transforms, it is what is returned. For the backward pass
    `points` and `weights` are kept and nothing else, so sample and logits may be changed in place.
    """
    if in_eager_mode():
        return _Carry.apply(logits, value, points, weights)[0]  # type: ignore[no-any-return, no-untyped-call]
    return _TransformedCarry.apply(logits, value, points, weights)  # type: ignore[no-any-return, no-untyped-call]


def jacobian_product(grad: Tensor, points: Tensor, weights: Weights, like: Tensor) -> Tensor:
    r"""The product :math:`\sum_m w_m J(q_m) g`, computed in the dtype of `points`, in the dtype of `like`."""
    if points.device.type != "cpu" or points.numel() <= BLOCK or not in_eager_mode():
        return _product(grad.to(points.dtype), points, weights).to(like.dtype)
    categories = points.shape[-1]
    result = torch.empty(grad.shape, dtype=like.dtype)
    out, grad, points = result.view(-1, categories), grad.reshape(-1, categories), points.flatten(1, -2)
    if isinstance(weights, Tensor):
        weights = weights.expand(*result.shape[:-1], 1).reshape(-1, 1)
    for rows in blocks(len(out), points.numel() // max(len(out), 1)):
        these = weights[rows] if isinstance(weights, Tensor) else weights
        out[rows] = _product(grad[rows].to(points.dtype), points[:, rows], these)
    return result


def blocks(rows: int, numbers: int) -> Iterator[slice]:
    """`rows` rows of so many `numbers` each, in blocks."""
    step = max(BLOCK // max(numbers, 1), 1)
    return (slice(start, start + step) for start in range(0, rows, step))


def _product(grad: Tensor, points: Tensor, weights: Weights) -> Tensor:
    if isinstance(weights, tuple):
        first, *others = (
            _weighted(grad, point, weight) for point, weight in zip(points, weights, strict=True)
        )
        return sum(others, first)
    if points.shape[0] == 1:
        return _weighted(grad, points[0], weights)
    # Point by point, so that a point at a corner of the simplex adds exactly nothing.
    return (points * weights * (grad - (points * grad).sum(-1, keepdim=True))).sum(0)


def _weighted(grad: Tensor, point: Tensor, weight: float | Tensor) -> Tensor:
    # J(q) g = q (g - <q, g>) is what torch's softmax does in its own backward, in one pass.
    product: Tensor = torch._softmax_backward_data(grad, point, -1, grad.dtype)
    if isinstance(weight, Tensor):
        return product * weight
    return product if weight == 1 else product.mul_(weight)


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, value: Tensor, points: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(value)
        ctx.set_materialize_grads(False)
        # An output without entries, kept for the backward pass: what depends on it depends on the logits.
        anchor = logits.new_empty(0)
        ctx.number = None if isinstance(weights, Tensor) else weights
        ctx.save_for_backward(anchor, points, *([weights] if ctx.number is None else []))
        return value, anchor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor, None, None, None]:
        anchor, points, *tensors = ctx.saved_tensors
        weights = tensors[0] if tensors else ctx.number
        return once(jacobian_product, anchor, grad, points, weights, anchor), None, None, None


class _TransformedCarry(torch.autograd.Function):
    """`_Carry` in the form that compilers and function transforms understand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, value: Tensor, points: Tensor, weights: Weights) -> Tensor:
        # A copy: autograd forbids returning an input as it is, and changing a view of one in place.
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, _, points, weights = inputs
        ctx.number = None if isinstance(weights, Tensor) else weights
        ctx.save_for_backward(logits, points, *([weights] if ctx.number is None else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, points, *tensors = ctx.saved_tensors
        weights = tensors[0] if tensors else ctx.number
        return once(jacobian_product, logits, grad, points, weights, logits), None, None, None
