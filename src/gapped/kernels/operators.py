"""The kernels as operators that a compiler can put into its graph without looking inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels import launch
from gapped.kernels.launch import Fused


@torch.library.custom_op("gapped::sample", mutates_args=())
def _sample(
    logits: Tensor,
    key: Tensor,
    mode: str,
    taus: Tensor | None,
    tau: float,
    gaps: Tensor | None,
    gap: float | None,
    detach: bool,
    taus_forward: Tensor | None,
    tau_forward: float,
    samples: int,
    soft: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    fused = _fused(mode, taus, tau, gaps, gap, detach, taus_forward, tau_forward, samples, soft)
    value, index, stats = launch.forward(logits, key, fused)
    # An operator returns tensors, whether there is something in them or not.
    return value, index, index.new_empty(0) if stats is None else stats


@_sample.register_fake
def _(logits: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    value = logits.new_empty(logits.shape)
    categories = logits.shape[-1]
    index = logits.new_empty((logits.numel() // categories,), dtype=launch.index_dtype(categories))
    if categories <= launch.LONGEST_BLOCK:
        return value, index, index.new_empty((0,))
    return value, index, logits.new_empty((*index.shape, 2), dtype=torch.float32)


@torch.library.custom_op("gapped::sample_backward", mutates_args=())
def _sample_backward(
    logits: Tensor,
    index: Tensor,
    stats: Tensor,
    key: Tensor,
    grad: Tensor,
    mode: str,
    taus: Tensor | None,
    tau: float,
    gaps: Tensor | None,
    gap: float | None,
    detach: bool,
    taus_forward: Tensor | None,
    tau_forward: float,
    samples: int,
    soft: bool,
) -> Tensor:
    fused = _fused(mode, taus, tau, gaps, gap, detach, taus_forward, tau_forward, samples, soft)
    return launch.backward(logits, index, stats, key, grad, fused)


@_sample_backward.register_fake
def _(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, key, *options = inputs
    _, index, stats = output
    tensors = [each for each in options if isinstance(each, Tensor)]
    ctx.options = [None if isinstance(each, Tensor) else each for each in options]
    ctx.places = [place for place, each in enumerate(options) if isinstance(each, Tensor)]
    ctx.save_for_backward(logits, index, stats, key, *tensors)


def _backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    logits, index, stats, key, *tensors = ctx.saved_tensors
    options = list(ctx.options)
    for place, tensor in zip(ctx.places, tensors, strict=True):
        options[place] = tensor
    gradient = torch.ops.gapped.sample_backward(logits, index, stats, key, grad, *options)
    return gradient, None, *(None for _ in options)


_sample.register_autograd(_backward, setup_context=_setup)


def sample(logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
    """`launch.sample` as one operator with its own backward."""
    taus, tau = _split(fused.tau)
    gaps, gap = (None, None) if fused.gap is None else _split(fused.gap)
    taus_forward, tau_forward = _split(fused.tau_forward)
    value: Tensor = torch.ops.gapped.sample(
        logits, key, fused.mode, taus, tau, gaps, gap, fused.detach, taus_forward, tau_forward, fused.samples,
        fused.soft,
    )[0]  # fmt: skip
    return value


def _split(level: float | Tensor) -> tuple[Tensor | None, float]:
    return (level, 0.0) if isinstance(level, Tensor) else (None, float(level))


def _fused(
    mode: str,
    taus: Tensor | None,
    tau: float,
    gaps: Tensor | None,
    gap: float | None,
    detach: bool,
    taus_forward: Tensor | None,
    tau_forward: float,
    samples: int,
    soft: bool,
) -> Fused:
    return Fused(
        mode,
        tau if taus is None else taus,
        gap if gaps is None else gaps,
        detach,
        tau_forward if taus_forward is None else taus_forward,
        samples,
        soft,
    )
