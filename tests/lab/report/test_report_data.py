"""Which runs belong together: no two data sets in one table, no lost run passed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_listops_task import TINY, toy_data

from gapped.lab.kinds import KINDS
from gapped.lab.report.cells import groups
from gapped.lab.report.paper import against_paper
from gapped.lab.spec import RunSpec
from gapped.lab.tasks.listops.task import ListOpsTask


def run(seed: int, value: float | None, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "schema": 1, "id": f"{seed}-{value}-{sorted(more.items())}", "recipe": "listops", "label": "STGS",
        "task": "listops", "data": "listops", "protocol": "paper", "estimator": "gumbel-softmax",
        "options": {}, "tau": 1.0, "seed": seed, "epochs": 20, "status": "ok" if value else "diverged",
        "metrics": {"test_accuracy": value}, "seconds": 60.0, "runs_in_fleet": 4,
        "environment": {"device": "a device"},
    }  # fmt: skip
    return made | more


def test_data_sets_are_not_mixed() -> None:
    runs = [run(seed, 0.66) for seed in (0, 1)]
    others = [run(seed, 0.9, data="listops (generated)") for seed in (0, 1)]
    tables = groups([*runs, *others])
    assert {key: len(cells[0].records) for key, cells in tables.items()} == {
        ("listops", "paper"): 2,
        ("listops", "paper on listops (generated)"): 2,
    }
    (beside,) = (row for row in against_paper([*runs, *others], "listops") if row.ours)
    assert beside.ours is not None
    assert (beside.ours.mean, beside.ours.count) == (pytest.approx(0.66), 2)
    assert not any(row.ours for row in against_paper(others, "listops"))


@pytest.mark.parametrize("official", [True, False])
def test_records_say_whether_the_data_are_official(official: bool) -> None:
    data = toy_data()
    valid, test = (replace(split, official=official) for split in (data.valid, data.test))
    task = ListOpsTask(TINY, replace(data, valid=valid, test=test), [0], torch.device("cpu"))
    spec = RunSpec("listops", "tiny", "listops", "gst")
    expected = "listops" if official else "listops (generated)"
    assert KINDS["listops"].source(spec, task) == expected
