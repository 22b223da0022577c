"""`gapped data`: what it prints and what it raises."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from gapped.errors import GappedError
from gapped.lab.cli.data import data
from gapped.lab.data.mnist import MNIST


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("GAPPED_DATA", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def invoke(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(data)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.output


def test_list_says_where_and_what_is_missing(tmp_path):
    folder = tmp_path / "sets" / "mnist"
    folder.mkdir(parents=True)
    (folder / MNIST.train.name).write_bytes(b"")
    lines = [line.split("\t") for line in invoke("--data-dir", str(tmp_path / "sets")).splitlines()]
    assert [line[0] for line in lines] == ["digits", "mnist", "fashion-mnist", "listops"]
    assert lines[0][2] == "inside scikit-learn"
    rest = ", ".join(file.name for file in MNIST.files[1:])
    assert lines[1][2] == f"{folder}; missing: {rest}"
    assert lines[2][2].startswith("missing: train-images-idx3-ubyte, ")


def test_fetch_prints_the_place_and_the_check():
    assert invoke("digits") == "load_digits\tshape\tinside scikit-learn\n"


def test_errors_are_raised_for_the_app_to_print(tmp_path):
    with pytest.raises(GappedError, match="downloading is off"):
        invoke("mnist", "--no-download", "--data-dir", str(tmp_path))
    with pytest.raises(GappedError, match="expected one of digits, mnist"):
        invoke("minst")


def test_a_terminal_gets_a_table(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    folder = tmp_path / "[red]sets" / "mnist"
    folder.mkdir(parents=True)
    (folder / MNIST.train.name).write_bytes(b"")
    shown = invoke("--data-dir", str(folder.parent))
    assert "━" in shown
    # Brackets in a path are not markup.
    assert "[red]sets" in "".join(shown.split("\n"))


def test_import_leaves_torch_alone():
    """As far as this file goes: the package's own `__init__` is measured elsewhere."""
    code = (
        "import sys, gapped; before = set(sys.modules); import gapped.lab.cli.data;"
        "print(sorted({'torch', 'numpy', 'sklearn', 'pooch', 'gapped.lab.data'}"
        "& (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
