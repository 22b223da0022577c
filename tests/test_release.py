"""What a release would be: the wheel, installed in an environment of its own and used from another folder.

`alone` and `both` borrow their dependencies from the environment that runs the tests; those that `fresh`
makes are empty but for what pip installs there. Slow, because it builds, installs and trains: `make
release-check`.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
import subprocesses
from subprocesses import environment

from gapped.checks import LEAST_TORCH
from gapped_lab.report.paper import paper

ROOT = Path(__file__).parents[1]
# Files that need nothing of the repository beside themselves, but for two tests of the documentation.
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


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
HOME = PROJECT["project"]["urls"]["Repository"]
FLOOR = ".".join(map(str, LEAST_TORCH))
# A link or a picture of Markdown; an address of the project as the index shows it, at the tag of a version.
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
AT_TAG = re.compile(rf"{re.escape(HOME)}/(blob|raw)/v[^/]+/(.+)")


def on_an_index(text: str) -> str:
    """The README as the build writes it into the metadata."""
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"].replace("$HFPR_VERSION", "1.0"), text)
    return text


def check_links(text: str) -> None:
    """Every link leads to another site or to a file of the repository, pictures to the file itself."""
    found = LINK.findall(text)
    assert len(found) > 20
    for picture, address in found:
        if address.startswith(HOME):
            where = AT_TAG.fullmatch(address)
            assert where, address
            assert where[1] == ("raw" if picture else "blob"), address
            assert (ROOT / where[2]).exists(), address
        else:
            assert re.match("https?://", address), address


def test_the_readme_has_no_relative_link_on_an_index() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    check_links(on_an_index(text))
    with pytest.raises(AssertionError):
        check_links(text)


def test_the_addresses_of_the_project_stand_in_one_place() -> None:
    """All under one owner, whose name a publisher changes in pyproject.toml alone."""
    urls = PROJECT["project"]["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= set(urls)
    owner = re.fullmatch(r"https://github\.com/([\w-]+)/gapped", HOME)
    assert owner
    assert all(
        re.match(rf"https://(github\.com/{owner[1]}|{owner[1]}\.github\.io)/gapped", u) for u in urls.values()
    )
    files = [ROOT / "README.md", *ROOT.glob("*.cff"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.yml")]
    named = [path.name for path in files if f"{owner[1]}/gapped" in path.read_text("utf-8")]
    assert named == []


def test_a_release_has_the_version_of_its_tag() -> None:
    """No file of the repository states it, and the first release stands in the changelog."""
    for project in (PROJECT, tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text("utf-8"))):
        assert "version" in project["project"]["dynamic"]
        assert project["tool"]["hatch"]["version"]["source"] == "vcs"
    # The first part of the file is what users read: ten lines, the rest is history.
    first = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("## [0.1.0]")[2]
    assert 1 <= len(re.findall("^- ", first, flags=re.M)) <= 10


def test_torch_and_jax_are_extras() -> None:
    """Nobody installs a framework that they do not use; the code knows the floor, which pip may pass over."""
    assert PROJECT["project"]["dependencies"] == []
    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["torch"] == [f"torch>={FLOOR}"]
    assert not [
        need
        for name in ("jax", "numpyro", "distrax", "jax-triton")
        for need in extras[name]
        if "torch" in need
    ]


def test_a_torch_that_is_too_old_is_refused_in_one_line() -> None:
    program = (
        "import torch, gapped\ntorch.__version__ = '2.1.0+cpu'\n"
        "try:\n    gapped.gst\nexcept ImportError as problem:\n    print(problem)"
    )
    line = f'gapped needs torch {FLOOR}, found 2.1.0+cpu: pip install -U "gapped[torch]"\n'
    assert subprocesses.python("-c", program) == line


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
    assert f"*{cited['title']}*" in readme
    assert f"pages {cited['start']}–{cited['end']}" in readme


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


def run(*command: str, where: Path, timeout: float = 280) -> str:
    return subprocesses.run(*command, cwd=where, env=environment(bare=True), timeout=timeout)


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
def test_the_wheel_is_pure_and_small(built: Path) -> None:
    (wheel,) = built.glob("gapped-*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    # The goal is 350,000.
    assert wheel.stat().st_size <= 415_000


@pytest.mark.slow
def test_the_source_distribution_holds_the_library_alone(built: Path) -> None:
    """The wheels of the other tests are built from it."""
    (packed,) = built.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    named = {
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "CHANGELOG.md",
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
    assert {name for name in held if not name.startswith("src/gapped/")} == named


@pytest.mark.slow
def test_an_index_would_accept_them(built: Path) -> None:
    for package in ("twine", "check_wheel_contents"):
        pytest.importorskip(package, reason=f"needs {package}, which the extra dev brings")
    (wheel,), (source,) = built.glob("gapped-*.whl"), built.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(source), where=ROOT)
    run(sys.executable, "-m", "check_wheel_contents", str(wheel), where=ROOT)
    (name,) = [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA")]
    metadata = message_from_string(zipfile.ZipFile(wheel).read(name).decode())
    check_links(metadata.get_payload())
    assert f"/v{metadata['Version']}/" in metadata.get_payload()


def fresh(home: Path, *packages: str) -> Path:
    """An interpreter of its own that has these packages and what they need, at the versions tested here."""
    run(sys.executable, "-m", "venv", str(home), where=ROOT)
    python = home / "bin" / "python"
    pip(python, *packages)
    return python


def pip(python: Path, *packages: str) -> None:
    command = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    if packages:
        run(*command, "-c", str(ROOT / "constraints.txt"), *packages, where=python.parent, timeout=900)


def timed(what: Any, *arguments: Any, **how: Any) -> float:
    start = time.monotonic()
    what(*arguments, **how)
    return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_beside_torch_a_first_gradient_takes_seconds(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("gapped-*.whl")
    python = fresh(tmp_path / "torch", "torch")
    theirs = "import torch\nx = torch.zeros(4, 3, requires_grad=True)\nx.sum().backward()\n"
    ours = "import gapped\ngapped.sample(x)[:, 0].sum().backward()\nassert x.grad.isfinite().all()"
    run(str(python), "-c", theirs, where=tmp_path)  # compiles torch's files
    least = timed(run, str(python), "-c", theirs, where=tmp_path)
    install = timed(pip, python, f"{wheel}[torch]")
    gradient = timed(run, str(python), "-c", theirs + ours, where=tmp_path)
    print(f"install {install:.1f} s, torch {least:.1f} s, torch and first gradient {gradient:.1f} s")
    assert install + gradient - least <= 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_user_of_jax_has_no_torch(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("gapped-*.whl")
    python = fresh(tmp_path / "jax", f"{wheel}[jax]")
    assert not list(tmp_path.glob("jax/lib/python*/site-packages/torch*"))
    program = (
        "import gapped.jax, jax\nz = gapped.jax.sample(jax.random.key(0), jax.numpy.zeros((4, 3)))\n"
        "print(z.sum())\nimport gapped\ngapped.sample"
    )
    done = subprocess.run([str(python), "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "4.0\n"
    assert done.stderr.splitlines()[-1].endswith(f"gapped.sample {NEEDS_TORCH}")


NEEDS_TORCH = 'needs torch: pip install "gapped[torch]", or "gapped[jax]" for gapped.jax'


@pytest.mark.slow
def test_without_a_framework_one_line_says_so(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("gapped-*.whl")
    python = fresh(tmp_path / "neither", str(wheel))
    printed = run(str(python), "-c", "import gapped; print(gapped.__version__)", where=tmp_path)
    assert printed.strip() == wheel.name.split("-")[1]
    lines = {
        "import gapped; gapped.sample": f"gapped.sample {NEEDS_TORCH}",
        "from gapped import nn": f"gapped.nn {NEEDS_TORCH}",
        "import gapped.jax": 'gapped.jax needs jax: pip install "gapped[jax]"',
    }
    for program, line in lines.items():
        done = subprocess.run([str(python), "-c", program], cwd=tmp_path, capture_output=True, text=True)
        assert done.stderr.splitlines()[-1] == f"gapped.errors.MissingExtra: {line}"
    done = subprocess.run([str(python.parent / "gapped")], cwd=tmp_path, capture_output=True, text=True)
    line = 'gapped: the gapped command needs typer and rich: pip install "gapped[compare]"\n'
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.slow
def test_the_commands_work_from_another_folder(built: Path, both: Path, tmp_path: Path) -> None:
    where = run(str(both), "-c", "import gapped; print(gapped.__file__)", where=tmp_path)
    assert Path(where.strip()).is_relative_to(both.parents[1])
    command = str(both.parent / "gapped")
    (wheel,) = built.glob("gapped-*.whl")
    assert run(command, "--version", where=tmp_path) == f"gapped {wheel.name.split('-')[1]}\n"
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
    assert (tmp_path / "runs" / "compare" / "mine.train" / "report.html").stat().st_size > 10_000
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
    selection = ("-m", "not slow and not gpu", "-k", "not in_the_reference and not scale_and_angle")
    run(str(python), "-m", "pytest", "-x", *selection, str(tmp_path), where=tmp_path)
