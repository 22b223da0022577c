"""Claims of the paper about its VAE on MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import sqrt

import numpy as np
from beyond import best_of, labelled
from evidence import ELBO, PLAIN, RECTIFIED, VALIDATION, Evidence, judge, lead, mean_std, require
from scipy.special import fdtri
from template import fill
from variance import claim as variance_claim
from verdicts import (
    BASELINES,
    FAILS,
    FAMILY,
    HOLDS,
    LOW,
    MIDDLE,
    OPEN,
    Pair,
    Values,
    across,
    decide,
    listed,
    over,
    pairs_of,
    pending,
    shown,
    weakest,
)

from gapped_lab.report.cells import Cell, rows_of
from gapped_lab.report.paper import FAILED_ABOVE, against_paper, paper
from gapped_lab.report.statistics import LEVEL, Difference, summary


def raised(evidence: Evidence) -> Values:
    """Whether lowering the others trains better than raising the selected one."""
    if "raised" not in evidence.recipes():
        return {"verdict": OPEN, "numbers": pending("raised")}
    leads: dict[str, list[Pair]] = {}
    for protocol, where in ((RECTIFIED, "with"), (PLAIN, "without")):
        leads[where] = [
            Pair(
                f"{label} at τ={tau:g}",
                lead(
                    evidence.cell("zoo", label, tau, protocol),
                    evidence.cell("raised", f"raised {label}", tau, protocol),
                ),
            )
            for label, tau in product(("GST-1.0", "GST-1.2"), MIDDLE)
        ]
    verdict = across(decide(leads["with"]), decide(leads["without"]))
    ends = np.concatenate([c.values(ELBO) for c in evidence.cells if c.recipe == "raised"])
    failed = int((~(ends <= FAILED_ABOVE)).sum())
    values = {**{key: listed(pairs) for key, pairs in leads.items()}, "failed": failed, "runs": ends.size}
    return {"verdict": verdict, "numbers": fill("claim-raised", values)}


def naive(evidence: Evidence) -> Values:
    pairs = [
        over(*(best_of(labelled(evidence, label, protocol)) for label in ("STGS", "ST")))
        for protocol in (RECTIFIED, PLAIN)
    ]
    verdict = across(*(decide([pair]) for pair in pairs))
    return {"verdict": verdict, "with": weakest(pairs[:1]), "without": weakest(pairs[1:])}


def ablation(evidence: Evidence) -> Values:
    labels = ("ST", "NZ-GST-0.0", "NZ-GST-1.0", "GST-0.0")

    def best(label: str, recipe: str, protocol: str) -> Cell:
        return best_of([c for c in evidence.group(recipe, protocol) if c.label == label])

    pairs = [over(*(best(each, "ablation", RECTIFIED) for each in ("GST-1.0", label))) for label in labels]
    same = pairs_of(evidence, "ablation", ["GST-1.0"], labels, MIDDLE)
    plain, without = None, pending("without-relu")
    if "without-relu" in evidence.recipes():
        own = best("GST-1.0", "zoo", PLAIN)
        others = [over(own, best(label, "without-relu", PLAIN)) for label in labels[1:]]
        plain, without = decide(others), listed(others)
    return {
        "verdict": across(decide(pairs), plain),
        "with": listed(pairs),
        "same": len(same),
        "ahead": sum(judge(pair.lead) == "better" for pair in same),
        "weakest": weakest(same),
        "without": without,
    }


def comparison(evidence: Evidence) -> Values:
    rectified = pairs_of(evidence, "vae", FAMILY, BASELINES, MIDDLE)
    plain = pairs_of(evidence, "zoo", ("GST-1.0", "GST-1.2"), BASELINES, MIDDLE, PLAIN)
    words = [judge(pair.lead) for pair in plain]
    return {
        "verdict": across(decide(rectified), decide(plain)),
        "pairs": len(rectified),
        "with": weakest(rectified),
        "others": len(plain),
        "better": words.count("better"),
        "worse": words.count("worse"),
        "without": weakest(plain),
    }


def best_setting(evidence: Evidence) -> Values:
    sides = {}
    for recipe, protocol, family in (("vae", RECTIFIED, FAMILY), ("zoo", PLAIN, ("GST-1.0", "GST-1.2"))):
        rival = best_of([c for c in evidence.group(recipe, protocol) if c.label == "GR-MC100"])
        sides[protocol] = {
            tau: [over(evidence.cell(recipe, label, tau, protocol), rival) for label in family]
            for tau in MIDDLE
        }
    verdicts = (decide(pair for pairs in sides[p].values() for pair in pairs) for p in (RECTIFIED, PLAIN))
    texts = {
        f"{where}_{str(tau).replace('.', '_')}": weakest(sides[protocol][tau])
        for (where, protocol), tau in product((("with", RECTIFIED), ("without", PLAIN)), MIDDLE)
    }
    return {"verdict": across(*verdicts), **texts}


def spread(evidence: Evidence) -> Values:
    """Standard deviations over seeds, pooled over the cells of a temperature; the ratio's interval is F's."""
    texts, verdicts = {}, {}
    for where, recipe, protocol, family in (
        ("with", "vae", RECTIFIED, FAMILY),
        ("without", "zoo", PLAIN, ("GST-1.0", "GST-1.2")),
    ):
        ratios = [_deviations(evidence, recipe, protocol, family, tau) for tau in MIDDLE]
        named = zip(MIDDLE, ratios, strict=True)
        texts[where] = "; ".join(f"τ={tau:g}: {r.mean:.2f} ({r.low:.2f} to {r.high:.2f})" for tau, r in named)
        verdicts[where] = decide(Pair("", Difference(1 - r.mean, 1 - r.high, 1 - r.low, r.p)) for r in ratios)
    return {"verdict": across(verdicts["with"], verdicts["without"]), **texts}


def _deviations(
    evidence: Evidence, recipe: str, protocol: str, family: Sequence[str], tau: float
) -> Difference:
    """The standard deviation of the family over that of the baselines."""
    pooled, freedoms = [], []
    for labels in (family, BASELINES):
        groups = [summary(evidence.cell(recipe, label, tau, protocol).values(ELBO)) for label in labels]
        freedom = sum(group.count - 1 for group in groups)
        pooled.append(sum(group.std**2 * (group.count - 1) for group in groups) / freedom)
        freedoms.append(freedom)
    square = pooled[0] / pooled[1]
    high, low = (fdtri(*freedoms, share) for share in (LEVEL / 2, 1 - LEVEL / 2))
    return Difference(sqrt(square), sqrt(square / low), sqrt(square / high), 1.0)


def best_gap(evidence: Evidence) -> Values:
    rivals = [label for label in FAMILY if label != "GST-1.2"]
    rectified = pairs_of(evidence, "vae", ["GST-1.2"], rivals, MIDDLE)
    plain = pairs_of(evidence, "zoo", ["GST-1.2"], ["GST-1.0"], MIDDLE, PLAIN)
    return {
        "verdict": across(decide(rectified), decide(plain)),
        "ahead": sum(judge(pair.lead) == "better" for pair in rectified),
        "pairs": len(rectified),
        "with": weakest(rectified),
        "without": listed(plain),
    }


def near_one(evidence: Evidence) -> Values:
    """Where the best cell of the grid over gaps and temperatures lies, on held-out images."""
    sides = {"with": RECTIFIED, "without": PLAIN}
    best = {key: rows_of(evidence.group("gap-grid", side), VALIDATION)[0] for key, side in sides.items()}
    gaps = [row.cell.gap or 0.0 for row in best.values()]
    others = [c.gap or 0.0 for c in evidence.group("gap-grid")]
    return {
        "verdict": HOLDS if all(0.8 <= gap <= 1.2 for gap in gaps) else FAILS,
        "low": min(others),
        "high": max(others),
        **{key: f"{row.cell.gap:g} ({mean_std(row.value)})" for key, row in best.items()},
    }


def colder(evidence: Evidence) -> Values:
    pairs = [
        Pair(
            f"{label}, τ={warm:g} over {cold:g}",
            lead(evidence.cell("vae", label, warm), evidence.cell("vae", label, cold)),
        )
        for label, (warm, cold) in product(BASELINES, ((0.5, 0.1), (0.1, 0.01)))
    ]
    return {"verdict": decide(pairs), "numbers": listed(pairs)}


def low(evidence: Evidence) -> Values:
    rows = [r for r in against_paper(evidence.records, "vae", RECTIFIED) if r.note.startswith("paper: X")]
    failed = sum(not r.disagrees for r in rows)
    runs = sum(r.ours.count for r in rows if r.ours)
    verdict, plain, without = HOLDS if failed == len(rows) else FAILS, None, pending("without-relu")
    if "without-relu" in evidence.recipes():
        group = [evidence.cell("without-relu", label, tau, PLAIN) for label, tau in product(FAMILY, LOW)]
        ends = [c.values(ELBO) for c in group]
        lost = sum(2 * int((~(x <= FAILED_ABOVE)).sum()) >= x.size for x in ends)
        plain = HOLDS if lost == len(group) else FAILS
        best = best_of(group)
        without = f"{lost} of {len(group)} fail, the best is {best.name(True)} with {_mean(best)}"
    return {
        "verdict": across(verdict, plain),
        "failed": failed,
        "cells": len(rows),
        "runs": runs,
        "limit": FAILED_ABOVE,
        "without": without,
    }


def entropy(evidence: Evidence) -> Values:
    rows = [r for r in against_paper(evidence.records, "entropy") if r.ours and r.paper_mean]
    off = [r.ours.mean / r.paper_mean - 1 for r in rows if r.ours and r.paper_mean]
    text = "; ".join(
        f"{r.label} {r.ours.mean:.4g} ({r.ours.low:.4g} to {r.ours.high:.4g}), paper {r.paper_mean:g}"
        for r in rows
        if r.ours
    )
    # The paper gives one or two digits.
    return {"verdict": HOLDS if max(map(abs, off)) < 0.05 else FAILS, "numbers": text}


def expected(evidence: Evidence) -> Values:
    """GST-pi against a gap of 1: similar means that the interval lies within half its lead over GR-MC100."""
    pairs = pairs_of(evidence, "vae", ["GST-pi"], ["GST-1.0"], MIDDLE)
    leads = pairs_of(evidence, "vae", ["GST-pi"], ["GR-MC100"], MIDDLE)
    margins = [pair.lead.mean / 2 for pair in leads]
    similar = all(max(-p.lead.low, p.lead.high) < m for p, m in zip(pairs, margins, strict=True))
    never = not any(judge(pair.lead) == "better" for pair in pairs)
    verdict = HOLDS if similar and never else FAILS
    return {"verdict": verdict, "pairs": listed(pairs), "leads": listed(leads)}


def mixed(evidence: Evidence) -> Values:
    pairs = [
        Pair(
            f"{label} at τ={tau:g}",
            lead(evidence.cell("mixed-temperature", label, tau), evidence.cell("vae", label, tau)),
        )
        for label, tau in product((*BASELINES, *FAMILY), LOW)
    ]
    stgs = next(pair for pair in pairs if pair.name == "STGS at τ=0.1")
    rows = weakest(pairs)
    return {"verdict": decide(pairs), "pairs": len(pairs), "weakest": rows, "stgs": shown(stgs.lead)}


def mixed_against_constant(evidence: Evidence) -> list[Pair]:
    """Each cell of the mixed training against the same estimator trained at the middle temperature alone."""
    middle = paper()["mixed-temperature"]["mid_temperature"]
    return [
        Pair(c.name(True), lead(c, evidence.cell("vae", c.label, middle)))
        for c in evidence.group("mixed-temperature")
    ]


def gain(evidence: Evidence) -> Values:
    pairs = mixed_against_constant(evidence)
    words = [judge(pair.lead) for pair in pairs]
    best = max(pairs, key=lambda pair: pair.lead.mean)
    return {
        "verdict": decide(pairs),
        "pairs": len(pairs),
        "better": words.count("better"),
        "equal": words.count("not separated"),
        "worse": words.count("worse"),
        "best": f"{best.name} {shown(best.lead)}",
    }


def variance(evidence: Evidence) -> Values:
    values = variance_claim(evidence)
    above = [values[f"{key}_above"] for key in ("stgs", "gr_mc100")]
    return {"verdict": HOLDS if above == ["none"] * 2 else FAILS, **values}


def _efficiency(evidence: Evidence) -> dict[str, dict[str, float]]:
    group = evidence.group("efficiency")
    names = ("seconds_per_epoch", "gpu_memory_gb")
    return {name: {c.label: summary(c.values(name)).mean for c in group} for name in names}


def time(evidence: Evidence) -> Values:
    pace = _efficiency(evidence)["seconds_per_epoch"]
    quotient = pace["GST-1.0"] / pace["STGS"]
    # A single run each has no interval.
    longer = pace["GR-MC1000"] > 1.2 * pace["GR-MC100"]
    return {"verdict": HOLDS if abs(quotient - 1) < 0.05 and longer else FAILS, **_keys(pace)}


def memory_of_runs(evidence: Evidence) -> dict[str, float]:
    """The memory of each run, in GB."""
    memory = _efficiency(evidence)["gpu_memory_gb"]
    # If it does not, the process still held what an earlier run had needed.
    require("GST needs as much memory as STGS", abs(memory["STGS"] / memory["GST-1.0"] - 1) < 0.2)
    return memory


def memory(evidence: Evidence) -> Values:
    memory = memory_of_runs(evidence)
    more = min(memory["GR-MC100"], memory["GR-MC1000"]) > 1.2 * memory["STGS"]
    return {"verdict": HOLDS if more else FAILS, **_keys(memory)}


def _keys(values: dict[str, float]) -> Values:
    return {label.lower().replace("-", "_").replace(".", "_"): value for label, value in values.items()}


def _mean(cell: Cell) -> str:
    return mean_std(summary(cell.values(ELBO)))
