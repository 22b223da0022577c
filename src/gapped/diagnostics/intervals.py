r"""Confidence intervals from moments: pure functions of numbers.

All are large-sample intervals. The one that needs care is that of a norm. Let :math:`\hat\delta` estimate a
vector :math:`\delta` without bias, with a normal error of covariance :math:`S`. Its squared length is too
large by :math:`\operatorname{tr} S` in the mean, and

.. math:: \|\hat\delta\|^2 - \operatorname{tr} S - \|\delta\|^2
          = \bigl(\|\varepsilon\|^2 - \operatorname{tr} S\bigr) + 2\,\delta^\top\varepsilon.

The first bracket is a sum of squares: by Satterthwaite's rule :math:`\|\varepsilon\|^2` is close to
:math:`\operatorname{tr} S\,\chi^2_\nu/\nu` with :math:`\nu = (\operatorname{tr} S)^2/\operatorname{tr} S^2`.
The second is normal with variance :math:`4\,\|\delta\|^2\lambda`, where :math:`\lambda` is that of the error
along :math:`\delta`. A length :math:`\sqrt\beta` belongs to the interval unless the left side is outside
:math:`\pm\sqrt{q^2 + 4 z^2 \beta \lambda}`, the quantiles of both combined: a quadratic inequality in
:math:`\beta`. At :math:`\beta = 0` only the :math:`\chi^2` quantile :math:`q` is left, so a vector that is
zero is found to be so at the declared rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch


@dataclass(frozen=True)
class Interval:
    """An estimate and the limits of its confidence interval."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        """Whether the intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high

    def __truediv__(self, divisor: Interval) -> Interval:
        """The ratio of two non-negative quantities; as wide as both together allow.

        >>> Interval(1.0, 0.5, 2.0) / Interval(2.0, 2.0, 2.0)
        Interval(value=0.5, low=0.25, high=1.0)
        """
        return Interval(
            _ratio(self.value, divisor.value),
            _ratio(self.low, divisor.high),
            _ratio(self.high, divisor.low),
        )


def _ratio(one: float, other: float) -> float:
    if other:
        return one / other
    return math.inf if one else 0.0


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
    for _ in range(10):  # each finds the quantile among 32 neighbours
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
    r"""The interval of :math:`\|\delta\|` from an estimate of :math:`\delta`, by the rule of this module.

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
