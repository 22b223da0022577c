"""Workloads: every way trains, seeds decide, the data are what they say, and one command compares them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_equal

from gapped.cli.app import main
from gapped_lab.recipe_files import WORKLOAD_TITLES
from gapped_lab.workloads import data, find_workload, world_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


SMALL: dict[str, dict[str, Any]] = {
    "tokenizer": {"epochs": 2, "width": 8, "size": 8, "batch": 250},
    "world-model": {"steps": 2, "every": 1, "batch": 4, "held": 4, "width": 16, "state": 16},
    "tokens": {"steps": 2, "every": 1, "prompts": 2, "pretraining": 3, "width": 16, "prompt": 4, "length": 4},
    "router": {"steps": 2, "every": 1, "batch": 2, "context": 16, "width": 16, "layers": 1, "hidden": 16},
}


def small(name: str) -> dict[str, Any]:
    """The cells of all settings of the quick version, scaled down further."""
    settings = find_workload(name).settings(True)
    return {
        f"{setting}: {label}": replace(cell, **SMALL[name])
        for setting, cells in settings.items()
        for label, cell in cells.items()
        # One rate is enough of each way to tune.
        if "rate 0.001" not in label
    }


def released(cell: Any) -> bool:
    return getattr(cell, "way", "") in ("vq-ema", "vq-rotation", "diveq", "simvq", "fsq", "lfq")


@pytest.mark.parametrize("name", WORKLOAD_TITLES)
def test_every_way_trains_and_its_seed_decides(name: str) -> None:
    train, before = find_workload(name).train, torch.get_rng_state()
    for label, cell in small(name).items():
        if released(cell):
            pytest.importorskip("vector_quantize_pytorch", reason="an extra of the laboratory")
        runs = [[dict(numbers) for numbers in train(cell, 3)] for _ in range(2)]
        for points in runs:
            for numbers in points:
                assert numbers.pop("ms_a_step") > 0, label
        assert len(runs[0]) == 2, label
        assert runs[0] == runs[1], label
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("name", WORKLOAD_TITLES)
def test_settings_have_cells_enough_and_their_incumbents(
    name: str, has_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    full = find_workload(name).settings(False)
    assert sum(map(len, full.values())) >= (16 if has_gpu else 12)
    ways = {cell.way for cells in full.values() for cell in cells.values()}
    incumbent = {
        "tokenizer": "vq-ema",
        "world-model": "straight-through",
        "tokens": "rloo",
        "router": "top-k",
    }
    assert {"gapmax", "gumbel-softmax:tau=1", incumbent[name]} <= ways


def test_the_text_is_split_by_file() -> None:
    train, held = data.text()
    assert len(train) > 5 * len(held) > 1_000_000
    assert int(train.max()) < 128


def test_a_digit_moves_over_the_field_and_keeps_its_light() -> None:
    images = torch.full((3, 1, 8, 8), 255, dtype=torch.uint8)
    frames, actions = world_model.World(images, torch.Generator().manual_seed(0)).sequences(16, 6)
    assert frames.shape == (16, 6, 1, 32, 32)
    assert actions.shape == (16, 6)
    torch.testing.assert_close(frames.sum((2, 3, 4)), torch.full((16, 6), 64.0), atol=1e-2, rtol=0)


def test_all_cells_of_the_world_model_see_equal_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    loss = world_model._loss
    monkeypatch.setattr(
        world_model, "_loss", lambda model, frames, *rest: seen.append(frames) or loss(model, frames, *rest)
    )
    for way in ("straight-through", "gumbel-rao"):
        list(world_model.train(small("world-model")[f"8 x 8: {way}"], 0))
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) == 4
    assert_equal(first, second)


def test_one_command_compares_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = {label: cell for label, cell in small("world-model").items() if "gapmax" in label}
    monkeypatch.setattr(world_model, "settings", lambda quick: {"8 x 8": cells})
    assert main(["reproduce", "world-model", "--quick", "--out", str(tmp_path)]) == 0
    assert "2 cells" in capsys.readouterr().out
    assert (tmp_path / "world-model" / "8-x-8" / "report.html").is_file()
    assert main(["reproduce", "world-model", "vae", "--out", str(tmp_path)]) == 2
