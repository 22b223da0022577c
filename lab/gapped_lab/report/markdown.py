"""Tables as Markdown, and texts that stay what they are in it."""

from __future__ import annotations

import re

from gapped.comparison.table import Entry, Table, aligned_right

# How many rows a table for the eye shows: the best ones. tables.md has all.
LISTED = 200


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
