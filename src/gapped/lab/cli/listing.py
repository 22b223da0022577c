"""Rows for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from gapped.errors import printable


def show_rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for a terminal; lines with tabs, which other programs can cut, for a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in rows:
            typer.echo("\t".join(map(printable, row)))
        return
    table = Table(*titles)
    for row in rows:
        # Text, because a path may hold brackets, which rich would read as markup.
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
    console.print(table)
