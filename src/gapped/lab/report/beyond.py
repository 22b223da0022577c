"""Beyond the paper: what the ReLU on the logits does to each estimator, and GST over its grid."""

from __future__ import annotations

from gapped.lab.report.cells import Cell
from gapped.lab.report.evidence import ELBO, PLAIN, RECTIFIED, Evidence, judge, mean_std
from gapped.lab.report.statistics import Difference, Floats, summary
from gapped.lab.report.tables import NOTHING, Entry, Table, rows_of, tau_entry, to_markdown

VALIDATION = "validation_negative_elbo"

ORDER = ("STGS", "GR-MC100", "GR-MC1000", "GST-1.0", "GST-1.2", "ReinMax", "Decoupled", "ST")


def advantage(evidence: Evidence) -> str:
    """Each estimator's advantage over STGS, with the ReLU on the logits and without."""
    labels = _labels(evidence)
    cells = sorted(evidence.group("zoo", PLAIN), key=lambda c: (labels.index(c.label), -(c.tau or 0)))
    sides = ("with", "advantage", "95% interval", "without", "advantage", "95% interval")
    columns = ("estimator", "τ", *sides, "left", "seeds")
    body = [_advantage_row(evidence, c.label, c.tau or 0.0) for c in cells]
    notes = (
        "With, without: test negative ELBO with and without the ReLU on the logits. Advantage: STGS's mean "
        "minus the estimator's, with Welch's 95% interval, so positive is better than STGS. Left: the second "
        "advantage as a share of the first, where the interval of the first lies above zero.",
        *_missing_reference(evidence),
    )
    return to_markdown(Table(columns, tuple(body), notes)) + "\n" + best_temperatures(evidence)


def gap_grid(evidence: Evidence) -> str:
    """The best three cells of the grid under each protocol."""
    body = []
    for protocol in (RECTIFIED, PLAIN):
        for row in rows_of(evidence.group("gap-grid", protocol), VALIDATION)[:3]:
            s = row.value
            gap = row.cell.gap
            body.append(
                (
                    Entry(protocol, code=True),
                    Entry(f"{gap:g}", gap) if gap is not None else Entry(NOTHING),
                    tau_entry(row.tau),
                    Entry(mean_std(s), s.mean),
                    Entry(str(s.count), s.count),
                )
            )
    columns = ("protocol", "gap", "τ", "validation negative ELBO", "seeds")
    return to_markdown(Table(columns, tuple(body), ("Mean ± standard deviation over seeds.",)))


def best_of(group: list[Cell]) -> Cell:
    """The cell with the lowest mean on the test set."""
    return rows_of(group, ELBO)[0].cell


def _advantage_row(evidence: Evidence, label: str, tau: float) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    gains: list[Difference | None] = []
    for protocol in (RECTIFIED, PLAIN):
        mine = evidence.values("zoo", label, tau, protocol)
        entries.append(Entry(f"{summary(mine).mean:.2f}", summary(mine).mean))
        gain = None if label == "STGS" else judge(mine, _reference(evidence, tau, protocol))[0]
        gains.append(gain)
        shown = (f"{gain.mean:+.2f}", f"{gain.low:+.2f} to {gain.high:+.2f}") if gain else (NOTHING, NOTHING)
        entries += [Entry(shown[0], gain.mean if gain else None), Entry(shown[1], gain.low if gain else None)]
    seeds = evidence.summary("zoo", label, tau, PLAIN).count
    mark = "" if _has_reference(evidence, tau) else "†"
    return (Entry(label + mark), tau_entry(tau), *entries, _left(*gains), Entry(str(seeds), seeds))


def _left(first: Difference | None, second: Difference | None) -> Entry:
    """What remains of an advantage, as a share."""
    if first is None or second is None or not first.low > 0:
        return Entry(NOTHING)
    share = second.mean / first.mean
    return Entry(f"{100 * share:.0f}%" if share > 0 else "none", share)


def _reference(evidence: Evidence, tau: float, protocol: str) -> Floats:
    """STGS at the same temperature or, where it was not run there, at its best one."""
    own = [c for c in evidence.group("zoo", protocol) if c.label == "STGS"]
    return next((c for c in own if c.tau == tau), best_of(own)).values(ELBO)


def _has_reference(evidence: Evidence, tau: float) -> bool:
    return any(c.label == "STGS" and c.tau == tau for c in evidence.group("zoo", PLAIN))


def _missing_reference(evidence: Evidence) -> list[str]:
    odd = any(not _has_reference(evidence, c.tau or 0) for c in evidence.group("zoo", PLAIN))
    return ["†: STGS was not run at this temperature; compared with STGS at its best one."] if odd else []


def _labels(evidence: Evidence) -> list[str]:
    found = {c.label for c in evidence.group("zoo", PLAIN)}
    return sorted(found, key=lambda name: ([*ORDER, name].index(name), name))


def best_temperatures(evidence: Evidence) -> str:
    """Each estimator at the better of its temperatures, against STGS at the better of its own."""
    body = []
    for label in _labels(evidence):
        entries = [Entry(label)]
        for protocol in (RECTIFIED, PLAIN):
            group = evidence.group("zoo", protocol)
            mine = best_of([c for c in group if c.label == label])
            reference = best_of([c for c in group if c.label == "STGS"])
            gain, word = judge(mine.values(ELBO), reference.values(ELBO))
            mean = summary(mine.values(ELBO)).mean
            text = f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f}), {word}"
            own = label == "STGS"
            entries += [
                tau_entry(mine.tau),
                Entry(f"{mean:.2f}", mean),
                Entry(NOTHING if own else text, None if own else gain.mean),
            ]
        body.append(tuple(entries))
    columns = ("estimator", "τ with", "with", "advantage", "τ without", "without", "advantage")
    lead = "Each estimator at the better of its own temperatures, against STGS at the better of its own:\n\n"
    return lead + to_markdown(
        Table(columns, tuple(body), ("The better temperature is that of the test set.",))
    )
