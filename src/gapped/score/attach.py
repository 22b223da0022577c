"""An estimated gradient, attached to the logits it estimates the gradient of."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

__all__ = ["attach"]


def attach(value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
    """Return `value`, bit for bit, as a function of `logits` whose derivative is `gradient`.

    `value` has the shape ``batch``; `logits` and `gradient` are ``(*batch, *variables, K)`` and each example
    depends on its own logits alone. Whatever `value` depends on besides keeps its own gradient.
    """
    return _Attach.apply(value, logits, gradient)  # type: ignore[no-any-return, no-untyped-call]


def _product(grad: Tensor, gradient: Tensor) -> Tensor:
    grad = grad.to(gradient.dtype)
    return grad.reshape(grad.shape + (1,) * (gradient.dim() - grad.dim())) * gradient


class _Attach(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        # A fresh view: autograd forbids returning an input as it is.
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        logits, gradient = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return grad, _product(grad, gradient), None
        return grad, _Once.apply(grad, logits, gradient), None  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """The product as a function of its own, so that differentiating it again says why it cannot be.

    It takes the logits only to stay connected to them: otherwise a second derivative would silently be zero.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        return _product(grad, gradient)

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
for _function in (_Attach, _Once):
    _function.forward.__signature__ = inspect.signature(_function.forward)  # type: ignore[union-attr]
