"""DisARM on a stick-breaking chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.score import Cost, Draws, Score, one_hot_rows
from gapped.score.disarm import antithetic_bits, direction_of_pair, fine_uniform, mark_absent

ORDERS = ("ascending", "descending", "given")


@dataclass(frozen=True)
class DisARMSticks(Score):
    r"""DisARM on sticks: categories are offered one after the other, each offer a DisARM pair.

    In some order of the categories, the offer of the :math:`t`-th has the logit
    :math:`\varphi_t = \theta_t - \log\sum_{j>t} e^{\theta_j}`; a sample is the first offer that it takes, or
    the last category. The pair and its gradient are those of `DisARMTree`, on this chain instead of a
    balanced tree. Every order is unbiased: past the offer that parts the samples, the one that goes on has
    its own score. (The importance-weighted form needs sticks of at most 1/2 each, hence ascending ones.)

    - Bias: none. Both samples follow :math:`\mathrm{softmax}(\theta)`.
    - Cost: two evaluations, no derivative of the cost; `K - 1` uniforms per row and, unless the order is
      ``"given"``, a sort.

    >>> import gapped
    >>> logits = torch.zeros(4, 7, requires_grad=True)
    >>> gapped.expectation(lambda z: (z[..., 0].sum(-1) - 1) ** 2, logits, DisARMSticks()).backward()

    References: Dong, Mnih, Tucker (2021).
    """

    name = "disarm-sticks"
    evaluations = 2

    order: Literal["ascending", "descending", "given"] = "ascending"
    """In which order categories are offered: by their probability, or as they stand."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise reject("order", self.order, "one of 'ascending', 'descending', 'given'")

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        return fine_uniform((*logits.shape[:-1], logits.shape[-1] - 1), logits, generator)

    def index(self, logits: Tensor, noise: Tensor) -> Tensor:
        order = self._order(logits)
        bits = torch.stack(antithetic_bits(stick_probabilities(logits.gather(-1, order)), noise))
        # A sample that takes no offer takes the last category; argmax returns the first of equal values.
        place = torch.nn.functional.pad(bits.to(torch.uint8), (0, 1), value=1).argmax(-1, keepdim=True)
        index = order.expand(2, *order.shape).gather(-1, place).squeeze(-1)
        return mark_absent(index, logits)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        position = self._order(cost.logits).argsort(-1)
        points = one_hot_rows(cost.logits, draws.category)
        sides = _sides(points, position)
        delta = cost.spread(draws.costs[:1] - draws.costs[1:]).squeeze(0)
        return delta * direction_of_pair(cost.logits, points, sides)

    def _order(self, logits: Tensor) -> Tensor:
        if self.order == "given":
            return torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
        return logits.argsort(dim=-1, descending=self.order == "descending", stable=True)


def stick_probabilities(logits: Tensor) -> Tensor:
    """The probabilities of the offers, in the order of `logits`: each category's share of what is left.

    They are quotients of masses in float64; NaN where nothing is left, which no sample reaches.
    """
    weights = simplex.accumulated(logits.exp())
    return (weights / weights.flip(-1).cumsum(-1).flip(-1))[..., :-1]


def _sides(points: Tensor, position: Tensor) -> Tensor:
    """For each sample: its category alone if it took the earlier offer, else all that come after that one."""
    own = torch.where(points > 0, position, 0).sum(-1, keepdim=True)
    first = own.amin(0, keepdim=True)
    return torch.where(own == first, position == own, position > first)
