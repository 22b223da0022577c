"""The one backward pass that all pathwise estimators share.

Each of them sends the incoming gradient `g` of its sample to the logits as

.. math:: \\sum_m w_m\\, J(q_m)\\, g, \\qquad J(q) = \\operatorname{diag}(q) - q q^\\top,

for some points `q_m` of the simplex and weights `w_m` that the forward pass has fixed. Straight-through
estimators have one point, their surrogate, with weight :math:`1/\\tau`; Gumbel-Rao has one per draw;
ReinMax has two.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from gapped.once import once

__all__ = ["carry", "jacobian_product"]


def carry(value: Tensor, logits: Tensor, points: Tensor, weights: float | Tensor) -> Tensor:
    r"""Return `value`, bit for bit, as a function of `logits` with gradient :math:`\sum_m w_m J(q_m) g`.

    Shapes: `value` and `logits` ``(*rows, K)``, `points` ``(m, *rows, K)``, `weights` a number, or a tensor
    that broadcasts against ``(*rows, K)``, or for several points against `points`. For the backward pass
    only `points` and `weights` are kept, beside the logits that the caller holds anyway.
    """
    return _Carry.apply(value, logits, points, weights)  # type: ignore[no-any-return, no-untyped-call]


def jacobian_product(grad: Tensor, points: Tensor, weights: float | Tensor) -> Tensor:
    r"""The product :math:`\sum_m w_m J(q_m) g`."""
    if points.shape[0] == 1:
        # J(q) g = q (g - <q, g>) is what torch's softmax does in its own backward, in one pass.
        product: Tensor = torch._softmax_backward_data(grad, points[0], -1, grad.dtype)
        return product * weights if isinstance(weights, Tensor) else product.mul_(weights)
    # Point by point, so that a point at a corner of the simplex adds exactly nothing.
    return (points * weights * (grad - (points * grad).sum(-1, keepdim=True))).sum(0)


class _Carry(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, logits: Tensor, points: Tensor, weights: float | Tensor) -> Tensor:
        # A fresh view: autograd forbids returning an input as it is.
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, logits, points, weights = inputs
        ctx.number = None if isinstance(weights, Tensor) else weights
        ctx.save_for_backward(logits, points, *([weights] if ctx.number is None else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        logits, points, *rest = ctx.saved_tensors
        weights = rest[0] if rest else ctx.number
        return None, once(jacobian_product, logits, grad, points, weights), None, None


# torch asks for the signature of `forward` at every call; kept ready, that takes 2 µs instead of 60.
_Carry.forward.__signature__ = inspect.signature(_Carry.forward)  # type: ignore[attr-defined]
