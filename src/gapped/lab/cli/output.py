"""What commands print: rows for people and for programs, and complaints."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gapped.errors import printable


def complain(message: str) -> None:
    """Print the message to standard error as one line. It may hold anything, such as a path."""
    print(f"gapped: {printable(message)}", file=sys.stderr)


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
    table = Table(*titles)
    for row in rows:
        # Text, because a path may hold brackets, which rich would read as markup.
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
    console.print(table)
