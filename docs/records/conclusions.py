"""What to conclude: the numbers of the closing list, and the checks that its words still hold."""

from __future__ import annotations

from typing import Any

from beyond import ORDER, best_of, chosen_cell, labelled, reference
from evidence import (
    ELBO,
    PLAIN,
    RECTIFIED,
    Evidence,
    judge,
    lead,
    mean_std,
    require,
    require_better,
    require_not_separated,
)
from template import fill
from variance import claim

from gapped.errors import listing
from gapped_lab.report.cells import Cell, rows_of, verdict_of
from gapped_lab.report.paper import against_paper
from gapped_lab.report.statistics import summary

TAUS = (1.0, 0.5)

Values = dict[str, Any]


def conclusions(evidence: Evidence) -> Values:
    """The findings as a list; intervals are Welch's at 95%, not corrected for their number."""
    zoo = evidence.group("zoo")
    known = {(c.label, c.tau) for c in zoo}
    rectified = [*zoo, *(c for c in evidence.group("vae") if (c.label, c.tau) not in known)]
    ours = summary(chosen_cell(evidence).values(ELBO))
    long = rows_of(evidence.group("variance"), ELBO)[0]
    return {
        "verdict_with": verdict_of(rectified),
        "verdict_without": verdict_of(evidence.group("zoo", PLAIN)),
        **_rivals(evidence, RECTIFIED, "with", better=(True, True, True)),
        **_rivals(evidence, PLAIN, "without", better=(False, True, True)),
        **_relu(evidence),
        **_others(evidence),
        **_draws(evidence),
        **_low(evidence),
        "variance": fill("variance-claim", claim(evidence)),
        "chosen": mean_std(ours),
        "chosen_seeds": ours.count,
        "long": long,
        "long_value": mean_std(long.value),
        "long_epochs": long.cell.records[0].epochs,
    }


def _rivals(evidence: Evidence, protocol: str, where: str, better: tuple[bool, ...]) -> Values:
    """The best GST and the best of the others, at each temperature and over all, and the lead of the better.

    `better` has for each of the three whether the sentence says that GST leads.
    """
    group = evidence.group("zoo", protocol)
    seeds = max(len(c.records) for c in group)
    gst = [c for c in group if _is_gst(c)]
    others = [c for c in group if not _is_gst(c) and len(c.records) == seeds]
    values: Values = {"seeds": seeds}
    for tau, leads in zip((*TAUS, None), better, strict=True):
        mine, rival = (best_of([c for c in part if tau in (None, c.tau)]) for part in (gst, others))
        key = f"{where}_{'all' if tau is None else f'{tau:g}'.replace('.', '_')}"
        gain = require_better(mine, rival) if leads else require_better(rival, mine)
        values |= {f"{key}_gst": mine, f"{key}_rival": rival, f"{key}_lead": gain}
    return values


def _relu(evidence: Evidence) -> Values:
    """What each estimator gains when the ReLU goes, and what that leaves of GST's advantages."""
    gains = []
    for label in ORDER:
        gain = lead(*(best_of(labelled(evidence, label, protocol)) for protocol in (PLAIN, RECTIFIED)))
        mark = " (not separated)" * (judge(gain) == "not separated")
        gains.append((-gain.mean, f"{label} {gain.mean:+.2f}{mark}"))
    texts = []
    for tau in TAUS:
        for label in ("GST-1.0", "GST-1.2"):
            first, second = (
                lead(*(evidence.cell("zoo", name, tau, protocol) for name in (label, "STGS"))).mean
                for protocol in (RECTIFIED, PLAIN)
            )
            require(f"{label} at τ={tau:g} loses most of its advantage", second < first / 2)
            texts.append(f"{label} (τ={tau:g}) from {first:.2f} to {second:.2f}")
    return {"gains": ", ".join(text for _, text in sorted(gains)), "advantages": listing(texts)}


def _others(evidence: Evidence) -> Values:
    """Which estimators are better and worse than STGS at the same temperature, or at its best one."""
    texts: dict[str, list[str]] = {"better": [], "worse": [], "not separated": []}
    for cell in sorted(evidence.group("zoo", PLAIN), key=lambda c: (c.label, -(c.tau or 0))):
        if cell.label != "STGS" and not _is_gst(cell):
            gain = lead(cell, reference(evidence, cell.tau, PLAIN))
            word = judge(gain)
            by = f" by {abs(gain.mean):.2f}" if word != "not separated" else ""
            texts[word].append(cell.name(True) + by)
    return {
        "better": listing(texts["better"]),
        "worse": listing(texts["worse"]),
        "open": listing(texts["not separated"]),
        "best_tau": best_of(labelled(evidence, "STGS", PLAIN)).tau,
    }


def _draws(evidence: Evidence) -> Values:
    """Whether ten times as many draws help Gumbel-Rao, and what they cost."""
    texts = []
    for protocol, where in ((RECTIFIED, "with the ReLU"), (PLAIN, "without the ReLU")):
        for tau in TAUS:
            many, few = (evidence.cell("zoo", name, tau, protocol) for name in ("GR-MC1000", "GR-MC100"))
            gain = require_not_separated(many, few)
            texts.append(f"{where} at τ={tau:g} ({gain.low:+.2f} to {gain.high:+.2f})")
    pace = {c.label: float(c.values("seconds_per_epoch")[0]) for c in evidence.group("efficiency")}
    return {
        "draws": listing(texts),
        "draws_seeds": evidence.summary("zoo", "GR-MC1000", 0.5, PLAIN).count,
        "times": pace["GR-MC1000"] / pace["GR-MC100"],
    }


def _low(evidence: Evidence) -> Values:
    """The cells that the paper marks X, and the means at low temperatures."""
    marked = [r for r in against_paper(evidence.records, "vae", RECTIFIED) if r.note.startswith("paper: X")]
    values: Values = {"marked": len(marked), "failed": sum(not r.disagrees for r in marked)}
    for tau, name in ((0.1, "low"), (0.01, "lowest")):
        for recipe, key in (("vae", "constant"), ("mixed-temperature", "mixed")):
            labels = ("STGS", "GR-MC100", "GST-1.2")[: 3 if key == "mixed" else 2]
            means = [f"{label} {evidence.summary(recipe, label, tau).mean:.2f}" for label in labels]
            values[f"{name}_{key}"] = listing(means)
    return values


def _is_gst(cell: Cell) -> bool:
    return cell.label.startswith("GST")
