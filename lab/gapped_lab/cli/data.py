"""`gapped data`: fetch and verify data sets, show where they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapped.cli.command import complain, show_rows

if TYPE_CHECKING:
    from gapped_lab.data.sources import Resource


def data(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The set to fetch and verify; without it, all are listed."),
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

    Files are looked up in --data-dir, $GAPPED_DATA, the user cache and
    /usr/share/datasets, where Debian's packages put them, then downloaded.

    \b
    Examples:
      gapped data
      gapped data mnist
    """
    from gapped_lab.task_kinds import SOURCES, source

    if name is None:
        rows = [
            (name, each.summary, "; ".join(filter(None, whereabouts(each.locate(data_dir)))))
            for name, each in SOURCES.items()
        ]
        show_rows(("data set", "content", "where"), rows)
    else:
        resources = source(name).fetch(data_dir, progress=True, download=not no_download)
        rows = [(each.name, each.verification, str(each.place)) for each in resources]
        show_rows(("file", "verified by", "where"), rows)
    # A download would have made it.
    if data_dir is not None and not data_dir.expanduser().exists():
        complain(f"--data-dir: {data_dir} does not exist, and nothing was looked up there")


def whereabouts(resources: Sequence[Resource]) -> tuple[str, str]:
    """The folders that hold these resources, each once, and the names of those that are missing."""
    places = [each.place for each in resources if each.place is not None]
    folders = (str(place.parent) if isinstance(place, Path) else place for place in places)
    missing = [each.name for each in resources if each.place is None]
    return ", ".join(dict.fromkeys(folders)), f"missing: {', '.join(missing)}" if missing else ""
