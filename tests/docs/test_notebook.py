"""The notebook of the examples runs from top to bottom, and holds no output of any machine."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from doc_pages import ROOT

import gapped

CELLS = json.loads((ROOT / "examples" / "two_minutes.ipynb").read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_it_holds_no_output() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_it_runs_from_top_to_bottom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "sklearn"):
        pytest.importorskip(package, reason="of the extra lab")
    monkeypatch.setenv("MPLBACKEND", "agg")
    space: dict[str, Any] = {}
    began = time.process_time()
    for cell in CODE:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
    assert time.process_time() - began < 120
    result, diagnosis = space["result"], space["diagnosis"]
    assert isinstance(result, gapped.Comparison)
    assert not any(record.failed for record in result.records)
    assert "<table" in result._repr_html_()
    assert diagnosis.reference.startswith("exact"), "few enough choices to enumerate"
    assert len(diagnosis.rows) == 4
    means = {row.label: row.value.mean for row in result.rows}
    assert min(means.values()) < 5, "it has learned something: it begins above 10"
    assert "tensor" in capsys.readouterr().out
