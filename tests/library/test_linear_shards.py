"""A vocabulary split over 2 and 4 ranks: the same index everywhere, gradients as without the split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import TESTS, environment, python

import gapped

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of each of four ranks."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    folder = tmp_path_factory.mktemp("ranks")
    source = Path(gapped.__file__).parents[1]
    python(str(TESTS / "shard_ranks.py"), str(folder), env=environment(source, TESTS))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def test_every_result_is_that_of_all_categories(found: Found) -> None:
    errors = [
        (error, rank, case) for rank, each in enumerate(found) for case, error in each["errors"].items()
    ]
    assert len(errors) >= 4 * 6 * 5 + 2 * 6
    assert max(errors)[0] < 1e-10, max(errors)


def test_rows_without_a_law(found: Found) -> None:
    for each in found:
        for outcome in each["rows"].values():
            assert all(outcome.values()), outcome


def test_half_precision(found: Found) -> None:
    assert all(each["half"] for each in found)


def test_what_cannot_be_split_is_refused_in_one_line(found: Found) -> None:
    for each in found:
        messages = each["refusals"]
        assert "expected one of decoupled, gapmax, gst" in messages["stranger"]
        assert messages["function"].startswith("gap: got a function, expected a number")
        assert messages["hard"].startswith("hard: got False")
        assert messages["group"].startswith("group: got an object of type str")
