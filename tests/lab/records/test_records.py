"""Files that outlive the process: torn lines, duplicates, partial files, hostile checkpoints, full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gapped.errors import GappedError
from gapped.lab import records
from gapped.lab.store import Store, _identity

CPU = torch.device("cpu")


def line(run: str, recipe: str = "toy", **more: Any) -> dict[str, Any]:
    return {"schema": 1, "recipe": recipe, "id": run, **more}


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Lines


def test_lines_come_back_in_order(tmp_path):
    path = tmp_path / "new" / "folder" / "records.jsonl"
    assert records.load(path) == []
    records.append(path, [line("a"), line("b", label="τ = 1\u2028\x85\nnext")])
    records.append(path, [])
    records.append(path, iter([line("c", value=0.1)]))
    assert records.load(path) == [
        line("a"),
        line("b", label=r"τ = 1\u2028\x85\nnext"),
        line("c", value=0.1),
    ]
    assert path.read_bytes().count(b"\n") == 3


def test_nothing_is_written_for_no_lines(tmp_path):
    records.append(tmp_path / "records.jsonl", [])
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"value": float("nan")}, "JSON compliant"),
        ({"value": float("inf")}, "JSON compliant"),
        ({"environment": {"commit": 300 * "a"}}, "environment.commit: got .* of 0 to 200 characters"),
    ],
)
def test_a_line_that_could_not_be_read_is_refused_before_anything_is_written(tmp_path, bad, why):
    path = tmp_path / "records.jsonl"
    records.append(path, [line("a")])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=why):
        records.append(path, [line("b"), line("c", **bad)])
    assert path.read_bytes() == before


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_append(tmp_path):
    path = tmp_path / "records.jsonl"
    records.append(path, [line("a", label="é"), line("b", label="é")])
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.warns(UserWarning, match=r"records\.jsonl: the last line is torn"):
            assert records.load(path) == [line("a", label="é")]
        assert path.read_bytes() == whole[:cut], "reading must not change anything"
        records.append(path, [line("c")])
        assert records.load(path) == [line("a", label="é"), line("c")]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("before", [[], [line("a")]])
def test_a_last_line_that_lacks_but_its_newline_is_whole(tmp_path, before):
    path = tmp_path / "records.jsonl"
    records.append(path, [*before, line("b", label="é")])
    path.write_bytes(path.read_bytes()[:-1])
    assert records.load(path) == [*before, line("b", label="é")]
    records.append(path, [line("c")])
    assert records.load(path) == [*before, line("b", label="é"), line("c")]
    assert path.read_bytes().count(b"\n") == len(before) + 2


def test_a_file_that_is_but_a_torn_line(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"schema": 1, "id"')
    with pytest.warns(UserWarning, match="torn"):
        assert records.load(path) == []
    records.append(path, [line("a")])
    assert records.load(path) == [line("a")]


ENDLESS = [b'{"recipe": "r", "id": "z", "new": [%b]}\n' % value for value in (b"NaN", b"-Infinity", b"1e999")]


@pytest.mark.parametrize("bad", [b"{]\n", b"3\n", b'{"schema": 2}\n', b'{"id": "x"}{"id": "y"}\n', *ENDLESS])
def test_damage_elsewhere_is_an_error_that_names_the_line(tmp_path, bad):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"recipe": "r", "id": "x"}\n\n' + bad + b'{"recipe": "r", "id": "y"}\n')
    with pytest.raises(GappedError, match=r"records\.jsonl, line 3: ") as caught:
        records.load(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_an_error_of_the_same_kind(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"recipe": "r", "id": "x"}\n{"label": "\xff"}\n')
    with pytest.raises(GappedError, match=r"records\.jsonl, line 2: not a JSON object"):
        records.load(path)


@pytest.mark.parametrize(
    ("name", "bad", "problem"),
    [
        ("records", {"id": "x"}, "recipe: got nothing"),
        ("records", {"recipe": "r"}, "id: got nothing"),
        ("records", {"recipe": "r", "id": 3}, "id: got 3"),
        ("curves", {"epoch": [1]}, "id: got nothing"),
    ],
)
def test_a_line_that_does_not_say_whose_it_is_is_an_error_that_names_it(tmp_path, name, bad, problem):
    path = tmp_path / f"{name}.jsonl"
    path.write_text(json.dumps(line("a")) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(GappedError, match=rf"{name}\.jsonl, line 2: {problem}, expected a text"):
        records.load(path)


def test_other_files_have_lines_of_their_own(tmp_path):
    records.append(tmp_path / "bench.jsonl", [{"rows": 3}])
    assert records.load(tmp_path / "bench.jsonl") == [{"rows": 3}]


def test_appending_syncs_once_and_a_failure_leaves_a_readable_file(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    synced: list[int] = []
    monkeypatch.setattr(records.os, "fsync", lambda number: synced.append(number))
    records.append(path, [line("a"), line("b")])
    assert len(synced) == 1
    monkeypatch.setattr(records.os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*records\.jsonl'"):
        records.append(path, [line("c")])
    monkeypatch.undo()
    assert [each["id"] for each in records.load(path)][:2] == ["a", "b"]


# Whole files


def test_an_atomic_file_appears_complete(tmp_path):
    path = tmp_path / "deep" / "file.bin"
    with records.atomic_write(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    with records.atomic_write(path) as file:
        file.write(b"newer")
        assert path.read_bytes() == b"new"
    assert path.read_bytes() == b"newer"
    assert [each.name for each in path.parent.iterdir()] == ["file.bin"]


def test_nothing_is_left_behind_when_the_body_raises(tmp_path):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def fail() -> None:
        with records.atomic_write(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.bin"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path, monkeypatch, call):
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    monkeypatch.setattr(records.os, call, full_disk)
    with pytest.raises(OSError, match="No space left"), records.atomic_write(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file.bin"]


# The store


def test_the_store_adds_only_what_is_not_there(tmp_path):
    store = Store(tmp_path)
    store.add(
        [line("a"), line("b")], {"curves": [{"id": "a", "epoch": [1]}], "images": [{"id": "a", "count": 1}]}
    )
    files = {name: (tmp_path / name).read_bytes() for name in ("curves.jsonl", "images.jsonl")}
    store.add(
        [line("b", changed=True), line("c"), line("a", recipe="other")],
        {"curves": [{"id": "a", "epoch": [2]}], "images": [{"id": "a", "count": 2}]},
    )
    assert list(store.done()) == [("toy", "a"), ("toy", "b"), ("toy", "c"), ("other", "a")]
    assert "changed" not in store.done()["toy", "b"]
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


def test_the_store_adds_a_line_once_even_if_given_twice(tmp_path):
    store = Store(tmp_path)
    twice = [{"id": "a"}, {"id": "a"}]
    store.add([line("a"), line("a")], {"curves": twice, "images": twice})
    for name in ("records", "curves", "images"):
        assert len(records.load(tmp_path / f"{name}.jsonl")) == 1, name


def test_the_last_line_beside_a_record_is_that_of_its_run(tmp_path):
    """Records that were removed, to train the runs again, leave curves that are not theirs any more."""
    curves = [{"id": key, "epoch": [1], "loss": [0.5]} for key in "ab"]
    Store(tmp_path).add([line("a"), line("b")], {"curves": curves})
    (tmp_path / "records.jsonl").write_text(json.dumps(line("b")) + "\n")
    again = [{**each, "loss": [0.7]} for each in curves]
    for _ in range(2):
        Store(tmp_path).add([line("a"), line("b")], {"curves": again})
    assert records.load(tmp_path / "curves.jsonl") == [*curves, again[0]]


def test_a_store_sees_what_others_do_to_its_files(tmp_path):
    store = Store(tmp_path)
    store.add([line("a"), line("b")])
    Store(tmp_path).add([line("c")])
    assert [key for _, key in store.done()] == ["a", "b", "c"]
    path = tmp_path / "records.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"\n") + 1])
    assert [key for _, key in store.done()] == ["a"]
    other = tmp_path / "other"
    other.write_bytes(content.replace(b'"b"', b'"d"') + content)
    other.replace(path)
    assert [key for _, key in store.done()] == ["a", "d", "c", "b"]
    path.write_bytes(path.read_bytes() + b"no json\n")
    with pytest.raises(GappedError, match=r"records\.jsonl, line 7: not a JSON object"):
        store.done()
    path.unlink()
    assert store.done() == {}


def test_adding_to_many_records_takes_no_longer_than_to_few(tmp_path):
    store, path = Store(tmp_path), tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line(str(n), text="x" * 500)) + "\n" for n in range(20_000)))
    began = time.perf_counter()
    store.add([line("first")])
    all_of_it = time.perf_counter() - began
    times = []
    for n in range(5):
        began = time.perf_counter()
        store.add([line(f"new {n}")], {"curves": [{"id": f"new {n}"}]})
        times.append(time.perf_counter() - began)
    assert min(times) < all_of_it / 5
    assert len(store.done()) == 20_006


RACES = {
    "before the first file": ("mkdir", None),
    "while it is made": ("mkdir", FileExistsError),
    "before it is searched": ("glob", FileNotFoundError),
}


@pytest.mark.parametrize("when", RACES)
def test_a_folder_that_another_process_tidies_away(monkeypatch, tmp_path, when):
    """An empty `checkpoints/` is removed by whoever finishes, at any moment of another's work."""
    name, problem = RACES[when]
    function, calls = getattr(Path, name), []

    def tidied(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name != "checkpoints" or calls:
            return function(path, *arguments, **options)
        calls.append(path)
        if problem is not None:
            raise problem(path)
        function(path, *arguments, **options)
        path.rmdir()
        return None

    monkeypatch.setattr(Path, name, tidied)
    store = Store(tmp_path)
    store.save_checkpoint("k", STATE)
    assert calls
    assert store.load_checkpoint("k", CPU) is not None


@pytest.mark.parametrize("whose", ["another's", "own", "a dead one's"])
def test_another_live_process_in_the_folder_is_announced(tmp_path, whose):
    process = {"another's": os.getppid(), "own": os.getpid(), "a dead one's": 2**22 + 1}[whose]
    with Store(tmp_path).occupied():
        (mark,) = tmp_path.iterdir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / mark.name.replace(str(os.getpid()), str(process))).touch()
    with warnings.catch_warnings(record=True, action="always") as caught, Store(tmp_path).occupied():
        pass
    announced = [f"process {process} trains into this folder, too" in str(each.message) for each in caught]
    assert announced == [True] * (whose == "another's")


def test_an_error_in_a_folder_that_became_a_file_is_not_hidden(tmp_path):
    store = Store(tmp_path / "o")

    def replace() -> None:
        with store.occupied():
            shutil.rmtree(tmp_path / "o")
            (tmp_path / "o").touch()
            raise RuntimeError("the cause")

    with pytest.raises(RuntimeError, match="the cause"):
        replace()


def test_records_are_written_last(tmp_path, monkeypatch):
    written: list[str] = []
    monkeypatch.setattr(records, "append", lambda path, lines: written.append(path.name))
    beside = {name: [{"id": "a"}] for name in ("curves", "images", "trees")}
    Store(tmp_path).add([line("a")], beside)
    assert written[-1] == "records.jsonl"
    assert set(written) == {"records.jsonl", "curves.jsonl", "images.jsonl", "trees.jsonl"}


@pytest.mark.parametrize("kind", ["file", "under a file"])
def test_a_store_that_cannot_be_written_says_so_before_any_work(tmp_path, kind):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" if kind == "file" else tmp_path / "file" / "below"
    with pytest.raises(GappedError, match="cannot write here") as caught:
        Store(folder)
    assert str(folder) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_read_only_folder(tmp_path, monkeypatch):
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(GappedError, match=r"cannot write here \(Read-only file system\)"):
        Store(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into folders without write permission")
def test_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(GappedError, match=r"cannot write here \(Permission denied\)"):
            Store(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_probing_leaves_nothing(tmp_path):
    Store(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


# Checkpoints

STATE = {"epoch": 3, "history": {"x": [[float("nan"), 1.0]]}, "model": {"w": torch.arange(3.0)}}


def test_checkpoints_come_back_and_go(tmp_path):
    store = Store(tmp_path)
    assert store.load_checkpoint("k", CPU) is None
    store.save_checkpoint("k", STATE)
    store.save_checkpoint("other", STATE)
    state = store.load_checkpoint("k", CPU)
    assert state is not None
    assert str(state) == str(STATE)
    store.drop_checkpoint("k")
    assert store.load_checkpoint("k", CPU) is None
    assert store.load_checkpoint("other", CPU) is not None
    store.drop_checkpoint("other")
    store.drop_checkpoint("other")
    assert list(tmp_path.iterdir()) == []


class Bomb:
    """Unpickled, it writes a file: what a hostile checkpoint could do, and worse."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "executed")


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, form):
    store, mark = Store(tmp_path), tmp_path / "mark"
    store.save_checkpoint("k", STATE)
    (path,) = (tmp_path / "checkpoints").iterdir()
    if form == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
        pickle.loads(path.read_bytes())
    else:
        torch.save({**STATE, "extra": Bomb(mark)}, path)
        torch.load(path, weights_only=False)
    assert mark.read_text() == "executed", "the bomb is a dud: the test has no power"
    mark.unlink()
    if form == "torch":
        sign(path, "k")
    with pytest.warns(UserWarning, match=r"k\.pt: .*not a checkpoint .*; its fleet starts over"):
        assert store.load_checkpoint("k", CPU) is None
    assert not mark.exists()


def sign(path: Path, key: str, **identity: Any) -> None:
    """Put a valid checksum and the identity of a checkpoint in front of whatever `path` holds."""
    rest = json.dumps({**_identity(key), **identity}).encode() + b"\n" + path.read_bytes()
    path.write_bytes(hashlib.sha256(rest).digest() + rest)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 half a zip"], ids=["empty", "text", "zip"])
def test_what_is_not_a_checkpoint_is_passed_over_with_one_clear_line(tmp_path, content):
    store = Store(tmp_path)
    store.save_checkpoint("k", STATE)
    (path,) = (tmp_path / "checkpoints").iterdir()
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"k\.pt: damaged, or not a checkpoint of this version; its fleet"):
        assert store.load_checkpoint("k", CPU) is None


def test_one_flipped_bit_is_noticed(tmp_path):
    """Wherever it is: in the checksum, in the identity, in the weights, or in what nobody reads."""
    store = Store(tmp_path)
    store.save_checkpoint("k", STATE)
    (path,) = (tmp_path / "checkpoints").iterdir()
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.warns(UserWarning, match="damaged"):
            assert store.load_checkpoint("k", CPU) is None
    path.write_bytes(content)
    assert str(store.load_checkpoint("k", CPU)) == str(STATE)


def test_a_checkpoint_says_whose_it_is(tmp_path):
    store = Store(tmp_path)
    store.save_checkpoint("other", STATE)
    path = tmp_path / "checkpoints" / "k.pt"
    (tmp_path / "checkpoints" / "other.pt").rename(path)
    with pytest.warns(UserWarning, match="a checkpoint of another fleet; its fleet starts over"):
        assert store.load_checkpoint("k", CPU) is None
    for name, value in (("format", 0), ("gapped", "0.0.1"), ("torch", "1.0.0")):
        torch.save(STATE, path)
        sign(path, "k", **{name: value})
        content = path.read_bytes()
        with pytest.raises(GappedError, match=rf"k.pt: made by .*{name} {value}.*, here is .*; go on with"):
            store.load_checkpoint("k", CPU)
        assert path.read_bytes() == content


def test_loading_asks_torch_for_weights_only(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.save_checkpoint("k", STATE)
    asked: list[Any] = []

    def load(*_: object, **how: Any) -> dict[str, Any]:
        asked.append(how.get("weights_only"))
        return STATE

    monkeypatch.setattr(torch, "load", load)
    store.load_checkpoint("k", CPU)
    assert asked == [True]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_while_a_checkpoint_is_written(tmp_path):
    store = Store(tmp_path)
    store.save_checkpoint("k", {"epoch": 1})
    before = (tmp_path / "checkpoints" / "k.pt").read_bytes()
    # What the file is called while it is written, so that the bytes go where there is no room.
    (tmp_path / "checkpoints" / f".k.pt.{records._machine()}.{os.getpid()}.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*k\.pt'") as caught:
        store.save_checkpoint("k", {"epoch": 2, "model": torch.zeros(100_000)})
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "checkpoints" / "k.pt").read_bytes() == before
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["k.pt"]


def test_records_are_plain_json(tmp_path):
    """Any program can read them, without this package."""
    Store(tmp_path).add([line("a", metrics={"x": None, "y": 0.1}, options={"gap": 1.2})])
    text = (tmp_path / "records.jsonl").read_text(encoding="ascii")
    assert json.loads(text) == line("a", metrics={"x": None, "y": 0.1}, options={"gap": 1.2})
