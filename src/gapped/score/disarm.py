"""DisARM: two antithetic samples of a binary variable; and the functions that its tree and chain share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.score import Cost, Draws, Score, one_hot_rows


@dataclass(frozen=True)
class DisARM(Score):
    r"""DisARM, also called U2G: an antithetic pair of binary samples.

    For two categories with logit :math:`\varphi = \theta_1 - \theta_0` and one uniform :math:`u`, the pair
    is :math:`b_1 = [u > 1 - \sigma(\varphi)]`, :math:`b_2 = [u < \sigma(\varphi)]`, and the gradient with
    respect to :math:`\varphi`

    .. math:: \tfrac12\,\bigl(f(b_1) - f(b_2)\bigr)\,(-1)^{b_2}\,[b_1 \ne b_2]\;\sigma(|\varphi|).

    It is ARM, :math:`(f(b_1) - f(b_2))(u - \tfrac12)`, averaged over the :math:`u` that give the same pair,
    so its variance is at most that of ARM. Several variables share the difference of the two costs.

    - Bias: none. Both samples follow :math:`\mathrm{softmax}(\theta)`.
    - Cost: two evaluations, no derivative of the cost; one uniform per row.

    >>> import gapped
    >>> logits = torch.zeros(5, 2, requires_grad=True)
    >>> gapped.expectation(lambda z: z[..., 1].sum(-1) ** 2, logits, DisARM()).backward()

    References: Dong, Mnih, Tucker (2020); Yin, Ho, Yan, Qian, Zhou (2020).
    """

    name = "disarm"
    evaluations = 2

    def check_size(self, variables: int, categories: int) -> None:
        if categories != 2:
            accepted = "two; for more take gapped.DisARMTree()"
            raise reject("logits", f"{categories} categories for DisARM", accepted)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        return fine_uniform(logits.shape[:-1], logits, generator)

    def index(self, logits: Tensor, noise: Tensor) -> Tensor:
        phi = _log_odds(logits)
        first, second = antithetic_bits(torch.sigmoid(simplex.accumulated(phi)), noise)
        return mark_absent(torch.stack([second, first]).long(), logits)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        phi = _log_odds(cost.logits)
        # One point minus the other is (-1)^{b2} [b1 != b2] in the second entry, its opposite in the first.
        points = one_hot_rows(cost.logits, draws.category)
        apart = points[0] - points[1]
        delta = cost.spread(draws.costs[:1] - draws.costs[1:]).squeeze(0)
        return 0.5 * delta * apart * torch.sigmoid(phi.abs()).unsqueeze(-1)


def fine_uniform(shape: tuple[int, ...], logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform noise of 53 bits for `antithetic_bits`: the 24 of float32 cannot hit a `p` below 6e-8."""
    return simplex.uniform(shape, simplex.accumulated(logits[..., :0]), generator)


def antithetic_bits(p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Two bits of probability `p`, from u and from 1 - u, that differ as often as they can.

    Written so that no u in [0, 1) gives a bit that a `p` of 0 or 1 forbids. Both are float64: near 1 the
    difference of a `p` from 1 has no digits in float32.
    """
    return u < p, u >= 1 - p


def _log_odds(logits: Tensor) -> Tensor:
    """The second logit less the first; 0 if neither category exists, which no sample reaches."""
    left, right = logits.unbind(-1)
    return torch.where(right == left, 0.0, right - left)


def mark_absent(index: Tensor, logits: Tensor) -> Tensor:
    """`index`, in rows without a sample replaced as `simplex` does: K if empty, K + 1 with a NaN."""
    top = logits.amax(-1)
    index = torch.where(top == -torch.inf, logits.shape[-1], index)
    return torch.where(top.isnan(), logits.shape[-1] + 1, index)


def direction_of_pair(logits: Tensor, points: Tensor, sides: Tensor) -> Tensor:
    r"""What the difference of two costs is multiplied by, for a pair drawn down a tree of DisARM bits.

    The two paths part at one node, with logit :math:`\varphi`; `sides` ``(2, *rows, K)`` are the categories
    below it on either path, :math:`q_1, q_2` the softmax restricted to them. At that node DisARM gives
    :math:`\tfrac12 \sigma(|\varphi|)(q_1 - q_2)`. Above it the bits agree and give nothing. Below it each
    path is alone, and its terms :math:`\pm\tfrac12 (b_t - \sigma(\varphi_t))\,\partial\varphi_t` add up to
    the score :math:`\pm\tfrac12 (D_i - q_i)`. Together,

    .. math:: \tfrac12\bigl[(D_1 - D_2) - \sigma(-|\varphi|)\,(q_1 - q_2)\bigr].
    """
    # A side that was drawn has mass: relative to the largest category, far more than the smallest number.
    weights = logits.exp() * sides
    mass = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)
    # sigma(-|phi|) is the lesser side's part of both.
    apart = points - weights * (mass.amin(0) / mass.sum(0) / mass)
    return 0.5 * (apart[0] - apart[1])
