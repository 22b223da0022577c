"""Files that outlive the process: torn lines, damaged lines, partial files, full disks."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from gapped.comparison import records, store
from gapped.comparison.records import Curve, Record
from gapped.errors import GappedError
from gapped_lab.records import Bench


def record(run: str, **more: Any) -> Record:
    return Record(recipe="toy", id=run, **{"label": "GST", **more})


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Lines


def test_lines_come_back_in_order(tmp_path):
    folder = tmp_path / "new" / "folder"
    assert records.read(folder, Record) == []
    records.write(folder, [])
    assert not (folder / "records.jsonl").exists()
    records.write(folder, [record("a"), record("b", label="τ = 1\u2028\x85\nnext")])
    records.write(folder, [])
    records.write(folder, iter([record("c", more={"value": 0.1})]))
    assert records.read(folder, Record) == [
        record("a"),
        record("b", label=r"τ = 1\u2028\x85\nnext"),
        record("c", more={"value": 0.1}),
    ]
    assert (folder / "records.jsonl").read_bytes().count(b"\n") == 3


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"more": {"value": float("nan")}}, "JSON compliant"),
        ({"seconds": float("inf")}, "JSON compliant"),
        ({"environment": {"commit": 300 * "a"}}, "environment.commit: got .* of 0 to 200 characters"),
    ],
)
def test_a_line_that_could_not_be_read_is_refused_before_anything_is_written(tmp_path, bad, why):
    records.write(tmp_path, [record("a")])
    before = (tmp_path / "records.jsonl").read_bytes()
    with pytest.raises(ValueError, match=why):
        records.write(tmp_path, [record("b"), record("c", **bad)])
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_write(tmp_path):
    path, first = tmp_path / "records.jsonl", record("a", label="é")
    records.write(tmp_path, [first, record("b", label="é")])
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match=r"records\.jsonl: the last line is torn"):
            assert records.read(tmp_path, Record) == [first]
        assert path.read_bytes() == whole[:cut], "reading must not change anything"
        records.write(tmp_path, [record("c")])
        assert records.read(tmp_path, Record) == [first, record("c")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("before", [[], [record("a")]])
def test_a_last_line_that_lacks_but_its_newline_is_whole(tmp_path, before):
    path = tmp_path / "records.jsonl"
    records.write(tmp_path, [*before, record("b", label="é")])
    path.write_bytes(path.read_bytes()[:-1])
    assert records.read(tmp_path, Record) == [*before, record("b", label="é")]
    records.write(tmp_path, [record("c")])
    assert records.read(tmp_path, Record) == [*before, record("b", label="é"), record("c")]
    assert path.read_bytes().count(b"\n") == len(before) + 2


def test_a_file_that_is_but_a_torn_line(tmp_path):
    (tmp_path / "records.jsonl").write_bytes(b'{"schema": 1, "id"')
    with pytest.warns(UserWarning, match="torn"):
        assert records.read(tmp_path, Record) == []
    records.write(tmp_path, [record("a")])
    assert records.read(tmp_path, Record) == [record("a")]


GOOD = b'{"recipe": "r", "id": "x", "label": "l"}\n'
ENDLESS = [GOOD.replace(b"}", b', "new": [%b]}' % value) for value in (b"NaN", b"-Infinity", b"1e999")]
DEEP = GOOD.replace(b"}", b', "new": ' + b"[" * 5000 + b"]" * 5000 + b"}")
BROKEN = [b"{]\n", b"3\n", b'{"label": "\xff"}\n', b'{"schema": 2}\n', b'{"id": "x"}{"id": "y"}\n']


@pytest.mark.parametrize("bad", [*BROKEN, *ENDLESS, DEEP])
def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path, bad):
    (tmp_path / "records.jsonl").write_bytes(GOOD + b"\n" + bad + GOOD)
    with pytest.raises(GappedError, match=r"records\.jsonl, line 3: ") as caught:
        records.read(tmp_path, Record)
    assert "\n" not in str(caught.value)


def test_a_line_of_an_unknown_kind_is_passed_over(tmp_path):
    """Of a later version's bench, for instance."""
    (tmp_path / "bench.jsonl").write_text('{"rows": 3}\n{"kind": "new", "rows": "many"}\n')
    assert records.read(tmp_path, Bench) == []


def test_writing_syncs_once_and_a_failure_leaves_a_readable_file(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(records.os, "fsync", lambda number: synced.append(number))
    records.write(tmp_path, [Curve(id="a"), Curve(id="b")])
    assert len(synced) == 1
    monkeypatch.setattr(records.os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*curves\.jsonl'"):
        records.write(tmp_path, [Curve(id="c")])
    monkeypatch.undo()
    assert [each.id for each in records.read(tmp_path, Curve)][:2] == ["a", "b"]


# Whole files


def test_an_atomic_file_appears_complete(tmp_path):
    path = tmp_path / "deep" / "file.bin"
    with store.atomic_write(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    with store.atomic_write(path) as file:
        file.write(b"newer")
        assert path.read_bytes() == b"new"
    assert path.read_bytes() == b"newer"
    assert [each.name for each in path.parent.iterdir()] == ["file.bin"]


@pytest.mark.parametrize("call", ["fsync", "replace", None])
def test_nothing_is_left_behind_when_the_disk_is_full_or_the_body_raises(tmp_path, monkeypatch, call):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    if call is not None:
        monkeypatch.setattr(records.os, call, full_disk)

    def write() -> None:
        with store.atomic_write(path) as file:
            file.write(b"new")
            if call is None:
                full_disk()

    with pytest.raises(OSError, match="No space left"):
        write()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.bin"]
