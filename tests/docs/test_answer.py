"""The answer to "which estimator?" follows from the records, and everything that gives one gives the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from answer import RECIPE, Study, default, when
from evidence import Evidence, gather

from gapped.errors import GappedError
from gapped.texts import DEFAULT
from gapped_lab.defaults import TEMPERATURES
from gapped_lab.records import Record

ROOT = Path(__file__).parents[2]
CALL = 'gapped.gst(logits, tau=0.85, hard=True, gap="auto")'


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return gather(ROOT / "results")


def moved(evidence: Evidence, label: str, tau: float, by: float) -> Evidence:
    """The evidence with the results of one cell worse by so many nats."""

    def change(record: Record) -> Record:
        if (record.recipe, record.label, record.tau) != (RECIPE, label, tau):
            return record
        metrics = {
            k: v + by if v is not None and k.startswith("test_") else v for k, v in record.metrics.items()
        }
        return replace(record, metrics=metrics)

    return replace(evidence, records=[change(record) for record in evidence.records])


def test_the_default_and_the_temperatures_are_those_of_the_records(evidence: Evidence):
    chosen = Study.of(evidence).recommended()
    assert chosen["GST-auto"] == ("GST-auto", TEMPERATURES[DEFAULT])
    assert len(chosen) == 6


@pytest.mark.parametrize(
    ("label", "tau", "by"), [("GST-auto", 0.85, 5.0), ("STGS", 0.7, 9.0), ("GR-MC10", 0.7, -3.0)]
)
def test_other_results_refuse_the_same_answer(evidence: Evidence, label: str, tau: float, by: float):
    with pytest.raises(GappedError, match="the records no longer show"):
        Study.of(moved(evidence, label, tau, by)).recommended()


def test_pages_give_one_answer(evidence: Evidence):
    assert default(evidence)["call"] == when(evidence)["default"] == CALL
    for name in ("README.md", "docs/index.md", "docs/choosing.md"):
        assert CALL in (ROOT / name).read_text("utf-8"), name


def test_a_shortfall_is_relative_to_the_best_cell_of_the_task(evidence: Evidence):
    study = Study.of(evidence)
    for task, best in study.best.items():
        assert study.above(task, best[1:]) == 0
        assert not any(study.above(task, cell) < 0 for cell in study.cells)
    task, cell = "codes-49x512", ("GST-1.0", 0.5)
    ratio = study.results[(task, *cell)] / study.results[study.best[task]]
    assert abs(study.shortfall(task, cell) - 100 * (ratio - 1)) < 1e-9
