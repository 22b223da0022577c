"""The kernels as operators that a compiler can put into its graph without looking inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels.sampling import launch
from gapped.kernels.sampling.fused import Fused
from gapped.kernels.sampling.layout import empty_rows

# The fields of `Fused`: a temperature or gap is a tensor or else a number.
_OPTIONS = (
    "Tensor? taus, Tensor? gaps, Tensor? taus_forward, float? tau, float? gap, float? tau_forward, "
    "str mode, bool detach, int samples, bool soft, bool argmax"
)


def _fused(*options: Any) -> Fused:
    *levels, mode, detach, samples, soft, argmax = options
    tau, gap, tau_forward = (n if t is None else t for t, n in zip(levels[:3], levels[3:], strict=True))
    return Fused(mode, tau, gap, detach, tau_forward, samples, soft, argmax)


@torch.library.custom_op(
    "gapped::sample",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor key, int axes, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _sample(logits: Tensor, key: Tensor, axes: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    # `axes` says how the results lie: a compiler has to know that, whatever the logits come to lie like.
    value, index, stats = launch.forward(logits, key, _fused(*options), axes=axes)
    # An operator returns tensors, whether there is something in them or not.
    return value, index, index.new_empty(0) if stats is None else stats


@_sample.register_fake
def _(logits: Tensor, key: Tensor, axes: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    value = empty_rows(logits, axes)
    categories = logits.shape[-1]
    index = logits.new_empty((logits.numel() // categories,), dtype=launch.index_dtype(categories))
    if not launch.has_stats(categories, axes):
        return value, index, index.new_empty((0,))
    return value, index, logits.new_empty((*index.shape, 2), dtype=torch.float32)


@torch.library.custom_op(
    "gapped::sample_backward",
    mutates_args=(),
    schema="(Tensor logits, Tensor index, Tensor stats, Tensor key, Tensor grad, int axes, "
    f"{_OPTIONS}) -> Tensor",
)
def _sample_backward(
    logits: Tensor, index: Tensor, stats: Tensor, key: Tensor, grad: Tensor, axes: int, *options: Any
) -> Tensor:
    return launch.backward(logits, index, stats, key, grad, _fused(*options), axes=axes)


@_sample_backward.register_fake
def _(
    logits: Tensor, index: Tensor, stats: Tensor, key: Tensor, grad: Tensor, axes: int, *options: Any
) -> Tensor:
    return empty_rows(logits, axes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, key, ctx.axes, taus, gaps, taus_forward, *ctx.rest = inputs
    _, index, stats = output
    ctx.save_for_backward(logits, index, stats, key, taus, gaps, taus_forward)


def _backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    logits, index, stats, key, *levels = ctx.saved_tensors
    options = (*levels, *ctx.rest)
    gradient = torch.ops.gapped.sample_backward(logits, index, stats, key, grad, ctx.axes, *options)
    return gradient, None, None, *(None for _ in options)


_sample.register_autograd(_backward, setup_context=_setup)


def sample(logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
    """`launch.sample` as one operator with its own backward."""
    levels = (fused.tau, fused.gap, fused.tau_forward)
    tensors = (level if isinstance(level, Tensor) else None for level in levels)
    numbers = (None if isinstance(level, Tensor) else level for level in levels)
    options = (*tensors, *numbers, fused.mode, fused.detach, fused.samples, fused.soft, fused.argmax)
    value: Tensor = torch.ops.gapped.sample(logits, key, launch.axes_of(logits, fused), *options)[0]
    return value
