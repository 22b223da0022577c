"""What commands share: options, lines and tables to print, and the training of recipes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapped.errors import GappedError, one_line, printable, reject
from gapped_lab.records import Record

if TYPE_CHECKING:
    from gapped_lab.recipe import Recipe

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder in which data sets are looked up first.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Train for so many minutes at most, but for one step at least, and stop with a checkpoint. "
        "The exit status is 3 (under torchrun, 0). The same command goes on from there.",
        min=0.0,
    ),
]
Engine = Annotated[
    str, typer.Option(help="What runs the training: local, torchrun or ray. The numbers are the same.")
]
RayAddress = Annotated[
    str | None, typer.Option(help="Address of a Ray cluster; by default, one on this machine.")
]
RunsPerFleet = Annotated[
    int | None, typer.Option(help="Largest number of runs in a fleet, which trains as one program.")
]


def estimator_option(default: str) -> Any:
    """The repeatable option ``--estimator``; `default` says which ones are used without it."""
    return typer.Option(help=f"name or name:option=value,...; repeatable. {default} by default.")


Tau = Annotated[
    float | None,
    typer.Option(
        help="Temperature of estimators whose text has none; by default, the one recommended for each."
    ),
]


class Stopped(Exception):
    """The command ended before its work was done. The message says why, and what is kept."""

    def __init__(self, message: str, status: int = 130) -> None:
        super().__init__(message)
        self.status = status
        """The exit status; by default that of Ctrl-C."""


def complain(message: str) -> None:
    """Print the message to standard error: one line, which a terminal shows broken between words.

    It may hold anything, such as a path.
    """
    line = f"gapped: {printable(message)}"
    if sys.stderr.isatty():
        width = get_terminal_size().columns
        line = fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)


def load_function(option: str, text: str) -> Callable[..., Any]:
    """The function called ``module:function``, looked up from the current folder; `option` asks for it."""
    from importlib import import_module

    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise reject(option, text, "module:function, importable from here")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise GappedError(f"{option}: {module_name}: {one_line(problem)}") from problem
    function = getattr(module, name, None)
    if not callable(function):
        what = "no such name" if function is None else f"an object of type {type(function).__name__}"
        raise reject(option, f"{text}, {what}", f"a function in {module_name}")
    return function  # type: ignore[no-any-return]


def show_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for a terminal; for a pipe, lines with tabs, which other programs can cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in rows:
            print("\t".join(map(printable, row)))
        return
    columns = zip(titles, *rows, strict=True)
    if sum(max(map(len, column)) + 3 for column in columns) + 1 > console.width:
        # Not wide enough: what is longest, the last column, stands below the one before it.
        titles = (*titles[:-2], ", ".join(titles[-2:]))
        rows = [(*row[:-2], "\n".join(filter(None, row[-2:]))) for row in rows]
    table = Table(*titles)
    for row in rows:
        # Text, because a path may hold brackets, which rich would read as markup.
        table.add_row(*(Text("\n".join(map(printable, cell.split("\n"))), overflow="fold") for cell in row))
    console.print(table)


def execute(
    recipes: Sequence[Recipe],
    out: Path,
    device: str,
    data_dir: Path | None,
    tensorboard: bool,
    minutes: float | None,
    engine: str,
    ray_address: str | None,
) -> None:
    """Train the runs of `recipes`, show tables and verdict, write the report."""
    from gapped_lab.cli.progress_display import Display
    from gapped_lab.cli.tensorboard import event_writer, write_events
    from gapped_lab.engines import engine as engine_by_name
    from gapped_lab.report.page import write_report
    from gapped_lab.report.rendering import console, say, show, write_tables
    from gapped_lab.store import Store
    from gapped_lab.training import Interrupted, Settings

    if tensorboard:
        event_writer()
    trainer = engine_by_name(engine, device, ray_address=ray_address)
    store = Store(out)
    screen = console(quiet=not trainer.leads)
    display = Display(screen, minutes)
    for recipe in recipes:
        say(screen, ": ".join(filter(None, (recipe.name, recipe.title))))
    try:
        with display:
            records = trainer.run(recipes, store, Settings(data_dir=data_dir, callbacks=display))
    except (Interrupted, KeyboardInterrupt):
        # Typer would end the program without a message on a KeyboardInterrupt.
        advice = "the same command goes on from the last checkpoint"
        if not store.has_checkpoint():
            advice = "there is no checkpoint, the same command starts its unfinished fleets over"
        if display.stop_signal or not display.is_late():
            raise Stopped(f"interrupted; {advice}", 128 + (display.stop_signal or signal.SIGINT)) from None
        if trainer.restarts:
            raise Stopped(f"out of time; {advice}; exit status 0, or it would be restarted", 0) from None
        raise Stopped(f"out of time; {advice}", 3) from None
    if not trainer.leads:
        return
    failed = {record.fleet: record for record in records if record.failed}
    sound = [record for record in records if not record.failed]
    if sound:
        say(screen, "All runs are finished; tables and report follow.")
        show(sound, screen)
        write_tables(records, out / "tables.md")
        if tensorboard:
            say(screen, f"TensorBoard: tensorboard --logdir {write_events(sound, out)}")
        say(screen, f"Report: {write_report(out)}")
    if failed:
        raise Stopped("\n".join(_failure(record, records) for record in failed.values()), 1)


def _failure(record: Record, records: Sequence[Record]) -> str:
    """Which runs a failed fleet has, and why it failed."""
    labels = sorted({each.label for each in records if each.fleet == record.fleet})
    runs = f"{record.runs_in_fleet} run{'s' * (record.runs_in_fleet != 1)} of {', '.join(labels)}"
    return f"fleet {record.fleet} failed ({runs}; the same command tries it again): {record.error}"
