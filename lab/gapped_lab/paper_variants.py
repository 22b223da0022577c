"""Variants of estimators that the paper mentions and that recipes compare; not for use elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.gradient import Points, Weights, jacobian_product
from gapped.pathwise import Draw, Pathwise
from gapped.pathwise.gapmax import GapMax
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


_ODDS = ("expected", "median", "geometric")


@dataclass(frozen=True, eq=False)
class GapMaxFamily(GapMax):
    r"""The family around GapMax that its study chose from.

    The gradient is :math:`(c/\tau)\,J(q)\,g - d\,J(p)\,g` with :math:`q_i \propto 1` at the drawn category
    and :math:`q_j \propto o(\lambda p_j)^{1/\tau}` elsewhere. GapMax is :math:`c = 2, d = \lambda = 1/2` with
    the expected odds :math:`o`. For a loser of rate :math:`x` the odds :math:`1/(1 + R)` have the tail
    :math:`P(R > r) = 1/(1 + xr)`, hence the median :math:`x/(1 + x)` and the geometric mean
    :math:`x^{1/(1 - x)}`.
    """

    name = "gapmax-family"

    c: float = 2.0
    d: float = 0.5
    share: float = 0.5
    """The weight of p at the centre: odds are those at this multiple of p."""
    odds: str = "expected"
    inside: bool = True
    """Whether the temperature is an exponent of the odds."""
    outside: bool = True
    """Whether the first term is divided by the temperature."""
    linear: bool = False
    """Whether J(p) less the mean of the rest is added: the gradient is unbiased for linear costs then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.odds not in _ODDS:
            raise reject("odds", self.odds, f"one of {', '.join(_ODDS)}")

    def fused(self) -> None:  # type: ignore[override]
        return None

    def points(self, logits: Tensor, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        p = torch.softmax(logits, -1)
        odds = self._odds_of(self.share * p)
        if self.inside:
            odds = odds ** (1 / tau)
        put = draw.put(odds, 1.0)
        points = torch.stack([put / draw.total(put), p, odds])
        return Points(points, self.c / tau if self.outside else self.c, self._product)

    def _odds_of(self, x: Tensor) -> Tensor:
        x = x.clamp(torch.finfo(x.dtype).tiny, 1 - 1e-4)
        if self.odds == "median":
            return x / (1 + x)
        if self.odds == "geometric":
            return x ** (1 / (1 - x))
        return x * (x - 1 - x.log()) / (1 - x) ** 2

    def _product(self, grad: Tensor, points: Tensor, weights: Weights) -> Tensor:
        q, p, odds = points
        first = jacobian_product(grad, q.unsqueeze(0), weights, grad)
        second = jacobian_product(grad, p.unsqueeze(0), 1.0 if self.linear else -self.d, grad)
        if not self.linear:
            return first + second
        scale = weights[0] if isinstance(weights, tuple) else weights
        return first + second - scale * mean_jacobian_product(grad, p, odds)


def mean_jacobian_product(grad: Tensor, p: Tensor, odds: Tensor) -> Tensor:
    r""":math:`\sum_i p_i J(q_i) g` for the points that have 1 at `i` and the `odds` elsewhere, normalised."""
    scale = 1 / (1 + odds.sum(-1, keepdim=True) - odds)
    inner = scale * ((odds * grad).sum(-1, keepdim=True) + (1 - odds) * grad)
    own, weighted = p * scale, p * scale * inner
    mean = own + odds * (own.sum(-1, keepdim=True) - own)
    return grad * mean - weighted - odds * (weighted.sum(-1, keepdim=True) - weighted)


VARIANTS: Mapping[str, type[Pathwise]] = MappingProxyType(
    {
        each.name: each
        for each in (RaisedGST, LinearGumbelRao, GapMaxFamily, LateMaskGumbelSoftmax, TreeShape, Fini)
    }
)
