"""Engines in one process, with a fake for Ray: fleets shared, stopped, lost and failed."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import FakeRay
from training_toys import Recorder, one_line, outcome, toy_recipe, train

from gapped.cli.app import main
from gapped.comparison import ray_tasks
from gapped.comparison.records import Record
from gapped.errors import GappedError, MissingExtra
from gapped_lab import training
from gapped_lab.engines import engine
from gapped_lab.engines import ray as ray_engine
from gapped_lab.engines.local import Local
from gapped_lab.engines.ray import Ray
from gapped_lab.planning import plan
from gapped_lab.recipe import find_recipe
from gapped_lab.store import Store
from gapped_lab.training import Interrupted, Settings

TOY = toy_recipe(seeds=4, runs_per_fleet=1)


def run(each: Any, folder: Path, recorder: Recorder | None = None, **settings: Any) -> list[Record]:
    """Train the toy recipe, of four fleets, with an engine."""
    return each.run([TOY], Store(folder), Settings(callbacks=recorder or Recorder(), **settings))


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_tasks, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in ray_tasks.SETTINGS.items():
        monkeypatch.setenv(name, value)
    return fake


@pytest.mark.usefixtures("fake_ray")
def test_an_interrupted_command_goes_on_under_another_engine(tmp_path):
    """The plan depends on what was asked for, and not on who does it."""
    train(TOY, tmp_path / "a")
    with pytest.raises(Interrupted):
        run(Local("cpu"), tmp_path / "b", Recorder(stop_after=3))
    # Ray's workers stop, too, and those that have not begun do not begin.
    recorder = Recorder(stop_after=1)
    with pytest.raises(Interrupted):
        run(Ray("cpu"), tmp_path / "b", recorder)
    assert len(recorder.finished) == 2, "the wish is passed on with the news of the first, during the second"
    recorder = Recorder()
    run(Local("cpu"), tmp_path / "b", recorder)
    assert outcome(tmp_path / "b") == outcome(tmp_path / "a")
    assert len(recorder.finished) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_every_worker_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [each.index for each in Local("cuda", 3).devices()] == [0, 1, 0]
    assert [each.index for each in Local("auto", 2).devices()] == [0, 1]
    assert [each.index for each in Local("cuda:1", 2).devices()] == [1, 1]


def test_one_fleet_needs_no_other_process(monkeypatch, tmp_path):
    monkeypatch.setattr("gapped_lab.engines.local.train_all", None)
    assert len(Local("cpu", 8).run([toy_recipe()], Store(tmp_path), Settings())) == 1


def test_ray_leaves_the_signals_to_the_command(monkeypatch, fake_ray, tmp_path):
    """`ray.init` takes SIGTERM for itself, and would end the driver before its workers have a checkpoint."""
    before = signal.getsignal(signal.SIGTERM)
    init = fake_ray.init

    def takes_sigterm(*address: str, **how: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        init(*address, **how)

    monkeypatch.setattr(fake_ray, "init", takes_sigterm)

    class Looking(Recorder):
        def epoch(self, *news: Any) -> None:
            super().epoch(*news)
            assert signal.getsignal(signal.SIGTERM) == before

    recorder = Looking()
    try:
        run(Ray("cpu"), tmp_path, recorder)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert recorder.epochs


@pytest.mark.slow
@pytest.mark.skipif(ray_tasks.ray is None, reason="ray is not installed")
def test_an_address_where_no_cluster_answers(monkeypatch, tmp_path):
    """Neither a closed port nor one where something else listens; Ray would go on trying."""
    monkeypatch.setattr(ray_tasks, "_ANSWER_SECONDS", 3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (1, silent.getsockname()[1]):
            with pytest.raises(GappedError, match=f"127.0.0.1:{port}', where no Ray cluster answers within"):
                run(Ray("cpu", f"127.0.0.1:{port}"), tmp_path)


@pytest.mark.usefixtures("fake_ray")
def test_ray_without_a_shared_folder(monkeypatch, tmp_path):
    """No checkpoints, a word about it, and the same records."""
    train(TOY, tmp_path / "a")
    monkeypatch.setattr(ray_engine, "plan_path", lambda folder, _: tmp_path / "elsewhere" / "c" / "plan")
    saved: list[str] = []
    monkeypatch.setattr(Store, "save_checkpoint", lambda _, key, state: saved.append(key))
    with pytest.warns(UserWarning, match="a worker does not see this folder and keeps no checkpoints"):
        run(Ray("cpu"), tmp_path / "b", checkpoint_seconds=0)
    assert outcome(tmp_path / "b") == outcome(tmp_path / "a")
    assert saved == []
    assert not (tmp_path / "elsewhere").exists()


def test_ray_gets_gpus_as_resources(fake_ray, tmp_path):
    with pytest.raises(GappedError, match="Ray sees no GPU here"):
        run(Ray("cuda"), tmp_path)
    assert ray_tasks.device_type("auto", None) == "cpu"
    assert ray_tasks.device_type("cuda", "a-cluster-that-grows:6379") == "cuda"
    fake_ray.gpus = 4
    assert ray_tasks.device_type("auto", None) == "cuda"
    job = ray_engine._Job(tmp_path / "c" / "plan", "cuda", Settings())
    ray_engine._train_all([], Store(tmp_path), job)
    assert fake_ray.options[-1] == {"num_cpus": 1, "num_gpus": 1, "max_retries": 3}
    with pytest.raises(GappedError, match="device: got 'cuda:1', expected auto, cpu or cuda"):
        engine("ray", "cuda:1")


ENGINES = {"local": Local, "ray": Ray, "ray, worker lost": Ray}


def failing(problem: Exception, *keys: str) -> Any:
    """A `build` that fails for these fleets, or for all."""
    build = training.build

    def fail(specs: Any, device: Any, data_dir: Any, key: str) -> Any:
        if not keys or key in keys:
            raise problem
        return build(specs, device, data_dir, key)

    return fail


@pytest.mark.parametrize("kind", ENGINES)
def test_a_fleet_that_fails_fails_alone(monkeypatch, fake_ray, tmp_path, kind):
    """Its runs are recorded as failed; the same command, given again, tries them again, and only them."""
    train(TOY, tmp_path / "a")
    bad = plan([TOY])[1]
    with monkeypatch.context() as patch:
        error = RuntimeError
        if kind == "ray, worker lost":
            error = fake_ray.exceptions.RayError
            patch.setattr(ray_engine, "attempt", training.train)
        patch.setattr(training, "build", failing(error("the machine\nis gone"), bad.key))
        for attempt in range(2):
            recorder = Recorder()
            lines = run(ENGINES[kind]("cpu"), tmp_path / "b", recorder)
            assert [line.status for line in lines] == ["ok", "failed", "ok", "ok"]
            assert (lines[1].id, lines[1].fleet) == (bad.specs[0].id, bad.key)
            only = lines[0].to_json().keys() ^ lines[1].to_json().keys()
            assert only == {"fleet", "error", "fleet_gpu_memory_gb"}, "fields of runs that failed, or did not"
            assert "Error: the machine is gone" in lines[1].error
            assert len(recorder.finished) == (1 if attempt else 4)
        assert not fake_ray.up, "the cluster was left running"
    run(ENGINES[kind]("cpu"), tmp_path / "b")
    lines, *others = outcome(tmp_path / "b")
    assert [[line for line in lines if not line.failed], *others] == outcome(tmp_path / "a")
    assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.parametrize("kind", ["local", "ray, worker lost"])
def test_a_package_that_is_missing_ends_the_command(monkeypatch, fake_ray, tmp_path, kind):
    """No fleet fails for it: with the package, the same command would do."""
    problem: Any = MissingExtra("digits needs scikit-learn")
    if kind == "ray, worker lost":
        lost = fake_ray.exceptions.RayError("a traceback")
        lost.cause, problem = problem, lost
        monkeypatch.setattr(ray_engine, "attempt", training.train)
    monkeypatch.setattr(training, "build", failing(problem))
    with pytest.raises(MissingExtra, match="digits needs scikit-learn"):
        run(ENGINES[kind]("cpu"), tmp_path)
    assert not (tmp_path / "records.jsonl").exists()


def test_failures_are_listed_at_the_end(monkeypatch, capsys, tmp_path):
    """With the fleet and the reason, after the tables of what is there; the exit status is 1."""
    fleets = plan([find_recipe("smoke", quick=True)])
    arguments = ["reproduce", "smoke", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(training, "build", failing(MemoryError("no room"), fleets[0].key, fleets[2].key))
        assert main(arguments) == 1
    printed = capsys.readouterr()
    assert "Report:" in printed.out
    for n, line in zip((0, 2), printed.err.splitlines(), strict=True):
        assert line.startswith(f"gapped: fleet {fleets[n].key} failed (")
        assert "; the same command tries it again): MemoryError: no room" in line
        assert fleets[n].label(fleets[n].specs[0]) in line
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""


ERRORS = {
    "unknown": (["--engine", "slurm"], "--engine: got 'slurm', expected local or ray"),
    "workers of Ray": (["--engine", "ray", "--workers", "2"], "--workers: goes with --engine local"),
    "no workers": (["--workers", "0"], "--workers: got 0, expected a positive integer"),
    "address of nothing": (["--ray-address", "auto"], "--ray-address: got 'auto', expected only with"),
    "no ray": (["--engine", "ray"], '--engine ray needs ray: pip install "gapped[ray]"'),
    "no runs": (["--runs-per-fleet", "0"], "runs_per_fleet: got 0, expected a positive integer"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_leave_nothing(monkeypatch, capsys, tmp_path, case):
    arguments, message = ERRORS[case]
    monkeypatch.setattr(ray_tasks, "ray", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["reproduce", "smoke", "--out", str(tmp_path / "o"), *arguments]) == 2
    assert message in one_line(capsys)
    assert not (tmp_path / "o").exists()
