"""Statistics of a comparison against scipy, closed forms, and simulations with a declared rate."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan, nan
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statistical import require_law, require_rejected

from gapped.comparison.statistics import (
    LEVEL,
    STOP_LEVEL,
    Ranking,
    band,
    check_margin,
    looks,
    losers,
    rank,
    seeds_to_separate,
    summary,
)
from gapped.errors import GappedError

Law = Callable[[np.random.Generator, int, int], np.ndarray]


@pytest.mark.parametrize("count", [2, 3, 10, 200])
def test_summary_is_the_t_interval(count: int) -> None:
    x = np.random.default_rng(count).normal(107, 1.3, count)
    got = summary(x)
    low, high = stats.t.interval(0.95, count - 1, loc=x.mean(), scale=stats.sem(x))
    assert (got.mean, got.std, got.count) == pytest.approx((x.mean(), np.std(x, ddof=1), count))
    assert (got.low, got.high) == pytest.approx((low, high))


def test_summary_of_one_none_and_diverged() -> None:
    one = summary([3.0])
    assert (one.mean, one.count, one.low, one.high) == (3.0, 1, -inf, inf)
    assert isnan(one.std)
    assert summary([]).count == 0
    assert isnan(summary([]).mean)
    assert summary([1.0, nan, 3.0, inf]) == summary([1.0, 3.0])


def test_band_is_a_summary_a_column() -> None:
    runs = np.array([[1.0, 5.0, nan], [3.0, nan, nan]])
    mean, low, high = band(runs)
    first = summary([1.0, 3.0])
    assert (mean[0], low[0], high[0]) == pytest.approx((first.mean, first.low, first.high))
    assert mean[1] == 5
    assert isnan(low[1])
    assert isnan(mean[2])
    assert band([[1.0], [100.0]], log=True)[0][0] == pytest.approx(10)


# What two means say: the tests against scipy, and the decision against the level.


def by_seed(*rows: Any) -> dict[str, dict[int, float]]:
    """Estimators "a", "b", ... with the values of seeds 0, 1, ...; NaN where a seed is missing."""
    return {
        chr(97 + i): {seed: float(x) for seed, x in enumerate(row) if x == x} for i, row in enumerate(rows)
    }


def critical_shift(ranks_worse: Callable[[float], bool], low: float = 0.0, high: float = 100.0) -> float:
    """The least shift at which a rival falls, by bisection."""
    assert ranks_worse(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if ranks_worse(middle) else (middle, high)
    return high


@pytest.mark.parametrize(("n", "m"), [(3, 3), (3, 10), (10, 10)])
def test_two_estimators_are_told_apart_by_welchs_test(n: int, m: int) -> None:
    rng = np.random.default_rng(n * m)
    a, b = rng.normal(0, 1, n), rng.normal(0, 3, m)
    b += a.mean() - b.mean()

    def worse(shift: float) -> bool:
        seeds_of_b = {100 + i: float(x) for i, x in enumerate(b + shift)}
        return rank({"a": dict(enumerate(map(float, a))), "b": seeds_of_b}).worse == ["b"]

    p = stats.ttest_ind(a, b + critical_shift(worse), equal_var=False).pvalue
    assert p == pytest.approx(LEVEL * (1 - 0.5 / min(n, m)), rel=1e-6)


@pytest.mark.parametrize("n", [4, 8])
def test_two_estimators_with_common_seeds_are_told_apart_seed_by_seed(n: int) -> None:
    rng = np.random.default_rng(n)
    common = 1000 * rng.normal(size=n)
    a, b = common + rng.normal(size=n), common + rng.normal(size=n)
    b += a.mean() - b.mean()
    assert rank(by_seed(a, b)).is_paired
    shift = critical_shift(lambda shift: rank(by_seed(a, b + shift)).worse == ["b"])
    assert stats.ttest_rel(a, b + shift).pvalue == pytest.approx(LEVEL * (1 - 0.5 / n), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e150])
def test_ranks_do_not_depend_on_the_unit(scale: float) -> None:
    a, b, c = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 4.1]), np.array([80.0, 81.0, 83.0])
    got, plain = rank(by_seed(scale * a, scale * b, scale * c)), rank(by_seed(a, b, c))
    assert (got.names, got.worse) == (plain.names, plain.worse) == (["a", "b", "c"], ["c"])
    assert got.leads["b"].error == pytest.approx(scale * plain.leads["b"].error, rel=1e-9)


def test_a_winner_needs_no_correction_and_a_pair_among_many_does() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=10)
    rival = rng.normal(size=10)
    rival += a.mean() - rival.mean()
    shift = critical_shift(lambda shift: rank(by_seed(a, rival + shift)).worse == ["b"])
    barely = rival + 1.01 * shift
    rivals = [np.roll(barely, i) for i in range(10)]
    assert len(rank(by_seed(a, *rivals)).worse) == 10, "it beats each of them: it wins"
    tie = np.roll(a, 1) + 1e-3
    assert rank(by_seed(a, tie, *rivals)).worse == [], "it was chosen among twelve"


def test_a_lost_run_moves_nobody_up() -> None:
    """B is better by 0.01 on every seed, and lost the run of the easiest one."""
    easy = np.array([5.0, 6.0, 7.0, 1.0])
    a, b = easy, easy - 0.01 + np.array([1e-4, -1e-4, 2e-4, nan])
    assert np.nanmean(b) > a.mean(), "by plain means B is worse"
    ranking = rank(by_seed(a, b))
    assert ranking.names == ["b", "a"]
    assert ranking.worse == ["a"]
    assert ranking.means["a"] - ranking.means["b"] == pytest.approx(0.01, abs=1e-3)


def test_unequal_seeds_are_compared_on_the_shared_ones_where_pairing_does_not_help() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=8), rng.normal(size=8) + 1.0
    a[6:] = nan
    b[7] = -1e6
    got, six = rank(by_seed(a, np.where(np.arange(8) < 7, b, nan))), rank(by_seed(a[:6], b[:6]))
    assert not got.is_paired
    assert got.leads[got.names[1]][:2] == pytest.approx(six.leads[six.names[1]][:2])


def test_a_lead_on_all_of_four_shared_seeds_counts() -> None:
    common = np.array([1.0, 3.0, 2.0, 9.0])
    ranking = rank(by_seed(common, common + 0.01 + np.array([1e-3, -1e-3, 5e-4, 0.0])))
    assert ranking.worse == ["b"]


def test_values_without_spread_decide_nothing_and_equal_differences_do() -> None:
    constant = rank(by_seed([1.0] * 5, [2.0] * 5))
    assert (constant.worse, constant.is_constant) == ([], True)
    assert rank(by_seed([0.1] * 3, [0.1 + 1e-17] * 3)).worse == []
    assert rank(by_seed([0.5, 0.51, 0.52], [2.0, 2.01, 2.02])).worse == ["b"]
    grid = rank(by_seed([0.8, 0.9, 0.9], [0.7, 0.8, 0.8]), higher_is_better=True)
    assert grid.worse == [], "a step of the grid may be chance"
    steps = rank(by_seed([0.8, 0.9, 0.9], [0.1, 0.2, 0.2]), higher_is_better=True)
    assert steps.worse == ["b"], "seven steps are not"
    assert rank(by_seed([1.0], [2.0])).worse == []


def test_the_margin_says_who_is_as_good_as_the_best() -> None:
    rng = np.random.default_rng(1)
    a, b, c = (100 + shift + 0.05 * rng.normal(size=10) for shift in (0.0, 0.2, 5.0))
    assert rank(by_seed(a, b, c), margin="1%").close == ["a", "b"]
    assert rank(by_seed(a, b, c), margin=1.0).close == ["a", "b"]
    assert rank(by_seed(a, b, c), margin=0.1).close == ["a"], "the best one itself, if it is shown to be"
    assert rank(by_seed(a, b, c)).close == []
    assert rank(by_seed(-a, -b, -c), higher_is_better=True, margin="1%").close == ["a", "b"]


@pytest.mark.parametrize("margin", [0, -1.0, "x%", "%", "-1%", True, [1], nan])
def test_a_wrong_margin_is_refused(margin: Any) -> None:
    with pytest.raises(GappedError, match="margin: got"):
        check_margin(margin)


# Rates. Each law has estimators of equal expectation, so that any statement on a pair is false.


def normal(rng: np.random.Generator, members: int, seeds: int) -> np.ndarray:
    return rng.standard_normal((members, seeds))


def heavy(rng: np.random.Generator, members: int, seeds: int) -> np.ndarray:
    return rng.standard_t(3, (members, seeds))


def unequal(rng: np.random.Generator, members: int, seeds: int) -> np.ndarray:
    return rng.standard_normal((members, seeds)) * np.where(np.arange(members) % 2, 4.0, 1.0)[:, None]


def shared(rng: np.random.Generator, members: int, seeds: int) -> np.ndarray:
    return rng.standard_normal((members, seeds)) + 3 * rng.standard_normal((1, seeds))


def few_values(rng: np.random.Generator, members: int, seeds: int) -> np.ndarray:
    """Accuracies on ten examples."""
    return rng.binomial(10, 0.9, (members, seeds)) / 10


def lost(rng: np.random.Generator, members: int, seeds: int) -> np.ndarray:
    """A fifth of the runs, but not the first two of each, did not take place."""
    x = shared(rng, members, seeds)
    x[:, 2:][rng.random((members, max(seeds - 2, 0))) < 0.2] = nan
    return x


def false_statements(law: Law, members: int, seeds: int, decide: Callable[..., bool], trials: int) -> float:
    """The p-value of "something false is said in at most 5% of comparisons", one-sided."""
    rng = np.random.default_rng(members * seeds)
    hits = sum(decide(by_seed(*law(rng, members, seeds))) for _ in range(trials))
    print(f"{law.__name__}, {members} x {seeds}: {hits} of {trials}")
    return float(stats.binomtest(hits, trials, LEVEL, alternative="greater").pvalue)


@pytest.mark.parametrize("trials", [400, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", [2, 3, 5, 20])
@pytest.mark.parametrize("members", [2, 6, 20])
@pytest.mark.parametrize("law", [normal, heavy, unequal, shared, few_values, lost])
def test_equal_estimators_are_seldom_told_apart(law: Law, members: int, seeds: int, trials: int) -> None:
    """A rate of 12% would be caught with 400 comparisons, one of 7% with 5,000."""
    require_law(false_statements(law, members, seeds, lambda cells: bool(rank(cells).worse), trials))


def test_a_test_for_each_pair_alone_is_caught() -> None:
    def uncorrected(cells: dict[str, dict[int, float]]) -> bool:
        rows = sorted((list(row.values()) for row in cells.values()), key=np.mean)
        return bool(stats.ttest_ind(rows[0], rows[-1], equal_var=False).pvalue <= LEVEL)

    require_rejected(false_statements(normal, 20, 20, uncorrected, 400))


@pytest.mark.parametrize(("members", "seeds"), [(2, 3), (2, 20), (6, 5), (20, 20)])
def test_what_lies_beyond_the_margin_is_seldom_called_close(members: int, seeds: int) -> None:
    """Half of the estimators tie for the best, the others are worse by the margin: both kinds of errors."""
    gap, best = 6 / seeds**0.5, {chr(97 + i) for i in range(max(1, members // 2))}

    def law(rng: np.random.Generator, members: int, seeds: int) -> np.ndarray:
        return normal(rng, members, seeds) + gap * (np.arange(members) >= len(best))[:, None]

    def says_something_false(cells: dict[str, dict[int, float]]) -> bool:
        ranking = rank(cells, margin=gap * (1 - 1e-9))
        inside = set(ranking.worse) & best if ranking.names[0] in best else set(ranking.worse)
        return bool(inside) or not best.issuperset(ranking.close)

    require_law(false_statements(law, members, seeds, says_something_false, 400))


def welch_with_holm(cells: dict[str, dict[int, float]]) -> bool:
    """Whether Welch's tests of the best mean against every other survive Holm's correction."""
    rows = np.array([list(row.values()) for row in cells.values()])
    best, *others = rows[rows.mean(1).argsort()]
    p = np.sort(stats.ttest_ind(best, others, axis=-1, equal_var=False).pvalue)
    return bool((p <= LEVEL / np.arange(len(p), 0, -1)).all())


def power(law: Law, members: int, seeds: int, lead: float) -> tuple[int, int]:
    """How many of 300 winners we find, and how many Welch's tests do."""
    rng = np.random.default_rng(0)
    ours = theirs = 0
    for _ in range(300):
        x = law(rng, members, seeds)
        x[0] -= lead
        cells = by_seed(*x)
        ours += len(rank(cells).worse) == members - 1
        theirs += welch_with_holm(cells)
    return ours, theirs


@pytest.mark.parametrize(("members", "seeds", "lead"), [(3, 5, 2.5), (6, 5, 3.0), (6, 20, 1.2), (20, 5, 3.5)])
def test_a_winner_is_found_as_often_as_by_welch_with_holm(members: int, seeds: int, lead: float) -> None:
    """But for a few: our level is below 5% with few seeds, which pays for the error of Welch's test there."""
    ours, theirs = power(normal, members, seeds, lead)
    assert 30 < theirs < 295, "neither hopeless nor sure"
    assert ours >= 0.98 * theirs


def test_shared_seeds_add_power() -> None:
    ours, theirs = power(shared, 2, 5, 3.0)
    assert ours > theirs + 100


def test_two_estimators_lose_little_to_welchs_test() -> None:
    """Our level is 4.5% with five seeds, so that very unequal spreads stay below 5%."""
    ours, theirs = power(normal, 2, 5, 2.0)
    assert 0.93 * theirs < ours <= theirs + 15


# Forecasts.


@pytest.mark.parametrize(
    ("members", "seeds", "lead"),
    [(2, 3, 1.0), (2, 3, 2.0), (2, 5, 1.0), (2, 5, 2.0), (6, 3, 2.0), (6, 5, 2.0)],
)
def test_forecasts_come_true(members: int, seeds: int, lead: float) -> None:
    """With as many seeds as forecast, four of five pairs are separated; law tests allow for chance."""
    rng = np.random.default_rng(0)
    came_true = []
    for _ in range(900):
        x = normal(rng, members, 10 * seeds)
        x[1:] += lead
        ranking = rank(by_seed(*x[:, :seeds]))
        first, *others = ranking.names
        for name in others:
            if name not in ranking.worse and (total := seeds_to_separate(ranking, name)):
                again = rank(by_seed(*x[:, :total]))
                came_true.append(again.names[0] == first and name in again.worse)
    assert len(came_true) > 100
    require_law(stats.binomtest(sum(came_true), len(came_true), 0.8, alternative="less").pvalue)


@pytest.mark.parametrize(("members", "seeds"), [(2, 3), (2, 5), (6, 5)])
def test_where_there_is_no_difference_a_forecast_is_rare(members: int, seeds: int) -> None:
    rng = np.random.default_rng(0)
    rankings = [rank(by_seed(*normal(rng, members, seeds))) for _ in range(500)]
    given = [seeds_to_separate(each, each.names[1]) is not None for each in rankings if not each.worse]
    assert np.mean(given) < 0.25


def test_no_forecast_without_a_lead_or_an_error() -> None:
    nothing = Ranking(["a", "b"], {}, [], [], False, False)
    assert seeds_to_separate(nothing, "b") is None
    assert seeds_to_separate(rank(by_seed([1.0], [2.0])), "b") is None


# Stopping early.


def alone(rng: np.random.Generator, count: int) -> np.ndarray:
    """Four cells of equal expectation, of which the first alone has noise worth the name."""
    return rng.standard_normal((4, count)) * np.array([[1.0], [0.01], [0.01], [0.01]])


def opposite(rng: np.random.Generator, count: int) -> np.ndarray:
    """Two cells of equal expectation, whose noise has opposite signs at each seed."""
    noise = rng.standard_normal((1, count))
    return np.concatenate([noise, -noise])


def stop_rate(law: Any, seeds: int, tests: int | None = None, trials: int = 3000) -> float:
    """The p-value of "the first cell is stopped with a chance of at most 1%", one-sided."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(trials):
        cells = {str(i): x for i, x in enumerate(law(rng, seeds))}
        number = tests or len(looks(seeds)) * (len(cells) - 1)
        for end in looks(seeds):
            out = losers({name: x[:end] for name, x in cells.items()}, False, number)
            cells = {name: x for name, x in cells.items() if name not in out}
        hits += "0" not in cells
    return float(stats.binomtest(hits, trials, STOP_LEVEL, alternative="greater").pvalue)


@pytest.mark.parametrize(("law", "seeds"), [(alone, 50), (opposite, 5)])
def test_the_best_cell_is_hardly_ever_stopped(law: Any, seeds: int) -> None:
    """At worst: its own noise dwarfs that of its rivals, or seeds drive two cells apart."""
    require_law(stop_rate(law, seeds))


@pytest.mark.parametrize("law", [normal, heavy, unequal, shared, few_values])
def test_stops_and_verdict_together_are_seldom_wrong(law: Law) -> None:
    """Six equal estimators, up to twelve seeds: a loser that is stopped, or a verdict, would be false."""
    rng, hits, trials = np.random.default_rng(0), 0, 600
    for _ in range(trials):
        cells = by_seed(*law(rng, 6, 12))
        out: dict[str, str] = {}
        for end in looks(12):
            whole = {name: [x[seed] for seed in range(end)] for name, x in cells.items() if name not in out}
            found = losers(whole, False, len(looks(12)) * 5)
            cells |= {name: {seed: cells[name][seed] for seed in range(end)} for name in found}
            out |= found
        hits += bool(out or rank(cells, level=LEVEL - STOP_LEVEL).worse)
    require_law(float(stats.binomtest(hits, trials, LEVEL, alternative="greater").pvalue))


def test_looks_that_each_spend_the_whole_rate_are_caught() -> None:
    require_rejected(stop_rate(alone, 50, tests=1, trials=600))


def test_clear_losers_are_out_and_doubtful_ones_are_not() -> None:
    cells = {"A": [1.0, 1.1, 1.2], "B": [1.3, 1.4, 1.5], "C": [9.0, 9.2, 9.1]}
    assert losers(cells, False, 2) == {"C": "A"}
    assert losers(cells, True, 2) == {"A": "C", "B": "C"}
    assert losers({"A": [1.0, 1.0, 1.0], "B": [2.0, 2.0, 2.0]}, False, 1) == {}, "no spread, no test"
    assert losers({"A": [0.1, 0.1, 0.1], "B": [0.3, 0.3, 0.1 + 0.2]}, False, 1) == {}, "nor of rounding"
    assert losers({"A": [1.0, 1.1, 1.2]}, False, 1) == {}
