"""The gradient that estimators are measured against: given, enumerated, or the mean of unbiased ones."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gapped import simplex
from gapped.diagnostics.gradients import CostGradients, Progress, collect
from gapped.diagnostics.moments import (
    LEAST,
    GradientStream,
    Interval,
    mean_interval,
    norm_interval,
    normal_quantile,
)
from gapped.errors import GappedError, reject
from gapped.score import Cost, Draws, Score, draw_independent
from gapped.score.double_cv import DoubleCV
from gapped.score.exact import LIMIT, Exact
from gapped.score.reinforce import RLOO

_KINDS = ("auto", "exact", "coordinate", "double-cv", "rloo")
# Samples of an unbiased gradient, and groups of gradients that show what the slopes of the cost gain.
_SAMPLES, _PILOTS = 16, 8
# Affordable are so many numbers in an enumeration, and so many per gradient with coordinates summed out.
_ENUMERATED, _SUMMED = 2**24, 2**22


@dataclass(frozen=True)
class Coordinates(Score):
    r"""One variable summed out at a time: the other variables are drawn, this one takes all its values.

    With :math:`f_{lk}` the cost of the sample after its variable :math:`l` is set to :math:`k`,

    .. math:: \nabla_{\theta_l} = p_l \odot \bigl(f_l - \langle p_l, f_l\rangle\bigr).

    It is the exact gradient given the other variables, so it is unbiased, with no more variance than any
    estimator that draws all variables independently. `L K` evaluations, and one to learn which axes are the
    batch. With one variable it is exact.

    References: Titsias and Lázaro-Gredilla (2015).
    """

    def estimate(
        self, cost: Cost, generator: torch.Generator | None, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits, categories = cost.logits, cost.logits.shape[-1]
        with torch.no_grad():
            draws = draw_independent(logits, 1, generator)
            batch = cost(simplex.one_hot(draws, categories, logits.dtype)).shape[1:]
            p = simplex.normalised(logits).reshape(*batch, -1, categories)
            index = _substituted(draws.reshape(*batch, -1), p > 0)
            points = simplex.one_hot(index.reshape(-1, *logits.shape[:-1]), categories, logits.dtype)
        # (L K, *batch) to (*batch, L, K)
        costs = cost(points).reshape(-1, categories, *batch).movedim((0, 1), (-2, -1))
        value = (p * costs).sum(-1).mean(-1)
        if not wanted:
            return value, None
        with torch.no_grad():
            # Relative to the cost of the likeliest category, in float64: costs far from zero keep their
            # differences, and p, which sums to 1 only up to rounding, multiplies no large number.
            costs = simplex.accumulated(costs)
            relative = costs - costs.gather(-1, p.argmax(-1, keepdim=True))
            gradient = p * (relative - (p * relative).sum(-1, keepdim=True))
        return value, gradient.reshape(logits.shape).to(logits.dtype)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        raise NotImplementedError("what is evaluated depends on which axes are the batch")


def _substituted(index: Tensor, possible: Tensor) -> Tensor:
    """`index` `(*batch, L)` with each entry set to each category in turn, `(L, K, *batch, L)`.

    Where a category is impossible the entry stays: the cost need not be defined there.
    """
    variables, categories = possible.shape[-2:]
    batch = (1,) * (index.dim() - 1)
    here = torch.eye(variables, dtype=torch.bool, device=index.device).view(variables, 1, *batch, variables)
    value = torch.arange(categories, device=index.device).view(1, categories, *batch, 1)
    return torch.where(here & possible.movedim(-1, 0).unsqueeze(0), value, index)


@dataclass(frozen=True, eq=False)
class Reference:
    """A gradient, and how well it is known."""

    kind: str
    """Where it comes from."""
    gradient: Tensor
    """The flat gradient `(d,)`, float64."""
    noise: float = 0.0
    """The trace of the covariance of its error; 0 if it is exact."""
    overlap: float = 0.0
    """The trace of the square of that covariance."""
    samples: int = 0
    """How many gradients were averaged; 0 if it is exact."""

    @classmethod
    def of(cls, name: str, stream: GradientStream) -> Reference:
        """The mean of a stream of unbiased gradients; `name` says which ones."""
        count = stream.count
        overlap = float(stream.overlap.mean) / count**2
        kind = f"{name}, {count:,} gradients"
        return cls(kind, stream.gradient.mean.clone(), stream.variance / count, overlap, count)

    def norm(self, confidence: float) -> Interval:
        """The length of the exact gradient."""
        square = float(self.gradient.square().sum())
        # The root of the overlap bounds the variance along any direction.
        return norm_interval(square, self.noise, self.overlap, math.sqrt(self.overlap), confidence)

    def relative_norm(self, stream: GradientStream, confidence: float) -> Interval:
        """The length of the stream's mean gradient over that of the exact one."""
        # Two limits enter a ratio: each gets half of the error unless the length is known exactly.
        level = confidence if self.samples == 0 else (1 + confidence) / 2
        square, n = float(stream.gradient.mean.square().sum()), stream.count
        # The root of the overlap bounds the variance along any direction.
        root = math.sqrt(max(float(stream.overlap.mean), 0.0)) / n
        return norm_interval(square, stream.variance / n, root**2, root, level) / self.norm(level)

    def errors_of(
        self, stream: GradientStream, confidence: float, eps: float
    ) -> tuple[Interval, Interval, Interval, Interval | None]:
        """Bias, relative bias, mean squared error and cosine of the stream's gradients, with intervals.

        `eps` is the relative rounding error of a gradient. A reference of length zero has no direction, and
        then there is no cosine.
        """
        n, variance = stream.count, stream.variance
        square = float((stream.gradient.mean - self.gradient).square().sum())
        noise = variance / n + self.noise
        # Cauchy and Schwarz bound what the errors of estimator and reference have in common.
        overlap = (math.sqrt(max(float(stream.overlap.mean), 0.0)) / n + math.sqrt(self.overlap)) ** 2
        debiased = max(square - noise, 0.0)
        along = stream.along / n + math.sqrt(self.overlap)
        length = self.norm(confidence).value
        resolution = 16 * eps * (length + float(stream.gradient.mean.norm()))

        def bias_at(level: float) -> Interval:
            return norm_interval(square, noise, overlap, along, level, resolution)

        # Two limits enter a ratio: each gets half of the error unless the length is known exactly.
        level = confidence if self.samples == 0 else (1 + confidence) / 2
        relative = bias_at(level) / self.norm(level)
        z = normal_quantile(confidence)
        doubt = 4 * debiased * math.sqrt(self.overlap) + 2 * self.overlap
        own = mean_interval(
            float(stream.error.mean) - self.noise, float(stream.error.variance), n, confidence
        )
        mse = own.widened(z * math.sqrt(doubt)).clamp(0.0)
        cosine = None
        if length > 0:
            mean, spread = float(stream.cosine.mean) / length, float(stream.cosine.variance) / length**2
            own = mean_interval(mean, spread, n, confidence)
            cosine = own.widened(z * self.overlap**0.25 / length).clamp(-1.0, 1.0)
        return bias_at(confidence), relative, mse, cosine


def reference_of(
    source: CostGradients, reference: str | Tensor, samples: int, progress: Progress | None
) -> Reference:
    """The reference that `gapped.diagnose` is asked for."""
    if isinstance(reference, Tensor):
        if reference.shape != source.logits.shape or not reference.isfinite().all():
            accepted = f"a finite tensor of the logits' shape {tuple(source.logits.shape)}"
            raise reject("reference", f"a tensor of shape {tuple(reference.shape)}", accepted)
        return Reference("the gradient that was given", reference.detach().double().reshape(-1))
    if reference not in _KINDS:
        raise reject("reference", reference, f"one of {', '.join(_KINDS)}, or a tensor")
    if reference == "auto":
        reference = _affordable(source.logits, source.batch_axes)
    if reference == "exact":
        return Reference("exact, by enumeration", source.draw(Exact(), 1)[0].double())
    if reference == "coordinate":
        stream, _ = collect(source, Coordinates(), max(samples // 4, 64), "reference", progress)
        return Reference.of("one variable summed out at a time", stream)
    unbiased: Score = RLOO(_SAMPLES)
    if reference == "double-cv" or (reference == "sampled" and _has_slopes(source)):
        alpha, ratio = _best_factor(source)
        if reference == "double-cv" or ratio < 0.5:  # a derivative costs about as much as the evaluations
            unbiased = DoubleCV(_SAMPLES, alpha=alpha)
    stream, _ = collect(source, unbiased, samples, "reference", progress)
    return Reference.of(f"{type(unbiased).__name__} with {_SAMPLES} samples", stream)


def _has_slopes(source: CostGradients) -> bool:
    try:
        source.draw(DoubleCV(2), 1)
    except GappedError:
        return False
    return True


def _best_factor(source: CostGradients) -> tuple[float, float]:
    """The factor of `DoubleCV` with the least variance, and its variance as a fraction of RLOO's.

    The gradient is linear in the factor, so two values with the same noise tell all. The gradients of the
    reference itself are others: its factor may not depend on them.
    """
    pilot = copy.copy(source)
    product = square = variance = 0.0
    for _ in range(_PILOTS):
        seed = int(torch.randint(2**63 - 1, (), generator=source.generator, device=source.device))
        at = []
        for alpha in (0.0, 1.0):
            pilot.generator = torch.Generator(source.device).manual_seed(seed)
            at.append(pilot.draw(DoubleCV(_SAMPLES, alpha=alpha), LEAST).double())
        plain, change = at[0] - at[0].mean(0), at[1] - at[0]
        change = change - change.mean(0)
        product += float((plain * change).sum())
        square += float(change.square().sum())
        variance += float(plain.square().sum())
    alpha = -product / square if square > 0 else 0.0
    return alpha, 1 - product**2 / (square * variance) if square * variance > 0 else 1.0


def _affordable(logits: Tensor, batch_axes: int) -> str:
    categories, variables = logits.shape[-1], math.prod(logits.shape[batch_axes:-1])
    # Any larger exponent is far beyond the limit, and slow to compute.
    combinations = categories ** min(variables, 64)
    if combinations <= LIMIT and combinations * logits.numel() <= _ENUMERATED:
        return "exact"
    return "coordinate" if variables * categories * logits.numel() <= _SUMMED else "sampled"
