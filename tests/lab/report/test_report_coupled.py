"""The coupled comparison in the report: quoted numbers stay out of rows, and absent records are no error."""

from __future__ import annotations

from typing import Any

import pytest

from gapped.lab.report.markdown import render_markdown
from gapped.lab.report.paper import against_paper, paper_table
from gapped.lab.report.tables import to_markdown

LEVELS = {
    "RLOO": 103.0,
    "DisARM-Tree": 101.0,
    "STGS": 97.0,
    "GR-MC100": 97.5,
    "GST-1.0": 96.0,
    "GST-1.2": 97.0,
}


def record(label: str, seed: int, **changes: Any) -> dict[str, Any]:
    tau = None if label in ("RLOO", "DisARM-Tree") else 0.5
    elbo = LEVELS[label] + 0.1 * seed
    return {
        "id": f"{label}-{seed}",
        "recipe": "coupled",
        "protocol": "paper-32x64",
        "label": label,
        "tau": tau,
        "seed": seed,
        "status": "ok",
        "epochs": 2000,
        "metrics": {"test_negative_elbo": elbo},
        "seconds": 60.0,
        "runs_in_fleet": 30,
        **changes,
    }


RECORDS = [record(label, seed) for label in LEVELS for seed in range(5)]


def test_quoted_numbers_are_in_a_note_and_in_no_comparison() -> None:
    rows = {row.label: row for row in against_paper(RECORDS, "coupled")}
    assert list(rows) == list(LEVELS)
    for label, number in (("RLOO", "104.03 ± 0.23"), ("DisARM-Tree", "103.10 ± 0.25")):
        row = rows[label]
        assert (row.paper_mean, row.difference, row.disagrees) == (None, None, False)
        assert f"quotes {number} from elsewhere, of another protocol" in row.note
        assert row.ours.mean == pytest.approx(LEVELS[label] + 0.2)
    assert rows["GST-1.0"].paper_mean == 96.09
    assert rows["GST-1.0"].difference == pytest.approx(0.11)
    assert "diverge" in rows["GR-MC100"].note
    table = to_markdown(paper_table(list(rows.values()), "coupled"))
    assert "| RLOO | – | 103.20 ± 0.16 | 5 | – |" in table


def test_numbers_of_the_other_protocol_are_never_set_beside_the_paper() -> None:
    other = [record("RLOO", seed, recipe="coupled-own", protocol="coupled-32x64") for seed in range(5)]
    text = render_markdown([*RECORDS, *other], "coupled-own")
    assert "paper" not in text
    assert against_paper(other, "coupled-own") == []
