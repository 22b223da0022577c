"""Clipping of gradients, run by run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["clip_norms"]

_EPS = 1e-6


@torch.no_grad()
def clip_norms(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Each run's gradients, scaled to a norm of at most `limit` over all weights together.

    The rule of `torch.nn.utils.clip_grad_norm_`, for weights whose first axis is the run axis.
    """
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients])
    scale = (limit / (torch.linalg.vector_norm(norms, dim=0) + _EPS)).clamp(max=1.0)
    # Not in place: autograd may give two weights one and the same tensor.
    return [g * scale.view(-1, *(1,) * (g.dim() - 1)) for g in gradients]
