"""Samples of several estimators by kernels, written into one tensor and never concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gapped.gradient import first_order
from gapped.kernels.sampling import launch
from gapped.kernels.sampling.fused import Fused
from gapped.simplex import draw_key


def sample(
    logits: Tensor, sizes: list[int], estimators: Sequence[Fused], generator: torch.Generator | None
) -> Tensor:
    """A sample of short rows, split along the first axis: `sizes` says how much of it each estimator draws.

    Samples and gradients are written where they belong, without concatenating them afterwards.
    """
    keys = draw_key(logits, generator, len(estimators))
    return _SideBySide.apply(logits, keys, sizes, estimators)  # type: ignore[no-any-return, no-untyped-call]


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, keys: Tensor, sizes: list[int], estimators: Sequence[Fused]
    ) -> Tensor:
        value = torch.empty_like(logits, memory_format=torch.contiguous_format)
        shares = torch.split(logits, sizes), torch.split(keys, 1), estimators, torch.split(value, sizes)
        indices = [
            launch.forward(rows, key, fused, out=out).indices
            for rows, key, fused, out in zip(*shares, strict=True)
        ]
        ctx.sizes, ctx.estimators = sizes, estimators
        levels = (level for fused in estimators for level in fused.tensors)
        ctx.save_for_backward(logits, keys, *indices, *levels)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, keys, *rest = ctx.saved_tensors
        indices = rest[: len(ctx.sizes)]

        def product(grad: Tensor) -> Tensor:
            gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
            rows, grads, outs = (torch.split(each, ctx.sizes) for each in (logits, grad, gradient))
            shares = rows, indices, torch.split(keys, 1), grads, ctx.estimators, outs
            for share, index, key, own, fused, out in zip(*shares, strict=True):
                launch.backward(share, index, None, key, own, fused, out=out)
            return gradient

        return first_order(product, logits, grad), None, None, None
