"""`gapped doctor`: what it finds, what it advises, how it ends."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import gapped
from gapped.cli import doctor
from gapped.cli.app import main
from gapped_lab.cli.doctor import PACKAGES
from gapped_lab.data.images import MNIST

pytestmark = pytest.mark.usefixtures("no_data")
Doctor = Callable[..., tuple[int, dict[str, list[str]]]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Runs the command. Returns its exit status, and state, details and hint of each component."""
    shown: list[doctor.Finding] = []
    monkeypatch.setattr(doctor, "show_findings", shown.extend)

    def run(*arguments: str) -> tuple[int, dict[str, list[str]]]:
        shown.clear()
        status = main(["doctor", *arguments])
        assert capsys.readouterr() == ("", "")
        return status, {component: list(rest) for component, *rest in shown}

    return run


def test_a_sound_machine(ask: Doctor, tmp_path: Path) -> None:
    for file in MNIST.files:
        (tmp_path / file.name).write_bytes(b"")
    status, findings = ask("--data-dir", str(tmp_path))
    assert status == 0
    assert findings["gapped"][1].startswith(gapped.__version__)
    assert findings["torch"][:2] == ["ok", torch.__version__]
    assert findings["cpu"][0] == "ok"
    assert findings["cpu"][1].endswith("samples by torch")
    assert findings["data digits"] == ["ok", "inside scikit-learn", ""]
    assert findings["data mnist"] == ["ok", str(tmp_path), ""]
    assert findings["data fashion-mnist"][0] == "ok", "the files of MNIST have the same names"
    assert findings["data listops"][0] == "absent"
    assert findings["data listops"][2] == "gapped data listops"


def test_what_is_absent_is_no_fault(ask: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setenv("GAPPED_DATA", str(tmp_path / "nowhere"))
    status, findings = ask("--data-dir", str(tmp_path / "absent"))
    assert status == 0
    assert findings["--data-dir"][:2] == ["absent", f"{tmp_path / 'absent'} does not exist"]
    assert findings["pooch"] == ["absent", "needed for downloads", "pip install ./lab"]
    assert findings["rich"][2] == 'pip install "gapped[compare]"'
    assert findings["$GAPPED_DATA"][:2] == ["absent", f"{tmp_path / 'nowhere'} does not exist"]
    assert findings["data mnist"][0] == "absent"
    assert findings["data mnist"][1].startswith("missing: train-images-idx3-ubyte, ")


def test_a_wrong_sample_is_a_fault(ask: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gapped, "gst", lambda logits, **_: 2 * logits.softmax(-1))
    status, findings = ask()
    assert status == 1
    assert findings["cpu"][0] == "broken"
    assert findings["cpu"][1].endswith("drew a wrong sample")

    def failing(logits: torch.Tensor, **_: object) -> torch.Tensor:
        raise RuntimeError("no such kernel\nat line 1")

    monkeypatch.setattr(gapped, "gst", failing)
    status, findings = ask()
    assert status == 1
    assert findings["cpu"][1].endswith("RuntimeError: no such kernel")


def test_a_data_folder_that_is_a_file_is_a_fault(
    ask: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("GAPPED_DATA", str(tmp_path / "file"))
    status, findings = ask()
    assert status == 1
    assert findings["data mnist"][0] == "broken"


def test_without_torch_it_says_so(ask: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    status, findings = ask()
    assert status == 1
    assert findings["torch"][0] == "broken"
    assert not any(name.startswith("data ") for name in findings)


def test_its_lines_fit_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--data-dir", str(tmp_path / ("absent" * 20))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "".join(lines)
    assert torch.__version__ in text
    assert "gapped data listops" in " ".join(text.split())


def test_it_knows_what_the_extras_bring() -> None:
    root = Path(__file__).parents[2]
    library, lab = (
        tomllib.loads((root / folder / "pyproject.toml").read_text("utf-8"))["project"]
        for folder in (".", "lab")
    )
    extras = {**library["optional-dependencies"], **lab["optional-dependencies"]}
    lines = lab["dependencies"] + [
        line for extra in ("compare", "tensorboard", "triton") for line in extras[extra]
    ]
    wanted = {line.split(">")[0] for line in lines} - {"gapped[compare]", "gapped[torch]"}
    assert wanted == {*doctor.PACKAGES, *doctor.TRITON, *PACKAGES}
