"""A folder of results: its lines as dataclasses, what is added by how many processes, its checkpoints."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gapped.comparison import records
from gapped.comparison.records import Curve, JsonLine, Record
from gapped.errors import GappedError
from gapped_lab.records import Bench, Images, Startup, Trees, Work
from gapped_lab.store import Store, _identity

CPU = torch.device("cpu")


def record(run: str, recipe: str = "toy", **more: Any) -> Record:
    return Record(recipe=recipe, id=run, label="GST", **more)


def curve(run: str, *epochs: int, **series: Any) -> Curve:
    return Curve(id=run, epoch=list(epochs), more=series)


def images(run: str, count: int = 1) -> Images:
    return Images(id=run, count=count, height=1, width=1)


def test_the_store_adds_only_what_is_not_there(tmp_path):
    store = Store(tmp_path)
    store.add([record("b"), *2 * [record("a"), curve("a", 1), images("a")]])
    assert [len(records.read(tmp_path, kind)) for kind in (Record, Curve, Images)] == [2, 1, 1]
    contents = {name: (tmp_path / name).read_bytes() for name in ("curves.jsonl", "images.jsonl")}
    store.add([record("b", seed=1), record("c"), record("a", "other"), curve("a", 2), images("a", 2)])
    assert list(store.finished()) == [("toy", "b"), ("toy", "a"), ("toy", "c"), ("other", "a")]
    assert store.finished()["toy", "b"].seed == 0
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents


def test_the_last_line_beside_a_record_is_that_of_its_run(tmp_path):
    """Records that were removed, to train the runs again, leave curves that are not theirs any more."""
    runs, curves = [record("a"), record("b")], [curve(key, 1, loss=[0.5]) for key in "ab"]
    Store(tmp_path).add([*runs, *curves])
    (tmp_path / "records.jsonl").write_bytes(runs[1].encode() + b"\n")
    again = [replace(each, more={"loss": [0.7]}) for each in curves]
    for _ in range(2):
        Store(tmp_path).add([*runs, *again])
    assert records.read(tmp_path, Curve) == [*curves, again[0]]


def test_the_last_of_two_processes_counts(tmp_path):
    stores, curves = [Store(tmp_path), Store(tmp_path)], [curve("a", 1, loss=[x]) for x in (0.5, 0.7)]
    for store, line in ((stores[0], curves[0]), (stores[1], curves[1]), (stores[0], curves[0])):
        store.add([line])
    assert records.read(tmp_path, Curve) == [*curves, curves[0]]


def test_a_store_sees_what_others_do_to_its_files(tmp_path):
    store = Store(tmp_path)
    store.add([record("a"), record("b")])
    Store(tmp_path).add([record("c")])
    assert [key for _, key in store.finished()] == ["a", "b", "c"]
    path = tmp_path / "records.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"\n") + 1])
    assert [key for _, key in store.finished()] == ["a"]
    other = tmp_path / "other"
    other.write_bytes(content.replace(b'"b"', b'"d"') + content)
    other.replace(path)
    assert [key for _, key in store.finished()] == ["a", "d", "c", "b"]
    path.write_bytes(path.read_bytes() + b"no json\n")
    with pytest.raises(GappedError, match=r"records\.jsonl, line 7: not a JSON object"):
        store.finished()
    path.unlink()
    assert store.finished() == {}


CROWD = """
import multiprocessing, sys
from pathlib import Path
from gapped.comparison.records import Curve, Record
from gapped_lab.store import Store

context = multiprocessing.get_context("fork")
barrier = context.Barrier(4)

def runs(n):
    return [Record(recipe="r", id=f"{n}-{i}", label="", more={"text": "x" * 3000}) for i in range(5)]

def add(own):
    store = Store(Path(sys.argv[1]))
    barrier.wait(60)
    for n in range(10):
        # What everybody adds, and what only one does.
        curves = [Curve(id=each.id, more={"text": "x" * 3000}) for each in runs(f"shared{n}")]
        store.add(runs(f"shared{n}") + runs(f"own{own}-{n}") + curves)

crowd = [context.Process(target=add, args=(own,)) for own in range(4)]
for each in crowd:
    each.start()
for each in crowd:
    each.join()
sys.exit(any(each.exitcode for each in crowd))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and flock")
def test_several_processes_add_to_one_folder(tmp_path):
    """Every line is there, and none is there twice."""
    subprocess.run([sys.executable, "-c", CROWD, str(tmp_path)], timeout=120, check=True)
    for name, count in (("records", 4 * 50 + 50), ("curves", 50)):
        texts = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert len(texts) == len(set(texts)) == count
    assert len(records.read(tmp_path, Record)) == 250


@pytest.mark.parametrize("whose", ["another's", "own", "a dead one's"])
def test_another_live_process_in_the_folder_is_announced(tmp_path, whose):
    process = {"another's": os.getppid(), "own": os.getpid(), "a dead one's": 2**22 + 1}[whose]
    with Store(tmp_path).occupy():
        (mark,) = tmp_path.iterdir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / mark.name.replace(str(os.getpid()), str(process))).touch()
    with warnings.catch_warnings(record=True, action="always") as caught, Store(tmp_path).occupy():
        pass
    announced = [f"process {process} trains into this folder, too" in str(each.message) for each in caught]
    assert announced == [True] * (whose == "another's")


def test_a_read_only_folder(tmp_path, monkeypatch):
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    Store(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == [], "probing leaves something"
    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(GappedError, match=r"cannot write here \(Read-only file system\)"):
        Store(tmp_path)


# Checkpoints

STATE = {"epoch": 3, "history": {"x": [[float("nan"), 1.0]]}, "model": {"w": torch.arange(3.0)}}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Store, Path]:
    """A store with the checkpoint "k", and the path of that."""
    store = Store(tmp_path)
    store.save_checkpoint("k", STATE)
    return store, tmp_path / "checkpoints" / "k.pt"


def test_checkpoints_come_back_and_go(tmp_path, saved):
    store, _ = saved
    store.save_checkpoint("other", STATE)
    assert str(store.load_checkpoint("k", CPU)) == str(STATE)
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
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, saved, form):
    (store, path), mark = saved, tmp_path / "mark"
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


def test_one_flipped_bit_is_noticed(saved):
    """Wherever it is: in the checksum, in the identity, in the weights, or in what nobody reads."""
    store, path = saved
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.warns(UserWarning, match="damaged"):
            assert store.load_checkpoint("k", CPU) is None
    path.write_bytes(content)
    assert str(store.load_checkpoint("k", CPU)) == str(STATE)


def test_a_checkpoint_says_whose_it_is(saved):
    store, path = saved
    store.save_checkpoint("other", STATE)
    path.with_name("other.pt").replace(path)
    with pytest.warns(UserWarning, match="a checkpoint of another fleet; its fleet starts over"):
        assert store.load_checkpoint("k", CPU) is None
    for name, value in (("format", 0), ("gapped", "0.0.1"), ("torch", "1.0.0")):
        torch.save(STATE, path)
        sign(path, "k", **{name: value})
        content = path.read_bytes()
        with pytest.raises(GappedError, match=rf"k.pt: made by .*{name} {value}.*, here is .*; go on with"):
            store.load_checkpoint("k", CPU)
        assert path.read_bytes() == content


RESULTS = Path(__file__).parents[2] / "results"
# Fields of records that the first published lines do not have.
LATER = {"learning_rate": None, "rate_decay": "none", "fleet_gpu_memory_gb": None}


@pytest.mark.parametrize("kind", [Record, Curve, Images, Trees, Bench, Work, Startup])
def test_published_lines_come_back_as_they_stand_in_the_file(kind: type[JsonLine]) -> None:
    objects = [json.loads(text) for text in (RESULTS / kind.FILE).read_text("utf-8").splitlines()]
    lines = [line for line in objects if line.get("kind") == kind.TAGS.get("kind")]
    later = LATER if kind is Record else {}
    assert [line.to_json() for line in records.read(RESULTS, kind)] == [{**later, **line} for line in lines]


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
