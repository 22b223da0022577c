"""Runs know their function: what changes their identity, what does not, and what a call then does."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import environment, python

import gapped
from gapped.cli.app import main
from gapped.comparison.identity import fingerprint, name_of
from gapped.comparison.records import Record, read
from gapped.errors import GappedError

HELPERS = """
SCALE = 1.0

def shift(seed):
    return SCALE * seed
"""

MODULE = """
# The first version.
import torch
from helpers import shift
import more

RATE = 0.5
CONFIG = {"width": [4, 8], "name": "small"}
WEIGHTS = torch.arange(3.0)

class Base:
    factor = 2

class Model(Base):
    def __init__(self):
        self.bias = 0.25

    def loss(self, x):
        '''The loss.'''
        return self.factor * x + self.bias

def unused():
    return 1

def decorated(function):
    return function

@decorated
def train(estimator, seed, *, power=1):
    '''Train.'''
    import late
    inner = lambda x: x + 1
    total = Model().loss(inner(seed)) + shift(seed) * RATE + CONFIG["width"][0] + more.CONSTANT
    return estimator.tau + total + float(WEIGHTS.sum()) + late.VALUE ** power
"""

OTHERS = {
    "helpers": HELPERS,
    "more": "CONSTANT = 1\n",
    "late": "import later\nVALUE = 3\n",
    "later": "Z = 1\n",
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The function of a file `mine.py`, imported afresh, with replacements in a file."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(file: str = "mine", before: str = "", after: str = "") -> Any:
        for name, text in {"mine": MODULE, **OTHERS}.items():
            assert name != file or before in text
            text = text.replace(before, after) if name == file and before else text
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("mine").train

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return load


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("mine", "inner(seed)) +", "inner(seed)) -"),
        ("mine", "x + 1", "x + 2"),
        ("mine", "RATE = 0.5", "RATE = 0.25"),
        ("mine", "[4, 8]", "[4, 16]"),
        ("mine", "arange(3.0)", "arange(4.0)"),
        ("mine", "factor = 2", "factor = 3"),
        ("mine", "self.bias = 0.25", "self.bias = 0.5"),
        ("mine", "power=1", "power=2"),
        ("mine", "(Base)", ""),
        ("helpers", "SCALE = 1.0", "SCALE = 2.0"),
        ("helpers", "* seed", "+ seed"),
        ("more", "1", "2"),
        ("late", "3", "4"),
        ("later", "1", "2"),
    ],
)
def test_a_change_of_what_train_uses_is_seen(load: Any, file: str, before: str, after: str) -> None:
    train = load()
    first = fingerprint(train, train)
    train = load(file, before, after)
    assert fingerprint(train, train) != first


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("mine", "", ""),
        ("mine", "first version", "second version"),
        ("mine", "return 1", "return 2"),
        ("mine", "import more", "\n\nimport more"),
        ("mine", "'''Train.'''", "'''Train a model.'''"),
        ("mine", "'''The loss.'''", "'''Its loss.'''"),
        ("more", "\n", "  # A comment.\n"),
    ],
)
def test_other_changes_are_none(load: Any, file: str, before: str, after: str) -> None:
    train = load()
    first = fingerprint(train, train)
    train = load(file, before, after)
    assert fingerprint(train, train) == first


def test_bound_arguments_and_states_of_own_objects_count_and_networks_do_not() -> None:
    def train(estimator: Any, seed: int, rate: float = 0.1, net: Any = None) -> float:
        return rate

    def of(value: Any) -> str:
        return fingerprint(value, train)

    class Trainer:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __call__(self, estimator: Any, seed: int) -> float:
            return self.rate

    assert of(functools.partial(train, rate=0.2)) != of(functools.partial(train, rate=0.3))
    assert of(Trainer(0.2)) != of(Trainer(0.3))
    assert of(Trainer(0.2)) == of(Trainer(0.2))
    assert of(Trainer(0.2).__call__) != of(Trainer(0.3).__call__)
    nets = [functools.partial(train, net=torch.nn.Linear(2, 3)) for _ in range(2)]
    assert of(nets[0]) == of(nets[1])
    assert of(functools.partial(train, net=torch.nn.Linear(2, 4))) != of(nets[0])
    tensors = [
        torch.zeros(2, dtype=kind) for kind in (torch.bool, torch.bfloat16, torch.complex64, torch.int8)
    ]
    assert len({of(each) for each in tensors}) == 4
    ring: list[Any] = []
    ring.append(ring)
    assert of(ring) == of(ring)


MEMBERS = """
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace
import torch

class Base:
    __slots__ = ("size",)
    ratios = torch.full((2,), 1.0)
    names = {"a", "b"}
    options = SimpleNamespace(depth=3)
    power = functools.partialmethod(lambda self, n: self.size**n, 4)

    def __init__(self, size):
        self.size = size

    @functools.lru_cache
    def half(self):
        return self.size / 5

class Model(Base):
    @functools.cached_property
    def third(self):
        return 6.0

@dataclass
class Unset:
    later: int = field(init=False)

MODEL, UNSET, META, DEVICE = Base(7), Unset(), torch.empty(8, device="meta"), torch.device("cpu")

def train(estimator, seed):
    return Model(seed), MODEL, UNSET, META, DEVICE
"""


@pytest.mark.parametrize("before", ["1.0", '"b"', "=3", "n, 4", "/ 5", "6.0", "Base(7)", "empty(8", '"cpu"'])
def test_members_of_classes_and_slots_of_objects_count(before: str) -> None:
    after = '"cuda"' if before == '"cpu"' else before.translate(str.maketrans("134567b8", "22222222"))
    assert MEMBERS.count(before) == 1
    assert after != before
    prints = []
    for text in (MEMBERS, MEMBERS, MEMBERS.replace(before, after)):
        names: dict[str, Any] = {"__name__": __name__}
        exec(compile(text, __file__, "exec"), names)
        prints.append(fingerprint(names["train"], names["train"]))
    assert prints[0] == prints[1] != prints[2]


SCRIPT = """
import sys
import gapped

def train(estimator, seed):
    return estimator.tau + seed

if __name__ == "__main__":
    result = gapped.compare(train, ["gst:tau=1"], seeds=2, out=sys.argv[1])
    print(result.records[0].recipe, result.reused)
"""

TYPED = """
import sys
sys.argv = ["", {out!r}]
exec(compile(open({file!r}).read(), "<input>", "exec"))
"""


def test_a_function_is_the_same_in_a_script_by_m_imported_and_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way finds the runs of the first."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "taus.py").write_text(SCRIPT, encoding="utf-8")
    out = str(tmp_path / "runs")
    typed = TYPED.format(out=out, file=str(package / "taus.py"))
    ways = [
        ["pack/taus.py", out],
        ["-m", "pack.taus", out],
        ["-c", typed],
    ]
    notebook = {**environment(), "JPY_SESSION_NAME": str(package / "taus.ipynb")}
    outputs = [python(*way, cwd=tmp_path, env=notebook).split() for way in ways]
    assert outputs == [["taus.train", "0"], ["taus.train", "2"], ["taus.train", "2"]]
    monkeypatch.syspath_prepend(str(tmp_path))
    train = importlib.import_module("pack.taus").train
    assert name_of(train) == "taus.train"
    assert gapped.compare(train, ["gst:tau=1"], seeds=2, out=out).reused == 2


def test_a_changed_function_is_trained_anew_unless_its_runs_are_kept(load: Any, tmp_path: Path) -> None:
    def run(train: Any, **how: Any) -> gapped.Comparison:
        return gapped.compare(train, ["gst:tau=1", "gst:tau=2"], seeds=2, out=tmp_path / "runs", **how)

    first = run(load())
    assert (first.reused, first.aside) == (0, 0)
    changed = load("mine", "RATE = 0.5", "RATE = 9.5")
    kept = run(changed, keep=True)
    assert (kept.reused, kept.aside) == (4, 0)
    assert kept.records == first.records
    second = run(changed)
    assert (second.reused, second.aside) == (0, 4)
    assert second.records[2].metrics != first.records[2].metrics
    assert "has changed: 4 earlier runs (keep takes them)" in second.verdict
    assert (run(changed).reused, run(changed).aside) == (4, 0)
    assert run(load()).reused == 4, "the old runs are still there"


def test_fresh_runs_take_the_place_of_earlier_ones(load: Any, tmp_path: Path) -> None:
    train = load()
    for _ in range(2):
        gapped.compare(train, ["gst:tau=1"], seeds=2, out=tmp_path / "runs")
    again = gapped.compare(train, ["gst:tau=1"], seeds=1, out=tmp_path / "runs", fresh=True)
    assert again.reused == 0
    assert len(read(tmp_path / "runs", Record)) == 2, "the other seed is untouched"
    assert len((tmp_path / "runs" / "records.old.jsonl").read_text().splitlines()) == 1
    assert gapped.compare(train, ["gst:tau=1"], seeds=2, out=tmp_path / "runs").reused == 2
    with pytest.raises(GappedError, match="fresh: cannot be combined with keep"):
        gapped.compare(train, ["gst"], fresh=True, keep=True)


def test_the_command_has_a_folder_for_each_function(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    load()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["compare", "--train", "mine:train", "--estimator", "gst", "--seeds", "1"]
    assert main(command) == 0
    assert (tmp_path / "runs" / "compare" / "mine.train" / "report.html").exists()
    capsys.readouterr()
    load("mine", "RATE = 0.5", "RATE = 9.5")
    assert main([*command, "--keep"]) == 0
    assert "All 1 runs were in" in " ".join(capsys.readouterr().out.split())
    assert main(command) == 0
    assert "has changed: 1 earlier run (keep" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--fresh"]) == 0
    assert main([*command, "--fresh", "--keep"]) == 2
    assert main(["compare", "--fresh"]) == 2


TWO = """
import pathlib, sys, time
import gapped

folder, workers = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / f"ready{workers}").touch()
while len(list(folder.glob("ready*"))) < 2:
    time.sleep(0.01)

def train(estimator, seed):
    with open(sys.argv[1] + "/log", "a") as log:
        log.write(f"{sys.argv[2]} {estimator.tau} {seed}\\n")
    time.sleep(0.1)
    return estimator.tau + 0.1 * seed * (estimator.tau != 3)

members = [f"gst:tau={i}" for i in range(1, 6)]
result = gapped.compare(train, members, 4, out=folder / "runs", workers=int(workers))
print([(r.label, r.seed, r.metrics) for r in result.records])
"""


def test_two_processes_on_one_folder_train_no_run_twice(tmp_path: Path) -> None:
    program = tmp_path / "two.py"
    program.write_text(TWO, encoding="utf-8")
    commands = [[sys.executable, str(program), str(tmp_path), workers] for workers in ("1", "2")]
    how: dict[str, Any] = {"env": environment(), "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **how) for command in commands]
    outputs = [each.communicate(timeout=100)[0] for each in started]
    assert outputs[0] == outputs[1] != "", "both end with the whole result"
    trained = [line.partition(" ") for line in (tmp_path / "log").read_text().splitlines()]
    assert len(trained) == len({run for _, _, run in trained}) == 20
    assert {who for who, _, _ in trained} == {"1", "2"}, "both have trained"
    assert len(read(tmp_path / "runs", Record)) == 20
