"""The blocks of the board: its state, and for each recipe its paper, what was run, and the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from evidence import Evidence, require
from field_again import AGAIN
from field_variance import RECIPE as APART
from speed import SHARED
from template import fill

from gapped.errors import listing
from gapped_lab.recipe import find_recipe
from gapped_lab.recipe_files import known_recipes
from gapped_lab.report.board import Contest, board
from gapped_lab.report.cells import Row, groups, rows_of
from gapped_lab.report.paper import FIELD_NATS, against_paper, field
from gapped_lab.report.rendering import hardware, provenance
from gapped_lab.report.tabular import Entry, Table, number, tau_entry, without_empty

DEFAULT, POLYNOMIAL = "default", "power-"


def contests() -> list[Contest]:
    """The recipes of the field whose results are ranked."""
    names = [name for name in known_recipes() if name.startswith("field-") and name != APART]
    made = []
    for recipe in map(find_recipe, names):
        specs = [entry.spec for entry in recipe.entries]
        protocols = tuple(dict.fromkeys(spec.protocol for spec in specs))
        runs = frozenset(spec.id for spec in specs)
        made.append(Contest(recipe.name, recipe.title, protocols, runs, recipe.name not in SHARED))
    return made


def field_board(evidence: Evidence) -> str:
    """A part for each recipe."""
    return "\n\n".join(_part(evidence, contest) for contest in contests())


def field_status(evidence: Evidence) -> str:
    """How many recipes of the board have records, and how many of their cells agree with published ones."""
    every = contests()
    run = [each for each in every if each.name in evidence.recipes()]
    rows = [
        (contest.name, row)
        for contest in run
        for protocol in contest.protocols
        for row in against_paper(evidence.records, contest.name, protocol)
        if row.difference is not None
    ]
    values: dict[str, Any] = {"run": len(run), "recipes": len(every), "published": len(rows)}
    part = sum(contest.missing(evidence.records) > 0 for contest in run)
    values["in_part"] = f", {part} of them in part" if part else ""
    values |= {"agree": sum(not row.disagrees for _, row in rows), "margin": FIELD_NATS}
    values["by_recipe"] = listing(
        f"{sum(not row.disagrees for name, row in rows if name == each)} of "
        f"{sum(name == each for name, _ in rows)} in `{each}`"
        for each in dict.fromkeys(name for name, _ in rows)
    )
    apart = {contest for contest, row in rows if row.disagrees}
    require("cells that disagree were trained again", apart <= {*AGAIN, "field-mve"})
    text = fill("field-status" if run else "field-status-none", values)
    return text if not rows else f"{text} {fill('field-agreement', values)}"


def field_default(evidence: Evidence) -> str:
    """For each protocol with a default, the best estimator and how far above it the default ends."""
    rows = []
    for protocol, ranked in _with_default(evidence):
        best, place = ranked[0], _place(ranked)
        own = ranked[place]
        rows.append(
            (
                Entry(protocol, code=True),
                Entry(best.label),
                tau_entry(best.tau),
                number(best.value.mean, best.metric),
                number(own.value.mean, own.metric),
                Entry(f"{_above(ranked, place):.1f}", _above(ranked, place)),
                Entry(f"{place + 1} of {len(ranked)}", place),
            )
        )
    if not rows:
        return fill("field-default-missing", {})
    columns = ("protocol", "best", "τ", "its loss", "default's", "above, %", "place")
    return fill("field-default", default_of_vaes(evidence) | {"table": Table(columns, tuple(rows))})


def default_of_vaes(evidence: Evidence) -> dict[str, Any]:
    """How far above the best, in per cent, the default ends on the board's VAEs, and where it fails."""
    shares = {protocol: _above(ranked, _place(ranked)) for protocol, ranked in _with_default(evidence)}
    models = {protocol: share for protocol, share in shares.items() if not protocol.startswith(POLYNOMIAL)}
    where, most = max(models, key=lambda protocol: models[protocol]), max(shares.values())
    require("polynomial programming is where the default fails", most > models[where])
    mean = float(np.mean(list(models.values())))
    return {"models": len(models), "mean": mean, "worst": models[where], "where": where, "polynomial": most}


def _place(ranked: Sequence[Row]) -> int:
    return next(place for place, row in enumerate(ranked) if row.label == DEFAULT)


def _above(ranked: Sequence[Row], place: int) -> float:
    return 100 * (ranked[place].value.mean / ranked[0].value.mean - 1)


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
        "table": without_empty(Table(table.columns[:-1], body, table.notes if own else ())),
        **(published or {}),
    }
    run = "run" if contest.alone else "run-beside"
    sentences = [run if own else "not-run", *(["missing"] if own and values["lost"] else [])]
    sentences += ["published"] if published else []
    parts = [f"## {contest.title}", " ".join(fill(f"field-{name}", values) for name in sentences)]
    return "\n\n".join([*parts, *([fill("field-table", values)] if body else [])])
