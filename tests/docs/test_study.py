"""The default and the temperatures are those of the records, and every page gives the same default."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from evidence import gather
from study import TEXTS, Study

import gapped

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
