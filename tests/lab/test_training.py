"""Training a fleet: what is recorded, measured and checkpointed, what is left alone, and on which device."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from training_toys import Recorder, interrupt, outcome, timeless, toy_recipe, train

import gapped
from gapped.comparison import records
from gapped.comparison.records import Curve, Record
from gapped.errors import GappedError
from gapped_lab import training
from gapped_lab.engines.local import Local
from gapped_lab.environment import pick_device
from gapped_lab.planning import Fleet
from gapped_lab.progress import Callbacks
from gapped_lab.records import Images
from gapped_lab.store import Store
from gapped_lab.training import Interrupted, Settings

CPU = torch.device("cpu")


def test_a_record_says_everything_about_its_run(tmp_path):
    recipe = toy_recipe("gst:gap=1.2", seeds=2, schedule={"kind": "mixed", "period": 2}, split="validation")
    lines = train(recipe, tmp_path)
    assert lines == records.read(tmp_path, Record)
    first, second = lines
    assert (first.seed, second.seed) == (0, 1)
    expected = {
        "schema": 1,
        "recipe": "toy",
        "id": recipe.entries[0].spec.id,
        "label": "gst:gap=1.2",
        "quick": False,
        "task": "vae",
        "data": "digits",
        "protocol": "digits-8x8",
        "estimator": "gst",
        "options": {"gap": 1.2},
        "tau": 0.5,
        "schedule": {"kind": "mixed", "period": 2},
        "split": "validation",
        "epochs": 2,
        "status": "ok",
        "runs_in_fleet": 2,
    }
    line = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])
    assert {key: line[key] for key in expected} == expected
    measured = {"metrics", "seconds", "environment", "fleet_gpu_memory_gb"}
    assert line.keys() - expected.keys() == {"learning_rate", "rate_decay", "seed"} | measured
    assert set(first.metrics) == {"train_negative_elbo", "validation_negative_elbo"}
    assert all(20 < value < 60 for value in first.metrics.values())
    assert first.metrics != second.metrics
    assert first.seconds > 0
    assert set(first.environment) >= {"gapped", "commit", "torch", "device", "python"}
    assert first.environment["gapped"] == gapped.__version__


def test_curves_and_images_are_keyed_by_run(tmp_path):
    recipe = toy_recipe("gst", "reinmax:tau=1.0", seeds=2, variance_samples=3, variance_images=20)
    lines = train(recipe, tmp_path)
    curves = {each.id: each for each in records.read(tmp_path, Curve)}
    assert set(curves) == {each.id for each in lines}
    for each in lines:
        curve = curves[each.id]
        assert curve.epoch == [1, 2]
        assert set(curve.series) == {"train_negative_elbo", "test_negative_elbo"}, "variance is measured once"
        for name, values in curve.series.items():
            assert len(values) == 2
            assert values[-1] == each.metrics[name]
        assert each.metrics["gradient_variance"] > 0
    images = records.read(tmp_path, Images)
    assert [each.id for each in images] == [each.id for each in lines if each.seed == 0]
    for each in images:
        assert (each.height, each.width, each.count) == (8, 8, 10)
        for name in ("original", "reconstruction", "sample"):
            assert len(base64.b64decode(getattr(each, name))) == 10 * 64


def test_variance_beside_is_that_of_another_estimator_at_the_same_weights(tmp_path):
    """With the factor at zero DoubleCV is RLOO: equal but for rounding; another estimator's differs."""
    how = {"variance_samples": 3, "variance_images": 20, "variance_every_epoch": True}
    for beside, same in (("double-cv:samples=2,alpha=0.0", True), ("rloo:samples=4", False)):
        recipe = toy_recipe("rloo:samples=2", variance_beside=beside, **how)
        train(recipe, tmp_path / beside[:4])
        (curve,) = records.read(tmp_path / beside[:4], Curve)
        own, other = (curve.series[f"gradient_variance{end}"] for end in ("", "_beside"))
        assert len(own) == 2
        assert (own == pytest.approx(other, rel=1e-4)) is same


def test_entropy_recipes_train_so_many_steps_and_no_more(tmp_path):
    estimators = ("gst:tau=0.1", "gumbel-softmax:tau=0.1", "gumbel-softmax:tau=1.0")
    recorder = Recorder()
    lines = train(toy_recipe(*estimators, entropy_steps=2, epochs=1), tmp_path, callbacks=recorder)
    assert recorder.epochs == []
    assert records.read(tmp_path, Curve) == []
    assert all(set(each.metrics) == {"surrogate_entropy"} for each in lines)
    gst, sharp, flat = (each.metrics["surrogate_entropy"] for each in lines)
    assert 0 < sharp < flat < math.log(8)
    assert 0 < gst < math.log(8)
    (line,) = train(toy_recipe("gst", entropy_steps=3, epochs=1), tmp_path)
    assert line.error == "entropy_steps: got 3, expected at most 2, one epoch"


def test_a_run_alone_has_its_time(tmp_path):
    recorder = Recorder()
    lines = train(toy_recipe("gst", "straight-through", runs_per_fleet=1), tmp_path, callbacks=recorder)
    assert [len(fleet.specs) for fleet in recorder.fleets] == [1, 1]
    assert all(each.metrics["seconds_per_epoch"] > 0 for each in lines)
    assert all("gpu_memory_gb" not in each.metrics for each in lines)


def test_runs_do_not_depend_on_what_else_is_in_the_folder_or_on_the_global_seed(tmp_path):
    first = train(toy_recipe("gst", "gumbel-softmax"), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        second = train(toy_recipe("gst", "gumbel-softmax"), tmp_path / "b")
    assert timeless(first) == timeless(second)
    assert (tmp_path / "b" / "notes.txt").read_text() == "mine"


def test_a_diverged_run_is_recorded_as_such_and_the_others_go_on(tmp_path):
    cell = {"estimator": "gst", "label": "rate {learning_rate}"}
    cells = [cell | {"learning_rate": 1e30}, cell | {"learning_rate": 2e-3}]
    broken, sound = train(toy_recipe(cell=cells), tmp_path)
    assert (broken.status, sound.status) == ("diverged", "ok")
    assert broken.metrics == {"train_negative_elbo": None, "test_negative_elbo": None}
    assert all(math.isfinite(value) for value in sound.metrics.values())
    for name in ("records", "curves", "images"):
        assert "NaN" not in (tmp_path / f"{name}.jsonl").read_text(), "not JSON"
    curve = next(each for each in records.read(tmp_path, Curve) if each.id == broken.id)
    assert curve.series["test_negative_elbo"] == [None, None]


def stopped_after_one_epoch(recipe: Any, folder: Path) -> Path:
    """The checkpoint of an interrupted command."""
    interrupt(recipe, folder)
    (path,) = (folder / "checkpoints").glob("*.pt")
    return path


def bend(path: Path, **changes: Any) -> None:
    """Change entries of a checkpoint, which then lies about itself in no other respect."""
    store, key = Store(path.parents[1]), path.stem
    state = store.load_checkpoint(key, CPU)
    assert state is not None
    store.save_checkpoint(key, {**state, **changes})


BENT: dict[str, Any] = {
    "too far": lambda path: bend(path, epoch=99),
    "before the first": lambda path: bend(path, epoch=-1),
    "other weights": lambda path: bend(path, model={"w": torch.zeros(3)}),
    "no dictionary": lambda path: bend(path, adam=[]),
}


@pytest.mark.parametrize("what", BENT)
def test_a_checkpoint_that_is_not_the_fleet_s_own_is_not_used(tmp_path, what):
    """A line says so, and the fleet starts over: the numbers are those of a run without interruption."""
    recipe, recorder = toy_recipe(epochs=3), Recorder()
    path = stopped_after_one_epoch(recipe, tmp_path / "a")
    BENT[what](path)
    with pytest.warns(UserWarning, match=rf"{path.name}: .*; its fleet starts over"):
        lines = train(recipe, tmp_path / "a", callbacks=recorder)
    assert len(recorder.epochs) == 3
    assert timeless(lines) == timeless(train(recipe, tmp_path / "whole"))


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Files may not grow beyond `size` bytes: the nearest thing to a full disk that a test may cause."""
    resource = pytest.importorskip("resource", reason="needs limits on processes")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("always")
def test_training_goes_on_where_no_checkpoint_can_be_written(tmp_path):
    """A full disk, of which a file may hold no more than the records need."""
    with limited(10_000), pytest.warns(UserWarning, match=r"\.pt: no checkpoint could be written \(File too"):
        lines = train(toy_recipe(), tmp_path, checkpoint_seconds=0)
    assert timeless(lines) == timeless(train(toy_recipe(), tmp_path / "whole"))


def test_unknown_data_fails_before_anything_is_trained(tmp_path):
    recorder = Recorder()
    with pytest.raises(GappedError, match=r"'minst', expected one of .*mnist"):
        train([toy_recipe(name="a"), toy_recipe(name="b", data="minst")], tmp_path, callbacks=recorder)
    assert recorder.epochs == [], "hours of training may have gone before the misspelt name was met"


@pytest.mark.parametrize(("device", "entered"), [("cpu", []), ("cuda:1", [torch.device("cuda:1")])])
def test_training_is_on_the_device_that_was_asked_for(monkeypatch, tmp_path, device, entered):
    """And not on the current one, whose streams are what a capture sees."""
    current: list[torch.device] = []

    @contextmanager
    def switched(to: torch.device) -> Iterator[None]:
        current.append(to)
        yield

    def stop(*_: object) -> None:
        assert current == entered
        raise Interrupted

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(training, "train", stop)
    engine = Local("cpu")
    engine.device = torch.device(device)
    with pytest.raises(Interrupted):
        engine.run([toy_recipe()], Store(tmp_path), Settings())


class StopsBefore(Recorder):
    """Asks for a stop at one step, counted over all epochs."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.left = step + 1

    def step(self, fleet: Fleet, epochs: float) -> None:
        self.left -= 1

    def wants_stop(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("step", range(1, 6))
def test_a_stop_before_any_step_changes_nothing(tmp_path, step):
    """With an estimator that has a state, a scheduled temperature, and noise that is used up in part."""
    cells = [
        {"estimator": "rebar"},
        {"estimator": "gst", "schedule": {"kind": "mixed", "period": 3}, "rate_decay": "cosine"},
    ]
    recipe = toy_recipe(cell=cells, seeds=2, train_images=300)
    train(recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "stopped", callbacks=StopsBefore(step))
    goes_on = Steps()
    train(recipe, tmp_path / "stopped", callbacks=goes_on)
    assert goes_on.first == pytest.approx(step / 3)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


class Steps(Callbacks):
    """Notes where training began."""

    first: float | None = None

    def step(self, fleet: Fleet, epochs: float) -> None:
        self.first = epochs if self.first is None else self.first


def test_devices():
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "mps", "", "cuda:x", "meta"):
        with pytest.raises(GappedError, match=f"device: got '{name}', expected auto, cpu or cuda"):
            pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda():
    with pytest.raises(GappedError, match="torch sees no CUDA device here; use --device cpu"):
        pick_device("cuda")
