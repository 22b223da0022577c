"""An LSTM over the tokens with a run axis: its states are the leaves of the tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.lab.tasks.listops.parts import parts_for


def lstm(inputs: Tensor, weight: Tensor, *, fused: bool = False) -> Tensor:
    """States ``(R, B, M, 2d)``, h and c side by side, of an LSTM that starts from zero.

    `inputs` ``(R, B, M, 4d)`` are the gates without their recurrent part, in torch's order: input, forget,
    cell, output. `weight` is ``(R, d, 4d)``. The gradient of the weight is one product for all tokens.
    `fused` lets kernels do the work of a step where they can.
    """
    return _LSTM.apply(inputs, weight, fused)  # type: ignore[no-any-return, no-untyped-call]


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, fused: bool) -> Tensor:
        runs, batch, count, four = inputs.shape
        ctx.parts = parts_for(inputs, fused)
        gates = torch.empty_like(inputs)
        states = inputs.new_empty(runs, count + 1, batch, four // 2)
        states[:, 0] = 0
        for step in range(count):
            before = states[:, step]
            ctx.parts.product(before[..., : four // 4], weight, gates[:, :, step])
            ctx.parts.advance(gates[:, :, step], inputs[:, :, step], before, states[:, step + 1])
        ctx.save_for_backward(gates, states, weight)
        return states[:, 1:].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gates, states, weight = ctx.saved_tensors
        runs, batch, count, four = gates.shape
        width = four // 4
        grads = torch.empty_like(gates)
        grad_h, grad_c = grad.new_zeros(2, runs, batch, width)
        for step in reversed(range(count)):
            out = grads[:, :, step]
            ctx.parts.retreat(gates[:, :, step], states[:, step], grad[:, :, step], grad_h, grad_c, out)
            ctx.parts.product(out, weight, grad_h, transposed=True)
        before = states[:, :-1, :, :width].transpose(1, 2).reshape(runs, -1, width)
        return grads, torch.bmm(before.transpose(1, 2), grads.flatten(1, 2)), None
