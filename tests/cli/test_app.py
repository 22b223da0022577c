"""The command line: help, user errors, unexpected errors, and their exit status."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from inspect import signature

import pytest
import torch
import typer
from subprocesses import python
from training_toys import one_line, recipe_file

import gapped
from gapped.cli.app import app, main
from gapped.errors import GappedError
from gapped.texts import DEFAULT
from gapped_lab import training
from gapped_lab.recipe_files import recipe_titles

pytestmark = pytest.mark.usefixtures("sandbox")
COMMANDS = list(typer.main.get_command(app).commands)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gapped {gapped.__version__}\n"


def test_help_shows_examples_first_and_is_the_default(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert 0 < text.index("Examples:") < text.index("Options:")
    assert all(re.search(rf"^  {command} ", text, re.MULTILINE) for command in COMMANDS)
    assert main([]) == 0
    assert capsys.readouterr() == (text, "")


def test_a_terminal_shows_an_error_broken_between_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["compare", "--estimator", "gts"]) == 2
    line = one_line(capsys)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["compare", "--estimator", "gts"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert " ".join(each.strip() for each in lines) == line.strip()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_plain_words_in_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"] if command else ["--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: gapped {command}".strip() in text
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"\.{4}|^  .*\w\.{3}$", text, re.MULTILINE), "a cut line"


def test_reproduce_lists_its_recipes(capsys):
    assert main(["reproduce", "--help"]) == 0
    text = capsys.readouterr().out
    for name, title in recipe_titles().items():
        assert re.search(rf"^  {name} +{re.escape(title.split()[0])}", text, re.MULTILINE), name


def options_of(kind):
    """As text, without those that all of a family share."""
    pairs = [(each.name, each.default) for each in signature(kind).parameters.values()]
    return ",".join(f"{k}={v}" for k, v in pairs if k not in ("hard", "draw", "backend"))


def test_every_estimator_has_a_line(capsys):
    assert main(["estimators"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    kinds = {f"{k} (default)" if k == DEFAULT else k: v for k, v in gapped.estimators().items()}
    expected = [(name, kind.__doc__.split("\n")[0], options_of(kind)) for name, kind in kinds.items()]
    assert [tuple(row) for row in rows] == expected
    # That many characters are left in a terminal of 80 columns.
    assert all(row[1].endswith(".") and len(row[1]) <= 57 for row in rows)
    assert main(["estimators", "--family", "score"]) == 0
    assert "gst" not in capsys.readouterr().out


@pytest.mark.parametrize("name", gapped.estimators())
def test_an_estimator_is_described_with_each_option(name, capsys):
    assert main(["estimators", name]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert name in text
    kind = gapped.estimators()[name]
    for pair in filter(None, options_of(kind).split(",")):
        assert re.search(rf"^  {re.escape(pair)}  \S", text, re.MULTILINE), "each has a description"
    (shown,) = re.findall(r"^As text +(\S+)\nIn Python +gapped\.(\w+)$", text, re.MULTILINE)
    assert shown[1] == kind.__name__
    assert type(gapped.estimator(shown[0])) is kind


def test_the_estimators_do_not_wait_for_torch():
    for call in (["estimators"], ["estimators", "gst"]):
        program = (
            f"import sys; from gapped.cli.app import main; main({call}); assert 'torch' not in sys.modules"
        )
        python("-c", program)


def test_help_is_quick_and_does_not_wait_for_torch():
    """Processor time, the least of five: what the start costs, whatever else the machine is doing."""
    calls = [["--help"], ["--version"], ["estimators"], *([command, "--help"] for command in COMMANDS)]
    code = (
        "import sys\n"
        "from gapped.cli.app import main\n"
        "assert not any(map(main, {}))\n"
        "heavy = {{'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib'}} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    seconds = []
    for each in ([["--help"]],) * 5 + (calls,):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", code.format(each)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds[:5]) < 0.3


WRONG: dict[str, tuple[list[str], str]] = {
    "device": (["compare", "--device", "gpu"], "device: got 'gpu', expected auto, cpu or cuda"),
    "seeds text": (
        ["compare", "--seeds", "many"],
        r"Invalid value for '--seeds'.* \(see gapped compare --help",
    ),
    "minutes": (["compare", "--minutes", "-1"], "Invalid value for '--minutes'"),
    "data": (["compare", "--data", "mnits"], "--data: got 'mnits', expected one of digits, mnist"),
    "estimator": (
        ["compare", "--estimator", "gts"],
        r"estimator: got 'gts'; did you mean gst\? Expected one of ",
    ),
    "enumerating": (["compare", "--estimator", "exact"], "expected"),
    "recipe": (["reproduce", "albation"], "recipe: got 'albation'; did you mean ablation"),
    "recipe file": (["reproduce", "absent.toml"], "absent.toml: No such file"),
    "no recipe": (["reproduce"], "Missing argument 'NAME'"),
    "unknown flag": (["compare", "--sedes", "3"], "No such option.*--sedes.*see gapped compare --help"),
    "command": (["comapre"], r"No such command 'comapre'.*see gapped --help"),
    "family": (["estimators", "--family", "scores"], "family: got 'scores', expected one of pathwise, score"),
    "report": (["report", "absent"], "absent"),
    "data set": (["data", "mnits"], "data set: got 'mnits', expected one of digits, mnist"),
    "control characters": (["report", "no\x1b[2J\nwhere"], r"no\\x1b\[2J\\nwhere: no records.jsonl"),
}
if not torch.cuda.is_available():
    WRONG["no cuda"] = (["compare", "--device", "cuda"], "no CUDA device here; use --device cpu")


@pytest.mark.parametrize("what", WRONG)
def test_user_errors_are_one_line_and_status_2(capsys, tmp_path, what):
    arguments, pattern = WRONG[what]
    assert main(arguments) == 2
    assert re.search(pattern, one_line(capsys))
    assert list(tmp_path.iterdir()) == [], "something was written before the arguments were checked"


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_output_folder_that_is_a_file(capsys, tmp_path, out):
    (tmp_path / "file").write_text("mine")
    assert main(["compare", "--device", "cpu", "--out", out]) == 2
    assert f"{out}: cannot write here" in one_line(capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_unexpected_failure_is_one_line_and_status_1(capsys, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(training, "build", fail)
    assert main(["reproduce", recipe_file(tmp_path)]) == 1
    assert "RuntimeError: first line second line" in one_line(capsys)


def test_debug_raises():
    with pytest.raises(GappedError, match="device: got 'gpu'"):
        main(["--debug", "compare", "--device", "gpu"])
