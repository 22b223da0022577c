"""What to conclude: sentences whose numbers and words both follow from the records."""

from __future__ import annotations

from gapped.errors import listing
from gapped.lab.report.better import GOAL, chosen_cell
from gapped.lab.report.beyond import best_of
from gapped.lab.report.cells import Cell
from gapped.lab.report.evidence import ELBO, PLAIN, RECTIFIED, Evidence, interval, judge, mean_std
from gapped.lab.report.noise import claim
from gapped.lab.report.paper import against_paper
from gapped.lab.report.statistics import summary
from gapped.lab.report.tables import verdict_of

WHERE = {RECTIFIED: "with the ReLU", PLAIN: "without the ReLU"}
TAUS = (1.0, 0.5)
LOW = (0.1, 0.01)


def conclusions(evidence: Evidence) -> str:
    """The findings as a list; intervals are Welch's at 95%, not corrected for their number."""
    parts = {
        "Best estimator": _best(evidence),
        "GST against the others with the ReLU": _wins(evidence, RECTIFIED),
        "GST against the others without it": _wins(evidence, PLAIN),
        "What the ReLU does": _relu(evidence),
        "The others without the ReLU": _others(evidence),
        "More draws for Gumbel-Rao": _draws(evidence),
        "Low temperatures": _low(evidence),
        "Gradient variance": claim(evidence),
        "A better number": _number(evidence),
    }
    return "\n".join(f"- **{title}.** {text}" for title, text in parts.items()) + "\n"


def _best(evidence: Evidence) -> str:
    zoo = evidence.group("zoo")
    known = {(c.label, c.tau) for c in zoo}
    rectified = [*zoo, *(c for c in evidence.group("vae") if (c.label, c.tau) not in known)]
    plain = evidence.group("zoo", PLAIN)
    first = f"With the ReLU on the logits, as in the paper: {verdict_of(rectified)}"
    return f"{first} Without it: {verdict_of(plain)}"


def _wins(evidence: Evidence, protocol: str) -> str:
    """The best GST against the best of the others, at each temperature and over all."""
    group = evidence.group("zoo", protocol)
    full = max(len(c.records) for c in group)
    gst, others = (
        [c for c in group if _is_gst(c)],
        [c for c in group if not _is_gst(c) and len(c.records) == full],
    )
    said = []
    for tau in TAUS:
        mine, rival = (best_of([c for c in part if c.tau == tau]) for part in (gst, others))
        said.append(f"at τ={tau:g} {mine.label} {_versus(mine, rival)} {rival.label}")
    mine, rival = best_of(gst), best_of(others)
    said.append(f"over all temperatures {mine.name(True)} {_versus(mine, rival)} {rival.name(True)}")
    return (
        f"{_capital(WHERE[protocol])}, the best GST against the best of the others with {full} seeds: "
        f"{'; '.join(said)}."
    )


def _relu(evidence: Evidence) -> str:
    """What each estimator gains when the ReLU goes, and what that leaves of the advantages."""
    gains = []
    for label in dict.fromkeys(c.label for c in evidence.group("zoo", PLAIN)):
        mine = [[c for c in evidence.group("zoo", p) if c.label == label] for p in (PLAIN, RECTIFIED)]
        gain, word = judge(*(best_of(group).values(ELBO) for group in mine))
        gains.append(
            (-gain.mean, f"{label} {gain.mean:+.2f}{' (not separated)' * (word == 'not separated')}")
        )
    cells = [(label, tau) for tau in TAUS for label in ("GST-1.0", "GST-1.2")]
    shares = {(label, tau): _shares(evidence, label, tau) for label, tau in cells}
    left = [
        f"{label} (τ={tau:g}) from {first:.2f} to {second:.2f}"
        for (label, tau), (first, second) in shares.items()
    ]
    most = all(second < first / 2 for first, second in shares.values())
    moral = (
        "Most of each is lost with the ReLU." if most else "Not all of them lose most of it with the ReLU."
    )
    return (
        "What each estimator, at the better of its temperatures, gains in nats when the ReLU is taken away: "
        f"{', '.join(text for _, text in sorted(gains))}. "
        f"GST's advantage over STGS at the same temperature goes: {listing(left)} nats. {moral}"
    )


def _shares(evidence: Evidence, label: str, tau: float) -> tuple[float, float]:
    """An estimator's advantage over STGS with the ReLU and without."""
    first, second = (
        judge(evidence.values("zoo", label, tau, p), evidence.values("zoo", "STGS", tau, p))[0].mean
        for p in (RECTIFIED, PLAIN)
    )
    return first, second


def _others(evidence: Evidence) -> str:
    """Who is better and who is worse than STGS at the same temperature, or at its best one."""
    group = evidence.group("zoo", PLAIN)
    own = [c for c in group if c.label == "STGS"]
    said: dict[str, list[str]] = {"better": [], "worse": [], "not separated": []}
    for cell in sorted(group, key=lambda c: (c.label, -(c.tau or 0))):
        if cell.label == "STGS" or _is_gst(cell):
            continue
        reference = next((c for c in own if c.tau == cell.tau), best_of(own))
        gain, word = judge(cell.values(ELBO), reference.values(ELBO))
        said[word].append(
            f"{cell.name(True)} by {abs(gain.mean):.2f}" if word != "not separated" else cell.name(True)
        )
    best = best_of(own)
    return (
        f"Better than STGS: {listing(said['better'])} nats. Worse: {listing(said['worse'])} nats. Not "
        f"separated from it: {listing(said['not separated'])}. Each against STGS at the same temperature, or "
        f"at {best.tau:g}, its best, where it was not run at the same."
    )


def _draws(evidence: Evidence) -> str:
    said: dict[str, list[str]] = {"better": [], "worse": [], "not separated": []}
    for protocol, where in WHERE.items():
        for tau in TAUS:
            many, few = (evidence.values("zoo", name, tau, protocol) for name in ("GR-MC1000", "GR-MC100"))
            gain, word = judge(many, few)
            said[word].append(f"{where} at τ={tau:g} ({gain.low:+.2f} to {gain.high:+.2f})")
    found = "; ".join(f"{word} {listing(where)}" for word, where in said.items() if where)
    pace = {c.label: float(c.values("seconds_per_epoch")[0]) for c in evidence.group("efficiency")}
    seeds = evidence.summary("zoo", "GR-MC1000", 0.5, PLAIN).count
    return (
        f"GR-MC1000 against GR-MC100, with the 95% interval of its lead: {found}. It has {seeds} seeds only, "
        f"and takes {pace['GR-MC1000'] / pace['GR-MC100']:.1f} times as long for an epoch."
    )


def _low(evidence: Evidence) -> str:
    marked = [r for r in against_paper(evidence.records, "vae", RECTIFIED) if r.note.startswith("paper: X")]
    failed = sum(not r.disagrees for r in marked)
    names = ("STGS", "GR-MC100", "GST-1.2")
    said = []
    for tau in LOW:
        plain = [f"{name} {evidence.summary('vae', name, tau).mean:.2f}" for name in names[:2]]
        mixed = [f"{name} {evidence.summary('mixed-temperature', name, tau).mean:.2f}" for name in names]
        said.append(f"At τ={tau:g}: {listing(plain)}; with mixed temperatures {listing(mixed)}.")
    return (
        f"Trained at τ={LOW[0]:g} or {LOW[1]:g} throughout, GST fails in {failed} of {len(marked)} cells "
        f"(the paper: in all). {' '.join(said)}"
    )


def _number(evidence: Evidence) -> str:
    chosen = chosen_cell(evidence)
    ours = summary(chosen.values(ELBO))
    missed = f"misses the goal of {GOAL:.1f} by {ours.mean - GOAL:.2f} nats"
    met = f"meets the goal of {GOAL:.1f}"
    return (
        f"The configuration chosen on held-out images has {mean_std(ours)} over {ours.count} seeds and "
        f"{missed if ours.mean > GOAL else met}."
    )


def _versus(mine: Cell, rival: Cell) -> str:
    """`is 3.78 nats (3.33 to 4.22) ahead of`, or what the interval says instead."""
    gain, word = judge(mine.values(ELBO), rival.values(ELBO))
    if word == "not separated":
        return f"is not separated (95% interval of the lead {gain.low:+.2f} to {gain.high:+.2f}) from"
    back = judge(rival.values(ELBO), mine.values(ELBO))[0]
    return f"is {interval(gain)} ahead of" if word == "better" else f"is {interval(back)} behind"


def _is_gst(cell: Cell) -> bool:
    return cell.label.startswith("GST")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
