"""`gapped data`: what it prints and what it raises."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from gapped.errors import GappedError
from gapped.lab.cli.data import data
from gapped.lab.data.images import MNIST

pytestmark = pytest.mark.usefixtures("no_data")


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
    (folder / MNIST.files[0].name).write_bytes(b"")
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
    (folder / MNIST.files[0].name).write_bytes(b"")
    output = invoke("--data-dir", str(folder.parent))
    assert "━" in output
    # Brackets in a path are not markup.
    assert "[red]sets" in "".join(output.split("\n"))
