"""Tables for the documentation, made from records by a command and checked by a test, never typed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gapped.errors import GappedError
from gapped.lab.records import atomic_write, has_failed
from gapped.lab.report.cells import Record, cells, failures, groups, read
from gapped.lab.report.paper import against_paper, is_papers, paper, paper_table
from gapped.lab.report.tables import (
    as_code,
    escaped,
    rows_of,
    summary_table,
    to_markdown,
    verdict_of,
    without_empty,
)


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
        table = without_empty(paper_table(beside, recipe)) if beside else summary_table(rows_of(group))
        title = f"Protocol {as_code(protocol)}: " if len(grouped) > 1 else ""
        parts.append(f"{title}{escaped(verdict_of(group))}\n\n{to_markdown(table)}")
    return "\n".join([*parts, provenance(mine, recipe) + "\n"])


def write_tables(lines: Iterable[Record], path: Path) -> None:
    """All recipes of the records as one Markdown file, and which runs have failed."""
    lines = list(lines)
    records = [r for r in lines if not has_failed(r)]
    recipes = dict.fromkeys(str(r.get("recipe", "runs")) for r in records)
    parts = [f"## {escaped(recipe)}\n\n{render_markdown(records, recipe)}" for recipe in recipes]
    text = "\n".join([*parts, *(f"{escaped(line)}\n" for line in failures(lines))])
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all; an error names it."""
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
        f"{quick}{as_code(command(records, recipe))} on {escaped(hardware(records))}: "
        f"{runs} run{'s' * (runs != 1)} in {duration(records)}.{_shared(records)}{_shorter(records, recipe)}"
    )


def command(records: Iterable[Record], recipe: str) -> str:
    """The command that gives these records."""
    quick = " --quick" if any(r.get("quick") for r in records) else ""
    return "gapped compare" if recipe == "compare" else f"gapped reproduce {recipe}{quick}"


def hardware(records: Iterable[Record]) -> str:
    """The devices that the records name, and how they multiply where that is not plain float32."""
    places = [r.get("environment") or {} for r in records]
    devices = sorted({str(place.get("device") or "an unnamed device") for place in places})
    tf32 = any(place.get("precision") == "tf32" for place in places)
    return " and ".join(devices) + " (TF32 products)" * tf32


def minutes(records: Iterable[Record]) -> float:
    """Wall time: a fleet's seconds are shared among its runs, so that a sum over runs counts them once."""
    unique = [r for cell in cells(records) for r in cell.records]
    return sum(float(r.get("seconds") or 0) / float(r.get("runs_in_fleet") or 1) for r in unique) / 60


def duration(records: Iterable[Record]) -> str:
    """The wall time in words; some measurements end before there is an epoch to time."""
    spent = minutes(records)
    if not spent:
        return "a time that was not recorded"
    return f"{spent:.1f} minutes" if spent >= 1 else f"{60 * spent:.0f} seconds"


def _shared(records: Iterable[Record]) -> str:
    """A remark where other tables' runs were trained in the same fleets."""
    own: dict[tuple[object, ...], set[object]] = {}
    for r in records:
        key = (r.get("seconds"), r.get("runs_in_fleet"), (r.get("environment") or {}).get("commit"))
        own.setdefault(key, set()).add(r.get("id"))
    shared = any(len(ids) < int(str(key[1] or 1)) for key, ids in own.items())
    return " Runs of other tables were trained in the same fleet; the time is these runs' share." * shared


def _shorter(records: Iterable[Record], recipe: str) -> str:
    """A remark where the paper trained for longer."""
    published = paper().get(recipe, {}).get("epochs", 0)
    epochs = {int(r.get("epochs") or 0) for r in records if not r.get("quick")}
    if not epochs or max(epochs) >= published:
        return ""
    return f" Trained for {max(epochs)} epochs; the paper's runs have {published}."


def is_published(recipe: str, protocol: str) -> bool:
    """Whether the paper has numbers to set beside those of this recipe and protocol."""
    return bool(paper().get(recipe)) and is_papers(protocol)
