"""The board of the field: every estimator under every protocol of a recipe, with what others published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from gapped.comparison.page import Section, hardware, render_html
from gapped.comparison.records import Record
from gapped.comparison.statistics import rank, summary
from gapped.comparison.table import (
    NOTHING,
    Cell,
    Entry,
    Row,
    Table,
    metric_name,
    number,
    tau_entry,
    value_entries,
    value_of,
    without_empty,
)
from gapped.errors import listing
from gapped_lab.recipe_files import FIELD
from gapped_lab.report.cells import groups, primary, rows_of
from gapped_lab.report.paper import DISAGREES, FIELD_NATS, PaperRow, against_paper, field

# Columns that a reader compares come first: a window shows it without scrolling.
COLUMNS = (
    "protocol", "estimator", "τ", "mean", "95% interval", "mark", "measure", "published", "difference",
    "seeds", "their seeds", "s / run", "std", "recipe",
)  # fmt: skip
BEST, TIED = "best", "not separated"
NOTE = (
    f"{BEST}: the best mean of a protocol. {TIED}: at 5% over all cells of the protocol, the test "
    f"of gapped.compare does not separate it from the best. {DISAGREES}: further from the published number "
    f"than two standard errors and {FIELD_NATS} nats; one without a standard deviation counts as exact."
)
SHARE = "s / run: a run's share of the wall time of its fleet."
DIVERGED = "2 of 3 seeds: the other run diverged, and enters no mean."


@dataclass(frozen=True)
class Contest:
    """A recipe as the board needs it."""

    name: str
    title: str
    protocols: tuple[str, ...]
    runs: frozenset[str]
    """The ids of its runs."""
    alone: bool = True
    """Whether its fleets had a device for themselves; else their seconds say nothing, and are not shown."""

    def missing(self, records: Iterable[Record]) -> int:
        """How many of its runs have no record."""
        return len(self.runs - {record.id for record in records if record.recipe == self.name})


def board(records: Iterable[Record], contests: Sequence[Contest]) -> Table:
    """The cells of these recipes that were run, best first in each protocol, then what is published alone."""
    records = list(records)
    rows = tuple(row for contest in contests for row in _rows(records, contest))
    own = {record.recipe for record in records}
    timed = any(contest.alone and contest.name in own for contest in contests)
    diverged = any(record.status == "diverged" for record in records)
    return Table(COLUMNS, rows, (" ".join([NOTE, *[SHARE] * timed, *[DIVERGED] * diverged]),))


def render_board(records: Sequence[Record], contests: Sequence[Contest]) -> str:
    """The board of the field as a page of its own, to filter and to sort."""
    own = [record for record in records if record.recipe in {contest.name for contest in contests}]
    asked = sum(len(contest.runs) for contest in contests)
    lacking = " ".join(contest.name for contest in contests if contest.missing(own))
    command = f"gapped reproduce {lacking} --device cuda --minutes 9"
    following = ("Runs that are missing, in pieces:", command) if lacking else ("Nothing is missing.", "")
    diverged = sum(record.status == "diverged" for record in own)
    verdict = f"{asked - sum(contest.missing(own) for contest in contests)} of {asked} runs are finished"
    verdict += f"; {diverged} of them diverged." if diverged else "."
    # No sum of times: fleets that shared a device have none that counts.
    facts = (*([hardware(own)] if own else ()), listing(contest.name for contest in contests))
    heading = "Every estimator under every protocol"
    section = Section(
        recipe=FIELD,
        verdict=verdict,
        facts=facts,
        next_step=following,
        records=tuple(own),
        details=((heading, heading, without_empty(board(own, contests))),),
        quick=any(record.quick for record in own),
    )
    return render_html([section], [], back="../field.html", title="The board")


def _rows(records: Sequence[Record], contest: Contest) -> Iterator[tuple[Entry, ...]]:
    own = [record for record in records if record.recipe == contest.name]
    by_protocol = {protocol: group for (_, protocol), group in groups(own).items()}
    for protocol in contest.protocols:
        group = by_protocol.get(protocol, [])
        theirs = {
            (row.label, row.tau): row
            for row in against_paper(own, contest.name, protocol)
            if row.paper_mean is not None
        }
        metric = field()[contest.name]["metric"] if contest.name in field() else primary(group)
        marks = _marks(group, metric)
        what = {"recipe": Entry(contest.name), "protocol": Entry(protocol, code=True)}
        what["measure"] = Entry(metric_name(metric))
        for row in rows_of(group, metric) if group else []:
            published = _list_published(theirs.pop((row.label, row.tau), None), metric)
            mark = {"mark": Entry(marks.get(row.name, ""))}
            yield _row(what | _ours(row) | (_share(row) if contest.alone else {}) | mark | published)
        for alone in theirs.values():
            name = {"estimator": Entry(alone.label), "τ": tau_entry(alone.tau)}
            yield _row(what | name | _list_published(alone, metric))


def _row(entries: Mapping[str, Entry]) -> tuple[Entry, ...]:
    nothing = Entry(NOTHING)
    return tuple(entries.get(name, nothing) for name in COLUMNS)


def _ours(row: Row) -> dict[str, Entry]:
    mean, std, interval, seeds = value_entries(row)
    if row.diverged:
        seeds = Entry(f"{seeds.text} of {row.value.count + row.diverged}", seeds.value)
    value = {"mean": mean, "std": std, "95% interval": interval, "seeds": seeds}
    return {"estimator": Entry(row.label), "τ": tau_entry(row.tau), **value}


def _share(row: Row) -> dict[str, Entry]:
    share = summary([record.seconds / record.runs_in_fleet for record in row.cell.records])
    return {"s / run": number(share.mean)}


def _list_published(row: PaperRow | None, metric: str) -> dict[str, Entry]:
    """A published mean and standard deviation, the number of seeds, and our difference."""
    if row is None:
        return {}
    mean, std, gap = (number(value, metric) for value in (row.paper_mean, row.paper_std, row.difference))
    spread = f" ± {std.text}" if std.value is not None else ""
    seeds = Entry(str(row.paper_count), row.paper_count) if row.paper_count else Entry(NOTHING)
    difference = Entry(gap.text + (f" {DISAGREES}" if row.disagrees else ""), gap.value)
    return {
        "published": Entry(mean.text + spread, mean.value),
        "their seeds": seeds,
        "difference": difference,
    }


def _marks(group: Sequence[Cell], metric: str) -> Mapping[str, str]:
    """Which cells are the best of their protocol, and which the data do not separate from it."""
    rows = rows_of(group, metric) if group else []
    metric_by_seed = {
        row.name: {r.seed: x for r in row.cell.records if isfinite(x := value_of(r, metric))} for row in rows
    }
    finished = {name: values for name, values in metric_by_seed.items() if values}
    if not finished:
        return {}
    ranking = rank(finished, any(row.higher for row in rows))
    best, *others = ranking.names
    return {best: BEST, **{name: TIED for name in others if name not in ranking.worse}}
