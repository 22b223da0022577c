"""The library without its extras: one line says which extra to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import subprocesses

LAB = ["numpy", "scipy", "sklearn", "matplotlib", "jinja2", "rich", "typer", "pooch", "tqdm", "tensorboard"]


def without(modules: list[str], program: str, where: Path) -> subprocess.CompletedProcess[str]:
    """The answer of a fresh interpreter in which `modules` are not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
    return subprocesses.done(sys.executable, "-c", hide + program, cwd=where)


COMMAND = "import runpy; sys.argv = ['gapped', *{!r}]; runpy.run_module('gapped', run_name='__main__')"


@pytest.mark.parametrize("arguments", [[], ["--version"], ["compare"], ["doctor"]])
def test_the_command_says_what_to_install(arguments: list[str], tmp_path: Path) -> None:
    done = without(LAB, COMMAND.format(arguments), tmp_path)
    line = 'gapped: the gapped command needs typer and rich: pip install "gapped[compare]"\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.slow_if(lambda hidden: hidden != "sklearn")
@pytest.mark.parametrize("hidden", ["scipy", "matplotlib", "jinja2", "sklearn"])
def test_nothing_is_trained_that_could_not_be_reported(hidden: str, tmp_path: Path) -> None:
    few = ["compare", "--estimator", "gst", "--seeds", "1", "--epochs", "1", "--device", "cpu"]
    done = without([hidden], COMMAND.format(few), tmp_path)
    assert done.returncode == 2, done.stderr
    package = "scikit-learn" if hidden == "sklearn" else hidden
    assert done.stderr.endswith(f' needs {package}: pip install "gapped[compare]"\n')
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("hidden", "files", "line"),
    [("sklearn", 4, "digits needs scikit-learn"), ("pooch", 3, "mnist: downloading needs pooch")],
)
def test_what_a_later_fleet_lacks_is_said_before_the_first_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden: str, files: int, line: str
) -> None:
    for name in ("GAPPED_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    parts = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    for part in parts[:files]:
        (tmp_path / f"{part}-ubyte").touch()
    names = ["m1.toml", "m2.toml"] if hidden == "sklearn" else ["m2.toml", "m1.toml"]
    for name, protocol, data in zip(
        ["m1", "m2"], ["paper-30x10", "digits-8x8"], ["mnist", "digits"], strict=True
    ):
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\ntask = "vae"\nprotocol = "{protocol}"\ndata = "{data}"\nepochs = 1\n'
            '[[cell]]\nestimator = "gst"\n'
        )
    done = without([hidden], COMMAND.format(["reproduce", *names, "--device", "cpu"]), tmp_path)
    assert done.returncode == 2, done.stderr
    assert line in done.stderr
    assert not list(tmp_path.rglob("*.jsonl"))


WAYS = [
    "import gapped_lab.report",
    "gapped.compare(lambda estimator, seed: 0.0, ['gst'])",
    "import gapped.cli.app",
    "import gapped_lab.data; gapped_lab.data.load('digits')",
    "from gapped_lab.cli import tensorboard",
    "gapped.diagnose(lambda z: z[..., 0].sum(-1), gapped.simplex.torch.zeros(2, 3), "
    "[gapped.GST()], samples=200).plot()",
]
EACH = """
import gapped
for way in {!r}:
    try:
        exec(way)
    except gapped.GappedError as e:
        print(isinstance(e, ImportError), e)
"""


def test_each_way_into_the_laboratory_says_so_too(tmp_path: Path) -> None:
    """As a `GappedError`, and as the `ImportError` that code which can do without looks for."""
    lines = without(LAB, EACH.format(WAYS), tmp_path).stdout.splitlines()
    assert len(lines) == len(WAYS)
    for line in lines:
        assert line.startswith("True ")
        assert line.endswith('pip install "gapped[compare]"')
