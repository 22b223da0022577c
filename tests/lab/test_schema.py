"""Lines of results as dataclasses: nothing is lost between a file and the dataclass, in either direction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gapped.comparison import records
from gapped.comparison.records import Curve, JsonLine, Record
from gapped.errors import GappedError
from gapped_lab.records import Bench, Images, Startup, Timing, Trees, Work

RESULTS = Path(__file__).parents[2] / "results"
# Fields of records that the first published lines do not have.
LATER = {"learning_rate": None, "rate_decay": "none", "fleet_gpu_memory_gb": None}


@pytest.mark.parametrize("kind", [Record, Curve, Images, Trees, Bench, Work, Startup])
def test_published_lines_come_back_as_they_stand_in_the_file(kind: type[JsonLine]) -> None:
    objects = [json.loads(text) for text in (RESULTS / kind.FILE).read_text("utf-8").splitlines()]
    lines = [line for line in objects if line.get("kind") == kind.TAGS.get("kind")]
    later = LATER if kind is Record else {}
    assert [line.to_json() for line in records.read(RESULTS, kind)] == [{**later, **line} for line in lines]


def test_lines_are_written_in_the_form_that_they_are_read_in(tmp_path: Path) -> None:
    record = Record(recipe="toy", id="a", label="GST", metrics={"x": None, "y": 0.1}, more={"new": [1]})
    failed = replace(record, id="b", status="failed", fleet="f", error="no memory", more={})
    curve = Curve(id="a", epoch=[1, 2], more={"loss": [0.5, None]})
    timing = Timing(1.0, 0.5, 2.0, 3)
    startup = Startup(what="import gapped", milliseconds=timing, environment={"device": "CPU"})
    work = Work(run="r", work="masks", sizes=[8, 4], dtype="f32", way="torch", status="too large", logits=128)
    done = replace(work, status="ok", milliseconds=timing, memory=2**40, gradients=128)
    for lines in ([record, failed], [curve], [startup], [work, done]):
        records.write(tmp_path, lines)
        assert records.read(tmp_path, type(lines[0])) == lines
    assert records.read(tmp_path, Bench) == []
    assert curve.series == {"loss": [0.5, None]}
    assert (record.failed, failed.failed) == (False, True)
    first, second = (json.loads(text) for text in (tmp_path / "records.jsonl").read_text().splitlines())
    assert first["new"] == [1]
    assert first.keys() - second.keys() == {"new", "fleet_gpu_memory_gb"}
    assert second.keys() - first.keys() == {"fleet", "error"}


@pytest.mark.parametrize(
    ("kind", "line", "fault"),
    [
        (Record, {"recipe": "r", "id": "x"}, "label: got nothing, expected a text of 0 to 200 characters"),
        (Record, {"recipe": "r", "id": "x", "label": "y", "metrics": None}, "metrics: got None, expected an"),
        (Trees, {"id": "x", "examples": [{"tokens": []}]}, r"examples\[0\].true: got nothing, expected a"),
        (Work, {"kind": "work", "run": "r", "work": "x", "sizes": [1]}, "dtype: got nothing, expected 'f64'"),
        (Startup, {"kind": "startup", "what": "x", "milliseconds": {"median": 1, "low": -1}}, "milli.*high"),
    ],
)
def test_a_line_of_another_form_is_refused(tmp_path: Path, kind: type[JsonLine], line: dict, fault: str):
    (tmp_path / kind.FILE).write_text(json.dumps(line) + "\n")
    with pytest.raises(GappedError, match=f"{kind.FILE}, line 1: {fault}"):
        records.read(tmp_path, kind)
