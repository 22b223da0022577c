"""Kill -9 anywhere, repeat the command, get what an uninterrupted run gives, bit for bit.

Training runs in processes that a server forks: it has imported everything once, so that a life costs
milliseconds, and it has never trained itself, so that forking is safe on every machine. Run as a script,
this file is that server: it reads one JSON line per life and answers with how the life ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from subprocesses import TESTS, environment
from training_toys import TABLE, timeless, train

from gapped.comparison import records
from gapped.comparison.records import Record
from gapped_lab import data as data_sets
from gapped_lab.recipe import recipe_from
from gapped_lab.store import Store

# Two tables that share runs; three fleets, one run that diverges, and everything that a run can measure.
VARIANCE = {"variance_samples": 3, "variance_images": 10, "variance_every_epoch": True}
TABLES: list[dict[str, Any]] = [
    {
        "name": "first",
        "seeds": 2,
        "runs_per_fleet": 4,
        "cell": [{"estimator": "gst:gap=0.8"}, {"estimator": "gumbel-softmax"}],
    },
    {
        "name": "second",
        "cell": [
            {"estimator": "gst:gap=0.8"},
            {"estimator": "straight-through", "learning_rate": 1e30, "label": "broken"},
            {
                "estimator": "gst:gap=expected",
                "schedule": {"kind": "mixed", "period": 3},
                "tau": 0.1,
                "rate_decay": "cosine",
            },
        ],
    },
    {"name": "third", "epochs": 2, "cell": [{"estimator": "reinmax", "tau": 1.0}]},
]
FILES = ("records.jsonl", "curves.jsonl", "images.jsonl")
KILLS = 30


def train_tables(folder: Path) -> None:
    recipes = [recipe_from({**TABLE, "epochs": 4, **VARIANCE, **table}, "toy") for table in TABLES]
    train(recipes, folder, checkpoint_seconds=0)


# Lives


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


def dying(function: Callable[..., Any], nth: int, *, after: bool) -> Callable[..., Any]:
    """`function`, but its nth call is the last thing that happens, or the first that does not."""
    calls = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and not after:
            die()
        result = function(*arguments, **options)
        if calls == nth:
            die()
        return result

    return wrapped


def torn_write(file_name: str, nth: int, share: float) -> Callable[..., None]:
    """Appending, but the nth time to `file_name` the disk gets only a part of the bytes."""
    write, calls = records.write, 0

    def wrapped(folder: Path, lines: Any, sync: bool = True) -> None:
        nonlocal calls
        path = folder / file_name
        if lines and file_name == lines[0].FILE:
            calls += 1
            if calls == nth:
                size = path.stat().st_size if path.exists() else 0
                write(folder, lines)
                os.truncate(path, size + int((path.stat().st_size - size) * share))
                die()
        write(folder, lines)

    return wrapped


def half_save(nth: int) -> Callable[..., None]:
    """Saving, but the nth checkpoint is cut off in the middle of its bytes."""
    save, calls = torch.save, 0

    def wrapped(state: Any, file: Any) -> None:
        nonlocal calls
        calls += 1
        save(state, file)
        if calls == nth:
            file.flush()
            os.truncate(file.fileno(), file.tell() // 2)
            die()

    return wrapped


def arrange(death: str, nth: int) -> None:
    """Make this process die at a chosen point."""
    if death.endswith(" replace"):
        os.replace = dying(os.replace, nth, after=death.startswith("after"))
    elif death == "half a checkpoint":
        torch.save = half_save(nth)
    elif death == "before dropping the checkpoint":
        Store.drop_checkpoint = dying(Store.drop_checkpoint, nth, after=False)  # type: ignore[method-assign]
    elif death.startswith("before appending to "):
        records.write = torn_write(death.split()[-1], nth, 0.0)
    elif death.startswith("torn "):
        _, percent, _, file_name = death.split()
        records.write = torn_write(file_name, nth, float(percent) / 100)
    else:
        raise AssertionError(death)


def live(job: dict[str, Any]) -> NoReturn:
    """One life, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore" if job.get("torn") else "error")
    try:
        if job.get("death"):
            arrange(job["death"], job["nth"])
        train_tables(Path(job["folder"]))
    except BaseException as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def serve() -> None:
    # Imports what is imported on first use, without any training.
    data_sets.load("digits")
    print("ready", flush=True)
    for text in sys.stdin:
        job = json.loads(text)
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            live(job)
        if job.get("delay") is not None:
            time.sleep(job["delay"])
            # Not waited for yet, so the number cannot have passed to another process.
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        answer = {"killed": killed, "ok": status == 0, "seconds": time.monotonic() - began}
        print(json.dumps(answer), flush=True)


class Server:
    """The server in a process of its own."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, __file__]
        self.process: Any = subprocess.Popen(command, **pipes, text=True, env=environment(TESTS))
        assert self.process.stdout.readline() == "ready\n"

    def life(self, folder: Path, **job: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"folder": str(folder), **job}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert answer["killed"] or answer["ok"], "the life ended by an error of its own: see standard error"
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    server = Server()
    yield server
    server.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory) -> dict[str, Any]:
    """The files of an uninterrupted run, and how long it takes."""
    folder = tmp_path_factory.mktemp("whole")
    server.life(folder)
    again = tmp_path_factory.mktemp("again")
    seconds = server.life(again)["seconds"]
    assert outcome(folder) == outcome(again), "not even repeatable"
    return {"outcome": outcome(folder), "seconds": seconds}


def outcome(folder: Path) -> dict[str, Any]:
    """Everything but times, in the order of the files; curves and images to the byte."""
    return {
        "records": timeless(records.read(folder, Record)),
        **{name: (folder / name).read_bytes() for name in FILES[1:]},
    }


def is_torn(path: Path) -> bool:
    content = path.read_bytes()
    return bool(content) and not content.endswith(b"\n")


def leftovers(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {".lock", *FILES}


def test_the_uninterrupted_run_is_what_the_tables_ask_for(whole):
    lines = whole["outcome"]["records"]
    assert len(lines) == len({line.key for line in lines}) == 8
    assert len({line.id for line in lines}) == 7
    assert [line.label for line in lines if line.status == "diverged"] == ["broken"]
    assert len({line.runs_in_fleet for line in lines}) > 1


def test_killed_at_random_points(server, whole, tmp_path):
    """Lives of random length until the tables are complete, again and again, until enough were cut short.

    How far a life comes depends on the machine, so it goes on until some have ended between two fleets.
    """
    dice = random.Random(20220)
    kills, rounds = 0, 0
    states: set[tuple[int, ...]] = set()
    while kills < KILLS or len(states) < 3:
        rounds += 1
        assert rounds < 60, "all kills came before the first or after the last fleet had finished"
        folder, lives = tmp_path / str(rounds), 0
        while True:
            lives += 1
            # Mostly short, so that a round takes many lives; some long, so that it ends.
            delay = dice.random() ** 2 * 1.2 * whole["seconds"]
            answer = server.life(folder, delay=delay if lives < 40 else None, torn=True)
            if answer["ok"]:
                break
            kills += 1
            states.add(tuple((folder / n).stat().st_size if (folder / n).exists() else 0 for n in FILES))
            for name in FILES[1:]:  # Whatever is there is a beginning of what there will be.
                if (folder / name).exists():
                    complete = (folder / name).read_bytes()
                    assert whole["outcome"][name].startswith(complete[: complete.rfind(b"\n") + 1])
        assert outcome(folder) == whole["outcome"]
    assert rounds > 1


# Where, and at which of its occurrences: the first, and one in a later fleet.
PLACES: dict[str, list[int]] = {
    "before replace": [1, 3, 6],
    "after replace": [1, 4, 6],
    "half a checkpoint": [2, 7],
    "before appending to curves.jsonl": [1],
    "before appending to images.jsonl": [2],
    "before appending to records.jsonl": [1, 3],
    "before dropping the checkpoint": [1, 3],
    "torn 30 of curves.jsonl": [1],
    "torn 70 of curves.jsonl": [2],
    "torn 40 of images.jsonl": [1],
    "torn 10 of records.jsonl": [1],
    "torn 60 of records.jsonl": [1],
    "torn 99 of records.jsonl": [2],
    "torn 50 of records.jsonl": [3],
}
DEATHS = [(death, nth) for death, calls in PLACES.items() for nth in calls]
# Those that leave more than the files of results, and no torn line.
MESSY = [("half a checkpoint", 2), ("before replace", 3), ("before dropping the checkpoint", 3)]


@pytest.mark.parametrize(("death", "nth"), DEATHS, ids=[f"{death}, {nth}" for death, nth in DEATHS])
def test_killed_at_a_chosen_point(server, whole, tmp_path, death, nth):
    """The next life completes the tables, and removes what the kill left: checkpoints may be gigabytes."""
    assert server.life(tmp_path, death=death, nth=nth)["killed"], "that point was never reached"
    assert leftovers(tmp_path) or (death, nth) not in MESSY, "nothing was left: the test has no power"
    torn = any((tmp_path / name).exists() and is_torn(tmp_path / name) for name in FILES)
    assert torn == death.startswith("torn")
    assert server.life(tmp_path, torn=torn)["ok"]
    assert outcome(tmp_path) == whole["outcome"]
    assert leftovers(tmp_path) == set()


if __name__ == "__main__":
    serve()
