"""The latent tree by its definition: every pair of every layer composed anew, differentiated by autograd.

Quadratic in the number of tokens. `gapped_lab.listops.tree` computes the same in linear time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gapped import simplex
from gapped_lab.listops.tables import Sampler, allowed_pairs, compose, sampled_lengths


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
