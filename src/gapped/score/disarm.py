"""DisARM and its categorical forms: antithetic pairs of samples, by one bit, down a tree, along a chain."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.kernels import backend
from gapped.score import Cost, Draws, Score, one_hot_rows

ORDERS = ("ascending", "descending", "given")


class _Pair(Score):
    """Two antithetic samples: the gradient is the difference of their costs times a direction."""

    evaluations = 2

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        delta = cost.spread(draws.costs[:1] - draws.costs[1:]).squeeze(0)
        return delta * self.direction(cost.logits, draws.category)

    @abstractmethod
    def direction(self, logits: Tensor, category: Tensor) -> Tensor:
        """The factor of the difference of the costs, for the pair `(2, *rows)`; `(*rows, K)`."""


@dataclass(frozen=True)
class DisARM(_Pair):
    """DisARM (U2G): an antithetic pair of binary samples.

    For two categories with logit `φ = θ_1 - θ_0` and one uniform `u`, the pair is `b_1 = [u > 1 - σ(φ)]`,
    `b_2 = [u < σ(φ)]`, and the gradient with respect to `φ`::

        ½ (f(b_1) - f(b_2)) (-1)^b_2 [b_1 ≠ b_2] σ(|φ|)

    It is ARM, `(f(b_1) - f(b_2))(u - ½)`, averaged over the `u` that give the same pair, so its variance is
    at most that of ARM. Several variables share the difference of the two costs.

    - Bias: none. Both samples follow `softmax(θ)`.
    - Cost: two evaluations, no derivative of the cost; one uniform per row.

    >>> import gapped
    >>> logits = torch.zeros(5, 2, requires_grad=True)
    >>> gapped.expectation(lambda z: z[..., 1].sum(-1) ** 2, logits, DisARM()).backward()

    References: Dong, Mnih, Tucker (2020); Yin, Ho, Yan, Qian, Zhou (2020).
    """

    name = "disarm"

    def check_size(self, variables: int, categories: int) -> None:
        if categories != 2:
            accepted = "two; for more take gapped.DisARMTree()"
            raise reject("logits", f"{categories} categories for DisARM", accepted)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        return fine_uniform(logits.shape[:-1], logits, generator)

    def index(self, logits: Tensor, noise: Tensor) -> Tensor:
        p = torch.sigmoid(simplex.accumulated(_log_odds(logits)))
        first, second = antithetic_bits(p, noise)
        return mark_absent(torch.stack([second, first]).long(), logits)

    def direction(self, logits: Tensor, category: Tensor) -> Tensor:
        # One point minus the other is (-1)^{b2} [b1 != b2] in the second entry, its opposite in the first.
        points = one_hot_rows(logits, category)
        return 0.5 * (points[0] - points[1]) * torch.sigmoid(_log_odds(logits).abs()).unsqueeze(-1)


@dataclass(frozen=True)
class DisARMTree(_Pair):
    """DisARM on categories as paths down a binary tree.

    The `K` categories are the leaves, padded to a power of two. Node `t` has the logit::

        φ_t = log Σ_{j in right(t)} exp(θ_j) - log Σ_{j in left(t)} exp(θ_j)

    and a uniform `u_t`; `b_1 = [u_t < σ(φ_t)]` and `b_2 = [1 - u_t < σ(φ_t)]` send the two samples right or
    left. With `Δ = f(D_1) - f(D_2)`, a node on both paths gives `½ Δ (-1)^b_2 [b_1 ≠ b_2] σ(|φ_t|) ∂φ_t`, one
    on the first path alone `½ Δ (b_1 - σ(φ_t)) ∂φ_t`, one on the second alone `-½ Δ (b_2 - σ(φ_t)) ∂φ_t`.
    Several variables share `Δ`.

    - Bias: none. Both samples follow `softmax(θ)`. With two categories it is `gapped.DisARM`.
    - Cost: two evaluations, no derivative of the cost; `K - 1` uniforms per row after padding.

    >>> import gapped
    >>> logits = torch.zeros(4, 7, requires_grad=True)
    >>> gapped.expectation(lambda z: (z[..., 0].sum(-1) - 1) ** 2, logits, DisARMTree()).backward()

    References: Dong, Mnih, Tucker (2021).
    """

    name = "disarm-tree"

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        nodes = (1 << _depth(logits.shape[-1])) - 1
        return fine_uniform((*logits.shape[:-1], nodes), logits, generator)

    def index(self, logits: Tensor, noise: Tensor) -> Tensor:
        depth = _depth(logits.shape[-1])
        if backend.takes_scores(logits):
            from gapped.kernels import scores

            return scores.tree_index(logits, noise, depth)
        bits = torch.stack(antithetic_bits(node_probabilities(logits), noise))
        # The children of node t are 2 t + 1 and 2 t + 2.
        step = bits.long() + 1
        node = step.new_zeros((2, *logits.shape[:-1], 1))
        for _ in range(depth):
            node = torch.add(step.gather(-1, node), node, alpha=2)
        return mark_absent(node.squeeze(-1) - bits.shape[-1], logits)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        if not backend.takes_scores(cost.logits):
            return super().gradient(cost, draws)
        from gapped.kernels import scores

        delta = (draws.costs[:1] - draws.costs[1:]).to(cost.logits.dtype)
        return scores.tree_gradient(cost.logits, draws.category, delta, _depth(cost.logits.shape[-1]))

    def direction(self, logits: Tensor, category: Tensor) -> Tensor:
        # The paths part where the highest bit in which the two leaves differ is decided.
        _, bit = torch.frexp((category[0] ^ category[1]).float())
        height = (bit.long() - 1).clamp(min=0).unsqueeze(-1)
        leaves = torch.arange(logits.shape[-1], device=logits.device)
        # The leaves below that node on either path; a leaf alone where no paths part.
        sides = (leaves >> height) == (category.unsqueeze(-1) >> height)
        return direction_of_pair(logits, one_hot_rows(logits, category), sides)


@dataclass(frozen=True)
class DisARMSticks(_Pair):
    """DisARM on categories offered one after the other.

    Arguments:
        order: In which order categories are offered: "ascending" or "descending" by their probability, or
            "given", as they stand.

    The offer of the `t`-th category has the logit `φ_t = θ_t - log Σ_{j>t} exp(θ_j)`; a sample is the first
    offer that it takes, or the last category. The pair and its gradient are those of `gapped.DisARMTree`, on
    this chain instead of a balanced tree. Every order is unbiased: past the offer that parts the samples, the
    one that goes on has its own score. (The importance-weighted form needs sticks of at most 1/2 each, hence
    ascending ones.)

    - Bias: none. Both samples follow `softmax(θ)`.
    - Cost: two evaluations, no derivative of the cost; `K - 1` uniforms per row and, unless the order is
      "given", a sort.

    >>> import gapped
    >>> logits = torch.zeros(4, 7, requires_grad=True)
    >>> gapped.expectation(lambda z: (z[..., 0].sum(-1) - 1) ** 2, logits, DisARMSticks()).backward()

    References: Dong, Mnih, Tucker (2021).
    """

    name = "disarm-sticks"

    order: Literal["ascending", "descending", "given"] = "ascending"

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

    def direction(self, logits: Tensor, category: Tensor) -> Tensor:
        position = self._order(logits).argsort(-1)
        points = one_hot_rows(logits, category)
        own = torch.where(points > 0, position, 0).sum(-1, keepdim=True)
        first = own.amin(0, keepdim=True)
        # Its category alone for the sample that took the earlier offer, else all that come after that one.
        sides = torch.where(own == first, position == own, position > first)
        return direction_of_pair(logits, points, sides)

    def _order(self, logits: Tensor) -> Tensor:
        if self.order == "given":
            return torch.arange(logits.shape[-1], device=logits.device).expand(logits.shape)
        return logits.argsort(dim=-1, descending=self.order == "descending", stable=True)


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
    r"""The factor of the difference of two costs, for a pair drawn down a tree of DisARM bits.

    The two paths part at one node, with logit `φ`; `sides` `(2, *rows, K)` are the categories below it on
    either path, `q_1, q_2` the softmax restricted to them. At that node DisARM gives `½ σ(|φ|)(q_1 - q_2)`.
    Above it the bits agree and give nothing. Below it each path is alone, and its terms
    `±½ (b_t - σ(φ_t)) ∂φ_t` add up to the score `±½ (D_i - q_i)`. Together::

        ½ [(D_1 - D_2) - σ(-|φ|) (q_1 - q_2)]
    """
    # A side that was drawn has mass: relative to the largest category, far more than the smallest number.
    weights = logits.exp() * sides
    mass = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)
    # sigma(-|phi|) is the lesser side's part of both.
    apart = points - weights * (mass.amin(0) / mass.sum(0) / mass)
    return 0.5 * (apart[0] - apart[1])


def _depth(categories: int) -> int:
    """How many decisions lead to one of these leaves of a balanced tree."""
    return (categories - 1).bit_length()


def node_probabilities(logits: Tensor) -> Tensor:
    """The probabilities of going right, level by level from the root, `(*rows, nodes)`.

    They are quotients of masses in float64; NaN where a node has none, which no sample reaches.
    """
    categories = logits.shape[-1]
    masses = torch.nn.functional.pad(
        simplex.accumulated(logits.exp()), (0, (1 << _depth(categories)) - categories)
    )
    rights, totals = [masses[..., :0]], [masses[..., :0]]
    while masses.shape[-1] > 1:
        rights.append(masses[..., 1::2])
        masses = masses[..., 0::2] + rights[-1]
        totals.append(masses)
    return torch.cat(rights[::-1], -1) / torch.cat(totals[::-1], -1)


def stick_probabilities(logits: Tensor) -> Tensor:
    """The probabilities of the offers, in the order of `logits`: each category's share of what is left.

    They are quotients of masses in float64; NaN where nothing is left, which no sample reaches.
    """
    weights = simplex.accumulated(logits.exp())
    return (weights / weights.flip(-1).cumsum(-1).flip(-1))[..., :-1]
