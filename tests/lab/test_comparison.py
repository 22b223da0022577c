"""`gapped.compare`: a training function of the user, recorded run by run, resumed, judged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import environment

import gapped
from gapped.errors import GappedError
from gapped.lab import comparison
from gapped.lab.cli.app import main
from gapped.lab.records import Curve, Record, read

MEMBERS = {"low": gapped.GST(tau=0.5), "middle": "gst:tau=0.6", "high": "gumbel-softmax:tau=9"}


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
    assert [row.value.count for row in result.rows] == [5, 5, 5]
    assert len(read(tmp_path, Record)) == 15
    curves = read(tmp_path, Curve)
    assert len(curves) == (15 if train in (epochs, plain_epochs) else 0)
    if train is epochs:
        assert curves[0].series["codes"] == [0, 1, 2, 7]
        assert curves[0].epoch == [1, 2, 3, 4]


def test_the_verdict_says_who_ties_who_loses_who_is_cheap_and_how_many_seeds() -> None:
    verdict = gapped.compare(dicts, MEMBERS).verdict
    assert verdict.startswith("low has the lowest loss (mean 0.7, ")
    assert "do not separate it from middle; low is better than high" in verdict
    assert "Among the tied, " in verdict
    assert "About 40 seeds each (35 more) would separate low from middle" in verdict
    assert "high wins: highest loss" in gapped.compare(dicts, MEMBERS, maximize=True).verdict


def test_all_ways_to_look_at_it(tmp_path: Path) -> None:
    result = gapped.compare(epochs, MEMBERS, seeds=[3, 5])
    assert repr(result) == "Comparison(6 runs of 3 estimators, best: low)"
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
    assert "1 run of middle failed: RuntimeError: out of luck." in result.verdict
    assert "1 of 4 runs of high diverged" in result.verdict


def test_nothing_finished_is_said(tmp_path: Path) -> None:
    def train(estimator: Any, seed: int) -> Any:
        return {"text": "only"} if seed else None

    result = gapped.compare(train, ["gst"], seeds=2)
    assert "No run finished with a value" in result.verdict
    assert "expected a number or a dict of numbers" in result.verdict
    assert result.table
    result.save_html(tmp_path / "page.html")
    with pytest.raises(GappedError, match="no run finished"):
        result.plot()


def test_a_process_that_dies_costs_its_run() -> None:
    def train(estimator: Any, seed: int) -> float:
        if seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return value_of(estimator, seed)

    result = gapped.compare(train, ["gst"], seeds=3, workers=2)
    assert [r.status for r in result.records] == ["ok", "failed", "ok"]
    assert "exit code -9" in result.records[1].error


def test_workers_give_what_one_process_gives() -> None:
    def train(estimator: Any, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(8, 5, generator=generator, requires_grad=True)
        estimator.sample(logits, generator=generator).square().mul(torch.arange(5)).sum().backward()
        assert logits.grad is not None
        return float(logits.grad.norm())

    one, two = (gapped.compare(train, MEMBERS, 3, workers=workers) for workers in (1, 2))
    assert values(one) == values(two)


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


def counting(calls: list[int], estimator: Any, seed: int) -> float:
    calls.append(seed)
    return broken(estimator, seed)


def test_finished_runs_are_not_repeated_and_failed_ones_are(tmp_path: Path) -> None:
    calls: list[int] = []
    train = partial(counting, calls)
    first = gapped.compare(train, MEMBERS, seeds=2, out=tmp_path)
    assert len(calls) == 6
    assert {r.recipe for r in first.records} == {f"{__name__}.counting"}
    assert values(gapped.compare(train, MEMBERS, seeds=2, out=tmp_path)) == values(first)
    assert len(calls) == 7
    gapped.compare(train, {"low": "gst:tau=0.7"}, seeds=2, out=tmp_path)
    assert len(calls) == 9, "another estimator under the same label is another run"


def test_a_budget_ends_it_and_the_same_call_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(comparison.time, "monotonic", lambda: next(clock))
    result = gapped.compare(numbers, MEMBERS, seeds=2, budget=5, out=tmp_path)
    assert result.missing == (("middle", 1), ("high", 1))
    assert "no time for middle (seed 1) and high (seed 1)" in result.verdict
    assert gapped.compare(numbers, MEMBERS, seeds=2, out=tmp_path).missing == ()


PROGRAM = """
import os, signal, sys
import gapped

def train(estimator, seed):
    if sys.argv[2] == "kill" and seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    print("run", seed)
    yield 5.0
    yield estimator.tau + seed

result = gapped.compare(train, ["gst:tau=0.5", "gst:tau=2"], 4, out=sys.argv[1])
print([(r.id, r.metrics) for r in result.records])
"""


def test_a_kill_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")

    def start(folder: str, how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-u", str(program), str(tmp_path / folder), how]
        return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)

    assert start("a", "kill").returncode == -signal.SIGKILL
    assert len(read(tmp_path / "a", Record)) == 4
    again, whole = start("a", "live"), start("b", "live")
    assert again.stdout.count("run") == 4
    assert whole.stdout.count("run") == 8
    assert again.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": 3}, "train: got 3"),
        ({"estimators": []}, "estimators: got 'none'"),
        ({"estimators": ["nobody"]}, "estimator: got 'nobody'"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"seeds": [-1]}, "seeds: got"),
        ({"budget": 0}, "budget: got 0"),
        ({"workers": 0}, "workers: got 0"),
        ({"engine": "ray"}, "'ray' is not available"),
        ({"engine": "cloud"}, "engine: got 'cloud'"),
    ],
)
def test_bad_arguments_are_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GappedError, match=message):
        gapped.compare(**{"train": numbers, "estimators": ["gst"], **arguments})


def test_a_function_that_cannot_travel_is_named_where_a_fork_is_not_safe(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(GappedError, match="a function at the top of a module"):
        gapped.compare(lambda estimator, seed: 1.0, ["gst"], workers=2)


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
    assert "3 of 3 runs failed; the same command tries them again" in capsys.readouterr().err
    assert main([*command, "--epochs", "3"]) == 2
    assert "--train: goes without --epochs" in capsys.readouterr().err
    assert main(["compare", "--maximize"]) == 2
    assert main(["compare", "--train", "my_training:absent"]) == 2
