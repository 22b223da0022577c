"""The commands of a user where the laboratory is not installed: what needs it says so in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from subprocesses import done

# No distribution has an entry point for `gapped`.
PROGRAM = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: ()
sys.modules["gapped_lab"] = None
from gapped.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str, where: Path) -> subprocess.CompletedProcess[str]:
    return done(sys.executable, "-c", PROGRAM, *arguments, cwd=where)


CALLS = {
    "gapped reproduce": ["reproduce", "vae", "--quick"],
    "gapped report": ["report", "--help"],
    "gapped data": ["data"],
    "gapped bench": ["bench", "--seconds", "1"],
    "gapped compare without --train": ["compare"],
    "gapped compare without --train ": ["compare", "--data", "mnist"],
    "--problem vae": ["diagnose", "--problem", "vae"],
}


def test_what_needs_the_laboratory_says_so(tmp_path: Path) -> None:
    each = PROGRAM.replace("sys.exit(main(sys.argv[1:]))", f"print([main(c) for c in {[*CALLS.values()]!r}])")
    ended = done(sys.executable, "-c", each, cwd=tmp_path)
    assert ended.stdout == f"{[2] * len(CALLS)}\n"
    advice = "needs the laboratory, gapped-lab: pip install ./lab in a clone of gapped"
    assert ended.stderr.splitlines() == [f"gapped: {what.strip()} {advice}" for what in CALLS]


def test_help_lists_what_is_there(tmp_path: Path) -> None:
    text = run("--help", where=tmp_path).stdout
    names = re.findall(r"^  (\w+) ", text[text.index("Commands:") :], flags=re.M)
    assert names == ["compare", "diagnose", "estimators", "properties", "doctor"]


def test_a_users_own_training_needs_no_laboratory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(estimator, seed):\n    yield seed / 10 + estimator.tau\n")
    compared = run("compare", "--train", "mine:train", "--seeds", "2", "--out", "out", where=tmp_path)
    assert (compared.returncode, compared.stderr) == (0, "")
    assert "Learning curves" in (tmp_path / "out" / "report.html").read_text("utf-8")
    doctor = run("doctor", where=tmp_path)
    assert doctor.returncode == 0
    assert re.search(r"^laboratory +absent", doctor.stdout, flags=re.M)
