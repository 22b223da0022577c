"""What a handful of seeds lets one say: pure functions of arrays.

A value that is not finite stands for a run that diverged. It never enters a mean; the sentences of
`outcome` count it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gapped.errors import reject

LEVEL = 0.05
STOP_LEVEL = 0.01
"""The chance at most that the best estimator of a comparison is stopped early: see `losers`."""
_POWER = 0.8
# Relative to the values, smaller differences come from rounding.
_ROUNDING = 1e-12
# The level of the test for seeds that shift all values alike.
_SHIFTED = 0.01
# The share of LEVEL that statements on the margin may use.
_CLOSE = 0.01
# Values whose spread is below this many steps of their grid are coarse.
_STEPS = 3
# A forecast beyond this many times the seeds so far is none.
_TIMES = 10

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


def summary(values: ArrayLike) -> Summary:
    """Mean, spread and interval of the finite values.

    >>> s = summary([1.0, 2.0, 3.0])
    >>> s.mean, s.std, s.count, round(s.low, 3), round(s.high, 3)
    (2.0, 1.0, 3, -0.484, 4.484)
    """
    from scipy.special import stdtrit

    x = np.asarray(values, dtype=np.float64).ravel()
    x = x[np.isfinite(x)]
    mean = float(x.mean()) if x.size else nan
    if x.size < 2:
        return Summary(mean, nan, x.size, -inf, inf)
    std = float(x.std(ddof=1))
    half = float(stdtrit(x.size - 1, 1 - LEVEL / 2)) * std / sqrt(x.size)
    return Summary(mean, std, x.size, mean - half, mean + half)


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


class Lead(NamedTuple):
    """How far one candidate is behind the first, its standard error and degrees of freedom."""

    size: float
    error: float
    freedom: float
    seeds: int
    """Of the two, the smaller number."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """What the runs say of several estimators, with a stated error rate: see `rank`."""

    names: list[str]
    """The candidates, best estimate first."""
    means: dict[str, float]
    """Estimates as if every candidate had run with every seed."""
    worse: list[str]
    """Those that the first one is better than."""
    close: list[str]
    """Those that are shown to be within the margin of the best one, whichever that is."""
    is_paired: bool
    """Whether seeds shift the values of all estimators alike, so that differences were taken seed by seed."""
    is_constant: bool
    """Whether no candidate's values depend on the seed: then chance cannot be told from difference."""
    leads: Mapping[str, Lead] = field(default_factory=dict)
    """Over each of the others, unless every value is the same."""

    @property
    def tied(self) -> list[str]:
        """Those that the data do not separate from the first one."""
        return [name for name in self.names[1:] if name not in self.worse]


def rank(
    values: Mapping[str, Mapping[int, float]],
    higher_is_better: bool = False,
    margin: float | str | None = None,
    level: float = LEVEL,
) -> Ranking:
    r"""Order estimators by their finite values by seed, and say what holds beyond chance.

    All statements together, "the first one is better than this one" and "this one is within the margin of
    the best", are false in at most 5% of comparisons.

    - *One pair.* Welch's test. Where seeds shift the values of all alike (an F-test of the additive model,
      value = estimator + seed, at 1%), the seeds' effects are taken out first and the degrees of freedom
      fall by a :math:`K`-th. Where values are so coarse that runs tie, as an accuracy on few examples,
      equal values are no evidence of a small spread: it is at least the pooled one, and half a step.
    - *Several.* With :math:`m` estimators left, the clearest loser falls if its p-value is at most
      :math:`\alpha / \binom m2`: the first one was chosen among all, so all pairs count. If every other
      one has a p-value of at most :math:`\alpha`, all of them fall: for a false winner that is enough.
      :math:`\alpha = 0.05 (1 - 1/2n)` pays for the error of Welch's test with few seeds; with two it is
      0.025.
    - *The margin.* An estimator is close if, for each other one, a one-sided test at
      :math:`0.01 / (K - 1)` (two estimators: :math:`\alpha`) refutes that it is worse by more.

    Candidates that lack some seeds are ordered by the additive model's estimates, and each pair is compared
    on the seeds that both have, so a lost run does not move anybody up.
    """
    from scipy.special import stdtr

    names, members = list(values), len(values)
    seeds = sorted({seed for runs in values.values() for seed in runs})
    sign = -1.0 if higher_is_better else 1.0
    held = np.array([[sign * values[name].get(seed, nan) for seed in seeds] for name in names])
    known = np.isfinite(held)
    held = np.where(known, held, 0.0)
    # In units of the largest value, squares neither overflow nor vanish.
    unit = float(np.abs(held).max()) or 1.0
    held = held / unit
    fit = _additive(held, known)
    order = sorted(range(members), key=lambda i: (fit.effects[i], names[i]))
    best, ranked = order[0], [names[i] for i in order]
    estimates = {names[i]: float(sign * unit * fit.effects[i]) for i in order}
    residuals = np.where(known, held - (held.sum(1) / known.sum(1))[:, None], 0.0)
    if (residuals**2).sum(1).sum() <= _ROUNDING**2 * members:
        return Ranking(ranked, estimates, [], [], False, bool(known.sum(1).max() > 1))
    spread, step, paired = _spreads(held, known, residuals, fit)
    lead, error, dof, shared = _compare_pairs(held, known, residuals, spread, step, paired)
    testable = (shared > 1) & (error**2 > _ROUNDING**2)
    # A difference that is the same at every seed, three or more, is no chance.
    certain = (shared > 2) & ~testable & (np.abs(lead) > _ROUNDING)
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(testable, 2 * stdtr(dof, -np.abs(lead) / error), 1.0 - certain)
    least = int(shared.min())
    alpha = level * (1 - 0.5 / least if least > 2 else 0.5)
    worse = _fallen(order[1:], np.where(lead > 0, p, 1.0)[:, best], alpha)
    close: list[int] = []
    if (width := _distance(margin, fit.effects[best], unit)) is not None and members > 1:
        bound = alpha if members == 2 else _CLOSE * level / LEVEL / (members - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            refuted = testable & (stdtr(dof, (lead - width) / error) <= bound) | certain & (lead < width)
        np.fill_diagonal(refuted, True)
        close = [i for i in order if refuted[i].all()]
    error = np.where(testable, error, inf)
    columns = zip(unit * lead[:, best], unit * error[:, best], dof[:, best], shared[:, best], strict=True)
    leads = [Lead(float(size), float(e), float(f), int(count)) for size, e, f, count in columns]
    return Ranking(
        ranked,
        estimates,
        [names[i] for i in order if i in worse],
        [names[i] for i in close],
        paired,
        False,
        {names[i]: leads[i] for i in order[1:]},
    )


def _spreads(
    held: Floats, known: NDArray[np.bool_], residuals: Floats, fit: _Additive
) -> tuple[Floats, float, bool]:
    """The variance of each one's values, the step of a coarse grid, and whether seeds shift all alike."""
    from scipy.special import fdtrc

    counts, squares = known.sum(1), (residuals**2).sum(1)
    freedom, blocks = np.maximum(counts - 1, 1), float((counts - 1).sum() - fit.freedom)
    paired = fit.freedom > 0 and blocks > 0 and len(held) > 1
    if paired and fit.left > _ROUNDING**2:
        ratio = (squares.sum() - fit.left) / blocks / (fit.left / fit.freedom)
        paired = bool(fdtrc(blocks, fit.freedom, ratio) < _SHIFTED)
    if paired:
        # A seed that one estimator alone has run leaves no residual.
        present = known.sum(0)
        weight = np.where(present > 1, present / np.maximum(present - 1, 1), 0.0)
        left = np.where(known, held - fit.effects[:, None] - fit.shifts, 0.0)
        squares, freedom = (left**2 * weight).sum(1), np.maximum((known & (present > 1)).sum(1) - 1, 1)
    spread, pooled = squares / freedom, squares.sum() / freedom.sum()
    if step := _coarse_step(held[known], pooled):
        spread = np.maximum(spread, max(pooled, step**2 / 4))
    return spread, step, paired


def _compare_pairs(
    held: Floats, known: NDArray[np.bool_], residuals: Floats, spread: Floats, step: float, paired: bool
) -> tuple[Floats, Floats, Floats, Floats]:
    """How far i is behind j in entry i, j, its standard error and degrees of freedom, the fewer seeds.

    A pair is compared on the seeds that both have, and on all of i and of j if they share none.
    """
    counts, members = known.sum(1), len(held)
    common = known.astype(float) @ known.T
    with np.errstate(divide="ignore", invalid="ignore"):
        lead = (held @ known.T - known @ held.T) / common
        variance = np.broadcast_to(spread[:, None], common.shape)
        if not paired:
            sums, powers = residuals @ known.T, residuals**2 @ known.T
            part = (powers - sums**2 / common) / (common - 1)
            floor = spread.min() if step else 0.0
            variance = np.where(common == counts[:, None], variance, np.maximum(part, floor))
        apart, means = common == 0, held.sum(1) / counts
        lead = np.where(apart, means[:, None] - means, lead)
        variance = np.where(apart, spread[:, None], variance)
        number = np.where(apart, counts[:, None], common)
        shared = np.minimum(number, number.T)
        first, second = variance / number, (variance / number).T
        factor = (members - 1) / members if paired else 1.0
        dof = factor * (first + second) ** 2 / (first**2 / (number - 1) + second**2 / (number.T - 1))
        dof = np.maximum(np.nan_to_num(dof, nan=1.0), np.maximum(shared - 1, 1))
        return lead, np.sqrt(first + second), dof, shared


def _fallen(others: Sequence[int], p: Floats, alpha: float) -> set[int]:
    """Those that the first one is better than, by their p-values."""
    if others and all(p[i] <= alpha for i in others):
        return set(others)
    fallen: set[int] = set()
    for i in sorted(others, key=lambda i: p[i]):
        left = len(others) + 1 - len(fallen)
        if p[i] > alpha / (left * (left - 1) / 2):
            break
        fallen.add(i)
    return fallen


class _Additive(NamedTuple):
    """Least squares of value = estimator + seed: both effects, the sum of squares left, its freedom."""

    effects: Floats
    shifts: Floats
    left: float
    freedom: float


def _additive(held: Floats, known: NDArray[np.bool_]) -> _Additive:
    members, seeds = known.shape
    if known.all():
        effects, shifts = held.mean(1), held.mean(0) - held.mean()
        left = float(((held - effects[:, None] - shifts) ** 2).sum())
        return _Additive(effects, shifts, left, float((members - 1) * (seeds - 1)))
    rows, columns = np.nonzero(known)
    design = np.zeros((rows.size, members + seeds))
    design[np.arange(rows.size), rows] = design[np.arange(rows.size), members + columns] = 1.0
    solution, _, ranks, _ = np.linalg.lstsq(design, held[known], rcond=None)
    center = solution[members:].mean()
    left = float(((design @ solution - held[known]) ** 2).sum())
    return _Additive(solution[:members] + center, solution[members:] - center, left, float(rows.size - ranks))


def _coarse_step(values: Floats, variance: float) -> float:
    """The step of the grid on which values tie, if it is not small against their spread; else 0."""
    gaps = np.diff(np.sort(values))
    steps = gaps[gaps > _ROUNDING]
    if not steps.size or gaps.min() > _ROUNDING or variance >= (_STEPS * steps.min()) ** 2:
        return 0.0
    return float(steps.min())


def _distance(margin: float | str | None, best: float, unit: float) -> float | None:
    """A margin in these units: a number is a distance, and "1%" is a share of the best estimate."""
    if margin is None:
        return None
    if isinstance(margin, str) and margin.endswith("%"):
        return float(margin[:-1]) / 100 * abs(best)
    return float(margin) / unit


def check_margin(margin: Any) -> None:
    """Refuse a margin that is neither a positive distance nor a share such as "1%"."""
    number: Any = margin.removesuffix("%") if isinstance(margin, str) else margin
    with suppress(TypeError, ValueError):
        if margin is None or (not isinstance(margin, bool) and 0 < float(number) < inf):
            return
    raise reject("margin", margin, 'a positive number, a share such as "1%", or None')


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


def seeds_to_separate(ranking: Ranking, name: str, level: float = LEVEL) -> int | None:
    r"""Seeds each that separate the best one from `name` with a chance of 80%, counting those that have run.

    With lead :math:`d`, standard error :math:`e` and :math:`n` seeds, the lead after :math:`N` seeds is
    :math:`d + e \sqrt{1 - n/N}\, T` as far as one can know now, and is significant beyond
    :math:`t_{1 - a/2}\, e \sqrt{n/N}`, where :math:`a` is the level over the number of pairs among those that
    still tie. None if no number up to ten times as many seeds is enough: a lead that is small against its
    error may be none.
    """
    from scipy.special import stdtr, stdtrit

    if name not in ranking.leads:
        return None
    size, error, freedom, count = ranking.leads[name]
    ratio = size / error
    if count < 2 or not ratio > 0:
        return None
    per_seed = freedom / (count - 1)
    tied = len(ranking.tied) + 1
    tail = level / max(tied * (tied - 1), 2)
    for total in range(count + 1, _TIMES * count + 1):
        bound = stdtrit(per_seed * (total - 1), 1 - tail) * sqrt(count / total)
        if stdtr(freedom, (ratio - bound) / sqrt(1 - count / total)) >= _POWER:
            return total
    return None
