"""The commit that records name."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import torch

from gapped.comparison import runs
from gapped.comparison.runs import describe

CPU = torch.device("cpu")


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
        ("src/gapped/comparison", "gapped", True),
        ("src/gapped/comparison", "another", False),
        ("src/gapped/comparison", None, False),
        (".venv/lib/python3.12/site-packages/gapped/comparison", "another", False),
        ("vendor/gapped/src/gapped/comparison", "gapped", False),
    ],
)
def test_the_commit_is_that_of_the_package_s_own_checkout(monkeypatch, tmp_path, place, name, own):
    module = tmp_path / place / "runs.py"
    module.parent.mkdir(parents=True)
    module.touch()
    for root in {tmp_path, *([module.parents[3]] if name == "gapped" else [])}:
        if name is not None:
            (root / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for step in (["init", "-q"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *step], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    monkeypatch.setattr(runs, "__file__", str(module))
    monkeypatch.delenv("GAPPED_COMMIT", raising=False)
    assert describe(CPU)["commit"] == (head[:12] if own else None)
