"""Cells, the runs that differ in nothing but their seed; their rows, best first; tables for any medium.

Every entry of a table is a text and, where it has one, the number to sort by.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isfinite, nan
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np

from gapped.comparison.records import Record
from gapped.comparison.statistics import Floats, Summary, summary

if TYPE_CHECKING:
    import rich.table


NOTHING = "–"
_EMPTY = ("", NOTHING)

# How many cells a picture shows: the best ones.
DRAWN = 40
# Labels up to this length are not broken on a terminal.
LABEL = 14
# How many kinds of failures are told.
_NAMED = 8
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Cell:
    """All runs of one estimator at one temperature under one protocol, on the same data."""

    recipe: str
    protocol: str
    label: str
    tau: float | None
    records: tuple[Record, ...]

    def values(self, metric: str) -> Floats:
        """One value a run, NaN where the run diverged; runs that failed have none."""
        return np.array([value_of(r, metric) for r in self.records if not r.failed], dtype=np.float64)

    @property
    def metrics(self) -> set[str]:
        """The names of what its runs measured."""
        return {name for record in self.records for name in record.metrics}


@dataclass(frozen=True)
class Row:
    """One cell, summarised; `name` tells it from the cells it is compared with."""

    cell: Cell = field(repr=False)
    name: str
    metric: str
    value: Summary
    diverged: int
    higher: bool = False
    """Whether a higher value is better."""
    failed: int = 0
    seconds: float | None = None
    """The median over runs that a function of the user trained: the first one of a process warms it up."""

    @property
    def own(self) -> bool:
        """Whether a function of the user trained the runs."""
        return bool(self.cell.records[0].metric)

    @property
    def label(self) -> str:
        return self.cell.label

    @property
    def tau(self) -> float | None:
        return self.cell.tau


def failures(records: Iterable[Record]) -> list[str]:
    """A sentence for each error that ended runs which no later attempt has finished, by its place."""
    last = {record.key: record for record in records}
    lost: dict[tuple[str, ...], list[Record]] = {}
    for r in (record for record in last.values() if record.failed):
        where = str(r.options.get("where", ""))
        kind = r.error.partition(":")[0] if where else r.error
        # A process that died names the file of its own output.
        lost.setdefault((r.recipe, kind, "" if where.startswith("output/") else where), []).append(r)
    sentences = []
    for runs in lost.values():
        labels, first = list(dict.fromkeys(r.label for r in runs)), runs[0]
        of = labels[0] if len(labels) == 1 else f"{len(labels)} estimators"
        place = f" ({first.options['where']})" if first.options.get("where") else ""
        count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
        sentences.append(f"{first.recipe}: {count} of {of} failed: {first.error}{place}")
    more = f"runs failed in {len(lost) - _NAMED} more ways"
    return [*sentences[:_NAMED], *[more] * (len(lost) > _NAMED)]


def cells(records: Iterable[Record], table: Callable[[Record], tuple[str, str]] | None = None) -> list[Cell]:
    """Cells in order of first appearance, runs in order of their seeds.

    `table` says in which recipe's table, and under which protocol, a record stands; by default, where it says
    itself. Within one table the last line with an id counts. A label that a user gave to several estimators
    is followed by the estimator.
    """
    unique = {record.key: record for record in records}
    members: dict[tuple[str, str], set[str]] = {}
    for r in unique.values():
        if r.metric:
            members.setdefault((r.recipe, r.label), set()).add(r.estimator)
    by_cell: dict[tuple[str, str, str, float | None], list[Record]] = {}
    for r in unique.values():
        shared = len(members.get((r.recipe, r.label), ())) > 1
        label = f"{r.label} ({r.estimator})" if shared else r.label
        place = table(r) if table else (r.recipe, r.protocol)
        by_cell.setdefault((*place, label, r.tau), []).append(r)
    return [Cell(*key, tuple(sorted(runs, key=lambda r: r.seed))) for key, runs in by_cell.items()]


def rows_of(group: Sequence[Cell], metric: str = "", higher: bool | None = None) -> list[Row]:
    """A row for every cell, best mean first, cells without a single finished run last.

    Without a `metric` it is the one that the records name, and they say whether a higher one is better.
    """
    metric = metric or own_metric(group)
    higher = own_direction(group) if higher is None else higher
    sign, rows = -1 if higher else 1, []
    for name, cell in named(group):
        values = cell.values(metric)
        own = [r.seconds for r in cell.records if r.metric and not r.failed]
        rows.append(
            Row(
                cell=cell,
                name=name,
                metric=metric,
                value=summary(values),
                diverged=int((~np.isfinite(values)).sum()),
                higher=higher,
                failed=sum(r.failed for r in cell.records),
                seconds=median(own) if own else None,
            )
        )
    return sorted(
        rows, key=lambda r: (r.value.count == 0, sign * r.value.mean if r.value.count else 0.0, r.name)
    )


def own_metric(group: Iterable[Cell]) -> str:
    """The metric that the records themselves name, if they do."""
    records = [r for cell in group for r in cell.records if r.metric]
    return min(records, key=lambda r: r.failed).metric if records else ""


def own_direction(group: Iterable[Cell]) -> bool:
    """Whether the records say that a higher metric is better."""
    return any(r.maximize for cell in group for r in cell.records)


def named(group: Sequence[Cell]) -> list[tuple[str, Cell]]:
    """Cells, each after its label, with the temperature where they differ in it."""
    several = len({cell.tau for cell in group}) > 1
    return [(f"{c.label} (τ={c.tau:g})" if several and c.tau is not None else c.label, c) for c in group]


def digits(metric: str) -> int:
    """To how many decimals a metric is shown."""
    if metric.endswith("cost"):
        return 5
    return 3 if metric.endswith("accuracy") else 2


def metric_name(metric: str) -> str:
    """A metric's name for readers.

    >>> metric_name("test_negative_elbo")
    'test negative ELBO'
    """
    return metric.replace("_", " ").replace("elbo", "ELBO").replace(" gb", " (GB)").replace("gpu", "GPU")


def finite(value: float | None) -> float:
    """A logged number, NaN where a run had none. Beyond float32, in which runs train, is no number either."""
    return float(value) if value is not None and abs(value) <= _LARGEST else nan


def value_of(record: Record, metric: str) -> float:
    """A run's metric, NaN where the run diverged."""
    return nan if record.status == "diverged" else finite(record.metrics.get(metric))


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


def summary_table(rows: Sequence[Row], more: Mapping[str, Sequence[Entry]] | None = None) -> Table:
    """Cells as a table, with `more` columns; an optional one that no cell fills is left out."""
    columns = ("estimator", "τ", metric_name(rows[0].metric), "std", "95% interval", "seeds")
    optional = {
        "diverged": [Entry(str(r.diverged or NOTHING), r.diverged) for r in rows],
        "failed": [Entry(str(r.failed or NOTHING), r.failed) for r in rows],
        "seconds / run": [number(r.seconds) for r in rows],
        **(more or {}),
    }
    extra = {name: column for name, column in optional.items() if any(entry.value for entry in column)}
    body = [
        (Entry(r.label), tau_entry(r.tau), *value_entries(r), *(column[i] for column in extra.values()))
        for i, r in enumerate(rows)
    ]
    table = Table(columns + tuple(extra), tuple(body))
    return without_empty(table) if rows[0].own else table


def number(value: float | None, metric: str = "", significant: int = 3) -> Entry:
    """A number to as many decimals as its metric has, or to `significant` digits."""
    if value is None or not isfinite(value):
        return Entry(NOTHING)
    if significant == 3 and metric.endswith(("elbo", "accuracy", "cost")) and abs(value) < 1e6:
        return Entry(f"{value:.{digits(metric)}f}", value)
    whole = 10**significant <= abs(value) < 1e6
    return Entry(f"{value:.0f}" if whole else f"{value:.{significant}g}", value)


def tau_entry(tau: float | None) -> Entry:
    """A temperature, as short as it goes."""
    return Entry(NOTHING) if tau is None else Entry(f"{tau:g}", tau)


def without_empty(table: Table) -> Table:
    """The table without the columns that no row fills."""
    everything = range(len(table.columns))
    return _select(table, [i for i in everything if any(row[i].text not in _EMPTY for row in table.rows)])


def _select(table: Table, columns: Sequence[int], *notes: str) -> Table:
    """These columns of a table, with further notes."""
    body = tuple(tuple(row[i] for i in columns) for row in table.rows)
    return Table(tuple(table.columns[i] for i in columns), body, (*notes, *table.notes))


def state_once(table: Table) -> Table:
    """The table without the columns that say the same in each of three rows or more: a note says it once.

    >>> table = state_once(Table(("a", "seeds"), tuple((Entry(name), Entry("3", 3)) for name in "xyz")))
    >>> table.columns, table.notes
    (('a',), ('In all rows: seeds 3.',))
    """
    if len(table.rows) < 3:
        return table
    first = table.rows[0]
    same = [i for i in range(1, len(first)) if all(row[i].text == first[i].text for row in table.rows)]
    kept = [i for i in range(len(first)) if i not in same]
    note = ", ".join(f"{table.columns[i]} {first[i].text}" for i in same if first[i].text not in _EMPTY)
    return _select(table, kept, *([f"In all rows: {note}."] if note else []))


def to_html(table: Table) -> str:
    """The table as an HTML element without a style of its own, as notebooks show one."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(entry.text)}</td>" for entry in row) + "</tr>" for row in table.rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


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
    widths = [max(len(name), wide) for name, wide in zip(table.columns, entries, strict=True)]
    narrow = sum(widths) + len(widths) + 1 > width
    if narrow:
        for i, name in enumerate(table.columns):
            widths[i] = max([entries[i] if right[i] else min(entries[i], LABEL), *map(len, name.split())])
        for i in (i for i in range(len(right)) if not right[i]):
            # What the others leave, the first column of texts may have, then the next.
            widths[i] += max(0, min(entries[i] - widths[i], width - sum(widths) - len(widths) - 1))
    rich_table = RichTable(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=0)
    for name, wide, is_number in zip(table.columns, widths, right, strict=True):
        justify: Literal["left", "right"] = "right" if is_number else "left"
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
