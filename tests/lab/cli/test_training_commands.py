"""`gapped compare` and `gapped reproduce`: what they print, what they write."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from report_records import load_json
from tiny_images import REAL_DATA
from training_toys import one_line, recipe_file

from gapped.cli.app import main
from gapped.comparison import records
from gapped.registry import RECOMMENDED, estimator
from gapped_lab.cli.demo import default_recipe
from gapped_lab.cli.tensorboard import write_events
from gapped_lab.planning import plan

pytestmark = pytest.mark.usefixtures("sandbox")


def lines(folder: Path) -> list[dict[str, Any]]:
    return load_json(folder / "records.jsonl")


def test_compare_takes_both_families(capsys, tmp_path):
    taus = {
        "rloo": None,
        "gst:gap=1.2": 0.85,
        "nvil:network=4": None,
        "relax:network=4": 0.5,
        "rodeo:hidden=4": None,
    }
    options = [word for text in taus for word in ("--estimator", text)]
    command = ["compare", *options, "--seeds", "1", "--epochs", "1", "--device", "cpu", "--out", "mine"]
    assert main(command) == 0
    output = capsys.readouterr()
    assert output.err == ""
    runs = lines(tmp_path / "mine")
    assert {each["label"]: each["tau"] for each in runs} == taus
    assert {(each["data"], each["epochs"], each["runs_in_fleet"]) for each in runs} == {("digits", 1, 5)}
    assert all(each["metrics"]["gradient_variance"] > 0 for each in runs)
    for each in runs:
        row = next(line for line in output.out.splitlines() if line.startswith(f" {each['label']} "))
        assert f"{each['metrics']['test_negative_elbo']:.2f}" in row
    best = min(runs, key=lambda each: each["metrics"]["test_negative_elbo"])["label"]
    assert re.search(rf"{re.escape(best)}( \(τ=[\d.]+\))? has the lowest test negative ELBO", output.out)
    assert "run three or more" in output.out, "one seed cannot make a winner"
    assert re.fullmatch(r"Report: .*mine/report\.html", output.out.splitlines()[-1])
    assert Path("mine/report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert Path("mine/tables.md").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]

    before = Path("mine/records.jsonl").read_bytes()
    assert main(command) == 0
    assert "All runs are finished already." in capsys.readouterr().out
    assert Path("mine/records.jsonl").read_bytes() == before


def test_compare_by_default_and_with_temperatures_from_where_they_are_named():
    recipe = default_recipe()
    cells = list(dict.fromkeys((entry.label, entry.spec.tau) for entry in recipe.entries))
    made = [estimator(text) for text in RECOMMENDED]
    assert cells == [(each.name, each.tau) for each in made]
    assert len(recipe.entries) == 3 * len(RECOMMENDED)
    assert {entry.spec.data for entry in recipe.entries} == {"digits"}
    assert len(plan([recipe], {})) == 1, "one fleet"
    recipe = default_recipe(estimators=["gst:tau=0.25", "gst:gap=2"], tau=0.75, seeds=1)
    assert [entry.spec.tau for entry in recipe.entries] == [0.25, 0.75]
    recipe = default_recipe(estimators=["reinmax", "straight-through", "gst"], seeds=1)
    assert [entry.spec.tau for entry in recipe.entries] == [1, 1, 0.85], "each at its own"
    recipe = default_recipe(estimators=["gst", "reinmax"], tau=0.7)
    assert {entry.spec.tau for entry in recipe.entries} == {0.7}
    assert default_recipe(data="mnist").entries[0].spec.protocol == "plain-30x10", "no ReLU"


def test_every_run_has_its_own_event_file(capsys, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    base = {"task": "vae", "label": "a/b", "tau": 0.5, "seed": 0}
    tables = ["vae paper-30x10 mnist", "mixed paper-30x10 mnist", "vae plain-30x10 mnist"]
    tables += ["vae plain-30x10 digits"] * 2
    fields = ("recipe", "protocol", "data")
    runs = [
        records.Record(**base, id=f"{n:016}"[::-1], **dict(zip(fields, table.split(), strict=True)))
        for n, table in enumerate(tables)
    ]
    records.write(tmp_path, [records.Curve(id=run.id, epoch=[1], more={"loss": [2.0]}) for run in runs])
    files: list[set[Path]] = []
    for _ in range(3):
        target = write_events(runs, tmp_path)
        files.append(set(target.rglob("events.out.tfevents.*")))
        if len(files) == 2:  # the first run is trained again
            records.write(tmp_path, [records.Curve(id=runs[0].id, epoch=[1], more={"loss": [3.0]})])
        folders = {file.parent.relative_to(target) for file in files[-1]}
        assert len(folders) == len(files[-1]) == 5
        places = ("vae/paper-30x10", "mixed/paper-30x10", "vae/plain-30x10", "vae/plain-30x10-digits")
        assert {str(place.parent) for place in folders} == set(places)
    assert files[0] == files[1]
    assert len(files[1] - files[2]) == 1


def test_tensorboard_is_missed_before_training(capsys, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main(["reproduce", recipe_file(tmp_path), "--out", "o", "--tensorboard"]) == 2
    assert '--tensorboard needs tensorboard: pip install "gapped[tensorboard]"' in one_line(capsys)
    assert not (tmp_path / "o").exists()


def test_reproduce_quick(capsys, tmp_path):
    assert main(["reproduce", "smoke", "--quick", "--seeds", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "smoke-quick"
    runs = lines(folder)
    assert [each["label"] for each in runs] == ["GST-0.8", "GST-1.2", "STGS", "ReinMax"]
    assert all(each["quick"] and each["epochs"] == 1 and each["recipe"] == "smoke" for each in runs)
    assert out.startswith("smoke: Smoke test\n")
    assert "quick run" in out
    assert (folder / "report.html").exists()


@pytest.mark.skipif(
    not any((REAL_DATA / "mnist").glob("train-images*")), reason="no MNIST in $GAPPED_DATA or ../shared/data"
)
def test_the_paper_s_protocol_trains_on_mnist(tmp_path):
    recipe = recipe_file(tmp_path, protocol="paper-30x10", data="mnist")
    assert main(["reproduce", recipe, "--device", "cpu", "--data-dir", str(REAL_DATA), "--out", "o"]) == 0
    assert {(each["status"], each["data"]) for each in lines(tmp_path / "o")} == {("ok", "mnist")}
