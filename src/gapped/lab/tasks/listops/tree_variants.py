"""Estimators for the recipes of ListOps alone: trees of a fixed shape, and masking after the softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.gradient import Points
from gapped.pathwise import Draw, Pathwise, per_row
from gapped.pathwise.gumbel_softmax import GumbelSoftmax


def _left(pairs: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.zeros_like(pairs)


def _right(pairs: Tensor, generator: torch.Generator | None) -> Tensor:
    return pairs - 1


def _balanced(pairs: Tensor, generator: torch.Generator | None) -> Tensor:
    # Of n nodes the first 2P - n stay, P < n <= 2P a power of two, until P are left: then all pairs in turn.
    _, exponent = torch.frexp(pairs.double())
    return torch.ldexp(torch.ones_like(pairs), exponent).long() - pairs - 1


def _random(pairs: Tensor, generator: torch.Generator | None) -> Tensor:
    # In float64 a uniform below 1 times a whole number stays below that number.
    like = torch.empty_like(pairs, dtype=torch.float64)
    return (simplex.uniform(like.shape, like, generator) * pairs).long()


SHAPES: Mapping[str, Any] = MappingProxyType(
    {"left": _left, "right": _right, "balanced": _balanced, "random": _random}
)


@dataclass(frozen=True, eq=False)
class TreeShape(Pathwise):
    r"""Trees that no score decides: the control of a latent tree. Scores get no gradient, exactly zero.

    `shape` is ``left``, always the first pair; ``right``, always the last; ``balanced``, leaves at two
    neighbouring depths at most; or ``random``, in every layer a pair drawn uniformly. Which pair is merged
    is a function of their number alone.

    >>> TreeShape(shape="right").sample(torch.tensor([0.3, 0.1, -torch.inf]))
    tensor([0., 1., 0.])
    """

    name = "tree"
    levels = ()

    tau: float | Tensor = field(default=1.0, init=False, repr=False)
    shape: str = "left"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape not in SHAPES:
            raise reject("tree: shape", self.shape, f"one of {', '.join(SHAPES)}")

    def draw_category(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        order = (logits > -torch.inf).cumsum(-1)
        place = SHAPES[self.shape](order[..., -1], generator)
        return Draw((order > place.unsqueeze(-1)).int().argmax(-1))

    def points(self, logits: Tensor, draw: Draw) -> Points:
        # The softmax has no slope at a corner.
        return Points(simplex.one_hot(draw.category, logits.shape[-1], logits.dtype).unsqueeze(0), 1.0)


@dataclass(frozen=True, eq=False)
class LateMaskGumbelSoftmax(GumbelSoftmax):
    r"""Straight-through Gumbel-softmax that masks after the softmax, as the paper's script for ListOps does.

    With the softmax :math:`p` of all places, those masked included, and :math:`\epsilon = 10^{-20}`,

    .. math:: y_j = \frac{m_j p_j + \epsilon}{\sum_k (m_k p_k + \epsilon)}, \qquad
              p = \mathrm{softmax}((\theta + G)/\tau).

    The sample is the one-hot argmax of y, the first of equals, and the gradient is that of y. So where a
    masked place has the largest noise, by a lead that :math:`\tau` makes large, all y are equal: index 0 is
    taken and no score gets a gradient. Scores of masked places never get one here; in the script they do
    where :math:`\epsilon` and the p of the others are of one size. A logit of -inf does not exist at all, and
    a row with nothing allowed is zero.
    """

    name = "gumbel-softmax-late-mask"
    masks_late: ClassVar[bool] = True

    def sample(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if dim != -1 or not self.hard:
            raise reject("gumbel-softmax-late-mask", "a dim or soft samples", "hard samples, last axis")
        exists = logits > -torch.inf
        allowed = exists if mask is None else exists & mask
        theta = torch.where(allowed, logits, logits.detach())
        scores = (theta + simplex.gumbel(theta.detach(), generator)) / per_row(self.tau, theta)
        # A row where nothing exists has no softmax, and needs none.
        scores = torch.where(exists.any(-1, keepdim=True), scores, 0.0)
        kept = torch.where(exists, scores.softmax(-1) * allowed + 1e-20, 0.0)
        y = kept / kept.sum(-1, keepdim=True).clamp(min=1e-20)
        value = simplex.one_hot(y.detach().argmax(-1), logits.shape[-1], logits.dtype)
        return (value + (y - y.detach())) * allowed.any(-1, keepdim=True)
