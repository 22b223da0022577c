"""What a person meets who installed the library without its extras: one line that says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAB = ["numpy", "scipy", "sklearn", "matplotlib", "jinja2", "rich", "typer", "pooch", "tqdm", "tensorboard"]


def without(modules: list[str], program: str, where: Path) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter answers in which `modules` are not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", hide + program], cwd=where, capture_output=True, text=True, timeout=120
    )


COMMAND = "import runpy; sys.argv = ['gapped', *{!r}]; runpy.run_module('gapped', run_name='__main__')"


@pytest.mark.parametrize("arguments", [[], ["--version"], ["compare"], ["doctor"]])
def test_the_command_says_what_to_install(arguments: list[str], tmp_path: Path) -> None:
    done = without(LAB, COMMAND.format(arguments), tmp_path)
    said = 'gapped: the gapped command needs typer and rich: pip install "gapped[lab]"\n'
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("hidden", ["scipy", "matplotlib", "jinja2", "sklearn"])
def test_nothing_is_trained_that_could_not_be_reported(hidden: str, tmp_path: Path) -> None:
    few = ["compare", "--estimator", "gst", "--seeds", "1", "--epochs", "1", "--device", "cpu"]
    done = without([hidden], COMMAND.format(few), tmp_path)
    assert done.returncode == 2, done.stderr
    package = "scikit-learn" if hidden == "sklearn" else hidden
    assert done.stderr.endswith(f' needs {package}: pip install "gapped[lab]"\n')
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    "program",
    [
        "import gapped.lab.report",
        "from gapped.lab.report.svg import to_svg",
        "import gapped.lab.cli.app",
        "import gapped.lab.data; gapped.lab.data.load('digits')",
        "from gapped.lab.cli import events",
        "import gapped; gapped.diagnose(lambda z: z[..., 0].sum(-1), gapped.simplex.torch.zeros(2, 3), "
        "[gapped.GST()], samples=16).plot()",
    ],
)
def test_each_way_into_the_laboratory_says_so_too(program: str, tmp_path: Path) -> None:
    """As a `GappedError`, and as the `ImportError` that code which can do without looks for."""
    caught = "except gapped.GappedError as e:\n    print(isinstance(e, ImportError), e)"
    done = without(LAB, f"import gapped\ntry:\n    {program}\n{caught}", tmp_path)
    assert done.stdout.startswith("True "), done.stderr
    assert done.stdout.endswith('pip install "gapped[lab]"\n')
