"""Documents that carry results: their marked blocks and figures, made from records by a command.

Everything is made before anything is written, each file appears complete or not at all, and a file that is
already what it should be is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gapped.errors import GappedError
from gapped.lab.records import atomic_write
from gapped.lab.report.blocks import render_block
from gapped.lab.report.drawings import Unfilled, draw, known_drawings
from gapped.lab.report.evidence import Evidence, gather
from gapped.lab.report.markdown import update_markers

MARKER = re.compile(r"<!-- (/?)records:([\w.-]+) -->")
FIGURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.svg)\)")


def update_documents(
    folder: Path, documents: Sequence[Path], figures: Path | None = None
) -> list[tuple[Path, bool | None]]:
    """Fill `documents` from the records in `folder`; each path comes back with whether it changed.

    With `figures`, the drawings that the documents show from that directory are written there; without any
    document, all that the records can draw. The others come back with None.
    """
    evidence = gather(folder)
    texts = {path: _read(path) for path in documents}
    made = {path: filled(evidence, text, str(path)) for path, text in texts.items()}
    left: list[tuple[Path, None]] = []
    if figures is not None:
        wanted = [name for path, text in made.items() for name in _figures_in(path, text, figures)]
        names = dict.fromkeys(wanted if documents else known_drawings(evidence))
        for name in names:
            try:
                made[figures / name] = draw(evidence, name)
            except Unfilled:
                if documents:
                    raise
                left.append((figures / name, None))
    return [*((path, write(path, text)) for path, text in made.items()), *left]


def filled(evidence: Evidence, text: str, where: str = "text") -> str:
    """The text with every block between markers as the records make it."""
    try:
        names = names_in(text)
        if not names:
            raise GappedError("no block to fill, expected <!-- records:NAME --> and <!-- /records:NAME -->")
        return update_markers(text, {name: render_block(evidence, name) for name in names})
    except GappedError as problem:
        raise GappedError(f"{where}: {problem}") from None


def names_in(text: str) -> list[str]:
    """The names of the blocks, each once; every marker that opens one must be followed by its end.

    >>> names_in("<!-- records:a -->old<!-- /records:a -->")
    ['a']
    """
    marks = [(end == "/", name) for end, name in MARKER.findall(text)]
    opened = [name for end, name in marks if not end]
    if marks != [mark for name in opened for mark in ((False, name), (True, name))]:
        raise GappedError(
            "records: markers do not pair up, expected each opened block to end before the next"
        )
    return list(dict.fromkeys(opened))


def _figures_in(document: Path, text: str, figures: Path) -> list[str]:
    """The file names of the figures that a document shows from that directory."""
    links = [document.parent / link for link in FIGURE.findall(text)]
    return [link.name for link in links if link.parent.resolve() == figures.resolve()]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "not UTF-8 text"
        raise GappedError(f"{path}: cannot be read ({reason})") from None


def write(path: Path, text: str) -> bool:
    """Make a file hold `text`; whether it did not yet."""
    new = text.encode("utf-8")
    try:
        if path.is_file() and path.read_bytes() == new:
            return False
        with atomic_write(path) as file:
            file.write(new)
    except OSError as problem:
        raise GappedError(f"{path}: cannot be written ({problem.strerror})") from None
    return True
