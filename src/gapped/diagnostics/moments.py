r"""Moments of a stream of gradients, and the confidence intervals that follow from them.

With :math:`g` a gradient, :math:`\mu` and :math:`\Sigma` its mean and covariance and :math:`e` the target,
a `GradientStream` estimates, from groups of independent gradients that it does not keep,

- :math:`\mu` and the entries' variances, by Welford's recursion in float64;
- :math:`\operatorname{tr}\Sigma^2 = \mathbb{E}\langle a, b\rangle^2` for independent :math:`a, b`, each a
  difference of two gradients over :math:`\sqrt 2`;
- the variance :math:`u^\top\Sigma\,u` along :math:`u = \delta/\|\delta\|`, :math:`\delta = \mu - e`: that of
  each group along the mean error of the groups before it, weighted by how many gradients these had.

All intervals are large-sample intervals. `docs/intervals.md` derives that of a norm.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 8
"""The smallest group of gradients: four pairs."""


class Moments:
    """Mean and unbiased variance of a stream of equal-shaped tensors, element by element.

    Welford's recursion in float64 keeps no sample and takes no difference of large squares. All updates are
    in place, so that they can be part of a captured CUDA graph.
    """

    def __init__(self, like: Tensor) -> None:
        self.count = torch.zeros((), dtype=torch.float64, device=like.device)
        self.mean = torch.zeros_like(like, dtype=torch.float64)
        self.scatter = torch.zeros_like(like, dtype=torch.float64)

    @torch.no_grad()
    def add(self, sample: Tensor) -> None:
        self.count += 1
        delta = sample.double() - self.mean
        self.mean += delta / self.count
        self.scatter += delta * (sample - self.mean)

    @torch.no_grad()
    def merge(self, samples: Tensor) -> None:
        """Add several samples, along a leading axis, at once."""
        samples = samples.double()
        mean, count = samples.mean(0), samples.shape[0]
        delta, total = mean - self.mean, self.count + count
        self.scatter += (samples - mean).square().sum(0) + delta.square() * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count += count

    @property
    def variance(self) -> Tensor:
        return self.scatter / (self.count - 1)

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def tensors(self) -> list[Tensor]:
        return [self.count, self.mean, self.scatter]


class GradientStream:
    """Moments of gradients `(d,)` that come in groups, and of their errors if there is a target."""

    def __init__(self, size: int, device: torch.device, target: Tensor | None = None) -> None:
        one = torch.zeros((), device=device)
        self.target = target
        self.gradient = Moments(torch.zeros(size, device=device))
        self.distance = Moments(one)
        """Squared distances from the mean of the group, scaled to those from the true mean."""
        self.overlap = Moments(one)
        self.error = Moments(one)
        """Squared distances from the target."""
        self.cosine = Moments(one)
        """Inner products of unit gradients with the target; zero gradients give zero."""
        self._along = one.double()
        self._weight = 0

    @torch.no_grad()
    def add(self, group: Tensor) -> None:
        """Add at least `LEAST` independent gradients, `(n, d)`."""
        group = group.double()
        count = group.shape[0]
        if self.target is not None:
            self._compare(group, self.target)
        self.gradient.merge(group)
        self.distance.merge((group - group.mean(0)).square().sum(1) * (count / (count - 1)))
        half = count // 2
        pairs = (group[: 2 * half : 2] - group[1::2]) / math.sqrt(2)
        squares = (pairs @ pairs.T).square()
        self.overlap.merge((squares.sum() - squares.diagonal().sum()).view(1) / (half * (half - 1)))

    def _compare(self, group: Tensor, target: Tensor) -> None:
        self.error.merge((group - target).square().sum(1))
        self.cosine.merge(torch.nn.functional.normalize(group, dim=1, eps=1e-300) @ target)
        if self.count:
            direction = torch.nn.functional.normalize(self.gradient.mean - target, dim=0, eps=1e-300)
            self._along = self._along + (group @ direction).var() * self.count
            self._weight += self.count

    @property
    def count(self) -> int:
        """How many gradients were added."""
        return int(self.gradient.count)

    @property
    def variance(self) -> float:
        """The total variance, the trace of the covariance."""
        return float(self.gradient.variance.sum())

    @property
    def along(self) -> float:
        """The variance of gradients along their mean error; 0 if there was a single group."""
        return float(self._along) / max(self._weight, 1)


class Interval(NamedTuple):
    """An estimate and the limits of its confidence interval."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        """Whether the intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high

    def clamp(self, low: float, high: float = math.inf) -> Interval:
        """Estimate and limits, each moved into the range of values that are possible."""
        return Interval(*(min(max(end, low), high) for end in self))

    def widen(self, by: float) -> Interval:
        """The interval with an independent error of half-width `by` added."""
        half = math.hypot(self.high - self.value, by)
        return Interval(self.value, self.value - half, self.value + half)

    def __truediv__(self, divisor: Interval) -> Interval:
        """The ratio of two non-negative quantities; as wide as both together allow.

        >>> Interval(1.0, 0.5, 2.0) / Interval(2.0, 2.0, 2.0)
        Interval(value=0.5, low=0.25, high=1.0)
        """
        pairs = zip(self, (divisor.value, divisor.high, divisor.low), strict=True)
        return Interval(*(a / b if b else math.inf if a else 0.0 for a, b in pairs))


def normal_quantile(confidence: float) -> float:
    """How many standard errors lie to either side of an estimate.

    >>> round(normal_quantile(0.95), 4)
    1.96
    """
    return NormalDist().inv_cdf((1 + confidence) / 2)


def chi_squared_quantile(freedom: float, probability: float) -> float:
    """The quantile of the chi-squared law; `freedom` need not be whole.

    >>> round(chi_squared_quantile(1.0, 0.95), 4), round(chi_squared_quantile(10.0, 0.025), 4)
    (3.8415, 3.247)
    """
    low, high = 0.0, freedom + 20 * math.sqrt(2 * freedom) + 100
    for _ in range(10):  # each divides the interval by 32
        grid = torch.linspace(low, high, 33, dtype=torch.float64)
        below = torch.special.gammainc(torch.full_like(grid, freedom / 2), grid / 2) < probability
        place = min(max(int(below.sum()), 1), 32)
        low, high = float(grid[place - 1]), float(grid[place])
    return (low + high) / 2


def mean_interval(mean: float, variance: float, count: int, confidence: float) -> Interval:
    """Student's interval of a mean of `count` independent values; the whole line for a single one.

    The quantile is the normal one with two terms of its expansion in the degrees of freedom.
    """
    if count < 2:
        return Interval(mean, -math.inf, math.inf)
    z, freedom = normal_quantile(confidence), count - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    half = t * math.sqrt(max(variance, 0.0) / count)
    return Interval(mean, mean - half, mean + half)


def norm_interval(
    square: float,
    noise: float,
    overlap: float,
    along: float,
    confidence: float,
    resolution: float = 0.0,
) -> Interval:
    r"""The interval of :math:`\|\delta\|` from an estimate :math:`\hat\delta` with a normal error.

    With :math:`S` the covariance of the error and :math:`\lambda` its variance along :math:`\delta`, a length
    :math:`\sqrt\beta` belongs to the interval unless :math:`\|\hat\delta\|^2 - \operatorname{tr} S - \beta`
    is outside :math:`\pm\sqrt{q^2 + 4 z^2 \beta \lambda}`: a quadratic inequality in :math:`\beta`. Here
    :math:`z` is the normal quantile and :math:`q` that of
    :math:`\operatorname{tr} S\,(\chi^2_\nu/\nu - 1)`, with Satterthwaite's
    :math:`\nu = (\operatorname{tr} S)^2/\operatorname{tr} S^2`. At :math:`\beta = 0` only :math:`q` is left,
    so the interval of a zero vector contains zero at the declared rate.

    `square` is :math:`\|\hat\delta\|^2`, `noise` :math:`\operatorname{tr} S`, `overlap`
    :math:`\operatorname{tr} S^2`, `along` :math:`\lambda`. Limits are widened by `resolution`, the size of
    rounding errors.
    """
    debiased = square - noise
    freedom = max(1.0, noise**2 / overlap) if overlap > 0 else 1.0
    above = below = 0.0
    if noise > 0:
        above = noise * (chi_squared_quantile(freedom, confidence) / freedom - 1)
        below = noise * (1 - chi_squared_quantile(freedom, (1 - confidence) / 2) / freedom)
    slack = 2 * normal_quantile(confidence) ** 2 * along
    lowest = 0.0
    if debiased > above:
        lowest = debiased + slack - math.sqrt(slack * (2 * debiased + slack) + above**2)
    value = max(debiased, 0.0)
    highest = value + slack + math.sqrt(slack * (2 * value + slack) + below**2)
    low, high = math.sqrt(max(lowest, 0.0)) - resolution, math.sqrt(highest) + resolution
    return Interval(math.sqrt(value), max(low, 0.0), high)
