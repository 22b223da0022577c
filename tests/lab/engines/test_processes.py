"""Engines of several processes: the same records as the local one's, also when a worker is killed.

Run as a script, this file is the `gapped` command, except that every step is written down before it is
trained, that checkpoints are made after every epoch, and that one worker kills itself on the way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import TESTS, environment
from training_toys import outcome, train

from gapped.cli.app import main
from gapped.comparison import ray_tasks
from gapped_lab.engines import local
from gapped_lab.fleet import Trainer
from gapped_lab.planning import plan
from gapped_lab.recipe import find_recipe
from gapped_lab.training import Settings

FLEETS, EPOCHS = 8, 3
FILES = ("records", "curves", "images")
needs_ray = pytest.mark.skipif(ray_tasks.ray is None, reason="ray is not installed")


def watched(log: Path, nth: int | None) -> None:
    """Write down each step of this process; its nth epoch, of one process, is its death."""
    train_epoch, train_step, calls = Trainer.train_epoch, Trainer._train_step, 0

    def wrapped(trainer: Trainer, *hooks: Callable[[int], None]) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            try:
                os.open(log.with_suffix(".killed"), os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        train_epoch(trainer, *hooks)

    def noted(trainer: Trainer) -> None:
        with open(log, "a") as file:
            file.write(f"{trainer.seed} {trainer.epoch} {trainer.step} {os.getpid()}\n")
        train_step(trainer)

    Trainer.train_epoch, Trainer._train_step = wrapped, noted  # type: ignore[method-assign]


def command(kind: str, folder: str, log: str, nth: str) -> int:
    # The fifth epoch of a process is in the middle of its second fleet.
    def hook() -> None:
        watched(Path(log), int(nth) or None)

    if kind == "ray":
        ray_tasks.ray.init = partial(
            ray_tasks.ray.init, num_cpus=2, runtime_env={"worker_process_setup_hook": hook}
        )
    else:
        local.train_fleets = partial(watched_worker, log, int(nth) or None)
    Settings.__init__.__kwdefaults__["checkpoint_seconds"] = 0  # type: ignore[index]
    engine = ["--engine", "ray"] if kind == "ray" else ["--workers", "2"]
    return main(["--debug", "reproduce", "smoke", "--device", "cpu", "--out", folder, *engine])


def watched_worker(log: str, nth: int | None, *arguments: Any) -> None:
    """A worker that is watched."""
    watched(Path(log), nth)
    local.train_fleets(*arguments)


def start(kind: str, folder: Path, log: Path, nth: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, kind, str(folder), str(log), str(nth)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(TESTS),
    )


def steps_in(log: Path) -> list[tuple[str, ...]]:
    """Fleet, epoch, number and process of each step."""
    return [tuple(line.split()) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The results of the local engine for the smoke recipe."""
    fleets = plan([find_recipe("smoke")])
    assert [fleet.specs[0].epochs for fleet in fleets] == [EPOCHS] * FLEETS
    folder = tmp_path_factory.mktemp("local")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert len(train(find_recipe("smoke"), folder)) == 16
    torch.set_num_threads(threads)
    return outcome(folder)


@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        ("workers", 5),
        pytest.param("ray", 5, marks=[pytest.mark.slow, needs_ray]),
        # That nothing changes without a kill either follows from these two; they are here to be certain.
        pytest.param("workers", 0, marks=pytest.mark.slow),
        pytest.param("ray", 0, marks=[pytest.mark.slow, needs_ray]),
    ],
)
def test_two_processes_make_the_same_records(whole, tmp_path, kind, nth):
    """With one of them killed by SIGKILL, too; and nothing that was checkpointed is trained again."""
    log = tmp_path / "steps.log"
    process = start(kind, tmp_path / "out", log, nth)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    assert log.with_suffix(".killed").exists() == bool(nth)
    assert outcome(tmp_path / "out") == whole
    *steps, workers = zip(*steps_in(log), strict=True)
    trained = list(zip(*steps, strict=True))
    assert len(trained) == len(set(trained)) == FLEETS * EPOCHS * len(set(steps[-1]))
    assert len(set(workers)) >= 2
    # One process shows and reports.
    assert printed.count("has the lowest test negative ELBO") == 1
    assert printed.count("training 16 runs in 8 fleets") == 1
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {".lock", *(f"{name}.jsonl" for name in FILES), "report.html", "tables.md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "status"),
    [
        ("workers", signal.SIGINT, 130),
        ("workers", signal.SIGTERM, 143),
        pytest.param("ray", signal.SIGINT, 130, marks=needs_ray),
        pytest.param("ray", signal.SIGTERM, 143, marks=needs_ray),
    ],
)
def test_interrupted_and_again(whole, tmp_path, kind, number, status):
    log, folder = tmp_path / "steps.log", tmp_path / "out"
    process = start(kind, folder, log)
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == status, printed
    assert "goes on from the last checkpoint" in printed
    assert len({step[:2] for step in steps_in(log)}) < FLEETS * EPOCHS, "it had finished before that"
    assert list((folder / "checkpoints").glob("*.pt"))
    again = start(kind, folder, log)
    printed, _ = again.communicate(timeout=240)
    assert again.returncode == 0, printed
    assert outcome(folder) == whole
    trained = [step[:3] for step in steps_in(log)]
    assert sorted(set(trained)) == sorted(trained)


if __name__ == "__main__":
    sys.exit(command(*sys.argv[1:]))
