"""Every `gapped` command line in README and docs is run, scaled down by a rule for its command."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doc_pages import CALLS

from gapped.lab.cli import command
from gapped.lab.cli.app import main
from gapped.lab.recipe import Recipe


def changed(call: list[str], **options: str) -> list[str]:
    """The call with these options set, whatever they were."""
    kept, skip = [], False
    for word in call:
        if not skip and word not in options:
            kept.append(word)
        skip = word in options
    return [*kept, *(word for pair in options.items() for word in pair)]


def compare(call: list[str]) -> list[str]:
    return changed(call, **{"--device": "cpu", "--out": "out", "--engine": "local"})


def reproduce(call: list[str]) -> list[str]:
    """In full and --quick are one call here: the grid is cut to a few runs on digits either way."""
    # Who trains is tested in test_engines.py.
    dropped = dict.fromkeys(
        ("--device", "--out", "--engine", "--ray-address", "--runs-per-fleet", "--minutes"), ""
    )
    dropped |= dict.fromkeys(("--seeds", "--epochs"), "")
    names = [word for word in changed(call, **dropped)[: -2 * len(dropped)] if word != "--quick"]
    return [*names, "--quick", "--device", "cpu", "--out", "out"]


def report(call: list[str]) -> list[str]:
    """The records of a small comparison."""
    return ["report", "runs/compare"]


def data(call: list[str]) -> list[str]:
    """Nothing is downloaded here, and nothing large is made."""
    return ["data", *(["digits"] if len(call) > 1 else [])]


def bench(call: list[str]) -> list[str]:
    """Shapes of a few rows; without one, the cost of importing would be measured too."""
    small = [re.sub(r"^\d+x\d+", "8x16", word) for word in call if word != "--no-compiled"]
    shape = [] if "--shape" in call else ["--shape", "8x16"]
    quick = {"--device": "cpu", "--seconds": "0.001", "--out": "out"}
    return [*changed(small, **quick), *shape, "--no-compiled"]


def diagnose(call: list[str]) -> list[str]:
    """Few samples; a function of the reader's own is the module that the test has written."""
    shrink = {"--samples": "40", "--out": "out"}
    return changed([re.sub(r":(\d+)$", ":2", word) for word in call], **shrink)


def properties(call: list[str]) -> list[str]:
    return changed(call, **{"--draws": "200"})


# A command without a rule fails below: it needs one, or an honest reason to run as it stands.
RULES: dict[str, Callable[[list[str]], list[str]]] = {
    "compare": compare,
    "reproduce": reproduce,
    "report": report,
    "data": data,
    "bench": bench,
    "doctor": lambda call: call,
    "diagnose": diagnose,
    "properties": properties,
}
# These have code of their own; the other recipes are grids of the same, and are run with -m slow.
OWN_PATH = ("variance", "entropy", "efficiency", "vae", "mixed-temperature", "coupled")


def scaled(call: list[str]) -> list[str]:
    if call[0] not in RULES:
        pytest.fail(f"gapped {call[0]}: no rule in tests/docs/test_commands.py that says how to run it small")
    return RULES[call[0]](call)


def marks(call: list[str]) -> list[Any]:
    slow = call[0] == "reproduce" and not set(OWN_PATH) & set(call)
    return [pytest.mark.slow] if slow else []


SMALL = {" ".join(scaled(call)): call for _, call in CALLS if call[0] in RULES}


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
    """Commands train what `shrunk` leaves of what they ask for."""

    def execute(asked: Sequence[Recipe], *how: Any) -> int:
        return command.execute([shrunk(recipe) for recipe in asked], *how)

    for name in ("compare", "reproduce"):
        monkeypatch.setattr(f"gapped.lab.cli.{name}.execute", execute)


@pytest.mark.usefixtures("_small")
@pytest.mark.filterwarnings("ignore:listops. no official")
@pytest.mark.parametrize("small", [pytest.param(text, marks=marks(text.split())) for text in SMALL])
def test_every_command_in_the_documentation_runs(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call = scaled(SMALL[small])
    if "--function" in call:
        (tmp_path / "mymodel.py").write_text(
            "def cost(z):\n    return z[..., 0].sum(-1) ** 2\n", encoding="utf-8"
        )
        monkeypatch.syspath_prepend(tmp_path)
    if call[0] == "report":
        assert main(["compare", "--device", "cpu"]) == 0
    assert main(call) == 0
    caught = capsys.readouterr()
    assert caught.err == ""
    assert caught.out
    if call[0] in ("compare", "reproduce"):
        made = "simplex.html" if "figures" in call else "report.html"
        assert (tmp_path / "out" / made).is_file()


@pytest.mark.parametrize(("where", "call"), CALLS, ids=lambda value: str(value))
def test_every_command_in_the_documentation_has_a_rule(where: str, call: list[str]) -> None:
    assert scaled(call)[0] == call[0]


def test_a_command_without_a_rule_is_found() -> None:
    with pytest.raises(pytest.fail.Exception, match="gapped train: no rule"):
        scaled(["train", "--fast"])


def test_options_are_replaced_wherever_they_stand() -> None:
    call = ["compare", "--seeds", "5", "--estimator", "gst", "--data", "mnist"]
    assert changed(call, **{"--seeds": "1", "--data": "digits"}) == [
        *("compare", "--estimator", "gst", "--seeds", "1", "--data", "digits")
    ]
    assert reproduce(["reproduce", "a", "b", "--device", "cuda", "--out", "runs/x"]) == [
        *("reproduce", "a", "b", "--quick", "--device", "cpu", "--out", "out")
    ]
