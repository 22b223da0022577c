"""What a release would be: the wheel, installed in an environment of its own and used from another folder.

The environment borrows its dependencies from the one that runs the tests; gapped itself is the wheel's alone.
Slow, because it builds and trains: `make release-check`.
"""

from __future__ import annotations

import re
import runpy
import shutil
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
SUITE = (
    "conftest.py",
    "statistical.py",
    "score_problems.py",
    "variants.py",
    "pathwise/test_contract.py",
    "pathwise/test_exact.py",
    "lab/test_spec.py",
    "report_records.py",
    "lab/report/test_page.py",
    "test_surface.py",
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
    """A folder with the source distribution, and the wheel that was made from it."""
    pytest.importorskip("build", reason="needs the package build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT), where=ROOT)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel."""
    home = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", str(home), where=home)
    (wheel,) = built.glob("*.whl")
    one = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(one)]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel), where=home)
    (site,) = home.glob("lib/python*/site-packages")
    # A plain path, whose own .pth files are not read: an editable install stays out of sight.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return one


def run(*command: str, where: Path) -> str:
    return subprocesses.run(*command, cwd=where, env=environment(bare=True))


@pytest.mark.slow
def test_the_wheel_holds_everything_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [p for p in (ROOT / "src").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    sources = {str(path.relative_to(ROOT / "src")) for path in files}
    assert names == {name for name in names if ".dist-info/" in name} | sources
    (packed,) = built.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    recipe = "lab/gapped_lab/recipes/vae.toml"
    assert {"README.md", "LICENSE", "CITATION.cff", recipe, "tests/conftest.py"} <= held


@pytest.mark.slow
def test_the_commands_work_from_another_folder(python: Path, tmp_path: Path) -> None:
    where = run(str(python), "-c", "import gapped; print(gapped.__file__)", where=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    command = str(python.parent / "gapped")
    assert run(command, "--version", where=tmp_path) == f"gapped {gapped.__version__}\n"
    assert str(python.parents[1]) in run(command, "doctor", where=tmp_path)
    small = ("--estimator", "gst", "--estimator", "reinmax", "--seeds", "2", "--epochs", "2", "--out", "out")
    assert "Report: " in run(command, "compare", *small, where=tmp_path)
    assert "Report: " in run(command, "report", "out", where=tmp_path)
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    run(command, "reproduce", "smoke", "--quick", "--device", "cpu", where=tmp_path)


@pytest.mark.slow
def test_the_suite_passes_against_the_wheel(python: Path, tmp_path: Path) -> None:
    for name in SUITE:
        shutil.copy(ROOT / "tests" / name, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    selection = ("-m", "not slow and not gpu", "-k", "not in_the_reference")
    run(str(python), "-m", "pytest", "-x", *selection, str(tmp_path), where=tmp_path)
