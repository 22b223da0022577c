"""Training that a signal, a deadline or a full disk interrupts, and the display that takes the signals."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from report_records import load_json
from rich.console import Console
from training_toys import recipe_file, toy_recipe, train

from gapped.cli.app import main
from gapped_lab.cli.progress_display import Display
from gapped_lab.planning import plan
from gapped_lab.store import Store

pytestmark = pytest.mark.usefixtures("sandbox", "one_thread")


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def numbers(folder: str) -> list[Any]:
    lines = load_json(Path(folder) / "records.jsonl")
    return [(each["recipe"], each["id"], each["metrics"]) for each in lines]


def checkpoints(folder: str) -> list[Path]:
    return list(Path(folder, "checkpoints").glob("*.pt"))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("earlier", [False, True])
def test_a_command_interrupted_on_a_full_disk_says_what_is_kept(capsys, tmp_path, monkeypatch, earlier):
    command = ["reproduce", recipe_file(tmp_path, epochs=3), "--out", "o", "--minutes", "0"]
    if earlier:
        assert main(command) == 3
        assert "the same command goes on from the last checkpoint" in capsys.readouterr().err

    monkeypatch.setattr(Store, "save_checkpoint", full)
    rest = "the last one" if earlier else "nothing"
    with pytest.warns(UserWarning, match=rf"\(No space left on device\); {rest} is kept of its fleet"):
        assert main(command) == 3
    advice = "goes on from the last checkpoint" if earlier else "starts its unfinished fleets over"
    assert advice in capsys.readouterr().err


def test_a_command_out_of_time_stops_with_a_checkpoint_and_goes_on(capsys, tmp_path):
    """No time at all is enough for a step, here an epoch: it ends after each of them."""
    command = ["reproduce", recipe_file(tmp_path, epochs=2), "--device", "cpu", "--out"]
    for _ in range(2):
        assert main([*command, "stopped", "--minutes", "0"]) == 3
        assert "out of time; the same command goes on" in capsys.readouterr().err
        assert len(checkpoints("stopped")) == 1
        assert numbers("stopped") == []
    assert main([*command, "stopped", "--minutes", "0"]) == 0
    assert main([*command, "whole"]) == 0
    assert numbers("stopped") == numbers("whole")


@pytest.mark.slow_if(lambda number: number == signal.SIGTERM)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_a_checkpoint_and_the_same_command_completes(number, capsys, tmp_path):
    arguments = ["reproduce", recipe_file(tmp_path, epochs=300), "--device", "cpu", "--out"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "gapped", *arguments, "stopped"],
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
    assert len(checkpoints("stopped")) == 1
    assert numbers("stopped") == []

    assert main([*arguments, "stopped"]) == 0
    assert main([*arguments, "whole"]) == 0
    # The first of the two began where the other process stopped.
    out = capsys.readouterr().out
    assert out.count("\nepoch 30 of 300") == 1
    assert out.count("going on from epoch ") == 1
    assert numbers("stopped") == numbers("whole")
    assert not Path("stopped", "checkpoints").exists()


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
    cell = {"estimator": "gst", "label": "sound"}
    with Display(screen) as display:
        train(
            toy_recipe(cell=[cell, {**cell, "label": "broken", "learning_rate": 1e30}]),
            tmp_path,
            callbacks=display,
        )
    output = screen.file.getvalue()
    assert all(text in output for text in ("sound", "broken", "2/2"))


def test_a_deadline_stops_before_a_step_or_a_test_that_would_not_end_in_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gapped_lab.cli.progress_display.time.monotonic", lambda: now[0])
    display = Display(Console(file=io.StringIO()), minutes=1)
    (fleet,) = plan([toy_recipe()], {})
    display.start([fleet])
    stops = []
    for now[0] in (10.0, 30.0, 32.0, 42.0, 49.0, 50.0):
        display.step(fleet, 0.5)
        stops.append(display.wants_stop())
    assert display.pace == 10, "the first step, which compiles, does not count"
    assert stops == [False] * 5 + [True]


def test_the_bar_moves_while_an_epoch_lasts(monkeypatch):
    monkeypatch.setattr("gapped_lab.cli.progress_display.time.monotonic", lambda: 10.0)
    display = Display(Console(file=io.StringIO()))
    (fleet,) = plan([toy_recipe()], {})
    display.start([fleet])
    display.step(fleet, 0.25)
    assert display.progress.tasks[0].completed == 0.25
    display.step(fleet, 0.5)
    assert display.progress.tasks[0].completed == 0.25, "not for every step"


def test_a_log_has_a_line_every_half_minute_while_an_epoch_lasts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gapped_lab.cli.progress_display.time.monotonic", lambda: now[0])
    out = io.StringIO()
    display = Display(Console(file=out))
    (fleet,) = plan([toy_recipe()], {})
    display.start([fleet])
    for second in range(70):
        now[0] = float(second)
        display.step(fleet, second / 100)
    assert [line.partition(",")[0] for line in out.getvalue().splitlines()[1:]] == [
        "epoch 0.3 of 2",
        "epoch 0.6 of 2",
    ]
