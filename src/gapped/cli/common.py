"""Options and endings that commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gapped.lab.recipe import Recipe

__all__ = ["DataDir", "Device", "Minutes", "Stopped", "TensorBoard", "execute"]


class Stopped(Exception):
    """The command ended before its work did, at the user's wish.

    The message says what is kept, if repeating the command does not go on from there.
    """

    def __init__(self, kept: str = "", *, in_time: bool = False) -> None:
        super().__init__(kept)
        self.in_time = in_time
        """Whether it was --minutes that ended it, and not Ctrl-C."""


Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets are looked up first.", show_default=False)
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")]

Minutes = Annotated[
    float | None,
    typer.Option(
        help="Stop with a checkpoint after so many minutes, exit status 3; the same command goes on.",
        show_default=False,
        min=0.0,
    ),
]


def execute(
    recipes: Sequence[Recipe],
    out: Path,
    device: str,
    data_dir: Path | None,
    tensorboard: bool,
    minutes: float | None = None,
) -> int:
    """Train what `recipes` ask for, show tables and verdict, write the report. Returns the exit status."""
    from gapped.cli.watch import Display
    from gapped.lab.environment import pick_device
    from gapped.lab.local import Interrupted, run
    from gapped.lab.store import Store
    from gapped.report.html import write_report
    from gapped.report.markdown import write_tables
    from gapped.report.terminal import console, show

    where = pick_device(device)
    store = Store(out)
    screen = console()
    display = Display(screen, minutes)
    try:
        with display:
            made = run(recipes, store, where, data_dir=data_dir, watch=display)
    except (Interrupted, KeyboardInterrupt):
        # Not a KeyboardInterrupt any more: the framework would end the program without a word.
        raise Stopped(in_time=display.is_late() and not display.stop) from None
    show(made, screen)
    write_tables(made, out / "tables.md")
    if tensorboard:
        from gapped.cli.events import write_events

        screen.print(f"TensorBoard: tensorboard --logdir {write_events(made, out)}")
    screen.print(f"Report: {write_report(out)}", soft_wrap=True)
    return 0 if all(line["status"] != "failed" for line in made) else 1
