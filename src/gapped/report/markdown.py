"""Tables for the documentation, made from records by a command and checked by a test, never typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from gapped.errors import GappedError
from gapped.records import atomic_write
from gapped.report.cells import Record, cells, groups, read
from gapped.report.paper import against_paper, paper, paper_table
from gapped.report.tables import rows_of, summary_table, to_markdown, verdict_of

__all__ = ["command", "hardware", "minutes", "render_markdown", "update_markers", "write_tables"]


def render_markdown(source: Path | Iterable[Record], recipe: str) -> str:
    """The block for one recipe: verdict, table, and how it came about. The same records give the same text.

    Under the paper's own protocol the table sets our numbers beside the paper's; other protocols get a plain
    one, each under its name.
    """
    records = read(source) if isinstance(source, Path) else list(source)
    mine = [r for r in records if str(r.get("recipe", "runs")) == recipe]
    if not mine:
        known = ", ".join(sorted({str(r.get("recipe", "runs")) for r in records})) or "none"
        raise GappedError(f"recipe: got {recipe!r}, expected one that the records hold: {known}")
    parts = []
    grouped = groups(mine)
    for (_, protocol), group in grouped.items():
        beside = against_paper(mine, recipe, protocol) if is_published(recipe, protocol) else []
        table = paper_table(beside) if beside else summary_table(rows_of(group))
        title = f"Protocol `{protocol}`: " if len(grouped) > 1 else ""
        parts.append(f"{title}{verdict_of(group)}\n\n{to_markdown(table)}")
    return "\n".join([*parts, provenance(mine, recipe) + "\n"])


def write_tables(records: list[Record], path: Path) -> None:
    """All recipes of the records as one Markdown file."""
    recipes = dict.fromkeys(str(r.get("recipe", "runs")) for r in records)
    text = "\n".join(f"## {recipe}\n\n{render_markdown(records, recipe)}" for recipe in recipes)
    try:
        with atomic_write(path) as file:
            file.write(text.encode("utf-8"))
    except OSError as problem:
        raise GappedError(f"{path}: cannot be written ({problem.strerror})") from None


def provenance(records: list[Record], recipe: str) -> str:
    """Command, hardware, count and minutes, in a line."""
    quick = "**Quick run**, scaled down. " if any(r.get("quick") for r in records) else ""
    runs = len([r for cell in cells(records) for r in cell.records])
    return (
        f"{quick}`{command(records, recipe)}` on {hardware(records)}: "
        f"{runs} run{'s' * (runs != 1)} in {minutes(records):.1f} minutes."
    )


def command(records: Iterable[Record], recipe: str) -> str:
    """The command that gives these records."""
    quick = " --quick" if any(r.get("quick") for r in records) else ""
    return "gapped compare" if recipe == "compare" else f"gapped reproduce {recipe}{quick}"


def hardware(records: Iterable[Record]) -> str:
    """The devices that the records name."""
    devices = {str((r.get("environment") or {}).get("device") or "an unnamed device") for r in records}
    return " and ".join(sorted(devices))


def minutes(records: Iterable[Record]) -> float:
    """Wall time: a fleet's seconds are shared among its runs, so that a sum over runs counts them once."""
    unique = [r for cell in cells(records) for r in cell.records]
    return sum(float(r.get("seconds") or 0) / float(r.get("runs_in_fleet") or 1) for r in unique) / 60


def is_published(recipe: str, protocol: str) -> bool:
    """Whether the paper has numbers to set beside those of this recipe and protocol."""
    return bool(paper().get(recipe)) and (not protocol or protocol.startswith("paper"))


def update_markers(text: str, blocks: Mapping[str, str]) -> str:
    """Put each block between its `<!-- records:NAME -->` and `<!-- /records:NAME -->`; the rest stays.

    >>> update_markers("a <!-- records:x -->old<!-- /records:x --> b", {"x": "new"})
    'a <!-- records:x -->\\nnew\\n<!-- /records:x --> b'
    """
    for name, block in blocks.items():
        start, end = f"<!-- records:{name} -->", f"<!-- /records:{name} -->"
        pieces = re.split(f"{re.escape(start)}.*?{re.escape(end)}", text, flags=re.S)
        if len(pieces) == 1:
            raise GappedError(
                f"records:{name}: no such pair of markers in the text, expected {start} ... {end}"
            )
        text = f"{start}\n{block.strip()}\n{end}".join(pieces)
    return text
