"""Gradients that are an estimator's choice: they have a value, but no derivative."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["is_differentiated", "once"]


def is_differentiated(logits: Tensor) -> bool:
    """Whether somebody wants a derivative by these logits.

    A derivative along with the forward pass counts: there is none, and a sample without a gradient would
    pass for one whose derivative is zero, where torch says that it is missing.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        return True
    if torch.compiler.is_compiling():
        return False
    return forward_ad.unpack_dual(logits).tangent is not None  # type: ignore[no-untyped-call]


def once(product: Callable[..., Tensor], logits: Tensor, grad: Tensor, *rest: Any) -> Tensor:
    """The gradient ``product(grad, *rest)`` of `logits`; differentiating it again says why it cannot be.

    It stays connected to the logits and to the incoming gradient `grad`: otherwise a second derivative
    would silently be zero.
    """
    if not torch.is_grad_enabled():
        return product(grad, *rest)
    with torch.no_grad():
        gradient = product(grad, *rest)
    return _Once.apply(gradient, grad, logits)  # type: ignore[no-any-return, no-untyped-call]


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, grad: Tensor, logits: Tensor) -> Tensor:
        # A fresh view: autograd forbids returning an input as it is.
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        raise RuntimeError(
            "gapped: an estimated gradient cannot be differentiated twice: it is the estimator's choice, "
            "not the derivative of a function of the logits"
        )


# torch asks for the signature of `forward` at every call; kept ready, that takes 2 µs instead of 60.
_Once.forward.__signature__ = inspect.signature(_Once.forward)  # type: ignore[attr-defined]
