"""Variants of estimators that the paper mentions and that recipes compare; not for use elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.pathwise import Draw, Pathwise
from gapped.pathwise.gst import GST
from gapped.pathwise.gumbel_rao import GumbelRao
from gapped.simplex import per_row
from gapped_lab.listops.variants import LateMaskGumbelSoftmax, TreeShape
from gapped_lab.tasks.count_vae import Fini


@dataclass(frozen=True, eq=False)
class RaisedGST(GST):
    r"""GST that makes the gap by raising the selected logit, instead of lowering the others.

    .. math:: t_i = \max(\theta_i,\ \max_{j \ne i}\theta_j + \gamma), \qquad t_j = \theta_j \quad (j \ne i).

    Section 4.2 of the paper names it as the other way to a strict gap, and says that it is less stable.
    """

    name = "gst-raised"

    gap: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gap, str) or not self.detach:
            raise reject("gst-raised", f"gap={self.gap}, detach={self.detach}", "a number, and detach=True")

    def fused(self) -> None:
        return None

    def _perturbed(self, logits: Tensor, draw: Draw) -> Tensor:
        selected = draw.category.unsqueeze(-1)
        others = logits.scatter(-1, selected, -torch.inf).amax(-1, keepdim=True)
        lead = torch.maximum(logits.gather(-1, selected), others + self._gap_of(logits, draw))
        return logits.scatter(-1, selected, lead)


@dataclass(frozen=True, eq=False)
class LinearGumbelRao(GumbelRao):
    r"""Gumbel-Rao with the conditional noise as Fact 1 of the paper writes it, outside of log space.

    .. math:: (\theta + G)_i = -\log(E_i / Z), \qquad (\theta + G)_j = -\log(E_j/e^{\theta_j} + E_i/Z),

    where :math:`Z = \sum_j e^{\theta_j}`. The exponentials of the logits overflow: in float32 a logit of 89
    makes a NaN. That is the point: it shows whether this is why the paper's runs diverge.

    `eps` is added to :math:`E_i`, and to the sum whose logarithm is taken: the form in the public code of
    Hooper and Shekhovtsov (2026), whose gradient vanishes for large logits.
    """

    name = "gumbel-rao-linear"

    eps: float = 0.0

    def fused(self) -> None:
        return None

    def sample(
        self,
        logits: Tensor,
        *,
        dim: int = -1,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if dim != -1 or mask is not None or not self.hard:
            raise reject("gumbel-rao-linear", "a dim, a mask or soft samples", "hard samples, last axis")
        theta = logits.detach()
        category = simplex.draw_index(theta, generator)
        value = simplex.one_hot(category, theta.shape[-1], theta.dtype)
        if not logits.requires_grad:
            return value
        scores = linear_gumbel(theta, value, self.samples, generator, self.eps)
        surrogate = torch.softmax((logits + (scores - theta)) / per_row(self.tau, theta), -1).mean(0)
        return value + (surrogate - surrogate.detach())


def linear_gumbel(
    logits: Tensor, chosen: Tensor, samples: int, generator: torch.Generator | None = None, eps: float = 0.0
) -> Tensor:
    """Draw the logits with Gumbel noise, given the one-hot argmax `chosen`: ``(samples, *logits.shape)``."""
    draws = torch.empty(samples, *logits.shape, dtype=logits.dtype, device=logits.device)
    draws.exponential_(generator=generator)
    weights = logits.exp()
    total = weights.sum(-1, keepdim=True)
    winner = (draws * chosen).sum(-1, keepdim=True) + eps
    losing = (draws / weights + winner / total + eps).log()
    return chosen * (total.log() - winner.log()) - (1 - chosen) * losing


VARIANTS: Mapping[str, type[Pathwise]] = MappingProxyType(
    {each.name: each for each in (RaisedGST, LinearGumbelRao, LateMaskGumbelSoftmax, TreeShape, Fini)}
)
