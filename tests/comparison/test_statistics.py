"""Statistics of the report against scipy, closed forms and numbers worked out by hand."""

from __future__ import annotations

from math import inf, isnan, nan
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statistical import require_law, require_rejected

from gapped.comparison.outcome import advice, verdict
from gapped.comparison.statistics import (
    STOP_LEVEL,
    Summary,
    band,
    difference,
    from_moments,
    holm,
    looks,
    losers,
    seeds_to_separate,
    standing,
    summary,
)
from gapped_lab.report.paper import standard_errors


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


@pytest.mark.parametrize(("n", "m"), [(2, 2), (3, 10), (10, 10)])
def test_difference_is_welch(n: int, m: int) -> None:
    rng = np.random.default_rng(n * m)
    a, b = rng.normal(0, 1, n), rng.normal(0.7, 3, m)
    got, want = difference(a, b), stats.ttest_ind(a, b, equal_var=False)
    assert got.p == pytest.approx(want.pvalue)
    assert (got.low, got.high) == pytest.approx(tuple(want.confidence_interval()))


def test_difference_without_spread() -> None:
    assert difference([1.0], [2.0, 3.0]).p == 1
    assert difference([1.0, 1.0], [1.0, 1.0]).p == 1
    assert difference([1.0, 1.0], [2.0, 2.0]).p == 0


def test_rounding_is_neither_a_spread_nor_a_difference() -> None:
    for a, b in (([0.1] * 12, [0.1] * 2), ([0.3] * 3, [0.1 + 0.2] * 3), ([0.0, 0.0], [0.0, 0.0, 0.0])):
        assert difference(a, b).p == 1
        place = standing({"a": a, "b": b})
        assert place is not None
        assert not place.beaten
    assert difference([0.3] * 3, [0.30001] * 3).p == 0


@pytest.mark.parametrize("scale", [1e-100, 1.0, 1e150])
def test_differences_do_not_depend_on_the_unit(scale: float) -> None:
    a, b = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0, 4.0, 6.0])
    assert difference(scale * a, scale * b).p == pytest.approx(difference(a, b).p, rel=1e-9)


@pytest.mark.parametrize("gap", [0.5, 1.0, 1.5, 2.0, 2.5])
def test_so_many_seeds_have_the_promised_power(gap: float) -> None:
    """By the noncentral t law of a difference of two normal means with equal spread."""
    count = seeds_to_separate(from_moments(0.0, 1.0, 2), from_moments(gap, 1.0, 2))

    def power(n: float) -> float:
        degrees, shift = 2 * n - 2, gap * (n / 2) ** 0.5
        bound = stats.t.ppf(0.975, degrees)
        return float(stats.nct.sf(bound, degrees, shift) + stats.nct.cdf(-bound, degrees, shift))

    assert power(count) > 0.78
    assert count == 3 or power(count - 1) < 0.83


def test_standard_errors_by_hand() -> None:
    # GST-1.2 at 0.5: (107.67 - 107.33) / sqrt(0.60^2/10 + 0.69^2/10) = 0.34 / 0.28915 = 1.1759.
    assert standard_errors(Summary(107.67, 0.60, 10, 0, 0), 107.33, 0.69, 10) == pytest.approx(
        1.1759, abs=1e-4
    )
    assert standard_errors(Summary(1.0, 0.0, 2, 0, 0), 1.0, 0.0, 2) == 0
    assert standard_errors(Summary(2.0, 0.0, 2, 0, 0), 1.0, 0.0, 2) == inf
    assert isnan(standard_errors(summary([1.0]), 1.0, 0.1, 10))


def test_holm_steps_down_and_stops() -> None:
    # Sorted: 0.001 <= 0.05/4, 0.012 <= 0.05/3, then 0.03 > 0.05/2 stops, though 0.04 <= 0.05/1.
    assert holm([0.03, 0.001, 0.04, 0.012]) == [False, True, False, True]
    assert holm([]) == []
    assert holm([0.05]) == [True]


def test_band_is_a_summary_a_column() -> None:
    runs = np.array([[1.0, 5.0, nan], [3.0, nan, nan]])
    mean, low, high = band(runs)
    first = summary([1.0, 3.0])
    assert (mean[0], low[0], high[0]) == pytest.approx((first.mean, first.low, first.high))
    assert mean[1] == 5
    assert isnan(low[1])
    assert isnan(mean[2])
    assert band([[1.0], [100.0]], log=True)[0][0] == pytest.approx(10)


CLEAR = {"A": [1.0, 1.1, 0.9], "B": [5.0, 5.1, 4.9], "C": [7.0, 7.2, 6.9]}


def test_verdict_names_a_clear_winner() -> None:
    text = verdict(CLEAR, what="loss")
    winner = "A wins: lowest loss (mean 1.00, std 0.10, 3 seeds), better than each of the other 2"
    assert text.startswith(winner)
    assert verdict(CLEAR, higher_is_better=True).startswith("C wins: highest value")
    assert text.endswith("(Welch tests, Holm-corrected, 5%).")


def test_verdict_says_what_is_not_separated() -> None:
    text = verdict({"A": [1.0, 1.1, 0.9], "near": [1.05, 1.15, 0.9], "B": [5.0, 5.1, 4.9]})
    assert "wins" not in text
    assert text.endswith("the data do not separate it from near; A is better than B.")
    tie = verdict({name: [1.0 + i / 100, 2.0, 3.0] for i, name in enumerate("abcdefg")})
    assert "from b, c, d and 3 more" in tie


def test_verdict_needs_the_correction() -> None:
    """One comparison at p = 0.03 is a winner; beside nine more like it, it is not."""
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1, 10)
    shift = next(s for s in np.linspace(0, 3, 3001) if difference(base, base + s).p < 0.03)
    assert "wins" in verdict({"A": base, "B": base + shift})
    assert "wins" not in verdict({"A": base} | {f"B{i}": base + shift for i in range(10)})


def test_verdict_on_one_seed_and_on_one_cell() -> None:
    text = verdict({"A": [1.0], "B": [2.0]})
    assert text.startswith("A has the lowest value (mean 1.00, 1 seed), but single seeds cannot separate it")
    assert text.endswith("from B: run more seeds.")
    alone = "A stands alone, with nothing to compare (mean 1.50, std 0.71, 2 seeds)."
    assert verdict({"A": [1.0, 2.0]}) == alone


def test_verdict_counts_diverged_runs() -> None:
    beaten = verdict(CLEAR | {"C": [nan, 7.0, 7.1]})
    assert beaten.startswith("A wins")
    assert beaten.endswith("1 of 3 runs of C diverged.")
    leader = verdict(CLEAR | {"A": [1.0, nan, 1.1]})
    assert "but 1 of 3 runs of A diverged, so it is not called the winner" in leader
    assert "the only one with finished runs" in verdict({"A": [1.0, 1.1], "B": [nan, nan]})
    assert "all 2 runs of B diverged" in verdict({"A": [1.0, 1.1], "B": [nan, nan]})
    assert verdict({"A": [nan]}) == "No run finished with a value; the run of A diverged."
    assert verdict({"A": []}) == "No run finished with a value; A has no finished run."


def test_one_whose_runs_failed_is_not_called_the_winner() -> None:
    cells = {"risky": [1.0, 1.1, 1.2], "safe": [9.0, 9.1, 9.2]}
    assert "risky wins" in verdict(cells)
    assert "but 2 of 5 runs of risky failed, so it is not called the winner" in verdict(
        cells, failed={"risky": 2}
    )
    assert "risky wins" in verdict(cells, failed={"safe": 2})


def test_runs_that_are_all_equal_are_asked_about() -> None:
    cells = {"a": [1.0, 1.0, 1.0], "b": [2.0, 2.1, 2.2]}
    assert "All runs of a gave the same value: does train use its seed?" in advice(cells, False, {})
    assert advice({**cells, "a": [1.0]}, False, {}) != advice(cells, False, {})


def test_the_cheapest_in_a_tie_is_named_where_times_differ() -> None:
    tie = {"A": [1.0, 2.0, 3.0], "B": [1.1, 2.1, 3.1], "C": [7.0, 8.0, 9.0]}
    seconds = {"A": [3.0, 2.9, 9.0], "B": [2.0, 1.0, 2.8], "C": [1.0, 1.0, 1.0]}
    assert "Among the tied, B is the cheapest: 2 s a run, against up to 3 s." in advice(tie, False, seconds)
    same = advice(tie, False, seconds | {"A": [2.1, 2.1, 2.1]})
    assert "The tied cost about the same, 2 s a run." in same
    assert "s a run" not in " ".join(advice(tie, False, seconds | {"A": [2.7, 3.0, 9.0]})), "times overlap"


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


def test_looks_that_each_spend_the_whole_rate_are_caught() -> None:
    require_rejected(stop_rate(alone, 50, tests=1))


def test_clear_losers_are_out_and_doubtful_ones_are_not() -> None:
    cells = {"A": [1.0, 1.1, 1.2], "B": [1.3, 1.4, 1.5], "C": [9.0, 9.2, 9.1]}
    assert losers(cells, False, 2) == {"C": "A"}
    assert losers(cells, True, 2) == {"A": "C", "B": "C"}
    assert losers({"A": [1.0, 1.0, 1.0], "B": [2.0, 2.0, 2.0]}, False, 1) == {}, "no spread, no test"
    assert losers({"A": [0.1, 0.1, 0.1], "B": [0.3, 0.3, 0.1 + 0.2]}, False, 1) == {}, "nor of rounding"
    assert losers({"A": [1.0, 1.1, 1.2]}, False, 1) == {}
