"""`gapped.compare`: a training function of the user, recorded run by run, resumed, judged."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_fakes import FakeRay
from subprocesses import done, environment, python

import gapped
from gapped.cli.app import main
from gapped.comparison import ray_tasks, workers
from gapped.comparison.records import Curve, Record, read
from gapped.errors import GappedError, MissingExtra

needs_ray = pytest.mark.skipif(ray_tasks.ray is None, reason="ray is not installed")

MEMBERS = {"low": gapped.GST(tau=0.5), "middle": "gst:tau=0.6", "high": "gumbel-softmax:tau=9"}


# That of JAX, where another test of the same process imported it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")


@pytest.fixture(autouse=True)
def _without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start as if no other test had imported JAX."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders of comparisons without one of their own are."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_tasks, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return fake


def value_of(estimator: Any, seed: int) -> float:
    """Any loss with a spread over seeds, lower for lower temperatures."""
    return float(estimator.tau) + 0.1 * (seed * 7 % 5)


def numbers(estimator: Any, seed: int) -> float:
    return value_of(estimator, seed)


def tensors(estimator: Any, seed: int) -> torch.Tensor:
    return torch.tensor(value_of(estimator, seed), dtype=torch.float64)


def dicts(estimator: Any, seed: int) -> dict[str, Any]:
    return {"loss": value_of(estimator, seed), "codes": 3, "note": "not a number"}


def epochs(estimator: Any, seed: int) -> Iterator[dict[str, float]]:
    for epoch in range(3 - seed % 2):
        yield {"loss": 10.0 - epoch, "codes": epoch}
    yield {"loss": value_of(estimator, seed), "codes": 7}


def plain_epochs(estimator: Any, seed: int) -> Iterator[float]:
    yield 20.0
    yield value_of(estimator, seed)


def values(result: gapped.Comparison) -> list[tuple[str, int, str, float | None]]:
    return [(r.label, r.seed, r.status, r.metrics.get(r.metric)) for r in result.records]


@pytest.mark.parametrize(
    ("train", "metric"),
    [(numbers, "value"), (tensors, "value"), (dicts, "loss"), (epochs, "loss"), (plain_epochs, "value")],
)
def test_train_may_return_or_yield_numbers_or_dicts(train: Any, metric: str, tmp_path: Path) -> None:
    result = gapped.compare(train, MEMBERS, out=tmp_path)
    assert [row.name for row in result.rows] == ["low", "middle", "high"]
    assert {row.metric for row in result.rows} == {metric}
    assert [row.value.mean for row in result.rows] == pytest.approx([0.7, 0.8, 9.2])
    stopped = train in (epochs, plain_epochs)
    assert [row.value.count for row in result.rows] == [5, 5, 3 if stopped else 5]
    assert len(read(tmp_path, Record)) == (13 if stopped else 15)
    curves = read(tmp_path, Curve)
    assert len(curves) == (13 if stopped else 0)
    if train is epochs:
        assert curves[0].series["codes"] == [0, 1, 2, 7]
        assert curves[0].epoch == [1, 2, 3, 4]


def test_all_ways_to_look_at_it(tmp_path: Path) -> None:
    result = gapped.compare(epochs, MEMBERS, seeds=[3, 5])
    assert repr(result).splitlines()[0] == "Comparison(6 runs of 3 estimators, best: low)"
    assert len(repr(result).splitlines()) <= 8
    assert max(map(len, str(result).splitlines())) <= 80
    assert "middle" in result.table
    assert "<td>middle</td>" in result._repr_html_()
    frame = result.to_pandas()
    assert list(frame["seed"]) == [3, 3, 3, 5, 5, 5]
    assert list(frame["loss"]) == [r.metrics["loss"] for r in result.records]
    assert result.plot().axes
    page = result.save_html(tmp_path / "page.html").read_text("utf-8")
    assert "low has the lowest loss" in page
    assert "Learning curves" in page


class Object:
    """A training function that is an object."""

    def __call__(self, estimator: Any, seed: int) -> Iterator[float]:
        yield value_of(estimator, seed)


@pytest.mark.parametrize("train", [epochs, Object(), partial(epochs)])
def test_clear_losers_get_no_further_seeds(train: Any, tmp_path: Path) -> None:
    result = gapped.compare(train, MEMBERS, seeds=8, out=tmp_path)
    assert result.stopped == (("high", 3, "low"),)
    assert result.missing == ()
    assert {r.seed for r in result.records if r.label == "high"} == {0, 1, 2}
    assert len(result.records) == 19
    assert "Stopped early: high after 3 seeds, behind low (a test that stops the best" in result.verdict
    assert result.table.splitlines()[0].split()[-1] == "stopped"
    assert result.table.splitlines()[-1].split()[-2:] == ["after", "3"]
    assert max(map(len, str(result).splitlines())) <= 80
    assert "Stopped early: high" in result.save_html(tmp_path / "page.html").read_text("utf-8")
    best = gapped.compare(train, MEMBERS, seeds=8, out=tmp_path / "max", maximize=True)
    assert [stop[:2] for stop in best.stopped] == [("low", 3), ("middle", 3)]


@pytest.mark.parametrize("how", [{}, {"workers": 3}, {"engine": "ray"}])
def test_what_is_stopped_depends_on_records_alone(how: Any, tmp_path: Path, fake_ray: FakeRay) -> None:
    """A call that was cut anywhere, and goes on anywhere, ends like one that was not."""
    whole = gapped.compare(epochs, MEMBERS, seeds=8, out=tmp_path / "whole")
    lines = (tmp_path / "whole" / Record.FILE).read_text("utf-8").splitlines(keepends=True)
    for cut in (2, 8, 9, 13):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / Record.FILE).write_text("".join(lines[:cut]), encoding="utf-8")
        again = gapped.compare(epochs, MEMBERS, seeds=8, out=folder, **how)
        assert values(again) == values(whole)
        assert again.stopped == whole.stopped


def test_a_failed_run_keeps_its_estimator_out_of_the_tests(tmp_path: Path) -> None:
    def train(estimator: Any, seed: int) -> Iterator[float]:
        yield broken(estimator, seed)

    members = {**MEMBERS, "last": "gst:tau=20"}
    result = gapped.compare(train, members, out=tmp_path)
    assert result.stopped == (("last", 3, "low"),), "a run of high diverged"


def test_if_every_estimator_fails_no_further_run_starts() -> None:
    def train(estimator: gapped.GST, seed: int) -> float:
        if estimator.tau < 2:
            raise RuntimeError("a bug")
        return 1.0

    for texts, count in (
        (["gst:tau=0.5", "gst:tau=1"], 2),
        (["gst:tau=0.5"], 2),
        (["gst:tau=0.5", "gst:tau=3"], 8),
    ):
        result = gapped.compare(train, texts, seeds=4)
        assert len(result.records) == count
        assert ("no further run was started" in result.verdict) == (count == 2)
    # One of two has failed when time is up: that says nothing of the other.
    result = gapped.compare(train, ["gst:tau=0.5", "gst:tau=1"], seeds=4, budget=1e-9)
    part = replace(result, records=gapped.compare(train, ["gst:tau=0.5"], seeds=2).records)
    assert "The budget left no time for" in part.verdict


def test_a_generator_that_fails_keeps_its_curve(tmp_path: Path) -> None:
    def train(estimator: Any, seed: int) -> Iterator[dict[str, float]]:
        yield {"loss": 3.0, "early": 1.0}
        yield {"loss": nan, "late": 2.0}
        if seed == 0:
            raise RuntimeError("over")
        yield {"loss": 1.0}

    result = gapped.compare(train, ["gst"], seeds=2, out=tmp_path)
    assert [(r.status, r.error) for r in result.records] == [("failed", "RuntimeError: over"), ("ok", "")]
    first, second = read(tmp_path, Curve)
    assert first.series == {"loss": [3.0, None], "early": [1.0, None], "late": [None, 2.0]}
    assert second.series == {"loss": [3.0, None, 1.0], "early": [1.0, None, None], "late": [None, 2.0, None]}
    gapped.compare(train, ["gst"], seeds=2, out=tmp_path)
    result.save_html(tmp_path / "page.html")


def broken(estimator: Any, seed: int) -> float:
    if estimator.tau == 0.6 and seed == 1:
        raise RuntimeError("out\nof luck")
    if estimator.tau == 9:
        return nan if seed == 0 else 9.0 + seed
    return value_of(estimator, seed)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_fails_or_diverges_costs_that_run_alone(workers: int) -> None:
    result = gapped.compare(broken, MEMBERS, seeds=4, workers=workers)
    status = {(r.label, r.seed): r.status for r in result.records if r.status != "ok"}
    assert status == {("middle", 1): "failed", ("high", 0): "diverged"}
    assert [(row.value.count, row.diverged, row.failed) for row in result.rows] == [
        (4, 0, 0),
        (3, 0, 1),
        (3, 1, 0),
    ]
    assert "diverged failed" in " ".join(result.table.split())
    assert "1 run of middle failed: RuntimeError: out of luck (test_compare.py, line " in result.verdict
    assert "high: 1 of 4 runs diverged, so it is not compared." in result.verdict


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    def train(estimator: Any, seed: int) -> Any:
        return {"text": "only"} if seed else None

    result = gapped.compare(train, ["gst"], seeds=2)
    assert "No run ended with a number." in result.verdict
    assert "expected a number or a dict of numbers" in result.verdict
    assert result.table
    result.save_html(tmp_path / "page.html")
    with pytest.raises(GappedError, match="no run finished"):
        result.plot()


def test_ray_gives_what_this_process_gives(tmp_path: Path, fake_ray: FakeRay) -> None:
    one = gapped.compare(broken, MEMBERS, seeds=4, out=tmp_path / "a")
    other = gapped.compare(broken, MEMBERS, seeds=4, out=tmp_path / "b", engine="ray")
    assert values(one) == values(other)
    assert fake_ray.options[-1] == {"num_cpus": 1, "num_gpus": 0, "max_retries": 3}
    assert not fake_ray.up
    fake_ray.options.clear()
    gapped.compare(numbers, MEMBERS, seeds=2, out=tmp_path / "b")
    gapped.compare(numbers, MEMBERS, seeds=2, out=tmp_path / "b", engine="ray")
    assert fake_ray.options == [], "nothing was left to train"
    fake_ray.gpus = 2
    gapped.compare(numbers, MEMBERS, seeds=3, out=tmp_path / "b", engine="ray")
    assert fake_ray.options[-1]["num_gpus"] == 1


def test_ray_loses_a_worker_or_is_interrupted(tmp_path: Path, fake_ray: FakeRay) -> None:
    def train(estimator: Any, seed: int) -> float:
        if seed == stop:
            raise KeyboardInterrupt
        return value_of(estimator, seed)

    stop, get = 2, fake_ray.get
    with pytest.raises(KeyboardInterrupt):
        gapped.compare(train, MEMBERS, seeds=3, out=tmp_path, engine="ray")
    assert len(read(tmp_path, Record)) == 6
    assert len(fake_ray.lost) == 1, "the other one under way was cancelled"
    assert not fake_ray.up
    stop = -1

    def lose(reference: Any) -> Any:
        if reference.args[-1] == 7:
            raise fake_ray.exceptions.RayError("the worker died.")
        return get(reference)

    fake_ray.get = lose  # type: ignore[method-assign]
    result = gapped.compare(train, MEMBERS, seeds=3, out=tmp_path, engine="ray")
    assert [r.status for r in result.records].count("ok") == 8
    assert "1 run of middle failed: RayError: the worker died. " in f"{result.verdict} "


@pytest.mark.slow
@needs_ray
def test_a_real_cluster(tmp_path: Path) -> None:
    """Functions of a module, closures, errors and deaths; what cannot travel is named in a line."""
    program = tmp_path / "program.py"
    program.write_text(RAY_PROGRAM, encoding="utf-8")
    results = json.loads(python(str(program), str(tmp_path / "out")).splitlines()[-1])
    assert results["module"] == [0.5, 2.0, 1.5, 3.0]
    assert results["closure"] == ["ok", "failed", "ok", "failed"]
    assert "RuntimeError: bad" in results["errors"][1]
    assert "WorkerCrashedError" in results["errors"][3]
    assert results["lock"].startswith("train: it cannot be sent to Ray (TypeError: cannot pickle")


RAY_PROGRAM = """
import json, os, pathlib, signal, sys, threading
import gapped

home = pathlib.Path(sys.argv[0]).parent / "modules"
home.mkdir()
(home / "my_module.py").write_text("def train(estimator, seed): return estimator.tau + seed")
sys.path.append(str(home))
import my_module

def closure(factor):
    def train(estimator, seed):
        if estimator.tau == 2:
            if seed == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("bad")
        return factor * estimator.tau + seed
    return train

members = ["gst:tau=0.5", "gst:tau=2"]
first = gapped.compare(my_module.train, members, 2, out=sys.argv[1], engine="ray")
second = gapped.compare(closure(2.0), members, 2, out=sys.argv[1], engine="ray")
lock = threading.Lock()
try:
    gapped.compare(lambda estimator, seed: lock, members, 2, engine="ray")
except gapped.GappedError as problem:
    refusal = str(problem)
print(json.dumps({
    "module": [r.metrics["value"] for r in first.records],
    "closure": [r.status for r in second.records],
    "errors": [r.error for r in second.records],
    "lock": refusal,
}))
"""


def test_the_state_of_an_estimator_is_not_shared() -> None:
    class Counting:
        count = 0

    def train(estimator: Any, seed: int) -> int:
        estimator.count += 1
        return int(estimator.count)

    mine, before = Counting(), torch.get_rng_state()
    result = gapped.compare(train, [mine], seeds=3)
    assert [r.metrics["value"] for r in result.records] == [1, 1, 1]
    assert mine.count == 0
    assert torch.equal(torch.get_rng_state(), before)


def counting(calls: deque[int], estimator: Any, seed: int) -> float:
    calls.append(seed)
    return broken(estimator, seed)


def test_finished_runs_are_not_repeated_and_failed_ones_are(tmp_path: Path) -> None:
    calls: deque[int] = deque()
    train = partial(counting, calls)
    first = gapped.compare(train, MEMBERS, seeds=2, out=tmp_path)
    assert len(calls) == 6
    assert {r.recipe for r in first.records} == {"test_compare.counting"}
    assert values(gapped.compare(train, MEMBERS, seeds=2, out=tmp_path)) == values(first)
    assert len(calls) == 7
    gapped.compare(train, {"low": "gst:tau=0.7"}, seeds=2, out=tmp_path)
    assert len(calls) == 9, "another estimator under the same label is another run"


def steady(calls: deque[int], estimator: Any, seed: int) -> float:
    calls.append(seed)
    return float(seed)


def lambda_gap(level: float) -> Any:
    return lambda p: level + 0 * p


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (gapped.DoubleCV(2), gapped.DoubleCV(16)),
        (gapped.REBAR(), gapped.REBAR(eta=0.5)),
        (gapped.GST(tau=torch.tensor(0.5)), gapped.GST(tau=torch.tensor(0.7))),
        (gapped.GST(gap=lambda_gap(1.0)), gapped.GST(gap=lambda_gap(2.0))),
        (("simple", 2), ("simple", 3)),
    ],
)
def test_a_changed_estimator_is_trained_anew(one: Any, other: Any, tmp_path: Path) -> None:
    calls: deque[int] = deque()
    train = partial(steady, calls)
    for estimator, trained in ((one, 1), (other, 2), (copy.deepcopy(one), 2)):
        gapped.compare(train, [estimator], seeds=1, out=tmp_path)
        assert len(calls) == trained


def test_a_network_that_starts_at_random_is_the_same_estimator(tmp_path: Path) -> None:
    calls: deque[int] = deque()
    for _ in range(2):
        member = gapped.NVIL(torch.nn.Linear(3, 1))
        gapped.compare(partial(steady, calls), [member], seeds=1, out=tmp_path)
    assert len(calls) == 1


def test_a_budget_ends_it_and_the_same_call_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    result = gapped.compare(numbers, MEMBERS, seeds=2, budget=5, out=tmp_path)
    assert result.missing == (("middle", 1), ("high", 1))
    assert "no time for middle (seed 1) and high (seed 1)" in result.verdict
    assert gapped.compare(numbers, MEMBERS, seeds=2, out=tmp_path).missing == ()


def test_runs_that_were_there_are_told_from_those_that_were_trained(tmp_path: Path) -> None:
    def train(estimator: Any, seed: int) -> float:
        return float(estimator.tau) + 0.1 * seed

    first = gapped.compare(train, ["gst:tau=1", "gst:tau=2"], seeds=2, out=tmp_path)
    more = gapped.compare(train, ["gst:tau=1", "gst:tau=2"], seeds=3, out=tmp_path)
    again = gapped.compare(train, ["gst:tau=1", "gst:tau=2"], seeds=3, out=tmp_path)
    assert [result.reused for result in (first, more, again)] == [0, 4, 6]
    assert "already" not in str(first)
    assert f"4 of 6 runs were in {tmp_path} already" in " ".join(str(more).split())
    assert f"All 6 runs were in {tmp_path} already" in " ".join(again._repr_html_().split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 3}, "train: got 3"),
        ({"estimators": []}, "estimators: got 'none'"),
        ({"estimators": ["nobody"]}, "estimator: got 'nobody'"),
        ({"estimators": [gapped.gst]}, "estimators: got the function gst, expected a list"),
        ({"estimators": [gapped.GST]}, r"estimators: got the \w+ GST, expected a list"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"seeds": [-1]}, "seeds: got"),
        ({"seeds": 2.5}, "seeds: got 2.5"),
        ({"seeds": None}, "seeds: got None"),
        ({"budget": 0}, "budget: got 0"),
        ({"budget": "1 h"}, "budget: got 1 h, "),
        ({"workers": 0}, "workers: got 0"),
        ({"engine": "ray", "workers": 2}, "workers: goes with engine 'local'"),
        ({"engine": "cloud"}, "engine: got 'cloud', expected local or ray"),
    ],
)
def test_bad_arguments_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GappedError, match=message):
        gapped.compare(**{"train": numbers, "estimators": ["gst"], **arguments})


@pytest.mark.parametrize("threads", ["cuda", "jax", pytest.param("asked", marks=pytest.mark.gpu)])
def test_a_function_that_cannot_travel_is_named_where_a_fork_is_not_safe(
    threads: str, monkeypatch: Any
) -> None:
    if threads == "cuda":
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    elif threads == "asked":
        assert torch.cuda.is_available()
    else:
        monkeypatch.setitem(sys.modules, "jax", object())
    with pytest.raises(GappedError, match="a function at the top of a module"):
        gapped.compare(lambda estimator, seed: 1.0, ["gst"], workers=2)


def test_what_was_typed_in_is_named_where_a_fork_is_not_safe(monkeypatch: Any) -> None:
    """A new process would look for the function in vain."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(numbers, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "numbers", numbers, raising=False)
    with pytest.raises(GappedError, match="does not see what was typed in here"):
        gapped.compare(numbers, ["gst"], workers=2)


def test_without_ray_it_is_one_line(monkeypatch: Any) -> None:
    monkeypatch.setattr(ray_tasks, "ray", None)
    monkeypatch.setattr("gapped.errors.find_spec", lambda name: None if name == "ray" else name)
    with pytest.raises(MissingExtra, match=r'--engine ray needs ray: pip install "gapped\[ray\]"'):
        gapped.compare(numbers, ["gst"], engine="ray")


def test_without_pandas_it_is_one_line(monkeypatch: Any) -> None:
    result = gapped.compare(numbers, ["gst"], seeds=2)
    assert len(repr(result["gst"])) < 300
    monkeypatch.setattr("gapped.errors.find_spec", lambda name: None if name == "pandas" else name)
    with pytest.raises(MissingExtra, match=r"to_pandas needs pandas: pip install pandas$"):
        result.to_pandas()


def test_a_temporary_folder_goes_with_the_comparison(temporary: Path) -> None:
    result = gapped.compare(epochs, ["gst"], seeds=2)
    assert list(temporary.iterdir()) == [result.folder]
    pickle.dumps(result)
    del result
    gc.collect()
    assert list(temporary.iterdir()) == []


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the suite runs in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interruption_keeps_what_is_there_and_says_where(workers: int, temporary: Path) -> None:
    def interrupted(estimator: Any, seed: int) -> float:
        if seed == 2:
            # What has ended is recorded by the process that waits for it.
            while len([r for folder in temporary.iterdir() for r in read(folder, Record)]) < 2:
                time.sleep(0.01)
            os.kill(os.getppid() if workers > 1 else os.getpid(), signal.SIGINT)
            time.sleep(60)
        return value_of(estimator, seed)

    with pytest.raises(KeyboardInterrupt) as caught:
        gapped.compare(interrupted, ["gst"], seeds=3, workers=workers)
    (folder,) = temporary.iterdir()
    assert str(folder) in caught.value.__notes__[0]
    assert [r.seed for r in read(folder, Record)] == [0, 1]


def test_names_that_no_record_can_hold_and_names_that_change() -> None:
    def train(estimator: Any, seed: int) -> dict[str, float]:
        return {("loss", "x" * 300, "error", "")[seed]: 1.0}

    result = gapped.compare(train, ["gst"], seeds=np.arange(4))
    assert [r.status for r in result.records] == ["ok", "failed", "ok", "failed"]
    assert "expected names of 1 to 200 characters" in result.verdict
    assert "Runs differ in their first number, loss and error: loss counts." in result.verdict


def test_two_estimators_under_one_label_are_told_apart(tmp_path: Path, capsys: Any) -> None:
    for text in ("gst:tau=0.5", "gst:tau=2"):
        gapped.compare(numbers, {"mine": text}, seeds=3, out=tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mine (gst:tau=0.5) wins" in out
    assert "better than mine (gst:tau=2)" in out


MODULE = """
def train(estimator, seed):
    if estimator.tau == 7:
        raise RuntimeError("no such number")
    return {"score": estimator.tau + 0.1 * seed}
"""


def test_the_command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "my_training.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["compare", "--train", "my_training:train", "--out", "runs", "--seeds", "3", "--maximize"]
    estimators = ["--estimator", "gst:tau=0.5", "--estimator", "gst:tau=2"]
    assert main([*command, *estimators]) == 0
    out = capsys.readouterr().out
    assert "gst:tau=0.5, seed 0: score 0.5, " in out
    assert "gst:tau=2 wins: highest score" in out
    assert (tmp_path / "runs" / "report.html").exists()
    assert main(["report", "runs"]) == 0
    assert "gst:tau=2 wins: highest score" in capsys.readouterr().out
    assert main([*command, "--estimator", "gst:tau=3", "--minutes", "1e-9"]) == 3
    assert "out of time; the same command trains the 3 missing runs" in capsys.readouterr().err
    assert main([*command, "--estimator", "gst:tau=7"]) == 1
    assert "all 2 runs failed" in capsys.readouterr().err
    assert main([*command, "--epochs", "3"]) == 2
    assert "--train: cannot be combined with --epochs" in capsys.readouterr().err
    assert main([*command, "--engine", "torchrun"]) == 2
    assert "engine: got 'torchrun', expected local or ray" in capsys.readouterr().err
    assert main([*command, "--ray-address", "auto"]) == 2
    assert "--ray-address: got 'auto', expected only with --engine ray" in capsys.readouterr().err
    assert main(["compare", "--maximize"]) == 2
    assert main(["compare", "--train", "my_training:absent"]) == 2


def test_a_generator_of_many_values_keeps_a_thin_curve(tmp_path: Path) -> None:
    def train(estimator: Any, seed: int) -> Iterator[float]:
        yield from map(float, range(100_001))

    result = gapped.compare(train, ["gst"], seeds=1, out=tmp_path)
    assert values(result)[0][-1] == 100_000
    (curve,) = read(tmp_path, Curve)
    assert 1000 <= len(curve.epoch) <= 2001
    assert curve.series["value"] == [epoch - 1 for epoch in curve.epoch], "each value at its epoch"
    assert (curve.epoch[0], curve.epoch[-1]) == (1, 100_001)
    assert len({b - a for a, b in pairwise(curve.epoch[:-1])}) == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["endless", "stubborn"])
def test_a_run_that_takes_too_long_has_failed(kind: str, workers: int, tmp_path: Path) -> None:
    def endless(estimator: Any, seed: int) -> Iterator[float]:
        while seed == 0:
            yield 1.0
        yield 2.0

    def stubborn(estimator: Any, seed: int) -> float:
        while seed == 0:
            try:
                time.sleep(600)
            except Exception:
                continue
        return 2.0

    train = {"endless": endless, "stubborn": stubborn}[kind]
    result = gapped.compare(train, ["gst"], seeds=2, timeout=0.3, workers=workers, out=tmp_path)
    first, second = result.records
    assert (first.status, first.error) == ("failed", "out of time: it still trained after 0.3 s")
    assert (second.status, second.metrics) == ("ok", {"value": 2.0})
    assert first.seconds < 30
    assert len(read(tmp_path, Curve)) == (2 if kind == "endless" else 0)


def test_a_process_that_does_not_listen_is_killed_after_its_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(workers, "_GRACE", 0.1)

    def train(estimator: Any, seed: int) -> float:
        if seed == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(600)
        return 2.0

    result = gapped.compare(train, ["gst"], seeds=2, timeout=0.3, workers=2)
    assert [r.error for r in result.records] == ["out of time: it still trained after 0.3 s", ""]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Foreign(BaseException):
    pass


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (ValueError("x" * 10**7), "ValueError: " + "x" * 1988 + "..."),
        (Unspeakable(), "Unspeakable: its text cannot be shown (RuntimeError)"),
        (Foreign("end"), "Foreign: end"),
        (GeneratorExit("end"), "GeneratorExit: end"),
        (SystemExit("enough"), "SystemExit: enough"),
    ],
    ids=["long", "unspeakable", "foreign", "exit of a generator", "exit"],
)
def test_any_error_costs_its_run_alone_and_is_one_line(problem: BaseException, text: str) -> None:
    def train(estimator: Any, seed: int) -> float:
        if seed == 0:
            raise problem
        return 1.0

    result = gapped.compare(train, ["gst"], seeds=2)
    assert [(r.status, r.error) for r in result.records] == [("failed", text), ("ok", "")]


LEAVES = """
import multiprocessing, os, subprocess, sys, threading, time

def train(estimator, seed):
    kind = ("thread", "process", "program", "fork", "orphan")[seed]
    if kind == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
    elif kind == "process":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    elif kind == "program":
        subprocess.Popen(["sleep", "600"])
    elif kind == "fork":
        if os.fork() == 0:
            return 5.0
    elif kind == "orphan":
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
    return 1.0 + seed
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are listed in /proc")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_runs_leave_behind_does_not_hold_the_command(tmp_path: Path, workers: str) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES, encoding="utf-8")
    options = ["--train", "leaves:train", "--estimator", "gst", "--seeds", "5", "--workers", workers]
    ended = done(sys.executable, "-m", "gapped", "compare", *options, "--out", "runs", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(ended.stdout.count(f"seed {seed}: value {1 + seed},") == 1 for seed in range(5))
    assert ended.stdout.count("Report: ") == 1


def test_processes_keep_output_measure_memory_and_have_a_gpu_each(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def train(estimator: Any, seed: int) -> float:
        torch.ones(25_000_000 * (1 + 4 * (seed == 1))).sum()
        if seed < 2:
            os.system(f"echo said by {seed}")
        if seed == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return float(os.environ["CUDA_VISIBLE_DEVICES"]) + torch.get_num_threads() / 10

    result = gapped.compare(train, ["gst"], seeds=4, out=tmp_path, workers=2)
    outputs = {r.seed: tmp_path / "output" / f"{r.id}.txt" for r in result.records}
    assert [outputs[seed].read_text() for seed in (0, 1)] == ["said by 0\n", "said by 1\n"]
    assert not outputs[3].exists()
    assert f"exit code -9 (output/{outputs[2].name})" in result.verdict
    used = {r.metrics["value"] for r in result.records if not r.failed}
    assert used <= {3.1, 5.1}
    assert result.records[0].metrics != result.records[1].metrics, "both run at once"
    if sys.platform == "linux":
        memory = list(result.to_pandas()["memory_gb"])
        assert 0.3 < memory[1] - memory[0] < 0.6


@pytest.mark.parametrize("seeds", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_costs_little_more_than_its_function(seeds: int, tmp_path: Path) -> None:
    """At most 3 ms a run, in time of this process: others may have the machine."""

    def train(estimator: gapped.GST, seed: int) -> float:
        return float(estimator.tau) + seed  # type: ignore[arg-type]

    members = {f"estimator {i}": gapped.GST(tau=1 + i / 200) for i in range(200)}
    start = time.process_time()
    gapped.compare(train, members, seeds, out=tmp_path)
    assert time.process_time() - start < 0.003 * 200 * seeds


KILLED = """
import sys, time
import gapped

def train(estimator, seed):
    for epoch in range(3):
        time.sleep(0.01)
        yield estimator.tau + 0.01 * seed + epoch

members = ["gst:tau=0.5", "gst:tau=0.51", "gst:tau=9"]
result = gapped.compare(train, members, 6, out=sys.argv[1], workers=int(sys.argv[2]))
print([(r.id, r.metrics) for r in result.records], result.stopped, result.best, result.worse, result.tied)
"""


@pytest.mark.slow_if(lambda workers: workers == 1)
@pytest.mark.parametrize("workers", [1, 3])
def test_kills_at_any_time_change_nothing(tmp_path: Path, workers: int) -> None:
    program = tmp_path / "killed.py"
    program.write_text(KILLED, encoding="utf-8")

    def start(folder: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(program), str(tmp_path / folder), str(workers)]
        return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)

    delays = np.random.default_rng(workers).uniform(0.0, 0.25, 4)
    killed = 0
    for delay in delays:
        process = start("a")
        while process.poll() is None and not (tmp_path / "a" / ".claims").exists():
            time.sleep(0.005)
        time.sleep(delay)
        killed += process.poll() is None
        process.kill()
        process.communicate()
    assert killed > 1
    whole, again = start("b").communicate(timeout=100)[0], start("a").communicate(timeout=100)[0]
    assert again == whole != ""
    assert len(read(tmp_path / "a", Record)) == 15, "no run has two records"


def test_processes_that_die_alike_are_told_of_once() -> None:
    def train(estimator: Any, seed: int) -> float:
        return os._exit(5) if estimator.tau < 1 else float(seed)

    result = gapped.compare(train, ["gst:tau=0.5", "gst:tau=2"], 3, workers=2)
    assert result.verdict.count("exit code 5") == 1
    assert "3 runs of gst:tau=0.5 failed: its process ended with exit code 5 (output/" in result.verdict
