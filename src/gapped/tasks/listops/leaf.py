"""An LSTM over the tokens with a run axis: its states are the leaves of the tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["lstm"]


def lstm(inputs: Tensor, weight: Tensor, *, compiled: bool = False) -> Tensor:
    """States ``(R, B, M, 2d)``, h and c side by side, of an LSTM that starts from zero.

    `inputs` ``(R, B, M, 4d)`` are the gates without their recurrent part, in torch's order: input, forget,
    cell, output. `weight` is ``(R, d, 4d)``. The gradient of the weight is one product for all tokens.
    """
    return _LSTM.apply(inputs, weight, compiled)  # type: ignore[no-any-return, no-untyped-call]


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, compiled: bool) -> Tensor:
        runs, batch, count, four = inputs.shape
        advance, _ = _parts(compiled)
        gates = inputs.new_empty(count, runs, batch, four)
        states = inputs.new_zeros(count + 1, runs, batch, four // 2)
        for step in range(count):
            before = states[step]
            torch.baddbmm(inputs[:, :, step], before[..., : four // 4], weight, out=gates[step])
            states[step + 1] = advance(gates[step], before[..., four // 4 :])
        ctx.save_for_backward(gates, states, weight)
        ctx.compiled = compiled
        return states[1:].permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gates, states, weight = ctx.saved_tensors
        _, retreat = _parts(ctx.compiled)
        count, runs, batch, four = gates.shape
        width = four // 4
        back = weight.transpose(1, 2)
        grads = torch.empty_like(gates)
        grad_h = grad_c = grad.new_zeros(runs, batch, width)
        for step in reversed(range(count)):
            before = states[step, ..., width:]
            grads[step], grad_c = retreat(gates[step], before, grad[:, :, step], grad_h, grad_c)
            grad_h = torch.bmm(grads[step], back)
        before = states[:-1, ..., :width].permute(1, 3, 0, 2).reshape(runs, width, -1)
        total = grads.transpose(0, 1).reshape(runs, -1, four)
        return grads.permute(1, 2, 0, 3), torch.bmm(before, total), None


@cache
def _parts(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if not compiled:
        return _advance, _retreat
    return torch.compile(_advance, dynamic=True), torch.compile(_retreat, dynamic=True)


def _advance(gates: Tensor, c: Tensor) -> Tensor:
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return torch.cat([o.sigmoid() * c.tanh(), c], -1)


def _retreat(
    gates: Tensor, before: Tensor, grad: Tensor, grad_h: Tensor, grad_c: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the gates and of the cell before; `grad` is the state's own, the others come from later."""
    own_h, own_c = grad.chunk(2, -1)
    grad_h, grad_c = own_h + grad_h, own_c + grad_c
    i, f, g, o = gates.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    top = (f * before + i * g).tanh()
    grad_c = grad_c + grad_h * o * (1 - top * top)
    parts = (
        grad_c * g * i * (1 - i),
        grad_c * before * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_h * top * o * (1 - o),
    )
    return torch.cat(parts, -1), grad_c * f
