"""The blocks of cells of the board that were trained again, because they disagree with published numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from evidence import Evidence, require
from template import fill

from gapped_lab.recipe import find_recipe
from gapped_lab.report.paper import DISAGREES, PaperRow, against_paper
from gapped_lab.report.tabular import Entry, Table, number, tau_entry
from gapped_lab.tasks import count_protocol

AGAIN = {"field-counts": "counts-longer", "field-rao": "rao-fresh"}
"""Recipes of the board, and those that train their cells with a published number again."""
BEYOND = "negative-binomial-8-16"
"""Where more steps lead to the other side of the published numbers."""
Rows = dict[tuple[str, str, float | None], PaperRow]


def counts_again(evidence: Evidence) -> str:
    """The count VAEs of Fini, with fewer and with more steps."""
    recipe, longer = "field-counts", AGAIN["field-counts"]
    if longer not in evidence.recipes():
        return fill("field-not-run", {"runs": len(find_recipe(longer).entries), "name": longer})
    first, later = _compared(evidence, recipe, recipe), _compared(evidence, recipe, longer)
    few_steps, many_steps = (f"{count_steps(evidence, each):,} steps" for each in (recipe, longer))
    columns = ("protocol", "estimator", few_steps, many_steps, "std", "published", "difference")
    table = Table(columns, tuple(_row(key, first, later) for key in later))
    few = {key: row for key, row in later.items() if key[0].endswith("-2")}
    many = [key for key in later if key not in few]
    far, near = (max(_gap(rows[key]) for key in many) for rows in (first, later))
    require("most of the difference is gone with more steps", near < far / 2)
    closer = sum(_gap(later[key]) < _gap(first[key]) for key in many)
    beyond = {key[0] for key in many if (later[key].difference or 0.0) < 0}
    require("one protocol ends below", beyond == {BEYOND})
    below = [-(row.difference or 0.0) for row in few.values() if row.disagrees]
    require("cells of two variables that disagree end lower here", min(below) > 0)
    moves = [abs(_mean(first[key]) - _mean(row)) for key, row in few.items()]
    values = {"table": table, "name": longer, "far": far, "near": near, "move": max(moves)}
    values |= {"closer": closer, "many": len(many), "beyond": BEYOND}
    values |= {"below": max(below), "before": _agree(first, later), "after": _agree(later, later)}
    return fill("counts-longer", values | {"cells": len(later), "steps": few_steps})


def rao_again(evidence: Evidence) -> str:
    """The VAEs of Gumbel-Rao's authors, with fresh seeds and with a second temperature."""
    recipe, fresh = "field-rao", AGAIN["field-rao"]
    if fresh not in evidence.recipes():
        return fill("field-not-run", {"runs": len(find_recipe(fresh).entries), "name": fresh})
    first, later = _compared(evidence, recipe, recipe), _compared(evidence, recipe, fresh)
    columns = ("protocol", "estimator", "τ", "first seeds", "fresh seeds", "std", "published", "difference")
    table = Table(columns, tuple(_row(key, first, later, tau_entry(key[2])) for key in later))
    same = [key for key in later if key in first]
    warm = [(key, (*key[:2], 0.5)) for key in later if key not in first]
    rises = [_mean(later[key]) - _mean(later[cold]) for key, cold in warm]
    require("a higher temperature is no better", min(rises) > 0)
    moves = [abs(_mean(later[key]) - _mean(first[key])) for key in same]
    kept = sum(later[key].disagrees == first[key].disagrees for key in same)
    values = {"table": table, "name": fresh, "move": max(moves), "kept": kept, "cells": len(same)}
    return fill("rao-again", values | {"warm": len(warm), "low": min(rises), "high": max(rises)})


def _compared(evidence: Evidence, recipe: str, trained: str) -> Rows:
    """The cells of the recipe `trained` beside the published numbers of `recipe`, where these exist."""
    own = [replace(each, recipe=recipe) for each in evidence.records if each.recipe == trained]
    protocols = dict.fromkeys(entry.spec.protocol for entry in find_recipe(recipe).entries)
    return {
        (protocol, row.label, row.tau): row
        for protocol in protocols
        for row in against_paper(own, recipe, protocol)
        if row.difference is not None
    }


def count_steps(evidence: Evidence, recipe: str) -> int:
    """How many steps the count VAEs of a recipe were trained for."""
    (epochs,) = {record.epochs for record in evidence.records if record.recipe == recipe}
    rules = count_protocol(find_recipe(recipe).entries[0].spec.protocol)
    assert rules.train_images is not None
    return epochs * (rules.train_images // rules.batch)


def _row(key: tuple[str, str, float | None], first: Rows, later: Rows, *more: Entry) -> tuple[Entry, ...]:
    row = later[key]
    assert row.ours is not None
    before = _mean(first[key]) if key in first else None
    gap = number(row.difference, row.metric)
    mark = Entry(gap.text + (f" {DISAGREES}" if row.disagrees else ""), gap.value)
    numbers = (before, row.ours.mean, row.ours.std, row.paper_mean)
    entries = (number(value, row.metric) for value in numbers)
    return (Entry(key[0], code=True), Entry(row.label), *more, *entries, mark)


def _agree(rows: Rows, keys: Iterable[Any]) -> int:
    return sum(not rows[key].disagrees for key in keys)


def _mean(row: PaperRow) -> float:
    assert row.ours is not None
    return row.ours.mean


def _gap(row: PaperRow) -> float:
    return abs(row.difference or 0.0)
