"""Estimators for the recipes of ListOps alone: trees of a fixed shape, and masking after the softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.gradient import Points
from gapped.pathwise import Draw, Pathwise
from gapped.pathwise.gumbel_softmax import GumbelSoftmax
from gapped.simplex import per_row
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.listops.tables import Greedy, Sampler


def _left(pairs: Tensor, uniform: Tensor | None) -> Tensor:
    return torch.ones_like(pairs)


def _right(pairs: Tensor, uniform: Tensor | None) -> Tensor:
    return pairs


def _balanced(pairs: Tensor, uniform: Tensor | None) -> Tensor:
    # Of n nodes the first 2P - n stay, P < n <= 2P a power of two, until P are left: then all pairs in turn.
    _, exponent = torch.frexp(pairs.double())
    return (1 << exponent) - pairs


def _random(pairs: Tensor, uniform: Tensor | None) -> Tensor:
    # In float64 a uniform below 1 times a whole number stays below that number.
    return (uniform * pairs).long() + 1  # type: ignore[operator]


SHAPES: Mapping[str, Callable[[Tensor, Tensor | None], Tensor]] = MappingProxyType(
    {"left": _left, "right": _right, "balanced": _balanced, "random": _random}
)
"""The number of the pair that is merged, from 1, by how many there are, and uniforms in float64."""


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return simplex.uniform(like.shape, torch.empty_like(like, dtype=torch.float64), generator)


@dataclass(frozen=True, eq=False)
class TreeShape(Pathwise):
    r"""Trees that no score decides: the control of a latent tree. Samples carry no gradient.

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

    @torch.no_grad()
    def sample(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if dim != -1:
            raise reject("tree: dim", dim, "-1, the last axis")
        logits = simplex.masked(logits, mask)
        uniform = _uniform(logits[..., 0], generator) if self.shape == "random" else None
        exists = logits > -torch.inf
        number = exists.cumsum(-1)
        chosen = SHAPES[self.shape](number[..., -1], uniform)
        return ((number == chosen.unsqueeze(-1)) & exists).to(logits.dtype)

    def points(self, logits: Tensor, draw: Draw) -> Points:
        raise reject("tree", "a choice", "`sample`: nothing else is needed of a control")


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
        allowed = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
        return mask_late(logits, allowed, simplex.gumbel(logits.detach(), generator), self.tau)


def mask_late(logits: Tensor, mask: Tensor, gumbel: Tensor, tau: float | Tensor) -> Tensor:
    """`LateMaskGumbelSoftmax` given its noise, as `logits` and `mask` of shape ``(*rows, K)``."""
    exists = logits > -torch.inf
    allowed = exists & mask
    theta = torch.where(allowed, logits, logits.detach())
    scores = (theta + gumbel) / per_row(tau, theta)
    # A row where nothing exists has no softmax, and needs none.
    scores = torch.where(exists.any(-1, keepdim=True), scores, 0.0)
    kept = torch.where(exists, scores.softmax(-1) * allowed + 1e-20, 0.0)
    y = kept / kept.sum(-1, keepdim=True).clamp(min=1e-20)
    value = simplex.one_hot(y.detach().argmax(-1), logits.shape[-1], logits.dtype)
    return (value + (y - y.detach())) * allowed.any(-1, keepdim=True)


def evaluation_sampler(sampler: Grouped) -> Sampler:
    """The greedy sampler, but for runs that were trained with a fixed shape: they keep it."""
    shapes = [(a, b, each) for a, b, each in sampler.groups if isinstance(each, TreeShape)]
    return _ShapedTrees(shapes) if shapes else Greedy()


class _ShapedTrees(Greedy):
    """`Greedy`, but for some runs: from a first to a last one, exclusive, a shape each."""

    def __init__(self, shapes: Sequence[tuple[int, int, TreeShape]]) -> None:
        self.shapes = shapes

    def sample(
        self, logits: Tensor, *, mask: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        sample = super().sample(logits, mask=mask)
        for start, stop, each in self.shapes:
            own = None if mask is None else mask[start:stop]
            sample[start:stop] = each.sample(logits[start:stop].detach(), mask=own, generator=generator)
        return sample
