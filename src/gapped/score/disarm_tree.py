"""DisARM-Tree: an antithetic pair of categorical samples, drawn down a balanced tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.kernels.scores import score_launch
from gapped.score import Cost, Draws, Score, one_hot_rows
from gapped.score.disarm import antithetic_bits, direction_of_pair, fine_uniform, mark_absent


@dataclass(frozen=True)
class DisARMTree(Score):
    r"""DisARM-Tree: a category is a path down a balanced binary tree, every node a DisARM pair.

    The `K` categories are the leaves, padded to a power of two. Node :math:`t` has the logit

    .. math:: \varphi_t = \log\sum_{j \in \mathrm{right}(t)} e^{\theta_j}
              - \log\sum_{j \in \mathrm{left}(t)} e^{\theta_j}

    and a uniform :math:`u_t`; :math:`b_1 = [u_t < \sigma(\varphi_t)]` and
    :math:`b_2 = [1 - u_t < \sigma(\varphi_t)]` send the two samples right or left. With
    :math:`\Delta = f(D_1) - f(D_2)`, a node on both paths gives
    :math:`\tfrac12\Delta(-1)^{b_2}[b_1\ne b_2]\,\sigma(|\varphi_t|)\,\partial\varphi_t`, one on the first
    path alone :math:`\tfrac12\Delta(b_1 - \sigma(\varphi_t))\,\partial\varphi_t`, one on the second alone
    :math:`-\tfrac12\Delta(b_2 - \sigma(\varphi_t))\,\partial\varphi_t`. The sum has a closed form:
    `gapped.score.disarm.direction_of_pair`. Several variables share :math:`\Delta`.

    - Bias: none. Both samples follow :math:`\mathrm{softmax}(\theta)`. With two categories it is `DisARM`.
    - Cost: two evaluations, no derivative of the cost; `K - 1` uniforms per row after padding.

    >>> import gapped
    >>> logits = torch.zeros(4, 7, requires_grad=True)
    >>> gapped.expectation(lambda z: (z[..., 0].sum(-1) - 1) ** 2, logits, DisARMTree()).backward()

    References: Dong, Mnih, Tucker (2021).
    """

    name = "disarm-tree"
    evaluations = 2

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        nodes = (1 << score_launch.depth(logits.shape[-1])) - 1
        return fine_uniform((*logits.shape[:-1], nodes), logits, generator)

    def index(self, logits: Tensor, noise: Tensor) -> Tensor:
        if score_launch.applies(logits):
            return score_launch.tree_index(logits, noise)
        bits = torch.stack(antithetic_bits(node_probabilities(logits), noise))
        # The children of node t are 2 t + 1 and 2 t + 2.
        step = bits.long() + 1
        node = step.new_zeros((2, *logits.shape[:-1], 1))
        for _ in range(score_launch.depth(logits.shape[-1])):
            node = torch.add(step.gather(-1, node), node, alpha=2)
        return mark_absent(node.squeeze(-1) - bits.shape[-1], logits)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        delta = draws.costs[:1] - draws.costs[1:]
        if score_launch.applies(cost.logits):
            return score_launch.tree_gradient(cost.logits, draws.category, delta.to(cost.logits.dtype))
        sides = _sides(draws.category, cost.logits.shape[-1])
        points = one_hot_rows(cost.logits, draws.category)
        return cost.spread(delta).squeeze(0) * direction_of_pair(cost.logits, points, sides)


def node_probabilities(logits: Tensor) -> Tensor:
    """The probabilities of going right, level by level from the root, ``(*rows, nodes)``.

    They are quotients of masses in float64; NaN where a node has none, which no sample reaches.
    """
    categories = logits.shape[-1]
    masses = torch.nn.functional.pad(
        simplex.accumulated(logits.exp()), (0, (1 << score_launch.depth(categories)) - categories)
    )
    rights, totals = [masses[..., :0]], [masses[..., :0]]
    while masses.shape[-1] > 1:
        rights.append(masses[..., 1::2])
        masses = masses[..., 0::2] + rights[-1]
        totals.append(masses)
    return torch.cat(rights[::-1], -1) / torch.cat(totals[::-1], -1)


def _sides(index: Tensor, categories: int) -> Tensor:
    """The leaves below the node where a pair of paths parts, ``(2, *rows, K)``; a leaf alone if none does."""
    # The paths part where the highest bit in which the two leaves differ is decided.
    _, bit = torch.frexp((index[0] ^ index[1]).float())
    height = (bit.long() - 1).clamp(min=0).unsqueeze(-1)
    leaves = torch.arange(categories, device=index.device)
    return (leaves >> height) == (index.unsqueeze(-1) >> height)
