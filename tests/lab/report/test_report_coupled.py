"""The coupled comparison in the report: quoted numbers stay out of rows, and absent records are no error."""

from __future__ import annotations

from typing import Any

import pytest

from gapped.lab.report.blocks import AWAITED, render_block
from gapped.lab.report.cells import cells
from gapped.lab.report.coupled import PROTOCOL
from gapped.lab.report.evidence import Evidence
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
        "protocol": PROTOCOL,
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


def evidence(records: list[dict[str, Any]]) -> Evidence:
    return Evidence(tuple(records), tuple(cells(records)), {})


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
    text = render_block(evidence([*RECORDS, *other]), "coupled-own")
    assert "paper" not in text
    assert against_paper(other, "coupled-own") == []


def test_findings_follow_from_the_records() -> None:
    text = render_block(evidence(RECORDS), "coupled-findings")
    assert "DisARM-Tree is ahead of RLOO, by 2.00 nats" in text
    assert "GST-1.2 is not separated from STGS" in text
    assert "none of its runs diverges" in text
    turned = [
        record(
            r["label"], r["seed"], metrics={"test_negative_elbo": 200 - LEVELS[r["label"]] + 0.1 * r["seed"]}
        )
        for r in RECORDS
    ]
    turned[15]["status"] = "diverged"
    text = render_block(evidence(turned), "coupled-findings")
    assert "DisARM-Tree is behind RLOO, by 2.00 nats" in text
    assert "1 of its 5 runs diverge" in text


def test_single_seeds_are_not_compared() -> None:
    text = render_block(evidence([r for r in RECORDS if r["seed"] == 0]), "coupled-findings")
    assert "DisARM-Tree and RLOO cannot be told apart" in text


@pytest.mark.parametrize("name", AWAITED)
def test_what_has_not_been_run_is_said_so(name: str) -> None:
    few = [{**r, "recipe": "other"} for r in RECORDS]
    assert render_block(evidence(few), name).startswith("Not run yet: `gapped reproduce coupled")
