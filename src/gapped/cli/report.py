"""`gapped report`: tables, figures and report.html from records, without training anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    runs: Annotated[
        Path, typer.Argument(help="A folder with records.jsonl, as compare and reproduce write it.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to put the report; RUNS/report.html without it.", show_default=False),
    ] = None,
) -> None:
    """Rebuild the tables, the figures and report.html from records."""
    from gapped.report import read, write_report
    from gapped.report.markdown import write_tables
    from gapped.report.terminal import console, show

    records = read(runs)
    path = write_report(runs, out)
    write_tables(records, path.with_name("tables.md"))
    screen = console()
    show(records, screen)
    screen.print(f"report: {path}", soft_wrap=True, highlight=False, markup=False)
