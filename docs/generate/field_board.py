"""The tables of the board: where the default stands, and the paper, runs and cells of each recipe."""

from __future__ import annotations

from collections.abc import Iterator

from evidence import Evidence
from template import fill

from gapped.comparison.page import hardware
from gapped.comparison.table import Entry, Row, Table, number, tau_entry, without_empty
from gapped_lab.recipe import find_recipe
from gapped_lab.recipe_files import known_recipes
from gapped_lab.report.board import Contest, board
from gapped_lab.report.cells import groups, rows_of
from gapped_lab.report.markdown import to_markdown
from gapped_lab.report.paper import field
from gapped_lab.report.rendering import provenance

DEFAULT = "default"
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
    for protocol, ranked in _with_default(evidence):
        best = ranked[0]
        place = next(place for place, row in enumerate(ranked) if row.label == DEFAULT)
        own = ranked[place]
        above = 100 * (own.value.mean / best.value.mean - 1)
        rows.append(
            (
                Entry(protocol, code=True),
                Entry(best.label),
                tau_entry(best.tau),
                number(best.value.mean, best.metric),
                number(own.value.mean, own.metric),
                Entry(f"{above:.1f}", above),
                Entry(f"{place + 1} of {len(ranked)}", place),
            )
        )
    columns = ("protocol", "best", "τ", "its loss", "default's", "above, %", "place")
    return to_markdown(Table(columns, tuple(rows)))


def _with_default(evidence: Evidence) -> Iterator[tuple[str, list[Row]]]:
    """The protocols that the default was trained under, with their cells by test loss, best first."""
    for contest in contests():
        own = [record for record in evidence.records if record.recipe == contest.name]
        for (_, protocol), group in groups(own).items():
            ranked = rows_of(group)
            if any(row.label == DEFAULT for row in ranked):
                yield protocol, ranked


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
        parts.append(to_markdown(without_empty(Table(table.columns[:-1], body, notes))).rstrip())
    return "\n\n".join(parts)
