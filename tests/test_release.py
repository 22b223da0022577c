"""What a release would be: the wheel, installed in an environment of its own and used from another folder.

The environment borrows its dependencies from the one that runs the tests; gapped itself is the wheel's alone.
Slow, because it builds and trains: `make release-check`.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import subprocesses
from subprocesses import environment

import gapped
from gapped_lab.report.paper import paper

ROOT = Path(__file__).parents[1]
# Files that need nothing of the repository beside themselves, but for one test of the documentation.
LIBRARY = (
    "conftest.py",
    "statistical.py",
    "score_problems.py",
    "variants.py",
    "pathwise/test_contract.py",
    "pathwise/test_exact.py",
    "comparison/test_statistics.py",
    "test_surface.py",
)
LABORATORY = (
    "conftest.py",
    "statistical.py",
    "lab/test_spec.py",
    "report_records.py",
    "lab/report/test_page.py",
)


def test_the_version_stands_in_one_place() -> None:
    """The metadata, the documentation and the command line all read it there; the changelog knows it."""
    text = re.compile(rf"(?<![\d.]){re.escape(gapped.__version__)}(?![\d.])")
    files = [
        *(ROOT / "src").rglob("*.py"),
        ROOT / "pyproject.toml",
        ROOT / "CITATION.cff",
        *ROOT.glob("docs/*.py"),
    ]
    assert [path.name for path in files if text.search(path.read_text("utf-8"))] == ["_version.py"]
    assert f"## [{gapped.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_every_dependency_has_a_floor_that_can_be_installed() -> None:
    """`make floors` holds each one to its lowest version, so each must name one, and no more."""
    pins = runpy.run_path(str(ROOT / "tools" / "floors.py"))["floors"]()
    assert [pin for pin in pins if not re.fullmatch(r"[\w-]+==[\d.]+(; .*)?", pin)] == []
    assert {"torch", "typer", "triton"} <= {pin.partition("==")[0] for pin in pins}


def test_the_citation_is_whole_and_the_same_everywhere() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which the extra docs brings")
    file = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= set(file)
    cited, known = file["preferred-citation"], paper()["citation"]
    assert cited["title"] == known["title"]
    assert [f"{a['given-names']} {a['family-names']}" for a in cited["authors"]] == known["authors"]
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"{{{cited['title']}}}" in readme
    assert f"pages     = {{{cited['start']}--{cited['end']}}}" in readme


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution of the library, the wheel made from it, and the laboratory's."""
    pytest.importorskip("build", reason="needs the package build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT), where=ROOT)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT / "lab"), where=ROOT)
    return folder


def interpreter(home: Path, *wheels: Path) -> Path:
    """An interpreter that has these wheels, and borrows all other packages."""
    run(sys.executable, "-m", "venv", "--without-pip", str(home), where=home)
    one = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(one)]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *map(str, wheels), where=home)
    (site,) = home.glob("lib/python*/site-packages")
    borrowed = home / "borrowed"
    borrowed.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.lstrip("_").startswith(("gapped", "editable")):
            (borrowed / each.name).symlink_to(each)
    (site / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return one


@pytest.fixture(scope="module")
def alone(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the library without the laboratory."""
    return interpreter(tmp_path_factory.mktemp("alone"), *built.glob("gapped-*.whl"))


@pytest.fixture(scope="module")
def both(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the library and the laboratory."""
    return interpreter(tmp_path_factory.mktemp("both"), *built.glob("*.whl"))


def run(*command: str, where: Path) -> str:
    return subprocesses.run(*command, cwd=where, env=environment(bare=True))


@pytest.mark.slow
@pytest.mark.parametrize(("wheel", "source"), [("gapped-*.whl", "src"), ("gapped_lab-*.whl", "lab")])
def test_a_wheel_holds_everything_and_nothing_else(built: Path, wheel: str, source: str) -> None:
    (path,) = built.glob(wheel)
    names = {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}
    folder = ROOT / source
    files = [p for p in folder.glob("gapped*/**/*") if p.is_file() and p.suffix != ".pyc"]
    assert names == {str(each.relative_to(folder)) for each in files}
    if source == "src":
        assert not [name for name in names if name.endswith((".toml", ".json"))], (
            "a recipe, or a paper's numbers"
        )


@pytest.mark.slow
def test_the_source_distribution_holds_the_laboratory(built: Path) -> None:
    (packed,) = built.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    recipe = "lab/gapped_lab/recipes/vae.toml"
    assert {"README.md", "LICENSE", "CITATION.cff", recipe, "tests/conftest.py"} <= held


@pytest.mark.slow
def test_the_commands_work_from_another_folder(both: Path, tmp_path: Path) -> None:
    where = run(str(both), "-c", "import gapped; print(gapped.__file__)", where=tmp_path)
    assert Path(where.strip()).is_relative_to(both.parents[1])
    command = str(both.parent / "gapped")
    assert run(command, "--version", where=tmp_path) == f"gapped {gapped.__version__}\n"
    # Its lines are broken at 80 characters.
    assert str(both.parents[1]) in "".join(run(command, "doctor", where=tmp_path).split())
    small = ("--estimator", "gst", "--estimator", "reinmax", "--seeds", "2", "--epochs", "2", "--out", "out")
    assert "Report: " in run(command, "compare", *small, where=tmp_path)
    assert "Report: " in run(command, "report", "out", where=tmp_path)
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    run(command, "reproduce", "smoke", "--quick", "--device", "cpu", where=tmp_path)


@pytest.mark.slow
def test_the_library_alone_compares_and_says_what_it_lacks(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def train(estimator, seed):\n    return estimator.tau + seed / 10\n")
    command = str(alone.parent / "gapped")
    assert "Report: " in run(command, "compare", "--train", "mine:train", "--seeds", "2", where=tmp_path)
    assert (tmp_path / "runs" / "compare" / "report.html").stat().st_size > 10_000
    assert "laboratory" in run(command, "doctor", where=tmp_path)
    for call in (["compare"], ["reproduce", "vae", "--quick"], ["diagnose", "--problem", "vae"]):
        done = subprocess.run([command, *call], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2
        assert re.fullmatch(r"gapped: .* needs the laboratory, gapped-lab: pip install .*\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["alone", "both"])
def test_the_suite_passes_against_the_wheels(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = request.getfixturevalue(which)
    for name in LIBRARY if which == "alone" else LABORATORY:
        shutil.copy(ROOT / "tests" / name, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    selection = ("-m", "not slow and not gpu", "-k", "not in_the_reference")
    run(str(python), "-m", "pytest", "-x", *selection, str(tmp_path), where=tmp_path)
