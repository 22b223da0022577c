"""The tables of the board: where the default stands, and the paper, runs and cells of each recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from board import Contest, board
from evidence import Evidence
from study import DEFAULT
from template import fill

from gapped.comparison.page import hardware
from gapped.comparison.table import Entry, Row, Table, number, state_once, tau_entry, without_empty
from gapped_lab.recipe import find_recipe
from gapped_lab.recipe_files import known_recipes
from gapped_lab.report.cells import groups, rows_of
from gapped_lab.report.paper import field
from gapped_lab.report.rendering import provenance, to_markdown

# Recipes whose fleets trained beside others on one GPU: their seconds say nothing of speed.
SHARED = (
    *("field-polynomial", "field-reinmax", "field-flows", "field-coupled", "field-codes", "field-counts"),
    *("field-mve", "field-rao", "field-binary"),
)


def contests() -> list[Contest]:
    """The recipes of the field whose results are ranked."""
    made = []
    for recipe in (find_recipe(name) for name in known_recipes() if name.startswith("field-")):
        specs = [entry.spec for entry in recipe.entries]
        protocols = tuple(dict.fromkeys(spec.protocol for spec in specs))
        runs = frozenset(spec.id for spec in specs)
        made.append(Contest(recipe.name, recipe.title, protocols, runs, recipe.name not in SHARED))
    return made


def field_board(evidence: Evidence) -> str:
    """A part for each recipe."""
    return "\n\n".join(_part(evidence, contest) for contest in contests())


def field_default(evidence: Evidence) -> str:
    """For each protocol with a default, the best estimator and how far above it the default ends."""
    rows = []
    for standing in standings(evidence):
        best, own, place = standing.best, standing.own, standing.place
        rows.append(
            (
                Entry(standing.protocol, code=True),
                Entry(best.label),
                tau_entry(best.tau),
                number(best.value.mean, best.metric),
                number(own.value.mean, own.metric),
                Entry(f"{standing.above:.1f}", standing.above),
                Entry(f"{place} of {standing.cells}", place),
            )
        )
    columns = ("protocol", "best", "τ", "its loss", "default's", "above, %", "place")
    return to_markdown(Table(columns, tuple(rows)))


class Standing(NamedTuple):
    """The default under one protocol, among all cells by test loss."""

    protocol: str
    best: Row
    own: Row
    place: int
    cells: int

    @property
    def above(self) -> float:
        """How far the default ends above the best cell, in per cent of it."""
        return 100 * (self.own.value.mean / self.best.value.mean - 1)


def standings(evidence: Evidence) -> Iterator[Standing]:
    """Those of the protocols that the default was trained under."""
    for contest in contests():
        own = [record for record in evidence.records if record.recipe == contest.name]
        for (_, protocol), group in groups(own).items():
            ranked = rows_of(group)
            for place, row in enumerate(ranked, 1):
                if (row.label, row.tau) == DEFAULT:
                    yield Standing(protocol, ranked[0], row, place, len(ranked))


def _part(evidence: Evidence, contest: Contest) -> str:
    own = [record for record in evidence.records if record.recipe == contest.name]
    table = board(own, [contest])
    # The recipe is in the heading.
    body = tuple(row[:-1] for row in table.rows)
    published = field().get(contest.name)
    values = {
        "name": contest.name,
        "runs": len(contest.runs),
        "lost": contest.missing(own),
        "count": len(own),
        "hardware": hardware(own),
        "provenance": provenance(own, contest.name) if own else "",
        **(published or {}),
    }
    run = "run" if contest.alone else "run-beside"
    sentences = [run if own else "not-run", *(["missing"] if own and values["lost"] else [])]
    sentences += ["published"] if published else []
    parts = [f"## {contest.title}", " ".join(fill(f"field-{name}", values) for name in sentences)]
    if body:
        notes = table.notes if own else ()
        parts.append(to_markdown(state_once(without_empty(Table(table.columns[:-1], body, notes)))).rstrip())
    return "\n\n".join(parts)
