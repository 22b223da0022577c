"""The claims of the paper, one by one: a verdict that the records decide, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import coupled_claims
import mnist_claims
import theory_claims
from evidence import ACCURACY, Evidence, judge
from verdicts import FAILS, HOLDS, OPEN, RELU_ONLY, Pair, Values, decide, listed, shown, weakest

from gapped_lab.report.paper import paper
from gapped_lab.report.statistics import Floats, between, difference, from_moments


def claims(evidence: Evidence) -> Values:
    """The values of every row of the table, by the row's name."""
    rows = {name: claim(evidence) for name, claim in CLAIMS.items()}
    verdicts = [row["verdict"] for row in rows.values()]
    counts = {name: verdicts.count(word) for name, word in (("hold", HOLDS), ("relu", RELU_ONLY))}
    counts |= {"fail": verdicts.count(FAILS), "open": verdicts.count(OPEN), "count": len(rows)}
    return {**rows, **counts}


def _accuracies(evidence: Evidence, others: Sequence[str], taus: Sequence[float]) -> list[Pair]:
    return [
        Pair(
            f"over {other} at τ={tau:g}",
            difference(
                *(
                    evidence.cell("listops", each, tau, "paper").values(ACCURACY)
                    for each in ("GST-1.0", other)
                )
            ),
        )
        for tau, other in product(taus, others)
    ]


def _accuracy(evidence: Evidence, label: str, tau: float) -> Floats:
    return evidence.cell("listops", label, tau, "paper").values(ACCURACY)


def _published(others: Sequence[str], taus: Sequence[float]) -> list[Pair]:
    """The same comparisons with the paper's own means and standard deviations."""
    seeds = paper()["listops"]["seeds"]
    rows = {
        (label, tau): from_moments(mean, std, seeds) for label, tau, mean, std in paper()["listops"]["rows"]
    }
    return [Pair("", between(rows["GST-1.0", tau], rows[other, tau])) for tau, other in product(taus, others)]


def _listops(others: Sequence[str], taus: Sequence[float]) -> Callable[[Evidence], Values]:
    def claim(evidence: Evidence) -> Values:
        pairs = _accuracies(evidence, others, taus)
        words, published = ([judge(p.lead) for p in each] for each in (pairs, _published(others, taus)))
        return {
            "verdict": decide(pairs),
            "pairs": len(pairs),
            "ahead": sum(p.lead.mean > 0 for p in pairs),
            "better": words.count("better"),
            "worse": words.count("worse"),
            "list": listed(pairs, 3),
            "weakest": weakest(pairs, 3),
            "published": published.count("better"),
        }

    return claim


def par(evidence: Evidence) -> Values:
    """On par: neither the paper's numbers nor ours separate the two."""
    (pair,), (theirs,) = _accuracies(evidence, ("GR-MC100",), (0.01,)), _published(("GR-MC100",), (0.01,))
    equal = judge(pair.lead) == judge(theirs.lead) == "not separated"
    values = {"ours": shown(pair.lead, 3), "paper": shown(theirs.lead, 3)}
    return {"verdict": HOLDS if equal else FAILS, **values}


CLAIMS: dict[str, Callable[[Evidence], Values]] = {
    "properties": theory_claims.properties,
    "lemma": theory_claims.lemma,
    "raised": mnist_claims.raised,
    "decomposition": theory_claims.decomposition,
    "naive": mnist_claims.naive,
    "ablation": mnist_claims.ablation,
    "comparison": mnist_claims.comparison,
    "best_setting": mnist_claims.best_setting,
    "spread": mnist_claims.spread,
    "expected": mnist_claims.expected,
    "best_gap": mnist_claims.best_gap,
    "near_one": mnist_claims.near_one,
    "low": mnist_claims.low,
    "colder": mnist_claims.colder,
    "entropy": mnist_claims.entropy,
    "mixed": mnist_claims.mixed,
    "gain": mnist_claims.gain,
    "variance": mnist_claims.variance,
    "coupled": coupled_claims.coupled,
    "before": coupled_claims.before,
    "divergence": coupled_claims.divergence,
    "identical": coupled_claims.identical,
    "time": mnist_claims.time,
    "memory": mnist_claims.memory,
    "family": _listops(("GST-0.8", "GST-1.2", "GST-pi"), (1.0, 0.1, 0.01)),
    "stgs": _listops(("STGS",), (1.0, 0.1, 0.01)),
    "rao": _listops(("GR-MC100",), (1.0, 0.1)),
    "par": par,
}
