"""How records decide whether a claim holds: by the 95% intervals of the leads that it is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

from evidence import RECTIFIED, Evidence, judge, lead

from gapped_lab.recipe_files import known_recipes
from gapped_lab.report.cells import Cell
from gapped_lab.report.statistics import Difference, Summary

HOLDS = "holds"
RELU_ONLY = "holds with the ReLU only"
FAILS = "does not hold"
OPEN = "cannot be told"

FAMILY = ("GST-0.8", "GST-1.0", "GST-1.2", "GST-pi")
BASELINES = ("STGS", "GR-MC100")
MIDDLE, LOW = (1.0, 0.5), (0.1, 0.01)

Values = dict[str, Any]


class Pair(NamedTuple):
    """A comparison that a claim makes, and the lead of the one that it calls better."""

    name: str
    lead: Difference


def decide(pairs: Iterable[Pair]) -> str:
    """What 95% intervals of leads say about a claim that all of them are positive."""
    leads = [pair.lead for pair in pairs]
    words = [judge(each) for each in leads]
    if all(word == "better" for word in words):
        return HOLDS
    backwards = any(each.mean < 0 for each in leads) and "better" not in words
    return FAILS if "worse" in words or backwards else OPEN


def across(rectified: str, plain: str | None) -> str:
    """One verdict of two, with the ReLU on the logits and without; None where that was not run."""
    return RELU_ONLY if rectified == HOLDS and plain not in (HOLDS, None) else rectified


def shown(d: Difference | Summary, digits: int = 2) -> str:
    """A number with its 95% interval."""
    return f"{d.mean:+.{digits}f} ({d.low:+.{digits}f} to {d.high:+.{digits}f})"


def weakest(pairs: Sequence[Pair], digits: int = 2) -> str:
    """The comparison that speaks least for a claim."""
    pair = min(pairs, key=lambda each: each.lead.low)
    return f"{pair.name} {shown(pair.lead, digits)}"


def listed(pairs: Iterable[Pair], digits: int = 2) -> str:
    return "; ".join(f"{pair.name} {shown(pair.lead, digits)}" for pair in pairs)


def pairs_of(
    evidence: Evidence,
    recipe: str,
    mine: Iterable[str],
    others: Iterable[str],
    taus: Iterable[float],
    protocol: str = RECTIFIED,
) -> list[Pair]:
    """Every one of `mine` against every one of `others` at the same temperature."""
    return [
        Pair(
            f"{a} over {b} at τ={tau:g}",
            lead(evidence.cell(recipe, a, tau, protocol), evidence.cell(recipe, b, tau, protocol)),
        )
        for tau, a, b in product(taus, mine, others)
    ]


def over(first: Cell, second: Cell) -> Pair:
    return Pair(f"{first.name(True)} over {second.name(True)}", lead(first, second))


def pending(recipe: str) -> str:
    """What stands in the place of numbers that nobody has measured yet."""
    assert recipe in known_recipes()
    return f"not run: `gapped reproduce {recipe} --device cuda`"
