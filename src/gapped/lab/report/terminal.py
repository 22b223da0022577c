"""What commands print: lines, tables and the verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gapped.errors import printable
from gapped.lab.records import Record
from gapped.lab.report.cells import groups, rows_of, verdict_of
from gapped.lab.report.paper import against_paper, paper_table
from gapped.lab.report.tabular import Table, best_rows, summary_table, to_rich

if TYPE_CHECKING:
    from rich.console import Console


def console(*, quiet: bool = False) -> Console:
    """The terminal at its width; a file or a pipe gets room enough for every column. Text is never markup."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    return Console(width=width, quiet=quiet, markup=False, emoji=False, highlight=False)


def say(screen: Console, text: str) -> None:
    """Print a line that may hold anything, such as a path; it is not broken at the terminal's width."""
    screen.print(printable(text), soft_wrap=True)


def show(records: Iterable[Record], console: Console) -> None:
    """For each recipe and protocol, print tables and a verdict, with the paper's numbers where it has any."""
    for (recipe, protocol), group in groups(records).items():
        own = [r for cell in group for r in cell.records]
        quick = ", quick run" if any(r.quick for r in own) else ""
        title = f"{recipe} {protocol}".strip() + quick
        table = best_rows(summary_table(rows_of(group)))
        console.print(to_rich(table, title, console.width), *table.notes)
        beside = against_paper(own, recipe, protocol)
        if beside:
            table = _notes_below(paper_table(beside, recipe))
            console.print(to_rich(table, "beside the paper", console.width))
            for note in table.notes:
                console.print(note.replace("*", ""))
        console.print(verdict_of(group), style="bold", soft_wrap=True)


def _notes_below(table: Table) -> Table:
    """The table without its last column, whose sentences would crowd out the numbers: they become notes."""
    notes = [f"{row[0].text}, τ {row[1].text}: {row[-1].text}" for row in table.rows if row[-1].text]
    return Table(table.columns[:-1], tuple(row[:-1] for row in table.rows), (*table.notes, *notes))
