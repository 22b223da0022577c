"""Launching the kernels of gates: a gate that carries its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.gradient import first_order
from gapped.kernels.runner import run
from gapped.kernels.sampling.launch import Fused, draw_key, level_tensors

# Gates of a program, and its warps. Not yet chosen by measurement.
BLOCK = 2048
WARPS = 4


def gate(logits: Tensor, fused: Fused, generator: torch.Generator | None) -> Tensor:
    """Gates of these log-odds, of any shape, that carry the gradient of the estimator `fused`."""
    return _Gate.apply(logits, draw_key(logits, generator), fused)  # type: ignore[no-any-return, no-untyped-call]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
        ctx.fused = fused
        # Temperatures and gaps too, so that autograd notices if they are changed before the backward pass.
        ctx.save_for_backward(logits, key, *fused.tensors)
        return forward(logits, key, fused)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, key, *_ = ctx.saved_tensors

        def product(grad: Tensor) -> Tensor:
            return backward(logits, grad, key, ctx.fused)

        return first_order(product, logits, grad), None, None


def forward(logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
    """Draw gates."""
    from gapped.kernels.gating.gate_kernels import gate_forward_kernel

    value = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _run(gate_forward_kernel, logits, (key,), value, fused, SOFT=fused.soft)
    return value


def backward(logits: Tensor, grad: Tensor, key: Tensor, fused: Fused) -> Tensor:
    """The gradient of the logits."""
    from gapped.kernels.gating.gate_kernels import gate_backward_kernel

    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _run(gate_backward_kernel, logits, (grad.contiguous(), key), out, fused)
    return out


def _run(
    kernel: Any, logits: Tensor, pointers: tuple[Tensor, ...], out: Tensor, fused: Fused, **more: Any
) -> None:
    """Launch a kernel over all gates, if there are any."""
    from gapped.kernels.sampling.surrogates import MODES

    count = logits.numel()
    if count == 0:
        return
    # Each gate is a row to its temperature and gap.
    levels, every = level_tensors(fused, logits.unsqueeze(-1))
    tau, gap, tau_forward = fused.numbers
    flags: dict[str, Any] = {
        "MODE": MODES[fused.mode],
        "EXPECTED_GAP": fused.gap is None,
        "FAST": logits.is_cuda,
        "TAU_PER_ROW": every[0] > 0,
        "GAP_PER_ROW": every[1] > 0,
        "TAU_FORWARD_PER_ROW": every[2] > 0,
        **more,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    tensors = (logits.contiguous(), *pointers, *levels, out)
    run(kernel, -(-count // BLOCK), tensors, (count, *every), (tau, gap, tau_forward, fused.samples), flags)
