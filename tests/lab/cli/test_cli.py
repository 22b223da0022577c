"""The command line: what it prints, what it writes, how it ends."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import json_lines
import pytest
import torch
from rich.console import Console

import gapped
from gapped.errors import GappedError
from gapped.lab import records, training
from gapped.lab.cli.app import main
from gapped.lab.cli.compare import default_recipe
from gapped.lab.cli.events import write_events
from gapped.lab.cli.watch import Display
from gapped.lab.engines.local import Local
from gapped.lab.planning import plan
from gapped.lab.recipe import find_recipe, known_recipes, recipe_from
from gapped.lab.store import Store

COMMANDS = ("compare", "reproduce", "diagnose", "properties", "report", "data", "bench", "doctor")
TINY = ["--epochs", "1", "--seeds", "1", "--device", "cpu"]
TWO = ["--estimator", "gst:gap=1.2", "--estimator", "straight-through"]
RECIPE = """
name = "toy"
task = "vae"
protocol = "digits-8x8"
data = "digits"
train_images = 100
test_images = 30
epochs = {epochs}
seeds = {seeds}

[[cell]]
label = "GST"
estimator = "gst"

[[cell]]
label = "GST-pi"
estimator = "gst:gap=expected"
"""


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """Default folders are relative: nothing may land in the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def toy_recipe(folder: Path, epochs: int = 1, seeds: int = 1) -> str:
    path = folder / "toy.toml"
    path.write_text(RECIPE.format(epochs=epochs, seeds=seeds))
    return str(path)


def lines(folder: Path) -> list[dict[str, Any]]:
    return json_lines.load(folder / "records.jsonl")


def numbers(folder: Path) -> list[Any]:
    return [(each["recipe"], each["id"], each["metrics"]) for each in lines(folder)]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The single line on standard error that a user error gives."""
    caught = capsys.readouterr()
    assert re.fullmatch(r"gapped: [^\n]+\n", caught.err), caught.err
    assert "Traceback" not in caught.out + caught.err
    return caught.err


# Help


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gapped {gapped.__version__}\n"


def test_help_shows_examples_first(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert 0 < text.index("Examples:") < text.index("Options:")
    assert all(re.search(rf"^  {command} ", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(capsys, command):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: gapped {command}" in text
    assert "--help" in text


def test_options_of_compare_are_the_documented_ones(capsys):
    main(["compare", "--help"])
    text = capsys.readouterr().out
    for option in ("data", "estimator", "seeds", "epochs", "tau", "device", "out", "data-dir", "tensorboard"):
        assert f"--{option} " in text, option


def test_without_a_command_help_is_shown_as_help(capsys):
    main([])
    caught = capsys.readouterr()
    shown = caught.out + caught.err
    assert shown.lstrip().startswith("Usage: gapped"), "help is not an error message"


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"]])
def test_help_does_not_wait_for_torch(arguments):
    code = (
        "import sys\n"
        "from gapped.lab.cli.app import main\n"
        f"assert main({arguments!r}) == 0\n"
        "heavy = {'torch', 'numpy', 'scipy', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_help_is_quick():
    """Processor time, the least of five: what the start costs, whatever else the machine is doing."""
    code = "import sys; from gapped.lab.cli.app import main; sys.exit(main(['--help']))"
    took = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3


# Compare


def test_compare(capsys, tmp_path):
    assert main(["compare", *TINY, *TWO, "--out", "mine"]) == 0
    caught = capsys.readouterr()
    assert caught.err == ""
    made = lines(tmp_path / "mine")
    assert [each["estimator"] for each in made] == ["gst", "straight-through"]
    assert all(each["data"] == "digits" and each["tau"] == 0.5 and each["epochs"] == 1 for each in made)
    assert all(each["metrics"]["gradient_variance"] > 0 for each in made)
    for each in made:
        row = next(line for line in caught.out.splitlines() if line.startswith(f" {each['label']} "))
        assert f"{each['metrics']['test_negative_elbo']:.2f}" in row
    best = min(made, key=lambda each: each["metrics"]["test_negative_elbo"])["label"]
    assert f"{best} has the lowest test negative ELBO" in caught.out
    assert "run more seeds" in caught.out, "one seed cannot make a winner"
    report = tmp_path / "mine" / "report.html"
    assert re.fullmatch(r"Report: .*mine/report\.html", caught.out.splitlines()[-1])
    assert report.read_text().lstrip().lower().startswith("<!doctype html>")
    assert (tmp_path / "mine" / "tables.md").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]

    before = (tmp_path / "mine" / "records.jsonl").read_bytes()
    assert main(["compare", *TINY, *TWO, "--out", "mine"]) == 0
    assert "All runs are finished already." in capsys.readouterr().out
    assert (tmp_path / "mine" / "records.jsonl").read_bytes() == before


def test_compare_by_default():
    recipe = default_recipe()
    cells = {(entry.spec.estimator, entry.spec.tau) for entry in recipe.entries}
    assert cells == {
        ("gumbel-softmax", 0.5),
        ("straight-through", 1.0),
        ("gumbel-rao", 0.5),
        ("gst", 0.5),
        ("reinmax", 1.0),
    }
    assert len(recipe.entries) == 15
    assert {entry.spec.data for entry in recipe.entries} == {"digits"}
    assert len(plan([recipe], {})) == 1, "one fleet"


def test_compare_takes_temperatures_from_where_they_are_named():
    recipe = default_recipe(estimators=["gst:tau=0.25", "gst:gap=2"], tau=0.75, seeds=1)
    assert [entry.spec.tau for entry in recipe.entries] == [0.25, 0.75]
    assert default_recipe(data="mnist").entries[0].spec.protocol == "paper-30x10"


def test_tensorboard(capsys, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    assert main(["reproduce", toy_recipe(tmp_path, epochs=2), "--out", "o", "--tensorboard"]) == 0
    assert "tensorboard --logdir" in capsys.readouterr().out
    files = list((tmp_path / "o" / "tensorboard").rglob("events.out.tfevents.*"))
    assert len(files) == 2


def test_every_run_has_its_own_event_file(capsys, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    base = {"task": "vae", "label": "a/b", "tau": 0.5, "seed": 0}
    places = [("vae", "paper-30x10", "mnist"), ("mixed", "paper-30x10", "mnist")]
    places += [
        ("vae", "plain-30x10", "mnist"),
        ("vae", "plain-30x10", "digits"),
        ("vae", "plain-30x10", "digits"),
    ]
    made = [
        records.Record(**base, id=f"{n:016}"[::-1], recipe=recipe, protocol=protocol, data=data)
        for n, (recipe, protocol, data) in enumerate(places)
    ]
    records.write(tmp_path, [records.Curve(id=r.id, epoch=[1], more={"loss": [2.0]}) for r in made])
    written: list[set[Path]] = []
    for _ in range(3):
        target = write_events(made, tmp_path)
        written.append(set(target.rglob("events.out.tfevents.*")))
        if len(written) == 2:  # the first run is trained again
            records.write(tmp_path, [records.Curve(id=made[0].id, epoch=[1], more={"loss": [3.0]})])
        found = {file.parent.relative_to(target) for file in written[-1]}
        assert len(found) == len(written[-1]) == 5
        assert {str(place.parent) for place in found} == {
            "vae/paper-30x10",
            "mixed/paper-30x10",
            "vae/plain-30x10",
            "vae/plain-30x10-digits",
        }
    assert written[0] == written[1]
    assert len(written[1] - written[2]) == 1


def test_tensorboard_is_missed_before_training(capsys, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert main(["reproduce", toy_recipe(tmp_path), "--out", "o", "--tensorboard"]) == 2
    assert '--tensorboard needs tensorboard: pip install "gapped[lab]"' in one_line(capsys)
    assert not (tmp_path / "o").exists()


# Reproduce and report


def test_reproduce_quick(capsys, tmp_path):
    assert main(["reproduce", "smoke", "--quick", "--seeds", "1", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "smoke-quick"
    made = lines(folder)
    assert [each["label"] for each in made] == ["GST-0.8", "GST-1.2", "STGS", "ReinMax"]
    assert all(each["quick"] and each["epochs"] == 1 and each["recipe"] == "smoke" for each in made)
    assert out.startswith("smoke: Smoke test\n")
    assert "quick run" in out
    assert (folder / "report.html").exists()


def test_reproduce_several_share_a_folder(capsys, tmp_path):
    assert main(["reproduce", toy_recipe(tmp_path), "smoke", "--quick", "--seeds", "1", "--epochs", "1"]) == 0
    capsys.readouterr()
    assert {each["recipe"] for each in lines(tmp_path / "runs" / "toy-smoke-quick")} == {"toy", "smoke"}


def test_report(capsys, tmp_path):
    main(["reproduce", toy_recipe(tmp_path), "--out", "o"])
    (tmp_path / "o" / "report.html").unlink()
    before = (tmp_path / "o" / "records.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["report", "o"]) == 0
    caught = capsys.readouterr()
    assert "GST-pi" in caught.out
    assert caught.out.rstrip().endswith("report.html")
    assert (tmp_path / "o" / "report.html").exists()
    assert (tmp_path / "o" / "records.jsonl").read_bytes() == before


def test_data_lists_what_there_is(capsys):
    assert main(["data"]) == 0
    assert "digits\t" in capsys.readouterr().out


# Errors


WRONG: dict[str, tuple[list[str], str]] = {
    "device": (["compare", "--device", "gpu"], "device: got 'gpu', expected auto, cpu or cuda"),
    "seeds": (["compare", "--seeds", "0"], "seeds: got 0"),
    "seeds text": (["compare", "--seeds", "many"], "Invalid value for '--seeds'"),
    "epochs": (["compare", "--epochs", "0"], "epochs: got 0"),
    "tau": (["compare", "--tau", "0"], "tau: got 0"),
    "data": (["compare", "--data", "mnits"], "--data: got 'mnits', expected one of digits, mnist"),
    "estimator": (["compare", "--estimator", "gts"], "estimator: got 'gts', expected one of .*gst"),
    "option": (["compare", "--estimator", "gst:gpa=1"], "unknown option 'gpa', expected one of .*gap"),
    "recipe": (["reproduce", "albation"], "recipe: got 'albation', expected one of ablation"),
    "recipe file": (["reproduce", "absent.toml"], "absent.toml: No such file"),
    "recipe seeds": (["reproduce", "smoke", "--seeds", "0"], "seeds: got 0"),
    "no recipe": (["reproduce"], "Missing argument 'NAME...'"),
    "unknown flag": (["compare", "--sedes", "3"], "No such option.*--sedes"),
    "command": (["comapre"], "No such command 'comapre'"),
    "report": (["report", "absent"], "absent"),
    "data set": (["data", "mnits"], "data set: got 'mnits', expected one of digits, mnist"),
}


@pytest.mark.parametrize("what", WRONG)
def test_user_errors_are_one_line_and_status_2(capsys, tmp_path, what):
    arguments, pattern = WRONG[what]
    assert main(arguments) == 2
    assert re.search(pattern, one_line(capsys))
    assert list(tmp_path.iterdir()) == [], "something was written before the arguments were checked"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda(capsys, tmp_path):
    assert main(["compare", "--device", "cuda"]) == 2
    assert "no CUDA device here; use --device cpu" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_output_folder_that_is_a_file(capsys, tmp_path, out):
    (tmp_path / "file").write_text("mine")
    assert main(["compare", *TINY, "--out", out]) == 2
    assert f"{out}: cannot write here" in one_line(capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_output_folder_that_cannot_be_written(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "locked"
    folder.mkdir()
    if os.geteuid() == 0:
        # Permissions do not bind root: let the system call fail as it would for others.
        def refuse(*_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

        monkeypatch.setattr(Path, "write_bytes", refuse)
    else:
        folder.chmod(0o500)
    try:
        assert main(["compare", *TINY, "--out", "locked"]) == 2
    finally:
        folder.chmod(0o700)
    assert "locked: cannot write here (Permission denied)" in one_line(capsys)


def test_an_empty_and_a_misspelt_recipe(capsys, tmp_path):
    for text, pattern in (("", r"at least one \[\[cell\]\]"), ("naem = 'x'", "unknown key 'naem'.*name")):
        (tmp_path / "bad.toml").write_text(text)
        assert main(["reproduce", "bad.toml"]) == 2
        assert re.search(pattern, one_line(capsys))


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_full_disk(capsys, tmp_path, monkeypatch, call):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class FullFile(io.FileIO):
        write = full  # type: ignore[assignment]

    if call == "fsync":
        monkeypatch.setattr(records.os, "fsync", full)
    else:
        monkeypatch.setattr(records, "open", lambda path, mode: FullFile(path, mode), raising=False)
    assert main(["reproduce", toy_recipe(tmp_path), "--out", "o"]) == 2
    assert "plan.json: No space left on device" in one_line(capsys)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", toy_recipe(tmp_path), "--out", "o"]) == 0, "does not recover"
    assert len(lines(tmp_path / "o")) == 2


def test_an_unexpected_failure_is_one_line_and_status_1(capsys, tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(training, "build", fail)
    assert main(["reproduce", toy_recipe(tmp_path)]) == 1
    assert "RuntimeError: first line second line" in one_line(capsys)


def test_debug_raises(tmp_path):
    with pytest.raises(GappedError, match="device: got 'gpu'"):
        main(["--debug", "compare", "--device", "gpu"])


def test_a_hostile_checkpoint_is_not_executed(tmp_path):
    path = toy_recipe(tmp_path, epochs=2)
    (fleet,) = plan([find_recipe(path)], {})
    checkpoints = tmp_path / "o" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / f"{fleet.key}.pt").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    with pytest.warns(UserWarning, match="not a checkpoint of this version; its fleet starts over"):
        assert main(["reproduce", path, "--out", "o"]) == 0
    assert not (tmp_path / "executed").exists()


# Interruption


@pytest.mark.parametrize("earlier", [False, True])
def test_a_command_interrupted_on_a_full_disk_says_what_is_kept(capsys, tmp_path, monkeypatch, earlier):
    command = ["reproduce", toy_recipe(tmp_path, epochs=3), "--device", "cpu", "--out", "o", "--minutes", "0"]
    if earlier:
        assert main(command) == 3
        assert "the same command goes on from the last checkpoint" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "k.pt")

    monkeypatch.setattr(Store, "save_checkpoint", full)
    kept = "the last one" if earlier else "nothing"
    with pytest.warns(UserWarning, match=rf"\(No space left on device\); {kept} is kept of its fleet"):
        assert main(command) == 3
    said = "goes on from the last checkpoint" if earlier else "starts its unfinished fleets over"
    assert said in capsys.readouterr().err


def test_a_command_out_of_time_stops_with_a_checkpoint_and_goes_on(capsys, tmp_path, one_thread):
    """No time at all is enough for an epoch: it ends after each of them."""
    command = ["reproduce", toy_recipe(tmp_path, epochs=2), "--device", "cpu", "--out"]
    stopped = [*command, str(tmp_path / "stopped"), "--minutes", "0"]
    for _ in range(2):
        assert main(stopped) == 3
        assert "out of time; the same command goes on" in capsys.readouterr().err
        assert len(list((tmp_path / "stopped" / "checkpoints").glob("*.pt"))) == 1
        assert lines(tmp_path / "stopped") == []
    assert main(stopped) == 0
    assert main([*command, str(tmp_path / "whole")]) == 0
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")
    assert main([*command, str(tmp_path / "never"), "--minutes", "-1"]) == 2
    assert not (tmp_path / "never").exists()


def test_compare_takes_both_families(capsys, tmp_path):
    estimators = ["rloo", "gst", "nvil:network=4", "relax:network=4"]
    named = [part for text in estimators for part in ("--estimator", text)]
    assert main(["compare", *named, "--seeds", "2", "--epochs", "1", "--out", str(tmp_path)]) == 0
    made = lines(tmp_path)
    assert {(line["label"], line["tau"]) for line in made} == {
        ("rloo", None),
        ("gst", 0.5),
        ("nvil:network=4", None),
        ("relax:network=4", 0.5),
    }
    assert all(line["metrics"]["gradient_variance"] > 0 for line in made)
    assert {line["runs_in_fleet"] for line in made} == {8}
    assert "has the lowest test negative ELBO" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("estimator", ["disarm", "exact", "rloo:samples=1", "rlo", "rloo:n=3"])
def test_an_estimator_that_cannot_be_compared_is_one_line(capsys, tmp_path, estimator):
    assert main(["compare", "--estimator", estimator, "--out", str(tmp_path / "never")]) == 2
    assert "expected" in one_line(capsys)
    assert not (tmp_path / "never").exists()


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint_and_the_same_command_completes(number, capsys, tmp_path):
    arguments = ["reproduce", toy_recipe(tmp_path, epochs=300), "--device", "cpu", "--out"]
    code = "from gapped.lab.cli.app import entry; entry()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, *arguments, str(tmp_path / "stopped")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch "):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "with a checkpoint" in out
    assert "Traceback" not in err
    assert len(list((tmp_path / "stopped" / "checkpoints").glob("*.pt"))) == 1
    assert lines(tmp_path / "stopped") == []

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main([*arguments, "stopped"]) == 0
        assert main([*arguments, "whole"]) == 0
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    # The first of the two began where the other process stopped.
    assert shown.count("epoch 30 of 300") == 1
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")
    assert not (tmp_path / "stopped" / "checkpoints").exists()


def test_the_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with Display(Console(file=io.StringIO())) as display:
        os.kill(os.getpid(), signal.SIGINT)
        assert display.wants_stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_terminal_gets_a_live_table(tmp_path):
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    cells = [
        {"estimator": "gst", "label": "sound"},
        {"estimator": "gst", "label": "broken", "learning_rate": 1e30},
    ]
    table = {"name": "t", "task": "vae", "protocol": "digits-8x8", "data": "digits", "train_images": 100}
    recipe = recipe_from({**table, "epochs": 2, "cell": cells}, "t")
    with Display(screen) as display:
        Local("cpu").run([recipe], Store(tmp_path), training.Settings(callbacks=display))
    shown = screen.file.getvalue()
    assert "sound" in shown
    assert "broken" in shown
    assert "2/2" in shown


# The paper's recipes, on real images


def mnist_folder() -> Path:
    named = os.environ.get("GAPPED_DATA")
    places = [Path(named)] if named else []
    places.append(Path(__file__).resolve().parents[4] / "shared" / "data")
    for place in places:
        if any((place / "mnist").glob("train-images*")):
            return place
    pytest.skip("needs the MNIST files, in $GAPPED_DATA or in ../shared/data beside the checkout")


SMALL = """
[quick]
seeds = 1
epochs = 1
train_images = 200
test_images = 100
"""
MORE = {
    "variance": "variance_samples = 2\nvariance_images = 20\n",
    "entropy": "entropy_steps = 2\n",
}
CELLS = {"ablation": 10, "vae": 24, "mixed-temperature": 12, "variance": 3, "entropy": 3, "efficiency": 4}


@pytest.mark.parametrize("name", CELLS)
def test_the_paper_s_recipes_run_on_mnist(capsys, tmp_path, name):
    folder = mnist_folder()
    text = known_recipes()[name].read_text().split("[quick]")[0]
    # What takes seconds and gigabytes on a CPU is not what is tested here.
    text = re.sub(r"samples=1000\b", "samples=6", re.sub(r"samples=100\b", "samples=5", text))
    (tmp_path / "small.toml").write_text(text + SMALL + MORE.get(name, ""))
    arguments = ["reproduce", "small.toml", "--quick", "--device", "cpu", "--data-dir", str(folder)]
    assert main([*arguments, "--out", "o"]) == 0
    made = lines(tmp_path / "o")
    assert len({(each["label"], each["tau"]) for each in made}) == len(made) == CELLS[name]
    assert all(each["recipe"] == name and each["quick"] and each["status"] == "ok" for each in made)
    measured = {"entropy": "surrogate_entropy", "variance": "gradient_variance"}.get(
        name, "test_negative_elbo"
    )
    assert all(each["metrics"][measured] > 0 for each in made)
    assert json.loads((tmp_path / "o" / "records.jsonl").read_text().splitlines()[0])["data"] == "mnist"
    assert (tmp_path / "o" / "report.html").exists()
    assert "quick" in capsys.readouterr().out
