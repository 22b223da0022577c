"""The blocks of the board: its state, and for each recipe its paper, what was run, and the table."""

from __future__ import annotations

from evidence import Evidence
from field_variance import RECIPE as APART
from template import fill

from gapped.lab.recipe import find_recipe
from gapped.lab.recipe_files import known_recipes
from gapped.lab.report.board import Contest, board
from gapped.lab.report.paper import against_paper, field
from gapped.lab.report.rendering import provenance
from gapped.lab.report.tabular import Table, without_empty


def contests() -> list[Contest]:
    """The recipes of the field whose results are ranked."""
    names = [name for name in known_recipes() if name.startswith("field-") and name != APART]
    made = []
    for recipe in map(find_recipe, names):
        specs = [entry.spec for entry in recipe.entries]
        protocols = tuple(dict.fromkeys(spec.protocol for spec in specs))
        made.append(Contest(recipe.name, recipe.title, protocols, frozenset(spec.id for spec in specs)))
    return made


def field_board(evidence: Evidence) -> str:
    """A part for each recipe."""
    return "\n\n".join(_part(evidence, contest) for contest in contests())


def field_status(evidence: Evidence) -> str:
    """How many recipes of the board have records, and how many of their cells agree with published ones."""
    every = contests()
    run = [each for each in every if each.name in evidence.recipes()]
    rows = [
        row
        for contest in run
        for protocol in contest.protocols
        for row in against_paper(evidence.records, contest.name, protocol)
        if row.difference is not None
    ]
    values = {"run": len(run), "recipes": len(every), "published": len(rows)}
    values["part"] = sum(contest.missing(evidence.records) > 0 for contest in run)
    values["agree"] = sum(not row.disagrees for row in rows)
    text = fill("field-status" if run else "field-status-none", values)
    return text if not rows else f"{text} {fill('field-agreement', values)}"


def _part(evidence: Evidence, contest: Contest) -> str:
    own = [record for record in evidence.records if record.recipe == contest.name]
    table = board(own, [contest])
    # The recipe is in the heading.
    body = tuple(row[1:] for row in table.rows)
    published = field().get(contest.name)
    values = {
        "name": contest.name,
        "runs": len(contest.runs),
        "lost": contest.missing(own),
        "provenance": provenance(own, contest.name) if own else "",
        "table": without_empty(Table(table.columns[1:], body, table.notes if own else ())),
        **(published or {}),
    }
    sentences = ["run" if own else "not-run", *(["missing"] if own and values["lost"] else [])]
    sentences += ["published"] if published else []
    parts = [f"## {contest.title}", " ".join(fill(f"field-{name}", values) for name in sentences)]
    return "\n\n".join([*parts, *([fill("field-table", values)] if body else [])])
