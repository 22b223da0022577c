"""`gapped diagnose`: what it prints and writes, and the input that it refuses in one line."""

from __future__ import annotations

import json
import re
import zipfile

import pytest
import torch
from training_toys import one_line

from gapped.cli.app import main
from gapped.cli.diagnose import PROBLEMS

TWO = ["--estimator", "gst:gap=1.2", "--estimator", "reinmax"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refusal(capsys, *arguments: str) -> str:
    """The one line that the command ends with."""
    assert main(["diagnose", *arguments]) == 2
    return one_line(capsys)


def test_it_prints_a_table_and_writes_it_down(here, capsys):
    assert main(["diagnose", "--problem", "cubic", *TWO, "--samples", "200", "--out", "d"]) == 0
    shown = capsys.readouterr().out
    assert "gst:gap=1.2" in shown
    record = json.loads((here / "d" / "diagnosis.json").read_text())
    assert [row["estimator"] for row in record["rows"]] == ["gst:gap=1.2", "reinmax"]
    words = " ".join(shown.replace("\n- ", "\n").split())
    assert all(" ".join(sentence.split()) in words for sentence in record["findings"])
    assert (here / "d" / "diagnosis.svg").read_text().startswith("<svg")
    assert sorted(p.name for p in (here / "d").iterdir()) == ["diagnosis.json", "diagnosis.svg"]


def test_the_defaults_are_known(here, capsys):
    assert main(["diagnose", "--problem", "classic", "--samples", "200"]) == 0
    assert (here / "runs" / "diagnose" / "diagnosis.json").exists()


def test_sweeps_make_heat_maps(here, capsys):
    two = ["--sweep", "tau=0.5:1:2", "--sweep", "gap=0:2:3"]
    assert main(["diagnose", *two, "--samples", "200", "--out", "d"]) == 0
    record = json.loads((here / "d" / "diagnosis.json").read_text())
    assert record["sweep"] == {"tau": [0.5, 1.0], "gap": [0.0, 1.0, 2.0]}
    assert len(record["rows"]) == 6
    assert "over gap and tau" in (here / "d" / "heat-gst.svg").read_text()
    one = ["--sweep", "tau=0.5:1:2", "--metric", "variance", *TWO[:2], "--estimator", "straight-through"]
    assert main(["diagnose", *one, "--samples", "200", "--out", "e"]) == 0
    assert "straight-through" in (here / "e" / "heat.svg").read_text()


def test_a_vanishing_gradient_is_named_and_not_recommended(here, capsys):
    three = ["--estimator", "gst:tau=0.05", "--estimator", "gst:tau=0.5", "--estimator", "reinmax:tau=1"]
    assert main(["diagnose", "--problem", "cubic", *three, "--out", "d"]) == 0
    shown = capsys.readouterr().out
    assert "Vanishing gradient: gst:tau=0.05. " in shown
    assert "gst:tau=0.05 (vanishes) " in shown
    assert "Least relative bias" in shown
    assert not re.search(r"(Least [^:]*:|Recommended:) gst:tau=0.05", shown)


def test_a_sweep_does_not_paint_a_vanishing_gradient_as_good(here, capsys):
    sweep = ["--sweep", "tau=0.05:0.5:2", "--estimator", "gst"]
    for metric in ("mse", "variance"):
        run = ["diagnose", "--problem", "cubic", *sweep, "--metric", metric, "--samples", "200"]
        assert main([*run, "--out", metric]) == 0
        picture = (here / metric / "heat.svg").read_text()
        assert "estimator gst, tau=0.05: vanishes" in picture
        assert re.search(r": best \S+ at estimator gst, tau=0.5", picture)
    nothing = ["--sweep", "tau=0.04:0.05:2", "--estimator", "gst", "--samples", "200", "--out", "n"]
    assert main(["diagnose", "--problem", "cubic", *nothing]) == 0
    assert "over tau: vanishes" in (here / "n" / "heat.svg").read_text()


@pytest.mark.parametrize("problem", PROBLEMS)
def test_80_columns_are_enough_and_nothing_is_recommended(here, capsys, monkeypatch, problem):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["diagnose", "--problem", problem, "--tau", "0.5", "--samples", "200", "--out", "d"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "Recommended" not in shown
    assert "Nothing is recommended" in shown
    assert shown.index("relative bias") < shown.index("variance") < shown.index("MSE") < shown.index("cosine")


def test_the_small_vae(here, capsys):
    assert main(["diagnose", "--problem", "vae", "--samples", "200", *TWO, "--out", "d"]) == 0
    assert "summed out" in " ".join(capsys.readouterr().out.split())


def test_logits_that_cannot_be_used_are_refused(here, capsys, monkeypatch):
    monkeypatch.setattr("gapped.cli.diagnose._BYTES", 2**20)

    def save_compressed(tensor: torch.Tensor, path: str) -> None:
        torch.save(tensor, "plain.pt")
        with zipfile.ZipFile("plain.pt") as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for entry in plain.infolist():
                file.writestr(entry.filename, plain.read(entry))

    for save, tensor, message in [
        (torch.save, torch.zeros(3, 4).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
        (torch.save, torch.zeros(3, 4, dtype=torch.int64), "dtype torch.int64"),
        (torch.save, torch.zeros(1).expand(10**6, 10**6), "shape (1000000, 1000000)"),
        (save_compressed, torch.zeros(2**18 + 1), "1 MiB at most"),
        (torch.save, torch.zeros(5, 6), "a tensor of shape (5, 6), expected (3, 4)"),
    ]:
        save(tensor, "logits.pt")
        error = refusal(capsys, *TWO, "--logits", "logits.pt", "--out", "d")
        assert "--logits: got" in error
        assert message in error


def test_a_function_of_the_user(here, capsys):
    (here / "mine_diagnosed.py").write_text(
        "def cost(z):\n    return z[..., 0].sum(-1) ** 2\n\n"
        "def broken(z):\n    raise KeyError('x')\n\nnumber = 3\n"
    )
    torch.save(torch.zeros(2, 5), here / "logits.pt")
    run = ["diagnose", *TWO, "--samples", "200", "--out", "d", "--function"]
    assert main([*run, "mine_diagnosed:cost", "--logits", "logits.pt"]) == 0
    assert json.loads((here / "d" / "diagnosis.json").read_text())["shape"] == [2, 5]
    capsys.readouterr()
    for text, message in [
        ("mine_diagnosed:broken", "failed on samples of shape"),
        ("mine_diagnosed:number", "an object of type int"),
        ("mine_diagnosed:nothing", "no such name"),
        ("some/mine.py:problem", "expected a module, not a file: some.mine:problem"),
        ("mine_diagnosed_not:cost", "ModuleNotFoundError"),
        ("mine", "module:function"),
    ]:
        assert message in refusal(capsys, *run[1:], text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--problem lineer", "--problem: got 'lineer'"),
        ("--shape 3", "--shape: got '3'"),
        ("--shape 3x1", "two categories"),
        ("--sweep tau=1:2", "--sweep: got 'tau=1:2'"),
        ("--sweep tau=1:2:1", "two values or more"),
        ("--sweep depth=1:2:3", "options of one of the estimators"),
        ("--metric cost", "--metric: got 'cost'"),
        ("--samples 2", "samples: got 2"),
        ("--estimator gts", "estimator: got 'gts'"),
        ("--logits pyproject.toml", "pyproject.toml"),
        (f"--seed {2**63}", "--seed"),
    ],
)
def test_wrong_arguments_are_refused(here, capsys, arguments, message):
    assert message in refusal(capsys, *arguments.split())
    assert list(here.iterdir()) == []


def test_nothing_is_measured_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("gapped.diagnostics.diagnose", lambda *_, **__: pytest.fail("measured"))
    assert str(tmp_path / "file") in refusal(capsys, "--out", str(tmp_path / "file" / "out"))
