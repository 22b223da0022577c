"""Files that anybody may have written or damaged: an answer in one line, no traceback, no full memory."""

from __future__ import annotations

import gzip
import re
import tracemalloc
from pathlib import Path
from typing import Annotated, Any

import pytest
from report_records import append_json, run_lines
from tiny_images import TINY_IMAGES, put_tiny_images

from gapped.cli.app import main
from gapped.comparison.records import Curve, Within, from_json
from gapped.errors import GappedError
from gapped_lab.listops import examples

# The only warning that a damaged file may give.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the last line is torn"),
    pytest.mark.usefixtures("sandbox"),
]


@pytest.mark.parametrize(
    ("value", "form", "problem"),
    [
        ({"a": [1, None]}, dict[str, list[float]], r"a\[1\]: got None, expected a number"),
        ({"a": True}, dict[str, float | None], "a: got True, expected a number or nothing"),
        (float("nan"), float, "got nan, expected a number"),
        (10**400, float, r"got 10+\.\.\.0+, expected a number"),
        (2**63, int, "got 9223372036854775808, expected a whole number"),
        (0, Annotated[int, Within(1)], "got 0, expected a whole number from 1"),
        ("abc", Annotated[str, Within(0, 2)], "got 'abc', expected a text of 0 to 2 characters"),
        ({"id": "x", "b": {}}, Curve, "b: got {}, expected a list or true or false or .* or nothing"),
        ({"b": []}, Curve, "id: got nothing, expected a text of 0 to 200 characters"),
        ({"a": {"b": "x" * 5000}}, dict[str, dict[str, int]], r"a\.b: got 'x+\.\.\.x+', expected .*"),
    ],
)
def test_a_fault_is_named(value: Any, form: Any, problem: str) -> None:
    with pytest.raises(GappedError, match=f"^a.json, line 3: {problem}$"):
        from_json(value, form, "a.json, line 3")


def test_a_metric_out_of_range_counts_as_a_lost_run(tmp_path: Path, capsys: Any) -> None:
    """The report says so, and shows the other numbers as ever."""
    values = {"GST": [1e150, 1.0, 1.2], "ST": [-1e308, 1e308, 1e39], "big": [1e30, 2e30]}
    runs = [line for label, numbers in values.items() for line in run_lines(label, numbers)]
    append_json(tmp_path / "records.jsonl", runs)
    curves = [{"id": r["id"], "epoch": [1, 2], "test_negative_elbo": [1e308, 1e150]} for r in runs]
    append_json(tmp_path / "curves.jsonl", curves)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "GST: 1 of 3 runs diverged" in out
    assert "ST: 3 of 3 runs diverged" in out
    assert re.search(r"big +0\.5 +1\.5e\+30", out)


@pytest.mark.parametrize("what", ["images", "expressions"])
def test_a_bomb_of_gzip_is_not_unpacked(what: str, tmp_path: Path) -> None:
    """100 MB of zeros in 100 KB: no more than is expected of the file is ever in memory."""
    bomb = gzip.compress(bytes(10**8), 1)
    name = TINY_IMAGES.files[0].name if what == "images" else "valid.tsv"
    put_tiny_images(tmp_path, packed=True)
    path = tmp_path / f"{name}.gz"
    path.write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(GappedError, match=rf"{path}: too long: it unpacks to more than the [\d,]+ bytes"):
            TINY_IMAGES.load(tmp_path, False, False) if what == "images" else examples.read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5e7
