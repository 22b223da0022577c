"""The laboratory: what it records, what it skips and shares, what it leaves alone."""

from __future__ import annotations

import base64
import json
import math
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MEMBERS

import gapped
from gapped.errors import GappedError
from gapped.lab import environment, local, records
from gapped.lab.environment import describe, pick_device
from gapped.lab.fleet.trainer import Trainer
from gapped.lab.fleets import Fleet
from gapped.lab.local import Interrupted, run
from gapped.lab.recipe import Recipe, recipe_from
from gapped.lab.store import Store

CPU = torch.device("cpu")
# Two steps an epoch: small enough to train dozens of runs in a second.
TABLE: dict[str, Any] = {
    "task": "vae",
    "protocol": "digits-8x8",
    "data": "digits",
    "train_images": 200,
    "test_images": 30,
    "epochs": 2,
    "tau": 0.5,
}


def recipe(*estimators: str, name: str = "toy", **changes: Any) -> Recipe:
    cells = [{"estimator": text} for text in estimators or ("gst:gap=1.0",)]
    return recipe_from({**TABLE, "cell": cells, **changes, "name": name}, "toy")


class Spy:
    """Writes down what is trained, and asks for a stop after so many epochs."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.fleets: list[Fleet] = []
        self.seen: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self.stop_after = stop_after

    def start(self, fleets: Sequence[Fleet]) -> None:
        self.fleets = list(fleets)

    def epoch(self, fleet: Fleet, trainer: Trainer) -> None:
        self.seen.append((fleet.key, trainer.epoch))

    def done(self, fleet: Fleet) -> None:
        self.finished.append(fleet.key)

    def wants_stop(self) -> bool:
        return self.stop_after is not None and len(self.seen) >= self.stop_after

    @property
    def trained(self) -> list[str]:
        return [spec.id for fleet in self.fleets for spec in fleet.specs]


def lines(folder: Path, name: str = "records") -> list[dict[str, Any]]:
    return records.load(folder / f"{name}.jsonl")


def numbers(made: Sequence[dict[str, Any]]) -> list[Any]:
    """What must not depend on how often a run was interrupted: all but times."""
    timed = ("seconds_per_epoch",)
    return [
        (
            each["recipe"],
            each["id"],
            each["status"],
            {k: v for k, v in each["metrics"].items() if k not in timed},
        )
        for each in made
    ]


# Records


def test_a_record_says_everything_about_its_run(tmp_path):
    asked = recipe("gst:gap=1.2", seeds=2, schedule={"kind": "mixed", "period": 2}, split="validation")
    made = run([asked], Store(tmp_path), CPU)
    assert made == lines(tmp_path)
    first, second = made
    assert (first["seed"], second["seed"]) == (0, 1)
    assert first["id"] == asked.entries[0].spec.id
    expected = {
        "schema": 1,
        "recipe": "toy",
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
    assert {key: first[key] for key in expected} == expected
    assert set(first["metrics"]) == {"train_negative_elbo", "validation_negative_elbo"}
    assert all(20 < value < 60 for value in first["metrics"].values())
    assert first["metrics"] != second["metrics"]
    assert first["seconds"] > 0
    assert set(first["environment"]) >= {"gapped", "commit", "torch", "device", "python"}
    assert first["environment"]["gapped"] == gapped.__version__


def test_curves_and_images_are_keyed_by_run(tmp_path):
    asked = recipe("gst", "reinmax:tau=1.0", seeds=2, variance_samples=3, variance_images=20)
    made = run([asked], Store(tmp_path), CPU)
    curves = {each["id"]: each for each in lines(tmp_path, "curves")}
    assert set(curves) == {each["id"] for each in made}
    for each in made:
        curve = curves[each["id"]]
        assert curve["epoch"] == [1, 2]
        for name in ("train_negative_elbo", "test_negative_elbo"):
            assert len(curve[name]) == 2
            assert curve[name][-1] == each["metrics"][name]
        assert each["metrics"]["gradient_variance"] > 0
        assert "gradient_variance" not in curve, "measured once, after the last epoch"
    images = lines(tmp_path, "images")
    assert [each["id"] for each in images] == [each["id"] for each in made if each["seed"] == 0]
    for each in images:
        assert (each["height"], each["width"], each["count"]) == (8, 8, 10)
        for name in ("original", "reconstruction", "sample"):
            assert len(base64.b64decode(each[name])) == 10 * 64


def test_variance_after_every_epoch_is_a_curve(tmp_path):
    asked = recipe("gst", variance_samples=3, variance_images=20, variance_every_epoch=True)
    (made,) = run([asked], Store(tmp_path), CPU)
    (curve,) = lines(tmp_path, "curves")
    assert len(curve["gradient_variance"]) == 2
    assert curve["gradient_variance"][-1] == made["metrics"]["gradient_variance"]
    assert len(set(curve["gradient_variance"])) == 2


def test_entropy_recipes_train_so_many_steps_and_no_more(tmp_path):
    asked = recipe(
        "gst:tau=0.1", "gumbel-softmax:tau=0.1", "gumbel-softmax:tau=1.0", entropy_steps=2, epochs=1
    )
    spy = Spy()
    made = run([asked], Store(tmp_path), CPU, watch=spy)
    assert spy.seen == []
    assert lines(tmp_path, "curves") == []
    entropies = [each["metrics"] for each in made]
    assert all(set(each) == {"surrogate_entropy"} for each in entropies)
    gst, sharp, flat = (each["surrogate_entropy"] for each in entropies)
    assert 0 < sharp < flat < math.log(8)
    assert 0 < gst < math.log(8)


def test_more_entropy_steps_than_an_epoch_has(tmp_path):
    (made,) = run([recipe("gst", entropy_steps=3, epochs=1)], Store(tmp_path), CPU)
    assert made["error"] == "entropy_steps: got 3, expected at most 2, one epoch"


def test_a_run_alone_has_its_time(tmp_path):
    asked = recipe("gst", "straight-through", runs_per_fleet=1)
    spy = Spy()
    made = run([asked], Store(tmp_path), CPU, watch=spy)
    assert [len(fleet.specs) for fleet in spy.fleets] == [1, 1]
    assert all(each["metrics"]["seconds_per_epoch"] > 0 for each in made)
    assert all("gpu_memory_gb" not in each["metrics"] for each in made)


def test_runs_do_not_depend_on_what_else_is_in_the_folder_or_on_the_global_seed(tmp_path):
    first = run([recipe("gst", "gumbel-softmax")], Store(tmp_path / "a"), CPU)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        second = run([recipe("gst", "gumbel-softmax")], Store(tmp_path / "b"), CPU)
    assert numbers(first) == numbers(second)
    assert (tmp_path / "b" / "notes.txt").read_text() == "mine"


def test_learning_rates_of_cells_are_used(tmp_path):
    cell = {"estimator": "gst", "learning_rate": [2e-3, 1e-6, 2e-2]}
    made = run([recipe(cell=[cell], epochs=5)], Store(tmp_path), CPU)
    own, tiny, large = (each["metrics"]["test_negative_elbo"] for each in made)
    assert large < own < tiny
    assert len({each["id"] for each in made}) == 3


# Divergence


def test_a_diverged_run_is_recorded_as_such_and_the_others_go_on(tmp_path):
    cell = {"estimator": "gst", "label": "rate {learning_rate}"}
    cells = [cell | {"learning_rate": 1e30}, cell | {"learning_rate": 2e-3}]
    made = run([recipe(cell=cells)], Store(tmp_path), CPU)
    assert [each["status"] for each in made] == ["diverged", "ok"]
    assert made[0]["metrics"] == {"train_negative_elbo": None, "test_negative_elbo": None}
    assert all(math.isfinite(value) for value in made[1]["metrics"].values())

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for name in ("records", "curves", "images"):
        for text in (tmp_path / f"{name}.jsonl").read_text().splitlines():
            json.loads(text, parse_constant=refuse)
    curve = next(each for each in lines(tmp_path, "curves") if each["id"] == made[0]["id"])
    assert curve["test_negative_elbo"] == [None, None]


def test_a_run_whose_very_last_step_breaks_it_is_not_called_sound(tmp_path):
    # One step: the loss before it is finite, the weights after it are useless.
    (made,) = run([recipe("gst", train_images=100, epochs=1, learning_rate=1e30)], Store(tmp_path), CPU)
    assert made["metrics"]["test_negative_elbo"] is None
    assert made["status"] == "diverged"


# Skipping and sharing


def test_a_finished_recipe_trains_nothing(tmp_path):
    asked = [recipe("gst", "straight-through", seeds=2)]
    made = run(asked, Store(tmp_path), CPU)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    spy = Spy()
    assert run(asked, Store(tmp_path), CPU, watch=spy) == made
    assert (spy.fleets, spy.seen, spy.finished) == ([], [], [])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert set(before) == {"records.jsonl", "curves.jsonl", "images.jsonl"}


def test_another_recipe_reuses_the_runs_it_shares(tmp_path):
    first, second = recipe("gst", "straight-through", name="a"), recipe("gst", "reinmax:tau=1.0", name="b")
    made = run([first], Store(tmp_path), CPU)
    spy = Spy()
    more = run([second], Store(tmp_path), CPU, watch=spy)
    assert spy.trained == [second.entries[1].spec.id]
    assert [each["recipe"] for each in more] == ["b", "b"]
    assert more[0]["metrics"] == made[0]["metrics"]
    keys = [(each["recipe"], each["id"]) for each in lines(tmp_path)]
    assert len(keys) == len(set(keys)) == 4
    assert len(lines(tmp_path, "curves")) == 3
    again = Spy()
    run([second], Store(tmp_path), CPU, watch=again)
    run([first], Store(tmp_path), CPU, watch=again)
    assert again.fleets == []


def test_finished_runs_are_not_trained_again_beside_unfinished_ones(tmp_path):
    first, second = recipe("gst", name="a"), recipe("straight-through", name="b")
    made = run([first], Store(tmp_path), CPU)
    spy = Spy()
    both = run([first, second], Store(tmp_path), CPU, watch=spy)
    assert both[0] == made[0]
    assert spy.trained == [second.entries[0].spec.id], "a finished run is never recomputed"


def test_recipes_trained_together_share_runs_and_fleets(tmp_path):
    first, second = recipe("gst", "straight-through", name="a"), recipe("gst", "reinmax:tau=1.0", name="b")
    spy = Spy()
    made = run([first, second], Store(tmp_path), CPU, watch=spy)
    (fleet,) = spy.fleets
    assert len(spy.trained) == len(set(spy.trained)) == 3
    assert [(each["recipe"], each["estimator"]) for each in made] == [
        ("a", "gst"),
        ("a", "straight-through"),
        ("b", "gst"),
        ("b", "reinmax"),
    ]
    assert made[0]["metrics"] == made[2]["metrics"]
    assert made[0]["id"] == made[2]["id"]
    assert all(each["runs_in_fleet"] == 3 for each in made)
    assert fleet.key in spy.finished


@pytest.mark.parametrize("how", ["seeds", "cells"])
def test_the_same_run_cannot_be_asked_for_twice(how):
    with pytest.raises(GappedError, match="the same run is asked for twice: gst at"):
        recipe("gst", seeds=[0, 0]) if how == "seeds" else recipe("gst", "gst")


def test_quick_and_full_runs_are_kept_apart(tmp_path):
    table = {**TABLE, "name": "toy", "cell": [{"estimator": "gst"}], "quick": {"epochs": 1}}
    full, quick = recipe_from(table, "t"), recipe_from(table, "t", quick=True)
    run([full], Store(tmp_path), CPU)
    run([quick], Store(tmp_path), CPU)
    assert [(each["quick"], each["epochs"]) for each in lines(tmp_path)] == [(False, 2), (True, 1)]


# Interruption


def test_a_wanted_stop_saves_a_checkpoint_and_the_next_call_completes(tmp_path):
    asked = [
        recipe("gst", "gumbel-softmax", name="a", epochs=4, seeds=2, runs_per_fleet=2),
        recipe(
            "gst", "straight-through:tau=0.2", name="b", epochs=4, schedule={"kind": "mixed", "period": 3}
        ),
    ]
    whole = run(asked, Store(tmp_path / "whole"), CPU)
    for stop_after in (1, 3, 4, 6):
        folder = tmp_path / f"stopped-{stop_after}"
        first, second = Spy(stop_after), Spy()
        with pytest.raises(Interrupted):
            run(asked, Store(folder), CPU, watch=first)
        assert len(first.seen) == stop_after
        assert len(list((folder / "checkpoints").glob("*.pt"))) == 1
        made = run(asked, Store(folder), CPU, watch=second)
        assert numbers(made) == numbers(whole)
        assert numbers(lines(folder)) == numbers(lines(tmp_path / "whole"))
        assert len(first.seen) + len(second.seen) == 4 * len(first.fleets), "an epoch was trained twice"
        for name in ("curves", "images"):
            assert lines(folder, name) == lines(tmp_path / "whole", name)
        assert not (folder / "checkpoints").exists()


def test_checkpoints_are_written_at_intervals(tmp_path, monkeypatch):
    saved: list[int] = []
    monkeypatch.setattr(Store, "save_checkpoint", lambda self, key, state: saved.append(state["epoch"]))
    run([recipe(epochs=3)], Store(tmp_path / "a"), CPU, checkpoint_seconds=3600)
    assert saved == []
    run([recipe(epochs=3)], Store(tmp_path / "b"), CPU, checkpoint_seconds=0)
    assert saved[:2] == [1, 2]


def test_removed_records_are_trained_again_beside_an_interrupted_command(tmp_path):
    """Also where the runs were not part of what was interrupted."""
    asked = [recipe("gst", "reinmax", epochs=2)]
    whole = run(asked, Store(tmp_path / "whole"), CPU)
    store = Store(tmp_path / "o")
    run([recipe("gst", epochs=2)], store, CPU)
    with pytest.raises(Interrupted):
        run(asked, store, CPU, watch=Spy(stop_after=1))
    (tmp_path / "o" / "records.jsonl").unlink()
    made = run(asked, Store(tmp_path / "o"), CPU)
    assert [each["id"] for each in made] == [each["id"] for each in whole]
    assert [each["status"] for each in made] == ["ok", "ok"]


def test_checkpoints_of_runs_that_another_command_has_finished_go(tmp_path):
    """Those that may still be used stay, until they are."""
    small, large = (recipe("gst", "reinmax", epochs=2, runs_per_fleet=n) for n in (1, 2))
    longer = recipe("gst", epochs=3)
    for asked in (small, longer):
        with pytest.raises(Interrupted):
            run([asked], Store(tmp_path), CPU, watch=Spy(stop_after=1))
    orphan = tmp_path / "checkpoints" / "0123456789abcdef.pt"
    orphan.touch()
    run([large], Store(tmp_path), CPU)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    spy = Spy()
    run([longer], Store(tmp_path), CPU, watch=spy)
    assert len(spy.seen) == 2, "its checkpoint was not used"
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"k": 3}', b'{"k": ["unknown run"]}'])
def test_a_plan_that_is_none_is_one_clear_line(tmp_path, content):
    asked = [recipe(epochs=2)]
    with pytest.raises(Interrupted):
        run(asked, Store(tmp_path), CPU, watch=Spy(stop_after=1))
    (path,) = (tmp_path / "checkpoints").glob("*.plan.json")
    path.write_bytes(content)
    with pytest.raises(GappedError, match=rf"{path.name}: not .* plan .*; remove it to start over"):
        run(asked, Store(tmp_path), CPU)


def bend(path: Path, **changes: Any) -> None:
    """Change entries of a checkpoint, which then lies about itself in no other respect."""
    store, key = Store(path.parents[1]), path.stem
    state = store.load_checkpoint(key, CPU)
    assert state is not None
    store.save_checkpoint(key, {**state, **changes})


BENT: dict[str, Any] = {
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-9] + b"~" + path.read_bytes()[-8:]),
    "too far": lambda path: bend(path, epoch=99),
    "before the first": lambda path: bend(path, epoch=-1),
    "other weights": lambda path: bend(path, model={"w": torch.zeros(3)}),
    "no dictionary": lambda path: bend(path, adam=[]),
    "another recipe's": None,
}


@pytest.mark.parametrize("what", BENT)
def test_a_checkpoint_that_is_not_the_fleet_s_own_is_not_used(tmp_path, what):
    """A line says so, and the fleet starts over: the numbers are those of a run without interruption."""
    asked, spy = [recipe(epochs=3)], Spy(stop_after=1)
    with pytest.raises(Interrupted):
        run(asked, Store(tmp_path / "a"), CPU, watch=spy)
    (path,) = (tmp_path / "a" / "checkpoints").glob("*.pt")
    if BENT[what] is None:
        other = recipe(epochs=3, learning_rate=0.1)
        with pytest.raises(Interrupted):
            run([other], Store(tmp_path / "other"), CPU, watch=Spy(stop_after=1))
        (strange,) = (tmp_path / "other" / "checkpoints").glob("*.pt")
        strange.rename(path)
    else:
        BENT[what](path)
    spy = Spy()
    with pytest.warns(UserWarning, match=rf"{path.name}: .*; its fleet starts over"):
        made = run(asked, Store(tmp_path / "a"), CPU, watch=spy)
    assert len(spy.seen) == 3
    assert numbers(made) == numbers(run(asked, Store(tmp_path / "whole"), CPU))


@pytest.mark.filterwarnings("always")
def test_training_goes_on_where_no_checkpoint_can_be_written(tmp_path):
    """A full disk, of which a file may hold no more than the records need."""
    with limited(10_000), pytest.warns(UserWarning, match=r"\.pt: no checkpoint could be written \(File too"):
        made = run([recipe()], Store(tmp_path), CPU, checkpoint_seconds=0)
    assert numbers(made) == numbers(run([recipe()], Store(tmp_path / "whole"), CPU))


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


def test_a_folder_that_is_removed_while_it_is_used(tmp_path):
    class Remover(Spy):
        def done(self, fleet: Fleet) -> None:
            if not self.finished:
                shutil.rmtree(tmp_path / "o")
            super().done(fleet)

    asked = [recipe("gst", "reinmax", runs_per_fleet=1)]
    with pytest.raises(
        GappedError, match="o: 1 of 2 records were removed while others were trained; the same"
    ):
        run(asked, Store(tmp_path / "o"), CPU, watch=Remover())
    assert [line["status"] for line in run(asked, Store(tmp_path / "o"), CPU)] == ["ok", "ok"]


# Surroundings


def test_nothing_touches_a_global_random_state(tmp_path):
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    kinds = [name for name in MEMBERS if name != "reinmax"]
    asked = recipe(*kinds, "reinmax:tau=1.0", variance_samples=2, variance_images=10)
    run([asked, recipe("gst", name="e", entropy_steps=1, epochs=1)], Store(tmp_path), CPU)
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


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


def test_the_commit_comes_from_the_environment_where_there_is_no_checkout(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GAPPED_COMMIT", "1a2b3c4d5e6f" + 28 * "0")
    assert describe(CPU)["commit"] == "1a2b3c4d5e6f"
    monkeypatch.setenv("GAPPED_COMMIT", 300 * "v")
    assert describe(CPU)["commit"] == 40 * "v"
    monkeypatch.delenv("GAPPED_COMMIT")
    assert describe(CPU)["commit"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("place", "name", "own"),
    [
        ("src/gapped", "gapped", True),
        ("src/gapped", "another", False),
        ("src/gapped", None, False),
        (".venv/lib/python3.12/site-packages/gapped", "another", False),
        ("vendor/gapped/src/gapped", "gapped", False),
    ],
)
def test_the_commit_is_that_of_the_package_s_own_checkout(monkeypatch, tmp_path, place, name, own):
    module = tmp_path / place / "lab" / "environment.py"
    module.parent.mkdir(parents=True)
    module.touch()
    for root in {tmp_path, *([module.parents[3]] if name == "gapped" else [])}:
        if name is not None:
            (root / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for step in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *step], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    monkeypatch.setattr(environment, "__file__", str(module))
    monkeypatch.delenv("GAPPED_COMMIT", raising=False)
    assert describe(CPU)["commit"] == (head[:12] if own else None)


def test_unknown_data_fails_before_anything_is_trained(tmp_path):
    spy = Spy()
    with pytest.raises(GappedError, match=r"'minst', expected one of .*mnist"):
        run([recipe(name="a"), recipe(name="b", data="minst")], Store(tmp_path), CPU, watch=spy)
    assert spy.seen == [], "hours of training may have gone before the misspelt name was met"


@pytest.mark.parametrize(("device", "entered"), [("cpu", []), ("cuda:1", [torch.device("cuda:1")])])
def test_training_is_on_the_device_that_was_asked_for(monkeypatch, tmp_path, device, entered):
    """And not on the current one, whose streams are what a capture sees."""
    current: list[torch.device] = []

    @contextmanager
    def switched(to: torch.device) -> Iterator[None]:
        current.append(to)
        yield

    def train(*_: object) -> None:
        assert current == entered
        raise Interrupted

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(local, "train", train)
    with pytest.raises(Interrupted):
        run([recipe()], Store(tmp_path), torch.device(device))
