"""Claims of the paper about its comparison with coupled estimators."""

from __future__ import annotations

from dataclasses import fields

from evidence import COUPLED, ELBO, Evidence, judge, lead, mean_std, require
from verdicts import FAILS, FAMILY, HOLDS, OPEN, Pair, Values, decide, listed, pending, shown, weakest

from gapped_lab.report.cells import finite
from gapped_lab.report.paper import paper
from gapped_lab.report.statistics import Summary, between, from_moments, standard_errors, summary
from gapped_lab.tasks import vae_protocol


def at_epoch(evidence: Evidence, label: str, epoch: int) -> Summary:
    """The test negative ELBO of a cell of the coupled comparison, where its curves have that epoch."""
    cell = evidence.cell("coupled", label, 0.5, COUPLED)
    curves = [evidence.curves[r.id] for r in cell.records]
    return summary([finite(curve.series[ELBO][list(curve.epoch).index(epoch)]) for curve in curves])


def coupled(evidence: Evidence) -> Values:
    cells = {c.label: c for c in evidence.group("coupled", COUPLED)}
    pairs = {
        other: [Pair(f"{label} over {other}", lead(cells[label], cells[other])) for label in FAMILY[1:3]]
        for other in ("RLOO", "DisARM-Tree", "STGS", "GR-MC100")
    }
    rest = [pair for other in ("RLOO", "DisARM-Tree", "STGS") for pair in pairs[other]]
    return {
        "verdict": decide([*rest, *pairs["GR-MC100"]]),
        "rest": weakest(rest),
        "rao": listed(pairs["GR-MC100"]),
    }


def before_divergence(evidence: Evidence) -> Values:
    """GR-MC100 at epoch 50, where the paper's runs are about to diverge, beside the paper and GST then."""
    label, _, mean, std = next(row for row in paper()["coupled"]["rows"] if row[0] == "GR-MC100")
    ours, published = at_epoch(evidence, label, 50), from_moments(mean, std, paper()["coupled"]["seeds"])
    gst = at_epoch(evidence, "GST-1.0", 50)
    ahead = between(gst, ours)
    require("GR-MC100 is ahead of GST-1.0 at epoch 50", judge(ahead) == "better")
    return {
        "ours": mean_std(ours),
        "paper": mean_std(published),
        "gap": between(ours, published),
        "errors": standard_errors(ours, published.mean, published.std, published.count),
        "gst": mean_std(gst),
        "ahead": ahead,
    }


def before(evidence: Evidence) -> Values:
    values = before_divergence(evidence)
    gap = values["gap"]
    return {**values, "verdict": HOLDS if gap.low < 0 < gap.high else FAILS, "gap": shown(gap)}


def divergence(evidence: Evidence) -> Values:
    runs = evidence.cell("coupled", "GR-MC100", 0.5, COUPLED).records
    lost = sum(r.status != "ok" for r in runs)
    linear = pending("coupled-linear")
    if "coupled-linear" in evidence.recipes():
        own = [r for r in evidence.records if r.recipe == "coupled-linear"]
        broken = sum(r.status != "ok" for r in own)
        linear = f"{broken} of {len(own)} within {own[0].epochs} epochs"
        if broken and not lost:
            linear += ", so what diverges is the arithmetic, not the estimator"
    verdict = HOLDS if lost == len(runs) else FAILS if not lost else OPEN
    return {"verdict": verdict, "lost": lost, "runs": len(runs), "epochs": runs[0].epochs, "linear": linear}


def identical(evidence: Evidence) -> Values:
    first, second = vae_protocol("paper-32x64"), vae_protocol("coupled-32x64")
    names = [f.name for f in fields(first) if f.name != "name"]
    differing = [name for name in names if getattr(first, name) != getattr(second, name)]
    rows = [r for r in paper()["coupled"]["rows"] if r[0] in ("RLOO", "DisARM-Tree")]
    cells = {c.label: c for c in evidence.group("coupled", COUPLED)}
    seeds = paper()["coupled"]["seeds"]
    gaps = [
        Pair(label, between(summary(cells[label].values(ELBO)), from_moments(mean, std, seeds)))
        for label, _, mean, std in rows
    ]
    return {"verdict": FAILS if differing else HOLDS, "count": len(differing), "gaps": listed(gaps)}
