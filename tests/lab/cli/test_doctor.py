"""`gapped doctor`: what it finds, what it advises, how it ends."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import gapped
from gapped.lab.cli import doctor
from gapped.lab.cli.app import main
from gapped.lab.data.mnist import MNIST


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("GAPPED_DATA", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, list[str]]]:
    """The exit status, and state, content and hint of each part."""
    status = main(["doctor", *arguments])
    caught = capsys.readouterr()
    assert caught.err == ""
    rows = [line.split("\t") for line in caught.out.splitlines()]
    assert all(len(row) == 4 for row in rows)
    return status, {row[0]: row[1:] for row in rows}


def test_a_sound_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for file in MNIST.files:
        (tmp_path / file.name).write_bytes(b"")
    status, found = ask(capsys, "--data-dir", str(tmp_path))
    assert status == 0
    assert found["gapped"][1].startswith(gapped.__version__)
    assert found["torch"][:2] == ["ok", torch.__version__]
    assert found["cpu"][0] == "ok"
    assert found["cpu"][1].endswith("samples by torch")
    assert found["data digits"] == ["ok", "inside scikit-learn", ""]
    assert found["data mnist"] == ["ok", str(tmp_path), ""]
    assert found["data fashion-mnist"][0] == "ok", "the files of MNIST have the same names"
    assert found["data listops"][0] == "absent"
    assert found["data listops"][2] == "gapped data listops"


def test_what_is_absent_is_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setenv("GAPPED_DATA", str(tmp_path / "nowhere"))
    status, found = ask(capsys)
    assert status == 0
    assert found["pooch"] == ["absent", "needed for downloads", 'pip install "gapped[lab]"']
    assert found["$GAPPED_DATA"][:2] == ["absent", f"{tmp_path / 'nowhere'} does not exist"]
    assert found["data mnist"][0] == "absent"
    assert found["data mnist"][1].startswith("missing: train-images-idx3-ubyte, ")


def test_a_wrong_sample_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gapped, "gst", lambda logits, **_: 2 * logits.softmax(-1))
    status, found = ask(capsys)
    assert status == 1
    assert found["cpu"][0] == "broken"
    assert found["cpu"][1].endswith("drew a wrong sample")

    def failing(logits: torch.Tensor, **_: object) -> torch.Tensor:
        raise RuntimeError("no such kernel\nat line 1")

    monkeypatch.setattr(gapped, "gst", failing)
    status, found = ask(capsys)
    assert status == 1
    assert found["cpu"][1].endswith("RuntimeError: no such kernel")


def test_a_data_folder_that_is_a_file_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("GAPPED_DATA", str(tmp_path / "file"))
    status, found = ask(capsys)
    assert status == 1
    assert found["data mnist"][0] == "broken"


def test_without_torch_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, found = ask(capsys)
    assert status == 1
    assert found["torch"][0] == "broken"
    assert not any(part.startswith("data ") for part in found)


def test_it_knows_what_the_extras_bring() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {line.split(">")[0] for extra in ("lab", "triton") for line in extras[extra]}
    assert wanted == set(doctor.PACKAGES)
