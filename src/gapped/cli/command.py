"""The options, errors, lines and tables that commands share, and what they ask of the laboratory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapped.errors import GappedError, MissingExtra, one_line, printable, reject

if TYPE_CHECKING:
    from rich.console import Console

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder in which data sets are looked up first.")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Train for so many minutes at most, but for one step at least, and stop with a checkpoint. "
        "The exit status is 3. The same command goes on from there.",
        min=0.0,
    ),
]
Engine = Annotated[str, typer.Option(help="What runs the training: local or ray. The numbers are the same.")]
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
    if module_name.endswith(".py"):
        meant = module_name.removesuffix(".py").replace("/", ".")
        raise reject(option, text, f"a module, not a file: {meant}:{name}")
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


def console() -> Console:
    """The terminal at its width; a file or a pipe gets room enough for every column. Text is never markup."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    return Console(width=width, markup=False, emoji=False, highlight=False)


def say(screen: Console, text: str) -> None:
    """Print a line that may hold anything, such as a path; it is not broken at the terminal's width."""
    screen.print(printable(text), soft_wrap=True)


def prose(text: str, screen: Console) -> str:
    """Sentences broken between words at the width of a terminal, or at ``$COLUMNS``; else one line."""
    has_width = screen.is_terminal or "COLUMNS" in os.environ
    return fill(text, screen.width, break_on_hyphens=False) if has_width else text


def laboratory(name: str, what: str) -> Callable[..., Any]:
    """A function of the laboratory, where that is installed; `what` needs it."""
    for point in entry_points(group="gapped.laboratory", name=name):
        function: Callable[..., Any] = point.load()
        return function
    raise missing(what)


def missing(what: str) -> MissingExtra:
    """The error where `what` needs the laboratory, which is not installed."""
    return MissingExtra(f"{what} needs the laboratory, gapped-lab: pip install ./lab in a clone of gapped")
