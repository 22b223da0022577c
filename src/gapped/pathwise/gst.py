"""The Gapped Straight-Through estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_flag, check_level, has_tangent, holds, ignore_eps, requires_grad
from gapped.docstrings import documented
from gapped.errors import reject
from gapped.gradient import Points, with_points
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Outcome, Pathwise, Source, cached_estimator
from gapped.simplex import divide, logistic_slope, per_row

Gap = float | Tensor | Literal["auto"] | Callable[[Tensor], Tensor]


@documented
@dataclass(frozen=True, eq=False)
class GST(Pathwise):
    """Gapped Straight-Through: a gap in place of noise.

    Its method `sample` draws what `gapped.gst` draws, whose help has the mathematics.

    Arguments:
        (tau, hard, gap, detach, draw, backend)
    """

    name = "gst"
    levels = ("tau", "gap")

    tau: float | Tensor = 0.85
    gap: Gap = "auto"
    detach: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("detach", self.detach)
        if isinstance(self.gap, str):
            if self.gap != "auto":
                raise reject("gap", self.gap, 'a number, a tensor, a function or "auto"')
            if not self.detach:
                raise reject("detach", False, 'True, or another gap than "auto"')
        elif not callable(self.gap):
            check_level("gap", self.gap, positive=False)

    def fused(self) -> Fused | None:
        if isinstance(self.gap, str):
            return Fused("gst-auto", self.tau, soft=not self.hard)
        if callable(self.gap) and not (self.gap is simplex.expected_gap and self.detach):
            return None
        gap = None if callable(self.gap) else self.gap
        return Fused("gst", self.tau, gap=gap, detach=self.detach, soft=not self.hard)

    def check_choice(self) -> None:
        super().check_choice()
        if not self.detach:
            raise reject("detach", False, "True for choices: only sample has the other gradient")

    def points(self, logits: Tensor, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        return Points(draw.softmax(divide(self._perturbed(logits, draw), tau)).unsqueeze(0), 1 / tau)

    def gate_slopes(self, lead: Tensor) -> Tensor:
        tau = per_row(self.tau, lead)
        if isinstance(self.gap, str):
            other = simplex.log_expected_odds(torch.nn.functional.logsigmoid(-lead))
        else:
            gap = self.gap(torch.sigmoid(lead)) if callable(self.gap) else per_row(self.gap, lead)
            other = (-lead).clamp(max=0.0)
            other = other.minimum(-gap) if isinstance(gap, Tensor) else other.clamp_max(-gap)
        return divide(logistic_slope(divide(other, tau)), tau)

    def is_rowwise(self) -> bool:
        # A gap function may depend on which row it gets.
        return self.detach and (not callable(self.gap) or self.gap is simplex.expected_gap)

    def attach(self, rows: Tensor, outcome: Outcome) -> Tensor:
        value, index, gradient = outcome
        assert gradient is not None
        return with_points(value, rows if self.detach else self._perturbed_rows(rows, index), *gradient)

    def _perturbed_rows(self, rows: Tensor, index: Tensor) -> Tensor:
        """The perturbed logits of `rows` as functions of the logits, for `detach=False`."""
        logits = simplex.shift(simplex.computed(rows))
        draw = Draw(index.clamp(max=rows.shape[-1] - 1))
        # A row with a NaN has no gap, and its gradient is NaN in any case.
        gap = self._gap_of(torch.where(logits.isnan(), 0.0, logits), draw)
        # Only the graph counts: a logit that is raised or lowered, even by zero, passes on what the gap does.
        stopped = logits >= -gap
        return draw.put(torch.where(stopped, -gap, logits), 0.0)

    def _perturbed(self, logits: Tensor, draw: Draw) -> Tensor:
        """The selected logit raised to 0, the largest; every other one put below it by its gap."""
        if isinstance(self.gap, str):
            return draw.put(simplex.log_expected_odds(draw.log_softmax(logits)), 0.0)
        gap = self._gap_of(logits, draw)
        lowered = logits.minimum(-gap) if isinstance(gap, Tensor) else logits.clamp_max(-gap)
        return draw.put(lowered, 0.0)

    def _gap_of(self, logits: Tensor, draw: Draw) -> float | Tensor:
        if not callable(self.gap):
            assert not isinstance(self.gap, str)
            return per_row(self.gap, logits)
        weights = logits.exp()
        # The sum is at least 1, or 0 in a row without categories.
        p = (draw.selected(weights) / draw.total(weights).clamp(min=0.5)).squeeze(-1)
        gap = self.gap(p)
        if not isinstance(gap, Tensor) or gap.shape != p.shape:
            shape = f"shape {tuple(gap.shape)}" if isinstance(gap, Tensor) else f"type {type(gap).__name__}"
            raise reject("gap", f"a function whose result has {shape}", f"a tensor of shape {tuple(p.shape)}")
        if (requires_grad(gap) and not requires_grad(p)) or has_tangent(gap):
            accepted = "one without: the gap gets no gradient"
            raise reject("gap", "a function with learnable parameters", accepted)
        if holds(~(gap >= 0)):
            raise reject("gap", "a function with negative or NaN results", "a gap of at least 0")
        return torch.where(gap >= 0, gap, torch.nan).to(logits.dtype).unsqueeze(-1)


@documented
def gst(
    logits: Tensor,
    tau: float | Tensor = 0.85,
    hard: bool = True,
    *,
    gap: Gap = "auto",
    detach: bool = True,
    draw: Source = "sample",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """Gapped Straight-Through sample: a category, and a gradient of low variance.

    The category i is drawn from p = softmax(θ). Then the logits are perturbed so that i leads by γ::

        t_i = max θ,    t_j = min(θ_j, max θ - γ)  for j ≠ i

    The surrogate is h = softmax(t/τ), in which the perturbation t - θ is a constant: a gradient g at the
    sample becomes J(h) g / τ at the logits, with J(h) = diag(h) - h hᵀ. With "auto",
    t_j = log E[exp(z_j - z_i) | i] for z = θ + Gumbel noise: see `gapped.simplex.log_expected_odds`.

    - Law of hard samples: exactly softmax(θ).
    - Bias: biased, for linear costs too.
    - Cost: one evaluation of what follows, one uniform per row.

    >>> g = torch.Generator().manual_seed(0)
    >>> gst(torch.zeros(2, 3), tau=0.5, hard=True, generator=g).sum(-1)
    tensor([1., 1.])

    References: Fan, Chi, Rudnicky, Ramadge (2022), equations 17 to 19 and algorithm 1.
    """
    ignore_eps(eps)
    estimator = cached_estimator(GST, tau=tau, hard=hard, gap=gap, detach=detach, draw=draw, backend=backend)
    return estimator.sample(logits, dim=dim, mask=mask, generator=generator)
