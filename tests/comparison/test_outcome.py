"""The verdict in words and as names, on runs whose values are given."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statistical import require_law

import gapped
from gapped.comparison.outcome import judge
from gapped.comparison.records import Record
from gapped.comparison.statistics import LEVEL
from gapped.comparison.table import Cell
from gapped.errors import GappedError

CLEAR = {"A": [1.0, 1.1, 0.9], "B": [5.0, 5.12, 4.93], "C": [7.0, 7.2, 6.95]}


def compared(values: dict[str, list[Any]], **how: Any) -> gapped.Comparison:
    """A comparison whose runs end with these values; None fails."""
    members = {name: gapped.GST(tau=i + 1.0) for i, name in enumerate(values)}

    def train(estimator: Any, seed: int) -> float:
        value = values[list(values)[int(estimator.tau) - 1]][seed]
        if value is None:
            raise ValueError("out of luck")
        return float(value)

    return gapped.compare(train, members, max(map(len, values.values())), **how)


def test_a_clear_winner_is_named() -> None:
    result = compared(CLEAR)
    winner = "A wins: lowest value (mean 1, std 0.1, 3 seeds), better than each of the other 2."
    assert result.verdict.startswith(winner)
    assert "wrong in at most 5% of comparisons" in result.verdict
    assert (result.best, result.worse, result.tied, result.within) == ("A", ["B", "C"], [], ["A"])
    assert compared(CLEAR, maximize=True).verdict.startswith("C wins: highest value")


def test_a_tie_says_who_is_in_it_and_what_would_end_it() -> None:
    result = compared({"A": [1.0, 1.1, 0.9], "near": [1.15, 0.97, 1.03], "far": [5.0, 5.1, 4.93]})
    assert (result.best, result.worse) == ("A", ["far"])
    assert result.tied == ["near"]
    assert "It is better than far. The data do not separate it from near." in result.verdict
    rows = {"A": [1.0, 1.1, 0.9], "D": [1.0, 1.11, 0.91], "B": [1.15, 1.27, 1.1], "C": [1.31, 1.1, 1.2]}
    each = compared(rows).verdict
    assert "About 13 seeds each (10 more) separate A from B and 10 (7 more) from C in four of five" in each
    assert "The lead over D is small against its error" in each
    many = compared({name: [1.0 + i / 99, 2.0, 3.1] for i, name in enumerate("abcdefg")})
    assert "from b, c, d and 3 more" in many.verdict


def test_single_seeds_and_single_estimators_separate_nothing() -> None:
    result = compared({"A": [1.0], "B": [2.0]})
    assert result.verdict.startswith("A has the lowest value (mean 1, 1 seed).")
    assert "Single seeds separate nothing: run three or more." in result.verdict
    assert compared({"A": [1.0, 2.0]}).verdict == (
        "A stands alone, with nothing to compare (mean 1.5, std 0.7071, 2 seeds)."
    )


def test_one_that_diverges_or_fails_is_not_the_best() -> None:
    """Its other runs are the best by far."""
    result = compared({"risky": [0.1, nan, 0.12, nan, 0.11], "safe": [9.0, 9.1, 9.2, 9.15, 9.3]})
    assert result.best == "safe"
    assert "risky: 2 of 5 runs diverged, so it is not compared." in result.verdict
    failed = compared({"risky": [0.1, None, 0.12], "safe": [9.0, 9.1, 9.2]})
    assert failed.best == "safe"
    assert "risky: 1 of 3 runs failed, so it is not compared." in failed.verdict
    assert failed.verdict.count("ValueError") == 1


def test_estimators_that_all_lost_a_run_are_still_compared() -> None:
    result = compared({"A": [1.0, nan, 1.2, 1.1], "B": [9.0, nan, 9.1, 9.3]})
    assert (result.best, result.worse) == ("A", ["B"])
    assert "A: 1 of 4 runs diverged. B: 1 of 4 runs diverged." in result.verdict


def test_nothing_can_be_said_without_numbers_or_where_the_estimator_is_ignored() -> None:
    diverged = compared({"A": [nan, nan], "B": [nan, nan]})
    assert diverged.is_empty
    assert (diverged.best, diverged.worse, diverged.tied) == (None, [], [])
    assert diverged.verdict.startswith("No run ended with a number. A: 2 of 2 runs diverged.")
    ignored = compared({"A": [1.0, 2.0, 1.5], "B": [1.0, 2.0, 1.5]})
    assert ignored.is_empty
    assert "gave the same values, seed by seed: does train use its estimator?" in ignored.verdict
    assert not compared(CLEAR).is_empty


def test_twins_and_constants_are_pointed_out() -> None:
    twins = compared({"A": [1.0, 2.0, 1.5], "B": [1.0, 2.0, 1.5], "C": [4.0, 5.5, 4.1]})
    assert "A and B gave the same values at every seed." in twins.verdict
    constant = compared({"A": [1.0, 1.0, 1.0], "B": [2.0, 2.0, 2.0]})
    assert (constant.best, constant.worse) == ("A", [])
    assert "gave one value at all seeds: does train use its seed?" in constant.verdict


def test_the_margin_is_said() -> None:
    rows = {"A": [100.0, 100.3, 99.8, 100.1], "B": [100.1, 100.45, 99.9, 100.2], "C": [120.0, 121, 119, 118]}
    assert compared(rows).within == ["A", "B"]
    assert "Shown to be within 1% of the best, whichever that is: A and B." in compared(rows).verdict
    assert compared(rows, margin=None).within == []
    assert "within 1%" not in compared(rows, margin=None).verdict
    with pytest.raises(GappedError, match="margin: got 'much'"):
        compared(rows, margin="much")


def test_a_result_is_used_by_code() -> None:
    result = compared(CLEAR)
    assert result["B"].value.mean == pytest.approx(5.0166667)
    with pytest.raises(GappedError, match="expected A, B and C"):
        result["b"]
    told = json.loads(compared({**CLEAR, "D": [nan, nan, nan]}).to_json())
    assert (told["best"], told["worse"], told["tied"]) == ("A", ["B", "C"], [])
    assert [row["estimator"] for row in told["estimators"]] == ["A", "B", "C", "D"]
    assert told["estimators"][3]["mean"] is None


def test_a_repr_is_short_and_begins_with_the_answer() -> None:
    rows = {f"estimator number {i}": [i, i + 0.2, i + 0.1 * i] for i in range(30)}
    lines = repr(compared(rows | {"lost": [None, nan, 1.0]})).splitlines()
    assert lines[0].startswith("Comparison(93 runs of 31 estimators, best: ")
    assert len(lines) <= 8
    assert max(map(len, lines)) <= 80


def test_a_failure_is_said_once_with_file_and_line() -> None:
    rows = {name: [None, None, 1.0] for name in ("A", "B", "C")}
    verdict = compared(rows).verdict
    assert verdict.count("out of luck") == 1
    lines = Path(__file__).read_text("utf-8").splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "raise ValueError" in text)
    assert f"of 3 estimators failed: ValueError: out of luck (test_outcome.py, line {line})." in verdict


def test_rows_stand_in_the_order_of_the_verdict() -> None:
    """B is better on every shared seed; the budget ended before its run of the easiest one."""
    result = compared({"A": [5.0, 6.0, 7.0, 1.0], "B": [4.99, 5.9899, 6.9902, 1.0]})
    cut = replace(result, records=result.records[:-1])
    means = {row.name: row.value.mean for row in cut.rows}
    assert means["A"] < means["B"]
    assert (cut.best, [row.name for row in cut.rows]) == ("B", ["B", "A"])
    assert cut.table.index("B") < cut.table.index("A")
    assert "pairs are compared on those that both have" in cut.verdict


def test_a_grid_is_chosen_by_some_seeds_and_judged_by_the_others() -> None:
    def train(estimator: Any, seed: int) -> float:
        return abs(float(estimator.tau) - 0.5) + 0.01 * (seed * 7 % 5)

    result = gapped.compare(train, ["gst:tau=0.3|0.5|1", "gst:tau=0.7"], seeds=6)
    assert (result.best, result.worse) == ("gst:tau=0.5", ["gst:tau=0.7"])
    told = "gst:tau=0.5 is the choice of 3 of 6 seeds out of gst:tau=0.3|0.5|1; only the others judge it."
    assert told in result.verdict
    assert {row.name for row in result.rows} == {"gst:tau=0.3", "gst:tau=0.5", "gst:tau=1", "gst:tau=0.7"}
    named = gapped.compare(train, {"mine": "gst:tau=0.5|1", "other": "gst:tau=0.7"}, seeds=4)
    assert named.best == "mine (gst:tau=0.5)"
    with pytest.raises(GappedError, match=r"seeds: got \[0\], expected two or more"):
        gapped.compare(train, ["gst:tau=0.3|0.5"], seeds=1)


def test_a_larger_grid_does_not_win_by_luck() -> None:
    """All settings are equal. By its best mean over all seeds, a grid of eight would win every other time."""
    rng, names, hits, trials = np.random.default_rng(0), [f"g{i}" for i in range(8)], 0, 300
    for _ in range(trials):
        cells = [
            Cell("r", "", name, None, tuple(grid_record(name, seed, rng.normal()) for seed in range(10)))
            for name in [*names, "one"]
        ]
        ranking = judge(cells).ranking
        assert ranking is not None
        assert len(ranking.names) == 2
        hits += bool(ranking.worse)
    require_law(float(stats.binomtest(hits, trials, LEVEL, alternative="greater").pvalue))


def grid_record(name: str, seed: int, value: float) -> Record:
    how: dict[str, Any] = {"options": {"grid": "g"}} if name != "one" else {}
    metrics: dict[str, float | None] = {"value": value}
    return Record(
        recipe="r", id=f"{name}{seed}", label=name, seed=seed, metric="value", metrics=metrics, **how
    )
