"""The recipe of CONTRIBUTING.md for a new estimator, followed in a copy of the repository: its tests pass."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from subprocesses import environment, python

ROOT = Path(__file__).parents[2]
STEP = re.compile(
    r"^(?P<verb>Write|In) `(?P<path>[^`]+)`"
    r"(?:, below the line (?:`(?P<line>[^`\n]+)`|that begins with \"(?P<start>[^\"\n]+)\"))?:\n\n"
    r"```\w*\n(?P<block>.*?)^```$",
    flags=re.M | re.S,
)
# Everything that runs over the registry of pathwise estimators.
SUITES = [
    "library",
    "pathwise",
    "score/test_expectation.py",
    "diagnostics/test_property_report.py",
    "docs/test_docs.py",
]


class Step(NamedTuple):
    """A block of code, and where it goes: a file of its own, or below a line of an existing one."""

    path: str
    anchor: str | None
    block: str


def steps_of(text: str) -> list[Step]:
    matches = STEP.finditer(text)
    return [Step(m["path"], m["line"] or m["start"], m["block"]) for m in matches]


def follow(step: Step, root: Path) -> None:
    path = root / step.path
    if step.anchor is None:
        assert not path.exists(), f"{step.path} is there already"
        path.write_text(step.block, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.startswith(step.anchor)]
    assert places, f"{step.path} has no line {step.anchor!r}"
    lines.insert(places[0] + 1, step.block)
    path.write_text("".join(lines), encoding="utf-8")


def mapped(text: str) -> list[Path]:
    """The paths on the map of the repository: indented names lie in the folder above them."""
    block = text.partition("## Where things are")[2].split("```")[1]
    paths, folder = [], ROOT
    for line in block.splitlines():
        if match := re.match(r"(  )?(\S+/|\S+\.pyi?) ", line):
            paths.append((folder if match[1] else ROOT) / match[2])
            folder = folder if match[1] else paths[-1]
    return paths


def test_the_map_lists_what_there_is() -> None:
    paths = mapped((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert [path for path in paths if not path.exists()] == []
    packages = {path.parent for path in (ROOT / "src" / "gapped").glob("*/__init__.py")}
    assert packages <= set(paths)


RECIPE = steps_of((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository after the steps of the recipe."""
    root = tmp_path_factory.mktemp("recipe")
    for name in ("src", "lab", "tests", "docs", "examples", "results/answered"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    for step in RECIPE:
        follow(step, root)
    return root


def run(root: Path, *command: str) -> str:
    return python("-m", *command, cwd=root, env=environment(root / "src", root / "lab", bare=True))


def test_the_recipe_touches_at_most_five_files() -> None:
    assert len(RECIPE) >= 5
    assert len({step.path for step in RECIPE}) <= 5


@pytest.mark.slow
def test_the_tests_of_the_new_estimator_pass(copy: Path) -> None:
    suites = [f"tests/{suite}" for suite in SUITES]
    names = "raised or surface_is_pinned or in_the_reference"
    printed = run(copy, "pytest", *suites, "tests/test_surface.py", "-k", names, "-p", "no:cacheprovider")
    count = re.search(r"(\d+) passed", printed)
    assert count
    assert int(count[1]) > 200


def test_the_steps_pass_the_linter(copy: Path) -> None:
    pytest.importorskip("ruff", reason="needs ruff")
    files = [step.path for step in RECIPE if step.path.endswith((".py", ".pyi"))]
    run(copy, "ruff", "check", *files)
    run(copy, "ruff", "format", "--check", *files)


def test_a_step_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (step,) = steps_of("In `a.py`, below the line `x = 2`:\n\n```python\ny = 3\n```\n")
    with pytest.raises(AssertionError, match=r"a\.py has no line 'x = 2'"):
        follow(step, tmp_path)
    follow(step._replace(anchor="x = "), tmp_path)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 3\n"
    with pytest.raises(AssertionError, match="there already"):
        follow(step._replace(anchor=None), tmp_path)
