"""The board of the field: marks, published numbers, what is missing; the default is that of the records."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from board import BEST, TIED, Contest, board, render_board
from evidence import gather
from report_records import many
from study import TEXTS, Study

import gapped
from gapped.comparison.records import Record
from gapped_lab.report.paper import field

FLOWS = Contest("field-mve", "Flows", ("mve-128x4", "mve-32x16"), frozenset("abc"))


def flows(label: str, tau: float, values: list[float]) -> list[Record]:
    runs = many(
        label, values, recipe="field-mve", protocol="mve-32x16", tau=tau, seconds=60.0, runs_in_fleet=3
    )
    return [replace(run, metrics={"train_negative_elbo": run.metrics["test_negative_elbo"]}) for run in runs]


RECORDS = [
    *flows("ReinMax at 0.001", 1.2, [93.59, 93.69, 93.79]),
    *flows("default", 0.85, [93.62, 93.66, 93.82]),
    *flows("ST at 0.001", 1.0, [120.0, 120.1, 120.2]),
]


def rows(records: list[Record]) -> dict[tuple[str, str], dict[str, str]]:
    """The board of one protocol, by estimator and temperature."""
    table = board(records, [FLOWS])
    texts = [dict(zip(table.columns, (entry.text for entry in row), strict=True)) for row in table.rows]
    return {(row["estimator"], row["τ"]): row for row in texts if row["protocol"] == "mve-32x16"}


def test_best_ties_and_published_numbers() -> None:
    """By hand: the default is not separated from the best, straight-through is, and disagrees."""
    found = rows(RECORDS)
    best, tied, beaten = (
        found[key] for key in (("ReinMax at 0.001", "1.2"), ("default", "0.85"), ("ST at 0.001", "1"))
    )
    assert [row["mark"] for row in (best, tied, beaten)] == [BEST, TIED, ""]
    assert [row["mean"] for row in (best, tied, beaten)] == ["93.69", "93.70", "120.10"]
    assert (best["published"], best["their seeds"], best["difference"]) == ("93.69 ± 0.20", "5", "0.00")
    assert (tied["published"], beaten["difference"]) == ("–", "5.70 ≠")
    assert {row["s / run"] for row in (best, tied, beaten)} == {"20"}
    assert (best["measure"], best["seeds"]) == ("train negative ELBO", "3")


def test_runs_that_diverged_are_counted_beside_those_that_did_not() -> None:
    (first, *others) = RECORDS
    row = rows([replace(first, status="diverged"), *others])["ReinMax at 0.001", "1.2"]
    assert (row["mean"], row["seeds"], row["difference"]) == ("93.74", "2 of 3", "0.05 ≠")
    assert "diverged" in board([replace(first, status="diverged")], [FLOWS]).notes[0]
    assert "diverged" not in board(RECORDS, [FLOWS]).notes[0]


def test_a_published_number_stands_alone_until_its_cell_is_run() -> None:
    alone = rows(RECORDS)["MVE annealed at 0.00316", "1"]
    assert (alone["mean"], alone["published"]) == ("–", "94.60 ± 0.26")
    published = sum(each[0] == "mve-32x16" for each in field()["field-mve"]["rows"])
    assert len(rows([])) == published
    assert len(rows(RECORDS)) == published + 1


@pytest.mark.parametrize("records", [RECORDS, []], ids=["some", "none"])
def test_the_page_has_every_row(records: list[Record]) -> None:
    page = render_board(records, [FLOWS])
    assert page.count("<tr") == 1 + len(board(records, [FLOWS]).rows)
    assert "gapped reproduce field-mve --device cuda --minutes 9" in re.sub("</?span>", "", page)
    assert '<a href="../field.html">' in page
    assert ("120.10" in page) == bool(records)


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study() -> Study:
    return Study.of(gather(ROOT / "results"))


def test_default_temperatures_are_those_of_the_records(study: Study) -> None:
    for label, (_, tau) in study.recommend().items():
        if ":gap=" not in TEXTS[label]:
            assert gapped.estimator(TEXTS[label]).tau == tau, label
    # A finding, not an accident of rounding: every cell is worse than the best by 1% on some task.
    complete = [cell for cell in study.cells if not np.isnan(study.mean(cell))]
    assert min(study.shortfall(study.worst(cell), cell) for cell in complete) > 1


def test_pages_give_one_answer() -> None:
    for name in ("README.md", "docs/index.md", "docs/choosing.md"):
        assert "gapped.sample(logits)" in (ROOT / name).read_text("utf-8"), name


def test_a_shortfall_is_relative_to_the_best_cell_of_the_task(study: Study) -> None:
    for task, best in study.best.items():
        assert study.above(task, best[1:]) == 0
        assert not any(study.above(task, cell) < 0 for cell in study.cells)
    task, cell = "codes-49x512", ("GST-1.0", 0.5)
    ratio = study.results[(task, *cell)] / study.results[study.best[task]]
    assert abs(study.shortfall(task, cell) - 100 * (ratio - 1)) < 1e-9
    assert np.isnan(study.above("codes-49x8192", ("STGS", 0.5)))
