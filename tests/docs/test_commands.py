"""Every `gapped` command line in README and docs is run, scaled down by a rule for its command."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from doc_pages import CALLS
from training_toys import WORK

from gapped.cli.app import app, main
from gapped_lab.bench import workloads
from gapped_lab.cli import training
from gapped_lab.recipe import Recipe


def changed(call: list[str], **options: str) -> list[str]:
    """The call with these options set, whatever they were."""
    rest, skip = [], False
    for word in call:
        if not skip and word not in options:
            rest.append(word)
        skip = word in options
    return [*rest, *(word for pair in options.items() for word in pair)]


def compare(call: list[str]) -> list[str]:
    device = {} if "--train" in call else {"--device": "cpu"}
    return changed(call, **device, **{"--out": "out", "--engine": "local"})


def reproduce(call: list[str]) -> list[str]:
    """The recipes alone, --quick or not: the grid is cut to a few runs; test_engines.py tests who trains."""
    words = zip(call, ["", *call], strict=False)
    names = [word for word, before in words if not (word.startswith("--") or before.startswith("--"))]
    # One of them needs released quantizers.
    names = ["world-model" if name == "workloads" else name for name in names]
    return [*names, "--quick", "--device", "cpu", "--out", "out"]


def bench(call: list[str]) -> list[str]:
    """Shapes of a few rows; without one, the cost of importing would be measured too. Not all workloads."""
    few = ["gates" if word == "all" else word for word in call if word != "--no-compiled"]
    small = [re.sub(r"^\d+x\d+", "8x16", word) for word in few]
    shape = [] if "--shape" in call else ["--shape", "8x16"]
    quick = {"--device": "cpu", "--seconds": "0.001", "--out": "out"}
    return [*changed(small, **quick), *shape, "--no-compiled"]


def diagnose(call: list[str]) -> list[str]:
    """Few samples; a function of the reader's own is the module that the test has written."""
    shrink = {"--samples": "200", "--out": "out"}
    return changed([re.sub(r":(\d+)$", ":2", word) for word in call], **shrink)


# How to run each command small; one without a rule fails below.
RULES: dict[str, Callable[[list[str]], list[str]]] = {
    "compare": compare,
    "reproduce": reproduce,
    # The records of a small comparison.
    "report": lambda call: ["report", "runs/compare"],
    # Nothing is downloaded here, and nothing large is made.
    "data": lambda call: ["data", *(["digits"] if len(call) > 1 else [])],
    "bench": bench,
    "doctor": lambda call: call,
    "diagnose": diagnose,
    "properties": lambda call: changed(call, **{"--draws": "200"}),
    "estimators": lambda call: call,
}
# These have code of their own; the other recipes are grids of the same, and are run with -m slow.
OWN_PATH = ("variance", "entropy", "efficiency", "vae", "mixed-temperature", "coupled")


def marks(call: list[str]) -> list[Any]:
    slow = call[0] == "reproduce" and not set(OWN_PATH) & set(call)
    return [pytest.mark.slow] if slow else []


SMALL = {" ".join(small): small for small in (RULES[call[0]](call) for _, call in CALLS if call[0] in RULES)}


def shrunk(full: Recipe) -> Recipe:
    """Two runs with different estimators where there are two, for one epoch; images are few and small."""
    first = {entry.spec.estimator: entry for entry in reversed(full.entries)}
    entries = []
    for entry in list(first.values())[:2]:
        spec = replace(entry.spec, epochs=1)
        if spec.task == "vae":
            spec = replace(
                spec,
                data="digits",
                protocol="digits-8x8",
                train_images=100,
                test_images=30,
                variance_samples=min(spec.variance_samples, 2),
                entropy_steps=min(spec.entropy_steps, 1),
            )
        entries.append(replace(entry, spec=spec))
    return replace(full, entries=tuple(entries))


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands train what `shrunk` leaves of what they ask for, and measure small workloads."""

    def execute(recipes: Sequence[Recipe], *how: Any, **more: Any) -> None:
        training.execute([shrunk(recipe) for recipe in recipes], *how, **more)

    for name in ("demo", "reproduce"):
        monkeypatch.setattr(f"gapped_lab.cli.{name}.execute", execute)
    monkeypatch.setattr(
        workloads, "tasks", lambda names, _: [workloads.task(each, WORK[each]) for each in names]
    )


@pytest.fixture
def _forgotten(tmp_path: Path) -> Iterator[None]:
    """Modules of the test's folder are not there for the next test."""
    yield
    own = [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(tmp_path))]
    for name in {*own, *(name.partition(".")[0] for name in own)}:
        del sys.modules[name]


@pytest.mark.usefixtures("_small", "_forgotten")
@pytest.mark.filterwarnings("ignore:listops. no official")
@pytest.mark.parametrize("small", [pytest.param(text, marks=marks(text.split())) for text in SMALL])
def test_every_command_in_the_documentation_runs(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    call = SMALL[small]
    if "--function" in call:
        (tmp_path / "mymodel.py").write_text("def cost(z):\n    return z[..., 0].sum(-1) ** 2\n")
        monkeypatch.syspath_prepend(tmp_path)
    if "--train" in call:
        module, _, _ = call[call.index("--train") + 1].partition(":")
        script = tmp_path / (module.replace(".", "/") + ".py")
        script.parent.mkdir(exist_ok=True)
        script.write_text("def train(estimator, seed):\n    return len(str(estimator)) + seed / 10\n")
        monkeypatch.syspath_prepend(tmp_path)
    if call[0] == "report":
        assert main(["compare", "--device", "cpu"]) == 0
    assert main(call) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", printed.out))
    assert any(lines)
    assert max(lines, key=len) == max((line for line in lines if len(line) <= 80), key=len)
    if call[0] in ("compare", "reproduce"):
        page = "expected-gap.svg" if "figures" in call else "report.html"
        assert (tmp_path / "out" / page).is_file()


def test_every_command_in_the_documentation_has_a_rule() -> None:
    """And every command has a line in the documentation, whose width is checked above."""
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert {call[0] for _, call in CALLS} == set(RULES) == commands
