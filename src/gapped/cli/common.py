"""Options and endings that commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gapped.lab.recipe import Recipe

__all__ = ["DataDir", "Device", "Stopped", "TensorBoard", "execute"]


class Stopped(Exception):
    """The user stopped the command; a message says what is kept, if repeating it does not go on."""


Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets are looked up first.", show_default=False)
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")]


def execute(
    recipes: Sequence[Recipe], out: Path, device: str, data_dir: Path | None, tensorboard: bool
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
    try:
        with Display(screen) as display:
            made = run(recipes, store, where, data_dir=data_dir, watch=display)
    except (Interrupted, KeyboardInterrupt):
        # Not a KeyboardInterrupt any more: the framework would end the program without a word.
        raise Stopped from None
    show(made, screen)
    write_tables(made, out / "tables.md")
    if tensorboard:
        from gapped.cli.events import write_events

        screen.print(f"TensorBoard: tensorboard --logdir {write_events(made, out)}")
    screen.print(f"Report: {write_report(out)}", soft_wrap=True)
    return 0 if all(line["status"] != "failed" for line in made) else 1
