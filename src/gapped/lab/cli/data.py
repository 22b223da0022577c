"""`gapped data`: fetches and verifies data sets, says where they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapped.lab.cli.listing import show_rows

if TYPE_CHECKING:
    from gapped.lab.data import Part


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
    from gapped.lab.data import SOURCES

    rows = []
    for name, source in SOURCES.items():
        rows.append((name, source.summary, "; ".join(filter(None, whereabouts(source.locate(data_dir))))))
    show_rows(("data set", "content", "where"), rows)


def _fetch(name: str, data_dir: Path | None, download: bool) -> None:
    from gapped.lab.data import source

    parts = source(name).fetch(data_dir, progress=True, download=download)
    show_rows(
        ("part", "verified by", "where"), [(part.name, part.checked, str(part.place)) for part in parts]
    )


def whereabouts(parts: Iterable[Part]) -> tuple[str, str]:
    """The folders that hold these parts, each once, and the names of those that are nowhere."""
    parts = list(parts)
    places = [part.place for part in parts if part.place is not None]
    heads = (str(place.parent) if isinstance(place, Path) else place for place in places)
    missing = [part.name for part in parts if part.place is None]
    return ", ".join(dict.fromkeys(heads)), f"missing: {', '.join(missing)}" if missing else ""
