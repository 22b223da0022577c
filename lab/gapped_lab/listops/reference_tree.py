"""The latent tree by its definition: every pair of every layer composed anew, differentiated by autograd.

Quadratic in the number of tokens. `gapped_lab.listops.tree` computes the same in linear time.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from gapped import simplex


class Sampler(Protocol):
    """Chooses one pair of each layer."""

    @property
    def hard(self) -> bool:
        """Whether samples are one-hot."""

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor: ...


class Greedy:
    """The sampler of evaluation: always the pair with the highest score, without a gradient."""

    hard = True

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        scores = simplex.masked(logits.detach(), mask)
        return simplex.one_hot(simplex.argmax_index(scores), scores.shape[-1], scores.dtype)


def sampled_lengths(sampler: Sampler, lengths: Tensor) -> Tensor | None:
    """How far the scores go that a sampler is shown, ``(R, B)``; None for the expressions' own `lengths`.

    One that masks late sees the padding too, up to the longest expression of its run's batch, and a mask.
    """
    if not getattr(sampler, "masks_late", False):
        return None
    return lengths.amax(-1, keepdim=True).expand_as(lengths).contiguous()


def reference_tree(
    leaves: Tensor,
    weight: Tensor,
    bias: Tensor,
    query: Tensor,
    lengths: Tensor,
    sampler: Sampler,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Root vectors ``(R, B, d)`` of leaves ``(R, B, M, 2d)``, which hold h and c side by side.

    With the sample :math:`z` over the adjacent pairs of a layer and its running sum :math:`C`, the next
    layer's states are (Choi et al. 2018)

    .. math:: s'_i = (1 - C_i)\, s_i + (C_i - z_i)\, s_{i+1} + z_i\, \mathrm{new}_i .

    An example that has no pair left samples nothing, z = 0, and keeps its state.

    Shapes: `weight` ``(R, 2d, 5d)``, `bias` ``(R, 1, 5d)``, `query` ``(R, 1, d)``, `lengths` ``(R, B)``.
    """
    width = query.shape[-1]
    states, shown = leaves, sampled_lengths(sampler, lengths)
    for layer in range(leaves.shape[2] - 1):
        left, right = states[:, :, :-1], states[:, :, 1:]
        inputs = torch.cat([left[..., :width], right[..., :width]], -1)
        gates = inputs @ weight.unsqueeze(1) + bias.unsqueeze(1)
        h, c = compose(gates, left[..., width:], right[..., width:])
        mask = allowed_pairs(lengths, layer, h.shape[2])
        if h.shape[2] == 1:  # nothing to choose
            z = mask.to(h.dtype)
        else:
            scores = (h * query.unsqueeze(1)).sum(-1) / math.sqrt(width)
            if shown is not None:
                scores = simplex.masked(scores, allowed_pairs(shown, layer, h.shape[2]))
            z = sampler.sample(scores, mask=mask, generator=generator)
        total = z.cumsum(-1).unsqueeze(-1)
        z = z.unsqueeze(-1)
        states = (1 - total) * left + (total - z) * right + z * torch.cat([h, c], -1)
    return states[:, :, 0, :width]


def allowed_pairs(lengths: Tensor, layer: int, pairs: int) -> Tensor:
    """Which of the `pairs` places of a layer hold nodes of the expression, ``(*lengths.shape, pairs)``."""
    left = lengths.unsqueeze(-1) - 1 - layer
    return torch.arange(pairs, device=lengths.device) < left


def compose(gates: Tensor, c_left: Tensor, c_right: Tensor) -> tuple[Tensor, Tensor]:
    r"""State of a node from the gates ``(..., 5d)`` and the cells ``(..., d)`` of its children.

    .. math:: c = \sigma(f_l + 1)\, c_l + \sigma(f_r + 1)\, c_r + \sigma(i) \tanh(u), \qquad
              h = \sigma(o) \tanh(c).
    """
    i, f_left, f_right, u, o = gates.chunk(5, -1)
    c = (f_left + 1).sigmoid() * c_left + (f_right + 1).sigmoid() * c_right + i.sigmoid() * u.tanh()
    return o.sigmoid() * c.tanh(), c


def compose_vjp(
    gates: Tensor, c_left: Tensor, c_right: Tensor, grad_h: Tensor, grad_c: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the gates and of both children's cells, from those of the node's ``h`` and ``c``."""
    i, f_left, f_right, u, o = gates.chunk(5, -1)
    i, f_left, f_right = i.sigmoid(), (f_left + 1).sigmoid(), (f_right + 1).sigmoid()
    u, o = u.tanh(), o.sigmoid()
    top = (f_left * c_left + f_right * c_right + i * u).tanh()
    grad_c = grad_c + grad_h * o * (1 - top * top)
    slopes = (
        grad_c * u * i * (1 - i),
        grad_c * c_left * f_left * (1 - f_left),
        grad_c * c_right * f_right * (1 - f_right),
        grad_c * i * (1 - u * u),
        grad_h * top * o * (1 - o),
    )
    return torch.cat(slopes, -1), grad_c * f_left, grad_c * f_right
