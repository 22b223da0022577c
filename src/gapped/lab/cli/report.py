"""`gapped report`: tables, figures and report.html from records, without training anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        Path,
        typer.Argument(
            help="A folder with records.jsonl or bench.jsonl, as compare, reproduce and bench write it."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the page to this file, or as report.html into this folder, and nothing else. Without "
            "it, RUNS/report.html and RUNS/tables.md are written.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Rebuild the tables, the figures and report.html from records."""
    from gapped.lab.records import load

    if (runs / "bench.jsonl").is_file() and not (runs / "records.jsonl").exists():
        from gapped.lab.cli.bench import present
        from gapped.lab.report.terminal import console

        present(load(runs / "bench.jsonl"), runs, console())
        return

    from gapped.lab.report import read, write_report
    from gapped.lab.report.cells import failures
    from gapped.lab.report.markdown import write_tables
    from gapped.lab.report.terminal import console, say, show

    records, lines = read(runs), load(runs / "records.jsonl")
    path = write_report(runs, out)
    if out is None:
        write_tables(lines, runs / "tables.md")
    screen = console()
    show(records, screen)
    for line in failures(lines):
        say(screen, line)
    say(screen, f"report: {path}")
