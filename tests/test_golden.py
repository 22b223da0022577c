"""Samples, gradients and run ids are those of `golden.json`, to the last bit."""

from __future__ import annotations

import json

import golden
import pytest

GOLDEN = json.loads(golden.FILE.read_text("utf-8"))


def test_samples_and_gradients_are_unchanged() -> None:
    if golden.platform() != GOLDEN["platform"]:
        pytest.skip(f"the hashes are those of {GOLDEN['platform']}, this is {golden.platform()}")
    assert golden.hashes() == GOLDEN["hashes"], "if results must change: python tests/golden.py"


def test_ids_of_published_runs_are_unchanged() -> None:
    assert golden.run_ids() == GOLDEN["runs"]


def test_every_published_run_is_one_of_a_recipe() -> None:
    ids = {name for own in golden.specs().values() for name in own}
    lines = (golden.FILE.parents[1] / "results" / "records.jsonl").read_text("utf-8").splitlines()
    published = [record for record in map(json.loads, lines) if record["recipe"] != "compare"]
    assert len(published) > 3000
    assert {record["recipe"] for record in published if record["id"] not in ids} == set()
