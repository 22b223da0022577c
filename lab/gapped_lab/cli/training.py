"""The training of recipes by a command: progress, tables, verdict, report."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gapped.cli.command import Stopped, console, say

if TYPE_CHECKING:
    from gapped.comparison.records import Record
    from gapped_lab.recipe import Recipe


def execute(
    recipes: Sequence[Recipe],
    out: Path,
    device: str,
    data_dir: Path | None,
    tensorboard: bool,
    minutes: float | None,
    engine: str,
    workers: int,
    ray_address: str | None,
) -> None:
    """Train the runs of `recipes`, show tables and verdict, write the report."""

    from gapped_lab.cli.progress_display import Display
    from gapped_lab.cli.tensorboard import event_writer, write_events
    from gapped_lab.engines import engine as engine_by_name
    from gapped_lab.report.page import write_report
    from gapped_lab.report.rendering import show, write_tables
    from gapped_lab.store import Store
    from gapped_lab.training import Interrupted, Settings

    if tensorboard:
        event_writer()
    trainer = engine_by_name(engine, device, workers=workers, ray_address=ray_address)
    store = Store(out)
    screen = console()
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
        raise Stopped(f"out of time; {advice}", 3) from None
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
