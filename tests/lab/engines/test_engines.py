"""Engines: the same records whoever trains, also when a worker is killed in the middle.

Run as a script, this file is the command that a launcher starts: the `gapped` command, except that every
epoch is written down before it is trained, that checkpoints are made after every epoch, and that one
worker kills itself on the way.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gapped.errors import GappedError, MissingExtra
from gapped.lab import local, records
from gapped.lab.cli.app import main
from gapped.lab.engines import Local, engine, torchrun
from gapped.lab.engines import ray as ray_engine
from gapped.lab.engines.ray import Ray
from gapped.lab.engines.torchrun import Torchrun
from gapped.lab.fleet.trainer import Trainer
from gapped.lab.fleets import plan
from gapped.lab.local import Interrupted, Nobody, request_of
from gapped.lab.recipe import Recipe, find_recipe, recipe_from
from gapped.lab.store import Store

CPU = torch.device("cpu")
FLEETS, EPOCHS = 8, 3
needs_ray = pytest.mark.skipif(ray_engine.ray is None, reason="ray is not installed")
FILES = ("records", "curves", "images")


# The command with a victim


def watched(log: Path, nth: int | None) -> None:
    """Write down each epoch of this process; the nth one, of one process, is its death."""
    train_epoch, calls = Trainer.train_epoch, 0

    def wrapped(trainer: Trainer) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            try:
                os.open(log.with_suffix(".killed"), os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        with open(log, "a") as file:
            file.write(f"{trainer.seed} {trainer.epoch} {os.getpid()}\n")
        train_epoch(trainer)

    Trainer.train_epoch = wrapped  # type: ignore[method-assign]


def command(kind: str, folder: str, log: str, nth: str) -> int:
    # The fifth epoch of a process is in the middle of its second fleet.
    def hook() -> None:
        watched(Path(log), int(nth) or None)

    if kind == "ray":
        ray_engine.ray.init = partial(
            ray_engine.ray.init, num_cpus=2, runtime_env={"worker_process_setup_hook": hook}
        )
    elif os.environ["RANK"] == "1":
        hook()
    else:
        watched(Path(log), None)
    for each in (Torchrun, Ray):
        each.run.__kwdefaults__["checkpoint_seconds"] = 0  # type: ignore[index]
    return main(["--debug", "reproduce", "smoke", "--device", "cpu", "--out", folder, "--engine", kind])


def start(kind: str, folder: Path, log: Path, nth: int = 0) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    arguments = [__file__, kind, str(folder), str(log), str(nth)]
    return subprocess.Popen(
        [sys.executable, *(launcher if kind == "torchrun" else []), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def outcome(folder: Path) -> dict[str, list[Any]]:
    """All that is recorded but times and places, in an order of its own."""
    found = {name: records.load(folder / f"{name}.jsonl") for name in FILES}
    for line in found["records"]:
        line.pop("seconds")
        line.pop("environment")
        line["metrics"].pop("seconds_per_epoch", None)
    return {name: sorted(lines, key=lambda line: line["id"]) for name, lines in found.items()}


def epochs_in(log: Path) -> list[tuple[str, str]]:
    return [(fleet, epoch) for fleet, epoch, _ in map(str.split, log.read_text().splitlines())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the local engine makes of the smoke recipe."""
    folder = tmp_path_factory.mktemp("local")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Local("cpu").run([find_recipe("smoke")], Store(folder))
    torch.set_num_threads(threads)
    found = outcome(folder)
    assert len(found["records"]) == 16
    return found


def test_the_smoke_recipe_has_eight_fleets():
    fleets = plan([find_recipe("smoke")], {})
    assert len(fleets) == FLEETS
    assert {fleet.specs[0].epochs for fleet in fleets} == {EPOCHS}


@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        ("torchrun", 5),
        pytest.param("ray", 5, marks=needs_ray),
        # That nothing changes without a kill either follows from these two; they are here to be certain.
        pytest.param("torchrun", 0, marks=pytest.mark.slow),
        pytest.param("ray", 0, marks=[pytest.mark.slow, needs_ray]),
    ],
)
def test_two_processes_make_the_same_records(whole, tmp_path, kind, nth):
    """With one of them killed by SIGKILL, too; and nothing that was checkpointed is trained again."""
    log = tmp_path / "epochs.log"
    process = start(kind, tmp_path / "out", log, nth)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    assert log.with_suffix(".killed").exists() == bool(nth)
    assert outcome(tmp_path / "out") == whole
    trained = epochs_in(log)
    assert len(trained) == len(set(trained)) == FLEETS * EPOCHS
    workers = {line.split()[2] for line in log.read_text().splitlines()}
    assert len(workers) >= 2
    # One process shows and reports.
    assert printed.count("has the lowest test negative ELBO") == 1
    assert printed.count("training 16 runs in 8 fleets") == 1
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {*(f"{name}.jsonl" for name in FILES), "report.html", "tables.md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "status"),
    [
        ("torchrun", signal.SIGINT, 1),
        pytest.param("ray", signal.SIGINT, 130, marks=needs_ray),
        pytest.param("ray", signal.SIGTERM, 143, marks=needs_ray),
    ],
)
def test_interrupted_and_again(whole, tmp_path, kind, number, status):
    log, folder = tmp_path / "epochs.log", tmp_path / "out"
    process = start(kind, folder, log)
    while not log.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=240)
    assert process.returncode == status, printed
    assert "goes on from the last checkpoint" in printed
    assert len(epochs_in(log)) < FLEETS * EPOCHS, "it had finished before it was interrupted"
    assert list((folder / "checkpoints").glob("*.pt"))
    again = start(kind, folder, log)
    printed, _ = again.communicate(timeout=240)
    assert again.returncode == 0, printed
    assert outcome(folder) == whole
    assert sorted(set(epochs_in(log))) == sorted(epochs_in(log))


# Many writers


CROWD = """
import multiprocessing, sys
from pathlib import Path
from gapped.lab import records
from gapped.lab.store import Store

folder, safe = Path(sys.argv[1]), sys.argv[2] == "locked"
context = multiprocessing.get_context("fork")
barrier = context.Barrier(4)

def made(n):
    return [{"schema": 1, "recipe": "r", "id": f"{n}-{i}", "text": "x" * 3000} for i in range(5)]

def write(own):
    store = Store(folder)
    if not safe:
        from contextlib import nullcontext
        append = records.append
        def late(path, lines):
            # Everybody has looked before anybody writes.
            if path.name == "records.jsonl":
                barrier.wait(60)
            append(path, lines)
        records.locked, records.append = nullcontext, late
    barrier.wait(60)
    for n in range(10):
        # What everybody adds, and what only one does.
        store.add(made(f"shared{n}") + made(f"own{own}-{n}"), {"curves": made(f"shared{n}")})

crowd = [context.Process(target=write, args=(own,)) for own in range(4)]
for each in crowd:
    each.start()
for each in crowd:
    each.join()
sys.exit(any(each.exitcode for each in crowd))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and flock")
@pytest.mark.parametrize("safe", [True, False], ids=["locked", "not locked"])
def test_several_processes_add_to_one_folder(tmp_path, safe):
    arguments = [sys.executable, "-c", CROWD, str(tmp_path), "locked" if safe else "not"]
    # Without the lock lines are added twice, and others may be lost or cut.
    assert (subprocess.run(arguments, timeout=120).returncode == 0 and sound(tmp_path)) == safe


def sound(folder: Path) -> bool:
    """Whether every line of the crowd is there, and none is there twice."""
    for name, count in (("records", 4 * 50 + 50), ("curves", 50)):
        texts = (folder / f"{name}.jsonl").read_text().splitlines()
        if len(texts) != count or len(set(texts)) != count:
            return False
    return len(records.load(folder / "records.jsonl")) == 250


def test_partial_files_of_other_machines_are_left_alone(tmp_path):
    (tmp_path / ".k.pt.another-machine.1.part").touch()
    mine = tmp_path / f".k.pt.{records._machine()}.{2**22 + 1}.part"
    mine.touch()
    records.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".k.pt.another-machine.1.part"]


# Small runs, in this process


def toy(**changes: Any) -> Recipe:
    table = {
        "name": "toy",
        "task": "vae",
        "protocol": "digits-8x8",
        "data": "digits",
        "train_images": 200,
        "test_images": 30,
        "epochs": 2,
        "seeds": 4,
        "runs_per_fleet": 1,
        "cell": [{"estimator": "gst:gap=1.0"}],
    }
    return recipe_from({**table, **changes}, "toy")


class Spy(Nobody):
    """Remembers what it was shown, and asks for a stop after so many epochs."""

    def __init__(self, stop_after: int = 1000) -> None:
        self.seen: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self.stop_after = stop_after

    def epoch(self, fleet: Any, standing: Any) -> None:
        assert list(standing.history)
        assert len(standing.alive.tolist()) == len(fleet.specs)
        self.seen.append((fleet.key, standing.epoch))

    def done(self, fleet: Any) -> None:
        self.finished.append(fleet.key)

    def wants_stop(self) -> bool:
        return len(self.seen) >= self.stop_after


class Answer:
    """What a call to an actor gives: a reference to what it returned."""

    def __init__(self, method: Any, *arguments: Any) -> None:
        self.value = method(*arguments)

    def future(self) -> Any:
        return SimpleNamespace(result=lambda: self.value)


class FakeRay:
    """As much of Ray as is used, in this process and without delay."""

    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))

    def __init__(self, gpus: int = 0) -> None:
        self.options: list[dict[str, Any]] = []
        self.gpus, self.up = gpus, False

    def init(self, *address: str, **_: Any) -> None:
        self.up = True

    def is_initialized(self) -> bool:
        return self.up

    def shutdown(self) -> None:
        self.up = False

    def cluster_resources(self) -> dict[str, int]:
        return {"GPU": self.gpus} if self.gpus else {}

    def remote(self, **options: Any) -> Any:
        self.options.append(options)
        return lambda what: SimpleNamespace(remote=partial(self._made, what))

    def _made(self, what: Any, *arguments: Any) -> Any:
        if not isinstance(what, type):
            return partial(what, *arguments)
        actor = what(*arguments)
        methods = [name for name in vars(what) if not name.startswith("_")]
        calls = {name: SimpleNamespace(remote=partial(Answer, getattr(actor, name))) for name in methods}
        return SimpleNamespace(**calls)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:1], references[1:]

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Answer):
            return reference.value
        return reference()


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_engine, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in ray_engine.SETTINGS.items():
        monkeypatch.setenv(name, value)
    return fake


class FakeChannel(dict[str, str]):
    """A key-value store of one process, in which other ranks have left what `given` says."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self for key in keys)

    def wait(self, keys: Sequence[str]) -> None:
        assert self.check(keys), "would wait forever"


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")


def test_an_interrupted_command_goes_on_under_another_engine(monkeypatch, fake_ray, tmp_path):
    """The plan depends on what was asked for, and not on who does it."""
    local.run([toy()], Store(tmp_path / "a"), CPU)
    store = Store(tmp_path / "b")
    with pytest.raises(Interrupted):
        local.run([toy()], store, CPU, watch=Spy(stop_after=3))
    # Ray's workers stop, too, and those that have not begun do not begin.
    spy = Spy(stop_after=1)
    with pytest.raises(Interrupted):
        Ray("cpu").run([toy()], store, watch=spy)
    assert len(spy.finished) == 2, "the wish is passed on with the news of the first, during the second"
    as_rank(monkeypatch, 0, 1)
    monkeypatch.setattr(torchrun, "_channel", FakeChannel)
    spy = Spy()
    Torchrun("cpu").run([toy()], store, watch=spy)
    assert outcome(tmp_path / "b") == outcome(tmp_path / "a")
    assert len(spy.finished) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_all_fleets_and_none_twice(monkeypatch, tmp_path, world):
    """One after the other here, so each stops where it would wait for the next."""
    trained: list[str] = []

    def train(fleet: Any, *_: Any) -> Any:
        trained.append(fleet.key)
        lines = [{"recipe": "toy", "id": spec.id} for spec in fleet.specs]
        return lines, {}

    monkeypatch.setattr(torchrun, "attempt", train)
    channel = FakeChannel()
    monkeypatch.setattr(torchrun, "_channel", lambda: channel)
    for rank in range(world):
        as_rank(monkeypatch, rank, world)
        waits = rank < min(world, 4) - 1
        spy = Spy(stop_after=0 if waits else 1000)
        with pytest.raises(Interrupted) if waits else nullcontext():
            assert len(Torchrun("cpu").run([toy()], Store(tmp_path), watch=spy)) == 4
        assert set(spy.finished) <= set(trained)
    assert len(trained) == len(set(trained)) == 4


def test_a_rank_that_does_not_see_the_folder_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torchrun, "_channel", lambda: FakeChannel(planned=""))
    monkeypatch.setattr(torchrun, "_SHARED_SECONDS", 0)
    as_rank(monkeypatch, 1, 2)
    with pytest.raises(GappedError, match=r"rank 1 does not see what rank 0 has written there.*shared"):
        Torchrun("cpu").run([toy()], Store(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_sigterm_makes_a_checkpoint(monkeypatch, tmp_path):
    """So does torchrun end the other workers when one has died."""
    as_rank(monkeypatch, 0, 1)
    monkeypatch.setattr(torchrun, "_channel", FakeChannel)

    class Terminated(Spy):
        def epoch(self, fleet: Any, standing: Any) -> None:
            super().epoch(fleet, standing)
            os.kill(os.getpid(), signal.SIGTERM)

    spy = Terminated()
    with pytest.raises(Interrupted):
        Torchrun("cpu").run([toy()], Store(tmp_path), watch=spy)
    assert len(spy.seen) == 1
    assert len(list((tmp_path / "checkpoints").glob("*.pt"))) == 1


def test_ray_that_does_not_start_is_told_in_a_line(monkeypatch, fake_ray, tmp_path):
    def init(*_: str, **__: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore.")

    monkeypatch.setattr(fake_ray, "init", init)
    with pytest.raises(GappedError, match=r"^--engine ray: Ray did not start here: The .* startup\.$"):
        Ray("cpu").run([toy()], Store(tmp_path))


def test_ray_leaves_the_signals_to_the_command(monkeypatch, fake_ray, tmp_path):
    """`ray.init` takes SIGTERM for itself, and would end the driver before its workers have a checkpoint."""
    before = signal.getsignal(signal.SIGTERM)
    init = fake_ray.init

    def takes_sigterm(*address: str, **how: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        init(*address, **how)

    monkeypatch.setattr(fake_ray, "init", takes_sigterm)

    class Looking(Spy):
        def epoch(self, fleet: Any, standing: Any) -> None:
            super().epoch(fleet, standing)
            assert signal.getsignal(signal.SIGTERM) == before

    spy = Looking()
    try:
        Ray("cpu").run([toy(seeds=2)], Store(tmp_path), watch=spy)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert spy.seen


@needs_ray
def test_an_address_where_no_cluster_answers(monkeypatch, tmp_path):
    """Neither a closed port nor one where something else listens; Ray would go on trying."""
    monkeypatch.setattr(ray_engine, "_ANSWER_SECONDS", 3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (1, silent.getsockname()[1]):
            with pytest.raises(
                GappedError, match=f"127.0.0.1:{port}', where no Ray cluster answers within 3"
            ):
                Ray("cpu", f"127.0.0.1:{port}").run([toy(seeds=1)], Store(tmp_path))


def test_every_rank_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    as_rank(monkeypatch, 1, 3)
    assert Torchrun("cuda").device == torch.device("cuda:1")
    assert Torchrun("auto").device == torch.device("cuda:1")
    assert Torchrun("cuda:0").device == torch.device("cuda:0")
    as_rank(monkeypatch, 2, 3)
    with pytest.raises(GappedError, match="got 'cuda:2', but there are 2 CUDA devices"):
        Torchrun("cuda")


def test_ray_without_a_shared_folder(monkeypatch, fake_ray, tmp_path):
    """No checkpoints, a word about it, and the same records."""
    local.run([toy()], Store(tmp_path / "a"), CPU)
    monkeypatch.setattr(ray_engine, "plan_path", lambda folder, _: tmp_path / "elsewhere" / "c" / "plan")
    saved: list[str] = []
    monkeypatch.setattr(Store, "save_checkpoint", lambda _, key, state: saved.append(key))
    with pytest.warns(UserWarning, match="a worker does not see this folder and keeps no checkpoints"):
        Ray("cpu").run([toy()], Store(tmp_path / "b"), checkpoint_seconds=0)
    assert outcome(tmp_path / "b") == outcome(tmp_path / "a")
    assert saved == []
    assert not (tmp_path / "elsewhere").exists()


ENGINES = {
    "local": lambda: Local("cpu"),
    "torchrun": lambda: Torchrun("cpu"),
    "ray": lambda: Ray("cpu"),
    "ray, worker lost": lambda: Ray("cpu"),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_a_fleet_that_fails_fails_alone(monkeypatch, fake_ray, tmp_path, kind):
    """Its runs are recorded as failed; the same command, given again, tries them again, and only them."""
    as_rank(monkeypatch, 0, 1)
    monkeypatch.setattr(torchrun, "_channel", FakeChannel)
    local.run([toy()], Store(tmp_path / "a"), CPU)
    bad = plan([toy()], {})[1]
    build = local.build

    def fail(specs: Any, device: Any, data_dir: Any, key: str) -> Any:
        if key == bad.key:
            if kind == "ray, worker lost":
                raise fake_ray.exceptions.RayError("the machine\nis gone")
            raise RuntimeError("the machine\nis gone")
        return build(specs, device, data_dir, key)

    if kind == "ray, worker lost":
        monkeypatch.setattr(ray_engine, "attempt", local.train)
    monkeypatch.setattr(local, "build", fail)
    store = Store(tmp_path / "b")
    for attempt in range(2):
        spy = Spy()
        made = ENGINES[kind]().run([toy()], store, watch=spy)
        assert [line["status"] for line in made] == ["ok", "failed", "ok", "ok"]
        assert made[1]["id"] == bad.specs[0].id
        assert made[1]["fleet"] == bad.key
        assert "Error: the machine is gone" in made[1]["error"]
        assert len(spy.finished) == (1 if attempt else 4)
    assert not fake_ray.up, "the cluster was left running"
    monkeypatch.setattr(local, "build", build)
    ENGINES[kind]().run([toy()], store)
    found = outcome(tmp_path / "b")
    found["records"] = [line for line in found["records"] if line["status"] != "failed"]
    assert found == outcome(tmp_path / "a")
    assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.parametrize("kind", ["local", "torchrun", "ray, worker lost"])
def test_a_package_that_is_missing_ends_the_command(monkeypatch, fake_ray, tmp_path, kind):
    """No fleet fails for it: with the package, the same command would do."""
    as_rank(monkeypatch, 0, 1)
    monkeypatch.setattr(torchrun, "_channel", FakeChannel)

    def build(*_: Any) -> Any:
        lost = MissingExtra("digits needs scikit-learn")
        if kind != "ray, worker lost":
            raise lost
        problem = fake_ray.exceptions.RayError("a traceback")
        problem.cause = lost
        raise problem

    monkeypatch.setattr(local, "build", build)
    if kind == "ray, worker lost":
        monkeypatch.setattr(ray_engine, "attempt", local.train)
    with pytest.raises(MissingExtra, match="digits needs scikit-learn"):
        ENGINES[kind]().run([toy()], Store(tmp_path))
    assert not (tmp_path / "records.jsonl").exists()


def test_failures_are_listed_at_the_end(monkeypatch, capsys, tmp_path):
    """With the fleet and the reason, after the tables of what is there; the exit status is 1."""
    recipe = find_recipe("smoke", quick=True)
    fleets = plan([recipe], {})
    build = local.build

    def fail(specs: Any, device: Any, data_dir: Any, key: str) -> Any:
        if key in (fleets[0].key, fleets[2].key):
            raise MemoryError(f"no room for {key}")
        return build(specs, device, data_dir, key)

    monkeypatch.setattr(local, "build", fail)
    arguments = ["reproduce", "smoke", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "Report:" in printed.out
    assert [line.partition(" failed (")[0] for line in printed.err.splitlines()] == [
        f"gapped: fleet {fleets[n].key}" for n in (0, 2)
    ]
    for n, line in zip((0, 2), printed.err.splitlines(), strict=True):
        assert "; the same command tries it again): MemoryError: " in line
        assert f"): MemoryError: no room for {fleets[n].key}" in line
        assert fleets[n].label(fleets[n].specs[0]) in line
    monkeypatch.setattr(local, "build", build)
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_ray_gets_gpus_as_resources(fake_ray, tmp_path):
    with pytest.raises(GappedError, match="Ray sees no GPU here"):
        Ray("cuda").run([toy(seeds=1)], Store(tmp_path))
    assert ray_engine._kind("auto", None) == "cpu"
    assert ray_engine._kind("cuda", "a-cluster-that-grows:6379") == "cuda"
    fake_ray.gpus = 4
    assert ray_engine._kind("auto", None) == "cuda"
    job = ray_engine._Job(tmp_path / "c" / "plan", "cuda", None, 0)
    ray_engine._train_all([], Store(tmp_path), job, Nobody())
    assert fake_ray.options[-1] == {"num_cpus": 1, "num_gpus": 1, "max_retries": 3}


def test_a_connection_that_was_there_is_used_and_left(fake_ray, tmp_path):
    fake_ray.up = True
    Ray("cpu").run([toy(seeds=1)], Store(tmp_path))
    assert fake_ray.up


# Options and errors


def test_runs_per_fleet_splits_and_is_part_of_the_request(tmp_path):
    whole, split = find_recipe("smoke", runs_per_fleet=16), find_recipe("smoke", runs_per_fleet=1)
    assert [len(plan([each], {})) for each in (whole, split)] == [1, 16]
    assert request_of([whole]) != request_of([split])


ERRORS = {
    "unknown": (["--engine", "slurm"], "--engine: got 'slurm', expected local, torchrun or ray"),
    "not started by torchrun": (["--engine", "torchrun"], "torchrun --nproc-per-node 2 -m gapped reproduce"),
    "address of nothing": (["--ray-address", "auto"], "--ray-address: got 'auto', expected only with"),
    "no ray": (["--engine", "ray"], '--engine ray needs ray: pip install "gapped[ray]"'),
    "no runs": (["--runs-per-fleet", "0"], "runs_per_fleet: got 0, expected a positive integer"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_leave_nothing(monkeypatch, capsys, tmp_path, case):
    arguments, message = ERRORS[case]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(ray_engine, "ray", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["reproduce", "smoke", "--out", str(tmp_path / "o"), *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.usefixtures("fake_ray")
def test_ray_chooses_the_gpu():
    with pytest.raises(GappedError, match="device: got 'cuda:1', expected auto, cpu or cuda"):
        engine("ray", "cuda:1")


def test_quiet_ranks_print_nothing(monkeypatch, capsys, tmp_path):
    as_rank(monkeypatch, 1, 2)
    recipe = tmp_path / "toy.toml"
    recipe.write_text(
        'name = "toy"\ntask = "vae"\nprotocol = "digits-8x8"\ndata = "digits"\ntrain_images = 100\n'
        'test_images = 30\nepochs = 1\nseeds = 1\n\n[[cell]]\nestimator = "gst"\n'
    )
    arguments = ["reproduce", str(recipe), "--device", "cpu", "--out", str(tmp_path / "o")]
    assert main([*arguments, "--engine", "local"]) == 0
    assert capsys.readouterr().out
    (fleet,) = plan([find_recipe(str(recipe))], {})
    monkeypatch.setattr(torchrun, "_channel", lambda: FakeChannel(planned="", **{fleet.key: ""}))
    (tmp_path / "o" / "report.html").unlink()
    assert main([*arguments, "--engine", "torchrun"]) == 0
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "o" / "report.html").exists()


def test_a_rank_out_of_time_gives_torchrun_no_reason_to_start_it_again(monkeypatch, capsys, tmp_path):
    as_rank(monkeypatch, 0, 1)
    monkeypatch.setattr(torchrun, "_channel", FakeChannel)
    # Two fleets of one epoch each.
    arguments = ["reproduce", "smoke", "--quick", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]
    for _ in range(2):
        assert main([*arguments, "--minutes", "0", "--engine", "torchrun"]) == 0
        assert "gapped: out of time; the same command goes on" in capsys.readouterr().err
        assert (tmp_path / "checkpoints").exists()
    assert main([*arguments, "--minutes", "0", "--engine", "torchrun"]) == 0
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "checkpoints").exists()


if __name__ == "__main__":
    sys.exit(command(*sys.argv[1:]))
