"""The kernels as operators that a compiler can put into its graph without looking inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels.masks import mask_launch
from gapped.kernels.masks.mask_launch import Options

# The fields of `Options`.
_OPTIONS = "int k, float tau, float? gap, bool soft"


@torch.library.custom_op(
    "gapped::mask",
    mutates_args=(),
    schema=f"(Tensor rows, Tensor key, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _mask(rows: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return mask_launch.forward(rows, key, Options(*options))


@_mask.register_fake
def _(rows: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    groups = rows.numel() // rows.shape[-1]
    return rows.new_empty(rows.shape), rows.new_empty((groups,), dtype=torch.uint8)


@torch.library.custom_op(
    "gapped::mask_backward",
    mutates_args=(),
    schema=f"(Tensor rows, Tensor chosen, Tensor grad, {_OPTIONS}) -> Tensor",
)
def _mask_backward(rows: Tensor, chosen: Tensor, grad: Tensor, *options: Any) -> Tensor:
    return mask_launch.backward(rows, chosen, grad, Options(*options))


@_mask_backward.register_fake
def _(rows: Tensor, *rest: Any) -> Tensor:
    return rows.new_empty(rows.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, _, *ctx.options = inputs
    ctx.save_for_backward(rows, output[1])


def _backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    gradient = torch.ops.gapped.mask_backward(*ctx.saved_tensors, grad, *ctx.options)
    return gradient, None, *(None for _ in ctx.options)


_mask.register_autograd(_backward, setup_context=_setup)


def sample(rows: Tensor, key: Tensor, options: Options) -> Tensor:
    """`mask_launch.sample` as one operator with its own backward."""
    value: Tensor = torch.ops.gapped.mask(rows, key, *options)[0]
    return value
