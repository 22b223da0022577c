"""Our numbers beside the paper's: what is compared, what is marked, and what is not comparable."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan
from typing import Any

import pytest
from report_records import many

from gapped.comparison.records import Record
from gapped.comparison.statistics import Summary, summary
from gapped_lab.report.paper import FAILED_ABOVE, against_paper, field, paper, paper_table, standard_errors
from gapped_lab.report.rendering import render_markdown, to_markdown


def vae(label: str, tau: float, values: list[float | None], **more: Any) -> list[Record]:
    return many(label, values, **({"recipe": "vae", "protocol": "paper-30x10", "tau": tau} | more))


def test_against_paper_by_hand() -> None:
    rows = against_paper(vae("GST-1.2", 0.5, [108.0, 109.0, 110.0]), "vae")
    (row,) = [r for r in rows if r.ours]
    assert row.difference == pytest.approx(109 - 107.33)
    assert row.standard_errors == pytest.approx(1.67 / (1 / 3 + 0.69**2 / 10) ** 0.5)
    assert row.disagrees
    assert (row.paper_mean, row.paper_std, row.paper_count) == (107.33, 0.69, 10)
    assert len(rows) == len(paper()["vae"]["rows"])
    assert all(r.note == "not run here" for r in rows if not r.ours)


@pytest.mark.parametrize("lost", [1, 3])
def test_a_cell_with_lost_runs_disagrees(lost: int) -> None:
    (row,) = [
        r for r in against_paper(vae("GST-1.2", 0.5, [107.3] * (3 - lost) + [None] * lost), "vae") if r.ours
    ]
    assert row.disagrees
    assert row.note == f"{lost} of 3 runs without a value"


def test_cells_marked_x_are_judged_by_the_stated_rule() -> None:
    worst = max(row[2] + 2 * row[3] for row in paper()["vae"]["rows"] if row[2] == 141.61)
    assert pytest.approx(worst) == FAILED_ABOVE
    fails = against_paper(vae("GST-1.0", 0.1, [None, 160.0, 120.0, 130.0]), "vae")[-1]
    works = against_paper(vae("GST-1.0", 0.1, [None, 110.0, 120.0, 130.0]), "vae")[-1]
    assert fails.note == "paper: X; here 2 of 4 seeds fail, so it fails too"
    assert works.note == "paper: X; here 1 of 4 seeds fail, so it converges"
    assert (fails.disagrees, works.disagrees) == (False, True)
    assert str(FAILED_ABOVE) in to_markdown(paper_table([fails]))


def test_tables_of_other_papers_go_by_protocol() -> None:
    """Each row beside its own protocol, by the metric of the table; cells without a number are left out."""
    runs = [
        replace(run, metrics={"train_negative_elbo": run.metrics["test_negative_elbo"]})
        for label, tau in (("ReinMax at 0.001", 1.2), ("STGS", 0.7))
        for run in vae(label, tau, [94.2, 94.4], recipe="field-mve", protocol="mve-32x16")
    ]
    rows = against_paper(runs, "field-mve", "mve-32x16")
    (row,) = [r for r in rows if r.ours]
    assert (row.paper_mean, row.paper_std, row.paper_count) == (93.69, 0.2, 5)
    assert row.difference == pytest.approx(0.61)
    assert row.disagrees
    assert len(rows) == sum(each[0] == "mve-32x16" for each in field()["field-mve"]["rows"])


def test_a_published_number_without_a_spread_can_disagree() -> None:
    """It counts as exact: two of our standard errors and half a nat decide."""
    for values, disagrees in (
        ([97.0, 97.1, 97.2], False),
        ([99.4, 99.5, 99.6], True),
        ([95.0, 98.0, 101.0], False),
    ):
        runs = [
            replace(run, metrics={"test_100_sample_negative_elbo": run.metrics["test_negative_elbo"]})
            for run in vae("STGS", 0.5, values, recipe="field-rao", protocol="fixed-120x2")
        ]
        (row,) = [r for r in against_paper(runs, "field-rao", "fixed-120x2") if r.ours]
        assert (row.paper_mean, row.paper_std) == (97.1, None)
        assert row.disagrees is disagrees


@pytest.mark.parametrize(
    ("recipe", "metrics"),
    [
        ("listops", {"test_accuracy": 0.66}),
        ("coupled", {"test_negative_elbo": 97.0}),
        ("entropy", {"surrogate_entropy": 0.15}),
        ("efficiency", {"gpu_memory_gb": 0.02, "seconds_per_epoch": 5.0}),
    ],
)
def test_every_table_of_the_paper_finds_its_cells(recipe: str, metrics: dict[str, float]) -> None:
    runs = many("STGS", [0.0, 0.0], recipe=recipe, protocol="paper", tau=1.0, metrics=metrics)
    rows = [r for r in against_paper(runs, recipe) if r.ours and r.paper_mean is not None]
    assert {r.metric for r in rows} == set(metrics)
    assert all(r.ours and r.ours.count == 2 for r in rows)


LEVELS = {
    "RLOO": 103.0,
    "DisARM-Tree": 101.0,
    "STGS": 97.0,
    "GR-MC100": 97.5,
    "GST-1.0": 96.0,
    "GST-1.2": 97.0,
}
COUPLED = [
    run
    for label, level in LEVELS.items()
    for run in many(
        label,
        [level + 0.1 * seed for seed in range(5)],
        recipe="coupled",
        protocol="paper-32x64",
        tau=None if label in ("RLOO", "DisARM-Tree") else 0.5,
    )
]


def test_numbers_measured_otherwise_are_in_a_note_and_in_no_comparison() -> None:
    rows = {row.label: row for row in against_paper(COUPLED, "coupled")}
    assert list(rows) == list(LEVELS)
    for label, number in (
        ("RLOO", "104.03 ± 0.23, quoted from elsewhere, of another protocol"),
        ("DisARM-Tree", "103.10 ± 0.25, quoted from elsewhere, of another protocol"),
        ("GR-MC100", "110.74 ± 1.23, of epoch 40 to 70, before its runs diverge"),
    ):
        row = rows[label]
        assert (row.paper_mean, row.difference, row.disagrees) == (None, None, False)
        assert row.note == f"the paper has {number}: not comparable"
        assert row.ours is not None
        assert row.ours.mean == pytest.approx(LEVELS[label] + 0.2)
    assert rows["GST-1.0"].paper_mean == 96.09
    assert rows["GST-1.0"].difference == pytest.approx(0.11)
    table = to_markdown(paper_table(list(rows.values()), "coupled"))
    assert "| RLOO | – | 103.20 ± 0.16 | 5 | – |" in table


@pytest.mark.parametrize(
    ("epochs", "quick", "shorter"), [(10, False, True), (20, False, False), (10, True, False)]
)
def test_a_shorter_training_than_the_paper_s_is_said(epochs: int, quick: bool, shorter: bool) -> None:
    settings = {"recipe": "listops", "protocol": "paper", "metrics": {"test_accuracy": 0.6}}
    runs = many("STGS", [0.0], epochs=epochs, quick=quick, **settings)
    sentence = f"Trained for {epochs} epochs; the paper's runs have 20."
    assert (sentence in render_markdown(runs, "listops")) is shorter


def test_standard_errors_by_hand() -> None:
    # GST-1.2 at 0.5: (107.67 - 107.33) / sqrt(0.60^2/10 + 0.69^2/10) = 0.34 / 0.28915 = 1.1759.
    assert standard_errors(Summary(107.67, 0.60, 10, 0, 0), 107.33, 0.69, 10) == pytest.approx(
        1.1759, abs=1e-4
    )
    assert standard_errors(Summary(1.0, 0.0, 2, 0, 0), 1.0, 0.0, 2) == 0
    assert standard_errors(Summary(2.0, 0.0, 2, 0, 0), 1.0, 0.0, 2) == inf
    assert isnan(standard_errors(summary([1.0]), 1.0, 0.1, 10))
