"""`gapped data`: what it prints and what it raises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from training_toys import one_line

from gapped.cli.app import main
from gapped_lab.data.images import MNIST

pytestmark = pytest.mark.usefixtures("no_data")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["data", *arguments]) == 0
    return capsys.readouterr().out


def one_file_of_mnist(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / MNIST.files[0].name).write_bytes(b"")
    return folder


def test_list_says_where_and_what_is_missing(tmp_path, capsys):
    folder = one_file_of_mnist(tmp_path / "sets" / "mnist")
    text = printed(capsys, "--data-dir", str(folder.parent))
    lines = [line.split("\t") for line in text.splitlines()]
    assert [line[0] for line in lines] == ["digits", "mnist", "fashion-mnist", "listops"]
    assert lines[0][2] == "inside scikit-learn"
    rest = ", ".join(file.name for file in MNIST.files[1:])
    assert lines[1][2] == f"{folder}; missing: {rest}"
    assert lines[2][2].startswith("missing: train-images-idx3-ubyte, ")


def test_what_must_not_be_downloaded_is_one_line(tmp_path, capsys):
    assert main(["data", "mnist", "--no-download", "--data-dir", str(tmp_path)]) == 2
    assert re.search(rf"mnist: downloading is off; put .* into {tmp_path}/mnist", one_line(capsys))


def test_a_folder_that_does_not_exist_is_said(tmp_path, capsys):
    for arguments in ((), ("digits",)):
        assert main(["data", *arguments, "--data-dir", str(tmp_path / "nowhere")]) == 0
        assert f"--data-dir: {tmp_path / 'nowhere'} does not exist" in one_line(capsys)
