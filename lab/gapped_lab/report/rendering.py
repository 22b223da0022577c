"""Records as Markdown, with the command, hardware and time behind them, and as tables on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gapped.cli.command import prose
from gapped.comparison.page import duration, hardware
from gapped.comparison.records import Record
from gapped.comparison.store import write_text
from gapped.comparison.table import (
    Entry,
    Table,
    aligned_right,
    failures,
    state_once,
    to_rich,
    without_empty,
)
from gapped.errors import GappedError
from gapped_lab.report.cells import cells, groups, rows_of, summary_table, verdict_of
from gapped_lab.report.paper import against_paper, paper, paper_table

if TYPE_CHECKING:
    from rich.console import Console


# How many rows a table for the eye shows: the best ones. tables.md has all.
LISTED = 200


def render_markdown(records: Iterable[Record], recipe: str) -> str:
    """The block for one recipe: verdict, table, and how it came about. The same records give the same text.

    Under the paper's own protocol the table sets our numbers beside the paper's; other protocols get a plain
    one, each under its name.
    """
    records = list(records)
    mine = [r for r in records if r.recipe == recipe]
    if not mine:
        known = ", ".join(sorted({r.recipe for r in records})) or "none"
        raise GappedError(f"recipe: got {recipe!r}, expected one that the records hold: {known}")
    texts = []
    by_table = groups(mine)
    for (_, protocol), group in by_table.items():
        beside = against_paper(mine, recipe, protocol)
        own = state_once(summary_table(rows_of(group)))
        table = without_empty(paper_table(beside, recipe)) if beside else own
        title = f"Protocol {as_code(protocol)}: " if len(by_table) > 1 else ""
        texts.append(f"{title}{escape(verdict_of(group))}\n\n{to_markdown(table)}")
    return "\n".join([*texts, provenance(mine, recipe) + "\n"])


def write_tables(records: Iterable[Record], path: Path) -> None:
    """All recipes of the records as one Markdown file, and which runs have failed."""
    records = list(records)
    finished = [r for r in records if not r.failed]
    recipes = dict.fromkeys(r.recipe for r in finished)
    texts = [f"## {escape(recipe)}\n\n{render_markdown(finished, recipe)}" for recipe in recipes]
    write_text(path, "\n".join([*texts, *(f"{escape(line)}\n" for line in failures(records))]))


def provenance(records: Sequence[Record], recipe: str) -> str:
    """Command, hardware, count and minutes, in a line."""
    quick = "**Quick run**, scaled down. " if any(r.quick for r in records) else ""
    own = [record for cell in cells(records) for record in cell.records]
    return (
        f"{quick}{as_code(command(records, recipe))} on {escape(hardware(records))}: "
        f"{len(own)} run{'s' * (len(own) != 1)} in {duration(own)}."
        f"{_describe_fleets(records)}{_shorter(records, recipe)}"
    )


def command(records: Iterable[Record], recipe: str) -> str:
    """The command that gives these records."""
    records = list(records)
    if any(r.metric for r in records):
        return "gapped.compare"
    quick = " --quick" if any(r.quick for r in records) else ""
    return "gapped compare" if recipe == "compare" else f"gapped reproduce {recipe}{quick}"


def _describe_fleets(records: Iterable[Record]) -> str:
    """A remark where other tables' runs were trained in the same fleets."""
    own: dict[tuple[float, int, object], set[str]] = {}
    for r in records:
        own.setdefault((r.seconds, r.runs_in_fleet, r.environment.get("commit")), set()).add(r.id)
    shared = any(len(ids) < size for (_, size, _), ids in own.items())
    return " Runs of other tables were trained in the same fleet; the time is these runs' share." * shared


def _shorter(records: Iterable[Record], recipe: str) -> str:
    """A remark where the paper trained for longer."""
    published = paper().get(recipe, {}).get("epochs", 0)
    longest = max((r.epochs for r in records if not r.quick), default=published)
    if longest >= published:
        return ""
    return f" Trained for {longest} epochs; the paper's runs have {published}."


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
        console.print(prose(verdict_of(group), console), style="bold", soft_wrap=True)


def _notes_below(table: Table) -> Table:
    """The table without its last column, whose sentences would crowd out the numbers: they become notes."""
    notes = [f"{row[0].text}, τ {row[1].text}: {row[-1].text}" for row in table.rows if row[-1].text]
    return Table(table.columns[:-1], tuple(row[:-1] for row in table.rows), (*table.notes, *notes))


def best_rows(table: Table) -> Table:
    """The table with no more rows than anybody reads, and a note on how many were left out."""
    if len(table.rows) <= LISTED:
        return table
    note = f"The best {LISTED} of {len(table.rows):,} cells; gapped report writes all of them to tables.md."
    return Table(table.columns, table.rows[:LISTED], (*table.notes, note))


def to_markdown(table: Table) -> str:
    """A Markdown table: texts to the left, numbers to the right."""
    # Our own headings may hold code.
    head = "| " + " | ".join(escape(name).replace("\\`", "`") for name in table.columns) + " |"
    rule = "|" + "|".join("---:" if right else ":---" for right in aligned_right(table)) + "|"
    texts = [[_format(entry) for entry in row] for row in table.rows]
    body = ["| " + " | ".join(row) + " |" for row in texts]
    notes = [f"\n{note}" for note in table.notes]
    return "\n".join([head, rule, *body, *notes]) + "\n"


def escape(text: str) -> str:
    r"""Text as Markdown that shows it, whatever is in it.

    >>> escape("GST[/1] | $x$"), escape("gst:gap=1.2"), escape("# x_y _z_")
    ('GST\\[/1\\] \\| \\$x\\$', 'gst:gap=1.2', '\\# x_y \\_z\\_')
    """
    text = re.sub(r"([\\`*\[\]<>|$~&#]|\b_|_\b)", r"\\\1", text)
    return re.sub(r"^(\d*)([-+=.)])(?=\s|[-=]|$)", r"\1\\\2", text)


def as_code(text: str) -> str:
    """Text as code in Markdown.

    >>> as_code("vae"), as_code("a`b``")
    ('`vae`', '``` a`b`` ```')
    """
    code = text.replace("|", "\\|")
    # More backticks than stand in a row inside of it.
    marks = "`" * max([1, *(len(run) + 1 for run in re.findall("`+", text))])
    return f"{marks} {code} {marks}" if "`" in text else f"`{code}`"


def _format(entry: Entry) -> str:
    return ", ".join(map(as_code, entry.text.split(", "))) if entry.code else escape(entry.text)
