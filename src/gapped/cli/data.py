"""`gapped data`: fetches and verifies data sets, says where they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["data"]


def data(
    name: Annotated[
        str | None, typer.Argument(help="The set to fetch and verify; without it, all are listed.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Look here first, as DIR/NAME/FILE or DIR/FILE; downloads go to DIR/NAME."),
    ] = None,
    no_download: Annotated[
        bool, typer.Option("--no-download", help="Use only what is on this machine.")
    ] = False,
) -> None:
    """List the data sets, or fetch and verify one.

    Files are looked up in --data-dir, $GAPPED_DATA and the user cache, then downloaded.
    """
    if name is None:
        _list(data_dir)
    else:
        _fetch(name, data_dir, download=not no_download)


def _list(data_dir: Path | None) -> None:
    from gapped.data import SOURCES

    rows = []
    for name, source in SOURCES.items():
        parts = source.locate(data_dir)
        missing = [part.name for part in parts if part.place is None]
        here = _folders(part.place for part in parts if part.place is not None)
        lacks = f"missing: {', '.join(missing)}" if missing else ""
        rows.append((name, source.summary, "; ".join(filter(None, (here, lacks)))))
    _show(("data set", "content", "where"), rows)


def _fetch(name: str, data_dir: Path | None, download: bool) -> None:
    from gapped.data import source

    parts = source(name).fetch(data_dir, progress=True, download=download)
    _show(("part", "verified by", "where"), [(part.name, part.checked, str(part.place)) for part in parts])


def _folders(places: Iterable[Path | str]) -> str:
    """Each folder once; words stand for themselves."""
    heads = (str(place.parent) if isinstance(place, Path) else place for place in places)
    return ", ".join(dict.fromkeys(heads))


def _show(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for a terminal; lines with tabs, which other programs can cut, for a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table(*titles)
    for row in rows:
        # Text, because a path may hold brackets, which rich would read as markup.
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    console.print(table)
