"""An estimated gradient, attached to the logits it estimates the gradient of."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from gapped.once import once

__all__ = ["attach"]


def attach(value: Tensor, logits: Tensor, gradient: Tensor, keep: bool = False) -> Tensor:
    """Return `value`, bit for bit, as a function of `logits` whose derivative is `gradient`.

    `value` has the shape ``batch``; `logits` and `gradient` are ``(*batch, *variables, K)`` and each example
    depends on its own logits alone. Whatever `value` depends on besides keeps its own gradient. A gradient to
    `keep` is out of reach of what replaces saved tensors, such as activation checkpointing.
    """
    kept = (gradient,) if keep and not torch.compiler.is_compiling() else gradient
    return _Attach.apply(value, logits, kept)  # type: ignore[no-any-return, no-untyped-call]


def _product(grad: Tensor, gradient: Tensor) -> Tensor:
    grad = grad.to(gradient.dtype)
    return grad.reshape(grad.shape + (1,) * (gradient.dim() - grad.dim())) * gradient


class _Attach(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, logits: Tensor, gradient: Tensor | tuple[Tensor]) -> Tensor:
        # A fresh view: autograd forbids returning an input as it is.
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, logits, gradient = inputs
        ctx.kept = gradient if isinstance(gradient, tuple) else None
        ctx.save_for_backward(logits, *(() if ctx.kept else (gradient,)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        logits, *saved = ctx.saved_tensors
        (gradient,) = ctx.kept or saved
        return grad, once(_product, logits, grad, gradient), None


# torch asks for the signature of `forward` at every call; kept ready, that takes 2 µs instead of 60.
_Attach.forward.__signature__ = inspect.signature(_Attach.forward)  # type: ignore[attr-defined]
