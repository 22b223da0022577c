"""What a handful of seeds lets one say: pure functions of arrays.

A value that is not finite stands for a run that diverged. It never enters a mean; the sentences of
`outcome` count it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, hypot, inf, nan, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.05
STOP_LEVEL = 0.01
"""The chance at most that the best estimator of a comparison is stopped early: see `losers`."""
_POWER = 0.8
# Relative to the values, smaller differences come from rounding.
_ROUNDING = 1e-12
# Nobody runs more seeds than this.
MANY = 1000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Summary:
    """Mean, sample standard deviation, and the 95% t-interval of the mean over `count` finite values.

    One value has no spread: its `std` is NaN and its interval the whole line. No value: the mean is NaN too.
    """

    mean: float
    std: float
    count: int
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Difference:
    """Mean of a minus mean of b, its 95% interval and the two-sided p-value (Welch: unequal variances)."""

    mean: float
    low: float
    high: float
    p: float


def summary(values: ArrayLike) -> Summary:
    """Mean, spread and interval of the finite values.

    >>> s = summary([1.0, 2.0, 3.0])
    >>> s.mean, s.std, s.count, round(s.low, 3), round(s.high, 3)
    (2.0, 1.0, 3, -0.484, 4.484)
    """
    x = _finite(values)
    if x.size == 0:
        return Summary(nan, nan, 0, -inf, inf)
    return from_moments(float(x.mean()), float(x.std(ddof=1)) if x.size > 1 else nan, x.size)


def from_moments(mean: float, std: float, count: int) -> Summary:
    """The summary of values of which only mean and standard deviation are known, as of published ones."""
    if count < 2:
        return Summary(mean, nan, count, -inf, inf)
    half = _quantile(count - 1) * std / sqrt(count)
    return Summary(mean, std, count, mean - half, mean + half)


def difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """Welch's comparison of two means. With fewer than two values on a side nothing can be told: p is 1."""
    return between(summary(a), summary(b))


def between(first: Summary, second: Summary) -> Difference:
    """Welch's comparison of two means, given as summaries."""
    from scipy.special import stdtr

    mean = first.mean - second.mean
    if min(first.count, second.count) < 2:
        return Difference(mean, -inf, inf, 1.0)
    error = hypot(first.std / sqrt(first.count), second.std / sqrt(second.count))
    # What rounding leaves of equal values is neither a spread nor a difference.
    rounding = _ROUNDING * max(abs(first.mean), abs(second.mean))
    if error <= rounding:
        return Difference(mean, mean, mean, 1.0 if abs(mean) <= rounding else 0.0)
    degrees = freedom(first, second)
    half = _quantile(degrees) * error
    return Difference(mean, mean - half, mean + half, float(2 * stdtr(degrees, -abs(mean) / error)))


def freedom(first: Summary, second: Summary) -> float:
    """Welch and Satterthwaite's degrees of freedom of a difference of two means."""
    # Relative to the larger one: squares of small numbers underflow.
    scale = max(first.std, second.std)
    u, v = (first.std / scale) ** 2 / first.count, (second.std / scale) ** 2 / second.count
    return (u + v) ** 2 / (u**2 / (first.count - 1) + v**2 / (second.count - 1))


def holm(p: Sequence[float]) -> list[bool]:
    """Which hypotheses Holm's step-down rule rejects, all errors together held at 5%.

    >>> holm([0.01, 0.04, 0.03])
    [True, False, False]
    """
    rejected = [False] * len(p)
    for step, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[index] > LEVEL / (len(p) - step):
            break
        rejected[index] = True
    return rejected


def band(runs: ArrayLike, log: bool = False) -> tuple[Floats, Floats, Floats]:
    """Mean, lower and upper 95% limit of each column of (runs, epochs); NaN where there is nothing to say.

    With `log`, of the logarithms: the geometric mean and an interval that stays positive.
    """
    x = np.atleast_2d(np.asarray(runs, dtype=np.float64))
    if log:
        mean, low, high = band(np.log(np.where(x > 0, x, nan)))
        return np.exp(mean), np.exp(low), np.exp(high)
    columns = [summary(x[:, j]) for j in range(x.shape[1])]
    mean = np.array([c.mean for c in columns])
    half = np.array([c.half if c.count > 1 else nan for c in columns])
    return mean, mean - half, mean + half


@dataclass(frozen=True)
class Standing:
    """The cells with finite values, best first: which ones the data separate from the best, which not."""

    best: str
    rivals: list[str]
    beaten: list[str]


def standing(arrays: Mapping[str, ArrayLike], higher_is_better: bool = False) -> Standing | None:
    """Welch's tests of the best mean against every other, Holm-corrected at 5%; None without any value.

    >>> standing({"a": [1.0, 1.1, 1.2], "b": [1.1, 1.2, 1.3], "c": [9.0, 9.1, 9.2]})
    Standing(best='a', rivals=['b'], beaten=['c'])
    """
    means = {name: s.mean for name, values in arrays.items() if (s := summary(values)).count}
    if not means:
        return None
    sign = -1 if higher_is_better else 1
    best, *others = sorted(means, key=lambda name: (sign * means[name], name))
    separated = holm([difference(arrays[best], arrays[name]).p for name in others])
    rivals, beaten = (
        [name for name, apart in zip(others, separated, strict=True) if apart is side]
        for side in (False, True)
    )
    return Standing(best, rivals, beaten)


def looks(seeds: int) -> list[int]:
    """After how many seeds losers are looked for.

    >>> looks(3), looks(5), looks(20)
    ([], [3], [3, 6, 12])
    """
    return [3 * 2**i for i in range(seeds.bit_length()) if 3 * 2**i < seeds]


def losers(cells: Mapping[str, ArrayLike], higher_is_better: bool, tests: int) -> dict[str, str]:
    r"""The cells that are clearly worse than the one with the best mean, and its name for each.

    `cells` have a finite value for each of the same :math:`n` seeds. With :math:`d_s` the lead of the best
    one at seed :math:`s`, a cell is out if

    .. math:: \sqrt n\, \bar d / \max(s_d, \sqrt{s_1^2 + s_2^2}) \ge t_{n-1}(1 - 0.01 / \mathrm{tests}).

    With :math:`s_d` alone this is the one-sided paired t-test, exact for differences that are normal,
    however the seeds couple them; the maximum makes it stricter, and keeps it in step with the Welch tests
    of the verdict. Let `tests` be the number of looks times the number of rivals: by Bonferroni's inequality,
    the cell with the best expectation, or one that ties for it, is ever out with a chance of at most 1%.
    Values without any spread decide nothing.
    """
    from scipy.special import stdtrit

    sign = -1 if higher_is_better else 1
    arrays = {name: sign * np.asarray(values, dtype=np.float64) for name, values in cells.items()}
    if len(arrays) < 2:
        return {}
    best = min(arrays, key=lambda name: (arrays[name].mean(), name))
    count, lead = arrays[best].size, arrays[best]
    bound = float(stdtrit(count - 1, 1 - STOP_LEVEL / tests)) / sqrt(count)
    out = {}
    for name, x in arrays.items():
        spread = sqrt(max(np.var(x - lead, ddof=1), np.var(x, ddof=1) + np.var(lead, ddof=1)))
        # What rounding leaves of equal values is no spread.
        if spread > 1e-9 * max(abs(x).max(), abs(lead).max()) and (x - lead).mean() >= bound * spread:
            out[name] = best
    return out


def seeds_to_separate(first: Summary, second: Summary) -> float:
    """Seeds each that separate two means at 5% with a chance of 80%, if difference and spread stay as seen.

    >>> seeds_to_separate(summary([1.0, 2.0, 3.0]), summary([1.5, 2.5, 3.5]))
    64
    """
    from scipy.special import stdtrit

    gap = abs(first.mean - second.mean)
    if gap == 0 or min(first.count, second.count) < 2:
        return inf
    ratio = (first.std / gap) ** 2 + (second.std / gap) ** 2
    quantiles = NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(_POWER)
    count = max(ceil(quantiles**2 * ratio), min(first.count, second.count) + 1)
    # Few values have wider quantiles than those of the normal law.
    while count <= MANY and count < float(sum(stdtrit(2 * count - 2, [1 - LEVEL / 2, _POWER]))) ** 2 * ratio:
        count += 1
    return count


def _finite(values: ArrayLike) -> Floats:
    x = np.asarray(values, dtype=np.float64).ravel()
    return x[np.isfinite(x)]


def is_constant(values: Summary) -> bool:
    """Whether several runs have one value, up to rounding."""
    return values.count > 1 and values.std <= _ROUNDING * abs(values.mean)


def _quantile(freedom: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - LEVEL / 2))
