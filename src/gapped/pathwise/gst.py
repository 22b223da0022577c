"""The Gapped Straight-Through estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_flag, check_level, has_tangent, holds, ignore_eps, requires_grad
from gapped.docstrings import documented
from gapped.errors import reject
from gapped.gradient import Points, with_points
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Draw, Outcome, Pathwise, Source, cached_estimator
from gapped.simplex import divide, per_row

if TYPE_CHECKING:
    from gapped.choice import Choice

Gap = float | Tensor | Literal["auto"] | Callable[[Tensor], Tensor]


@documented
@dataclass(frozen=True, eq=False)
class GST(Pathwise):
    """Gapped Straight-Through: a gap in place of noise.

    Its method `sample` draws what `gapped.gst` draws, whose help has the mathematics. To begin with, take
    `GST(tau=0.85, gap="auto")`.

    Arguments:
        (tau, hard)
        gap: Least lead of the drawn category over the others: a number, a tensor that broadcasts as `tau`
            does, a function of the drawn probability such as `gapped.expected_gap`, or "auto".
        detach: Whether the perturbation is a constant of the backward pass; False is the paper's NZ ablation.
        (draw, backend)
    """

    name = "gst"
    levels = ("tau", "gap")

    gap: Gap = 1.0
    """Least distance of the selected logit to the others: a number, a tensor, a function of the selected
    probability, or `"auto"`."""
    detach: bool = True
    """Whether the perturbation is a constant of the backward pass; False is the paper's NZ ablation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("detach", self.detach)
        if isinstance(self.gap, str):
            if self.gap != "auto":
                raise reject("gap", self.gap, 'a number, a tensor, a function or "auto"')
            if not self.detach:
                raise reject("detach", False, 'True with gap="auto"')
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
            raise reject("detach", False, "True for choose and gst_index: only sample has the other gradient")

    def points(self, logits: Tensor, draw: Draw) -> Points:
        tau = per_row(self.tau, logits)
        return Points(torch.softmax(divide(self._perturbed(logits, draw), tau), -1).unsqueeze(0), 1 / tau)

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
        selected = simplex.place(index, rows.shape[-1])
        # A row with a NaN has no gap, and its gradient is NaN in any case.
        gap = self._gap_of(torch.where(logits.isnan(), 0.0, logits), selected)
        # Only the graph counts: a logit that is raised or lowered, even by zero, passes on what the gap does.
        stopped = logits >= -gap
        return torch.where(stopped, -gap, logits).scatter(-1, selected, 0.0)

    def _perturbed(self, logits: Tensor, draw: Draw) -> Tensor:
        """The selected logit raised to 0, the largest; every other one put below it by its gap."""
        selected = draw.category.unsqueeze(-1)
        if isinstance(self.gap, str):
            return simplex.log_expected_odds(simplex.log_softmax(logits)).scatter(-1, selected, 0.0)
        gap = self._gap_of(logits, selected)
        lowered = logits.minimum(-gap) if isinstance(gap, Tensor) else logits.clamp_max(-gap)
        return lowered.scatter(-1, selected, 0.0)

    def _gap_of(self, logits: Tensor, selected: Tensor) -> float | Tensor:
        if not callable(self.gap):
            assert not isinstance(self.gap, str)
            return per_row(self.gap, logits)
        p = simplex.softmax(logits).gather(-1, selected).squeeze(-1)
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
    tau: float | Tensor = 1.0,
    hard: bool = False,
    *,
    gap: Gap = 1.0,
    detach: bool = True,
    draw: Source = "sample",
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    eps: float = 1e-10,
    backend: str = "auto",
) -> Tensor:
    """Gapped Straight-Through sample: a category, and a gradient of low variance.

    Soft by default, as torch's function is: pass `hard=True` for one-hot vectors. The class `gapped.GST` is
    hard by default. To begin with, take `gst(logits, tau=0.85, hard=True, gap="auto")`.

    Arguments:
        (logits, tau, hard)
        gap: Least lead γ of the drawn category over the others: a number (0.8 to 1.2 in the paper, for 10
            categories); a tensor that broadcasts as `tau` does; a function of the drawn probability, such as
            `gapped.expected_gap`; or "auto", which gives each category the gap that Gumbel noise would, and
            needs no tuning to the number of categories.
        detach: False differentiates the perturbation as well, with a gap function's own slope, the paper's NZ
            ablation. It trains badly.
        (draw, dim, mask, generator, eps, backend)

    Returns:
        A tensor of the shape and dtype of `logits` that carries the gradient. Its rows are one-hot if `hard`,
        else points of the simplex. Half precision is computed in float32 and rounded once.

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


@documented
def gst_index(
    logits: Tensor,
    tau: float | Tensor = 1.0,
    *,
    gap: Gap = 1.0,
    dim: int = -1,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Choice:
    """Gapped Straight-Through choice: the drawn index, for look-ups and routers.

    It is `gapped.gst` with `hard=True` and without the one-hot vector, which is never written; what uses the
    choice never multiplies by its zeros. Values and gradients are those of the one-hot sample.

    Arguments:
        (logits, tau)
        gap: Least lead of the drawn category over the others, as in `gapped.gst`.
        (dim, mask, generator, backend)

    Returns:
        A `Choice`. Its `index` has the shape of the logits without the category axis; `select(table)` looks
        up entries, and `gate()` is a 1 for each row that carries the gradient.

    >>> logits = torch.zeros(2, 4, requires_grad=True)
    >>> table = torch.eye(4)
    >>> choice = gst_index(logits, tau=0.5, generator=torch.Generator().manual_seed(0))
    >>> choice.index.shape, choice.select(table).shape, choice.gate()
    (torch.Size([2]), torch.Size([2, 4]), tensor([1., 1.], grad_fn=<_GateBackward>))
    """
    return cached_estimator(GST, tau=tau, gap=gap, backend=backend).choose(
        logits, dim=dim, mask=mask, generator=generator
    )
