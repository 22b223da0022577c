"""Tables for any medium: every entry is a text and, where it has one, the number to sort by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Literal

from gapped_lab.report.cells import Row, digits, metric_name

if TYPE_CHECKING:
    import rich.table


NOTHING = "–"

# How many cells a picture, and how many rows a table for the eye shows: the best ones. tables.md has all.
DRAWN = 40
LISTED = 200

# Labels up to this length are not broken on a terminal.
LABEL = 14


@dataclass(frozen=True)
class Entry:
    """What a table shows, and the number it sorts by; texts sort as texts. Markdown sets `code` as code."""

    text: str
    value: float | None = None
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Column names and entries; `notes` explain marks below the table."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = ()


def summary_table(rows: Sequence[Row]) -> Table:
    """Cells as a table; a column that none of them fills is left out."""
    columns = ("estimator", "τ", metric_name(rows[0].metric), "std", "95% interval", "seeds")
    optional = {
        "diverged": [Entry(str(r.diverged or NOTHING), r.diverged) for r in rows],
        "failed": [Entry(str(r.failed or NOTHING), r.failed) for r in rows],
        "seconds / run": [number(r.seconds) for r in rows],
        "gradient variance": [number(r.gradient_variance) for r in rows],
        "ms / epoch": [number(r.seconds_per_epoch and 1e3 * r.seconds_per_epoch) for r in rows],
    }
    extra = {name: column for name, column in optional.items() if any(entry.value for entry in column)}
    body = [
        (Entry(r.label), tau_entry(r.tau), *value_entries(r), *(column[i] for column in extra.values()))
        for i, r in enumerate(rows)
    ]
    table = Table(columns + tuple(extra), tuple(body))
    return without_empty(table) if rows[0].own else table


def number(value: float | None, metric: str = "", significant: int = 3) -> Entry:
    """A number as its metric wants it: nats to two decimals, accuracy to three, costs to five, the rest to
    `significant` digits."""
    if value is None or not isfinite(value):
        return Entry(NOTHING)
    if significant == 3 and metric.endswith(("elbo", "accuracy", "cost")) and abs(value) < 1e6:
        return Entry(f"{value:.{digits(metric)}f}", value)
    whole = 10**significant <= abs(value) < 1e6
    return Entry(f"{value:.0f}" if whole else f"{value:.{significant}g}", value)


def tau_entry(tau: float | None) -> Entry:
    """A temperature, as short as it goes."""
    return Entry(NOTHING) if tau is None else Entry(f"{tau:g}", tau)


def best_rows(table: Table) -> Table:
    """The table with no more rows than anybody reads, and a note on how many were left out."""
    if len(table.rows) <= LISTED:
        return table
    note = f"The best {LISTED} of {len(table.rows):,} cells; gapped report writes all of them to tables.md."
    return Table(table.columns, table.rows[:LISTED], (*table.notes, note))


def without_empty(table: Table) -> Table:
    """The table without the columns that no row fills."""
    columns = [
        i for i in range(len(table.columns)) if any(row[i].text not in ("", NOTHING) for row in table.rows)
    ]
    body = tuple(tuple(row[i] for i in columns) for row in table.rows)
    return Table(tuple(table.columns[i] for i in columns), body, table.notes)


def to_markdown(table: Table) -> str:
    """A Markdown table: texts to the left, numbers to the right."""
    # Our own headings may hold code.
    head = "| " + " | ".join(escaped(name).replace("\\`", "`") for name in table.columns) + " |"
    rule = "|" + "|".join("---:" if right else ":---" for right in aligned_right(table)) + "|"
    texts = [[_in_markdown(entry) for entry in row] for row in table.rows]
    body = ["| " + " | ".join(row) + " |" for row in texts]
    notes = [f"\n{note}" for note in table.notes]
    return "\n".join([head, rule, *body, *notes]) + "\n"


def to_html(table: Table) -> str:
    """The table as an HTML element without a style of its own, as notebooks show one."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(entry.text)}</td>" for entry in row) + "</tr>" for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def escaped(text: str) -> str:
    r"""Text as Markdown that shows it, whatever is in it.

    >>> escaped("GST[/1] | $x$"), escaped("gst:gap=1.2"), escaped("# x_y _z_")
    ('GST\\[/1\\] \\| \\$x\\$', 'gst:gap=1.2', '\\# x_y \\_z\\_')
    """
    text = re.sub(r"([\\`*\[\]<>|$~&#]|\b_|_\b)", r"\\\1", text)
    return re.sub(r"^(\d*)([-+=.)])(?=\s|[-=]|$)", r"\1\\\2", text)


def as_code(text: str) -> str:
    """Text as code in Markdown.

    >>> as_code("vae"), as_code("a`b``")
    ('`vae`', '``` a`b`` ```')
    """
    code, marks = text.replace("|", "\\|"), fence(text)
    return f"{marks} {code} {marks}" if "`" in text else f"`{code}`"


def fence(text: str, least: int = 1) -> str:
    """Backticks around text that is code: more than stand in a row inside of it."""
    return "`" * max([least, *(len(marks) + 1 for marks in re.findall("`+", text))])


def _in_markdown(entry: Entry) -> str:
    return ", ".join(map(as_code, entry.text.split(", "))) if entry.code else escaped(entry.text)


def wrap(name: str, width: int, most: int | None = None) -> str:
    """A name in lines of `width` characters, broken after a sign where one is near; `most` keep the ends.

    >>> wrap("gumbel-rao:samples=10, rate_decay=cosine", 24).split("\\n")
    ['gumbel-rao:samples=10,', 'rate_decay=cosine']
    >>> wrap("abcdefghij", 3, 2).split("\\n")
    ['abc', '…hij']
    """
    lines = [""]
    for piece in re.findall(r"[^,:; ]*[,:;]* *", name):
        if len(lines[-1] + piece.rstrip()) <= width:
            lines[-1] += piece
        else:
            lines += [piece[i : i + width] for i in range(0, len(piece.rstrip()), width)]
    lines = [line.rstrip() for line in lines if line]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"…{name[-width:]}"]
    return "\n".join(lines)


def to_rich(table: Table, title: str, width: int) -> rich.table.Table:
    """The table for a terminal of `width`; a narrow one breaks headings and long labels, never numbers."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    right = aligned_right(table)
    entries = [max((len(row[i].text) for row in table.rows), default=0) for i in range(len(right))]
    natural = [max(len(name), wide) for name, wide in zip(table.columns, entries, strict=True)]
    narrow = sum(natural) + len(natural) + 1 > width
    widths = natural
    if narrow:
        widths = [
            max([wide if number_ else min(wide, LABEL), *map(len, name.split())])
            for name, wide, number_ in zip(table.columns, entries, right, strict=True)
        ]
        for i in (i for i, number_ in enumerate(right) if not number_):
            # What the others leave, the first column of texts may have, then the next.
            widths[i] += max(0, min(entries[i] - widths[i], width - sum(widths) - len(widths) - 1))
    rich_table = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=0)
    for name, wide, number_ in zip(table.columns, widths, right, strict=True):
        justify: Literal["left", "right"] = "right" if number_ else "left"
        rich_table.add_column(name, justify=justify, width=wide if narrow else None, overflow="fold")
    for row in table.rows:
        rich_table.add_row(*(Text(wrap(entry.text, wide)) for entry, wide in zip(row, widths, strict=True)))
    return rich_table


def aligned_right(table: Table) -> list[bool]:
    """Which columns hold numbers."""
    return [any(row[i].value is not None for row in table.rows) for i in range(len(table.columns))]


def value_entries(row: Row) -> tuple[Entry, ...]:
    """Mean, standard deviation, interval and number of seeds."""
    s, significant = row.value, 4 if row.own else 3
    low, high = (number(end, row.metric, significant) for end in (s.low, s.high))
    interval = Entry(NOTHING) if s.count < 2 else Entry(f"{low.text} to {high.text}", s.low)
    mean, std = number(s.mean, row.metric, significant), number(s.std, row.metric, 3)
    return mean, std, interval, Entry(str(s.count), s.count)
