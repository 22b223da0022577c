"""The ratchet: no room grows unless its limit here does, with a line under *Cost* in the changelog.

Limits are the numbers of today: lower them when a room has shrunk. Goals stand beside them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lines and modules of Python, stubs included: the limit, and the goal.
LIMITS = {
    "src/gapped": ((25_583, 124), (19_000, 115)),
    "lab/gapped_lab": ((12_038, 81), (10_500, 79)),
    "docs/generate": ((1_432, 14), (1_500, 11)),
    "tests": ((31_898, 171), (27_000, 180)),
}


def size(folder: Path) -> tuple[int, int]:
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".pyi")]
    return sum(len(path.read_text("utf-8").splitlines()) for path in files), len(files)


@pytest.mark.parametrize("folder", LIMITS)
def test_no_room_grows(folder: str) -> None:
    now, (limit, goal) = size(ROOT / folder), LIMITS[folder]
    names = ("lines", "modules")
    grown = [f"{n} {name}, limit {most}" for n, most, name in zip(now, limit, names, strict=True) if n > most]
    assert grown == [], f"{folder}, goal {goal}: make it smaller, or raise the limit and say what users gain"


def test_every_line_of_every_file_counts(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n\n# y\n")
    (tmp_path / "b.pyi").write_text("x: int")
    (tmp_path / "c.md").write_text("no\n")
    assert size(tmp_path) == (4, 2)
