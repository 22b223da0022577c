"""`gapped report`: tables, figures and report.html from records, without training anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS",
            help="A folder with records.jsonl or bench.jsonl, as compare, reproduce and bench write it.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the page to this file, or as report.html into this folder, and nothing else. Without "
            "it, RUNS/report.html and RUNS/tables.md are written."
        ),
    ] = None,
) -> None:
    """Rebuild tables, figures and report.html from records.

    \b
    Examples:
      gapped report runs/compare
      gapped report runs/vae --out page.html
    """
    from gapped.cli.command import console, say
    from gapped.comparison.records import Record, read
    from gapped_lab.records import Bench, Startup, Work
    from gapped_lab.report.rendering import show

    screen = console()
    if (runs / Bench.FILE).is_file() and not (runs / Record.FILE).exists():
        from gapped_lab.cli.bench import present

        present(read(runs, Bench), read(runs, Work), read(runs, Startup), runs, screen)
        return

    from gapped.comparison.table import failures
    from gapped_lab.report.cells import finished_runs
    from gapped_lab.report.page import write_report
    from gapped_lab.report.rendering import write_tables

    finished, records = finished_runs(runs), read(runs, Record)
    path = write_report(runs, out)
    if out is None:
        write_tables(records, runs / "tables.md")
    show(finished, screen)
    for line in failures(records):
        say(screen, line)
    say(screen, f"Report: {path}")
