"""Which runs belong together: no two data sets in one table, no lost run passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gapped.lab import records
from gapped.lab.report.blocks import render_block
from gapped.lab.report.cells import groups
from gapped.lab.report.evidence import gather
from gapped.lab.report.paper import against_paper, paper


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


def test_a_lost_run_disagrees(tmp_path: Path) -> None:
    (name, tau, mean, std), (other, *_) = paper()["listops"]["rows"][:2]
    runs = [run(seed, mean + std * (seed - 2), label=name, tau=tau) for seed in range(5)]
    lost = [run(seed, None if seed < 3 else mean, label=other, tau=tau) for seed in range(5)]
    records.append(tmp_path / "records.jsonl", [*runs, *lost])
    text = render_block(gather(tmp_path), "listops-agreement")
    assert "The table has 2 cells" in text
    assert "**1 of the 2 agree**" in text
    assert f"Beyond that: {other} at τ=1 (3 lost runs)." in text
