"""Small recipes, callbacks that note what they are told, and results in a form to compare."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapped.comparison import records
from gapped.comparison.records import Curve, Record
from gapped_lab.engines.local import Local
from gapped_lab.planning import Fleet
from gapped_lab.progress import Callbacks, Snapshot
from gapped_lab.recipe import Recipe, recipe_from
from gapped_lab.records import Images
from gapped_lab.store import Store
from gapped_lab.training import Interrupted, Settings

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


# A size of each workload of `gapped bench` that takes milliseconds.
WORK = {
    "quantizer": "3x2x5x4:f64",
    "channels": "2x5x3x2:f64",
    "gates": "40:f64",
    "masks": "6x4:f64",
    "subsets": "3x6x2:f64",
    "experts": "5x6x2:f64",
    "vocabulary": "5x4x11:f64",
    "decoding": "5x4x11:f64",
    "router": "12x4x3x2:f64",
    "rollout": "2x3x4x2x11:f64",
    "mixture": "5x6x4:f64",
    "rao": "5x6:f64",
    "jax": "5x6:f32",
}


def toy_recipe(*estimators: str, name: str = "toy", **changes: Any) -> Recipe:
    cells = [{"estimator": text} for text in estimators or ("gst:gap=1.0",)]
    return recipe_from({**TABLE, "cell": cells, **changes, "name": name}, "toy")


def recipe_file(folder: Path, label: str = "GST", **changes: Any) -> str:
    """The path of a recipe file, with two estimators, on a hundred digits."""
    table = {**TABLE, "name": "toy", "train_images": 100, "epochs": 1, "seeds": 1, **changes}
    cells = [{"label": label, "estimator": "gst"}, {"label": "GST-pi", "estimator": "gst:gap=expected"}]
    path = folder / "toy.toml"
    entries = [[f"{key} = {json.dumps(value)}" for key, value in each.items()] for each in (table, *cells)]
    path.write_text("\n[[cell]]\n".join(map("\n".join, entries)))
    return str(path)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The single line on standard error that a user error gives."""
    output = capsys.readouterr()
    assert re.fullmatch(r"gapped: [^\n]+\n", output.err), output.err
    assert "Traceback" not in output.out + output.err
    return output.err


def train(recipes: Sequence[Recipe] | Recipe, folder: Path | Store, **settings: Any) -> list[Record]:
    """Train in this process, on the CPU."""
    store = folder if isinstance(folder, Store) else Store(folder)
    tables = [recipes] if isinstance(recipes, Recipe) else recipes
    return Local("cpu").run(tables, store, Settings(**settings))


class Recorder(Callbacks):
    """Callbacks that note what is trained, and ask for a stop after so many epochs."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.fleets: list[Fleet] = []
        self.epochs: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self.stop_after = stop_after

    def start(self, fleets: Sequence[Fleet]) -> None:
        self.fleets = list(fleets)

    def epoch(self, fleet: Fleet, snapshot: Snapshot) -> None:
        assert snapshot.metrics
        assert len(snapshot.alive) == len(fleet.specs)
        self.epochs.append((fleet.key, snapshot.epoch))

    def done(self, fleet: Fleet) -> None:
        self.finished.append(fleet.key)

    def wants_stop(self) -> bool:
        return self.stop_after is not None and len(self.epochs) >= self.stop_after

    @property
    def runs(self) -> list[str]:
        return [spec.id for fleet in self.fleets for spec in fleet.specs]


def interrupt(recipes: Sequence[Recipe] | Recipe, folder: Path, stop_after: int = 1) -> Recorder:
    """Train until so many epochs are done."""
    recorder = Recorder(stop_after)
    with pytest.raises(Interrupted):
        train(recipes, folder, callbacks=recorder)
    return recorder


def timeless(lines: Iterable[Record]) -> list[Record]:
    """Records without what may differ between equal runs: times, and the machine."""
    return [
        replace(
            each,
            seconds=0.0,
            environment={},
            metrics={name: value for name, value in each.metrics.items() if name != "seconds_per_epoch"},
        )
        for each in lines
    ]


def outcome(folder: Path) -> list[Any]:
    """All that is recorded but times and machines, sorted by run."""
    lines = [
        timeless(records.read(folder, Record)),
        records.read(folder, Curve),
        records.read(folder, Images),
    ]
    return [sorted(each, key=lambda line: str(line.key)) for each in lines]
