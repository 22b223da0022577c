"""Options and endings that commands share."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapped.lab.records import Record

if TYPE_CHECKING:
    from gapped.lab.recipe import Recipe


class Stopped(Exception):
    """The command ended before its work did, at the user's wish. The message says why, and what is kept."""

    def __init__(self, message: str, status: int = 130) -> None:
        super().__init__(message)
        self.status = status
        """The exit status; that of Ctrl-C if nothing else is said."""


Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets are looked up first.", show_default=False)
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")]

Minutes = Annotated[
    float | None,
    typer.Option(
        help="Stop with a checkpoint after so many minutes, exit status 3 (under torchrun, 0); "
        "the same command goes on.",
        show_default=False,
        min=0.0,
    ),
]
Engine = Annotated[str, typer.Option(help="Who trains: local, torchrun or ray. The numbers are the same.")]
RayAddress = Annotated[
    str | None, typer.Option(help="A Ray cluster; one on this machine by default.", show_default=False)
]
RunsPerFleet = Annotated[
    int | None,
    typer.Option(help="At most so many runs train as one program, to split the work.", show_default=False),
]


def execute(
    recipes: Sequence[Recipe],
    out: Path,
    device: str,
    data_dir: Path | None,
    tensorboard: bool,
    minutes: float | None = None,
    engine: str = "local",
    ray_address: str | None = None,
) -> None:
    """Train what `recipes` ask for, show tables and verdict, write the report."""
    from gapped.lab.cli.events import event_writer, write_events
    from gapped.lab.cli.watch import Display
    from gapped.lab.engines import engine as engine_called
    from gapped.lab.report.markdown import write_tables
    from gapped.lab.report.page import write_report
    from gapped.lab.report.terminal import console, say, show
    from gapped.lab.store import Store
    from gapped.lab.training import Interrupted, Settings

    if tensorboard:
        event_writer()
    trains = engine_called(engine, device, ray_address=ray_address)
    store = Store(out)
    screen = console(quiet=not trains.leads)
    display = Display(screen, minutes)
    for recipe in recipes:
        named = ": ".join(filter(None, (recipe.name, recipe.title)))
        say(screen, named)
    try:
        with display:
            records = trains.run(recipes, store, Settings(data_dir=data_dir, callbacks=display))
    except (Interrupted, KeyboardInterrupt):
        # Not a KeyboardInterrupt any more: the framework would end the program without a word.
        goes_on = "the same command goes on from the last checkpoint"
        if not store.has_checkpoint():
            goes_on = "there is no checkpoint, the same command starts its unfinished fleets over"
        if display.asked or not display.is_late():
            raise Stopped(f"interrupted; {goes_on}", 128 + (display.asked or signal.SIGINT)) from None
        if trains.restarts:
            raise Stopped(f"out of time; {goes_on}; exit status 0, or it would be restarted", 0) from None
        raise Stopped(f"out of time; {goes_on}", 3) from None
    if not trains.leads:
        return
    failed = {record.fleet: record for record in records if record.failed}
    sound = [record for record in records if not record.failed]
    if sound:
        show(sound, screen)
        write_tables(records, out / "tables.md")
        if tensorboard:
            say(screen, f"TensorBoard: tensorboard --logdir {write_events(sound, out)}")
        say(screen, f"Report: {write_report(out)}")
    if failed:
        raise Stopped("\ngapped: ".join(_failure(record, records) for record in failed.values()), 1)


def _failure(record: Record, records: Sequence[Record]) -> str:
    """Which runs a failed fleet has, and why it failed."""
    labels = sorted({each.label for each in records if each.fleet == record.fleet})
    runs = f"{record.runs_in_fleet} run{'s' * (record.runs_in_fleet != 1)} of {', '.join(labels)}"
    return f"fleet {record.fleet} failed ({runs}; the same command tries it again): {record.error}"
