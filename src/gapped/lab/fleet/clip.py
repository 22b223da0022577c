"""Clipping of gradients, run by run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_EPS = 1e-6


@torch.no_grad()
def clip_scales(gradients: Sequence[Tensor], limit: float) -> Tensor:
    """What to multiply each run's gradients by for a norm of at most `limit` over all weights, ``(R,)``.

    The rule of `torch.nn.utils.clip_grad_norm_`, for gradients whose first axis is the run axis. The products
    are left to those who read the gradients anyway: as tensors of their own, all weights would go through
    memory twice more.
    """
    norms = _norms(torch.stack([_norms(gradient) for gradient in gradients], 1))
    return (limit / (norms + _EPS)).clamp(max=1.0)


def scaled(gradient: Tensor, scales: Tensor | None) -> Tensor:
    """A gradient times the runs' `scales`, if there are any."""
    # Not in place: autograd may give two weights one and the same tensor.
    return gradient if scales is None else gradient * scales.view(-1, *(1,) * (gradient.dim() - 1))


def _norms(gradient: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
    return norms
