"""What the README shows of the results: the demo's verdict, and the paper's comparison beside ours."""

from __future__ import annotations

from gapped.errors import listing
from gapped.lab.report.evidence import Evidence, mean_std
from gapped.lab.report.markdown import provenance
from gapped.lab.report.paper import PaperRow, against_paper
from gapped.lab.report.tables import NOTHING, Entry, Table, to_markdown, verdict_of

RECIPE = "vae"
TAUS = (1.0, 0.5)


def demo(evidence: Evidence) -> str:
    """The verdict of `gapped compare`."""
    return verdict_of(evidence.group("compare", "digits-8x8")) + "\n"


def headline(evidence: Evidence) -> str:
    """One row an estimator, two numbers a temperature; the difference is in standard errors."""
    rows = {(r.label, r.tau): r for r in against_paper(evidence.records, RECIPE) if r.paper_mean is not None}
    labels = dict.fromkeys(label for label, _ in rows)
    body = [
        (Entry(label), *(entry for tau in TAUS for entry in _entries(rows.get((label, tau)))))
        for label in labels
    ]
    heads = tuple(f"{what}, τ={tau:g}" for tau in TAUS for what in ("ours", "paper", "std. errors"))
    seeds = sorted({n for r in rows.values() for n in (r.ours.count if r.ours else None, r.paper_count) if n})
    over = listing(map(str, seeds))
    notes = (f"Test negative ELBO in nats, lower is better; mean ± standard deviation over {over} seeds.",)
    mine = [r for r in evidence.records if r.get("recipe") == RECIPE]
    return to_markdown(Table(("estimator", *heads), tuple(body), notes)) + f"\n{provenance(mine, RECIPE)}\n"


def _entries(row: PaperRow | None) -> tuple[Entry, ...]:
    if row is None or row.ours is None or row.paper_mean is None or row.standard_errors is None:
        return (Entry(NOTHING),) * 3
    return (
        Entry(mean_std(row.ours), row.ours.mean),
        Entry(f"{row.paper_mean:.2f} ± {row.paper_std:.2f}", row.paper_mean),
        Entry(f"{row.standard_errors:+.1f}", row.standard_errors),
    )
