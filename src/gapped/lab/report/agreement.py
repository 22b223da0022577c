"""How well the records agree with the paper, taken together, and what fresh seeds say where they do not."""

from __future__ import annotations

from math import prod

import numpy as np

from gapped.errors import GappedError, listing
from gapped.lab.report.cells import Cell
from gapped.lab.report.evidence import ELBO, RECTIFIED, Evidence, mean_std
from gapped.lab.report.paper import FAILED_ABOVE, MARGIN, NATS, PaperRow, against_paper
from gapped.lab.report.statistics import (
    Floats,
    Summary,
    between,
    chance_beyond,
    difference,
    from_moments,
    sign_test,
    standard_errors,
    summary,
)
from gapped.lab.report.tables import Entry, Table, tau_entry, to_markdown
from gapped.lab.report.trees import NONE

TABLES = ("ablation", "vae", "mixed-temperature")


def agreement(evidence: Evidence) -> str:
    """Every published mean of the VAE with a standard deviation, and how far ours lie from them."""
    rows = _compared(evidence)
    repeated = sum(len(_rows(evidence, recipe)) for recipe in TABLES) - len(rows)
    where = f"The three tables hold {len(rows)} different cells with a mean and a standard deviation" + (
        f" ({repeated} more stand in two of them)" if repeated else ""
    )
    return _agreement(rows, where, f"{NATS} nats")


def listops_agreement(evidence: Evidence) -> str:
    """The same of ListOps."""
    rows = _rows(evidence, "listops", None)
    if not rows:
        return NONE
    where = f"The table has {len(rows)} cells with a mean and a standard deviation"
    runs = sorted(
        (value, cell.name(True))
        for cell in evidence.group("listops", "paper")
        for value in cell.values(rows[0].metric)
        if np.isfinite(value)
    )
    (low, lowest), (next_, second), (high, best) = runs[0], runs[-2], runs[-1]
    return (
        _agreement(rows, where, f"{MARGIN['listops']} of accuracy")
        + f"\nSingle runs lie between {low:.3f}, of {lowest}, and {high:.3f}, of {best}; the second highest "
        f"has {next_:.3f}, of {second}.\n"
    )


def _agreement(rows: list[PaperRow], where: str, margin: str) -> str:
    """How many of `rows`, counted in `where`, agree, and how many would by chance."""
    measured = [r for r in rows if r.ours and r.ours.count > 1 and r.standard_errors is not None]
    sides = [(r.ours, _published(r)) for r in measured]
    errors = [abs(r.standard_errors or 0) for r in measured]
    beyond = sum(e > 2 for e in errors)
    apart = [r for r in rows if r.disagrees]
    two = [chance_beyond(a, b, 2) for a, b in sides if a]
    one = [1 - chance_beyond(a, b, 1) for a, b in sides if a]
    worst = max(errors, default=0.0)
    as_far = 1 - prod(1 - chance_beyond(a, b, worst) for a, b in sides if a)
    names = listing(map(_distance, apart))
    within = sum(e <= 1 for e in errors)
    gaps = np.array([a.mean - b.mean for a, b in sides if a])
    above, below = int((gaps > 0).sum()), int((gaps < 0).sum())
    return (
        f"{where}. **{len(rows) - len(apart)} of the {len(rows)} agree**: they lie within two standard "
        f"errors of the paper's mean or within {margin} of it."
        + (f" Beyond that: {names}." if apart else "")
        + "\n\nIf our runs and the paper's came from the same law, Welch's t would still put "
        f"{sum(two):.1f} of the {len(rows)} cells beyond two standard errors; {beyond} {_are(beyond)} there. "
        f"It would put {sum(one):.0f} within one; {within} {_are(within)} there. A deviation as large as the "
        f"largest, {worst:.1f}, would turn up somewhere among {len(rows)} independent cells with probability "
        f"{as_far:.2f}. {above} of our means lie above the paper's and {below} below (sign test: p = "
        f"{sign_test(above, below):.2f}), the median difference is {np.median(gaps):+.3f}. Our cells share "
        "initial weights seed by seed, so they are not quite independent.\n"
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def failing(evidence: Evidence) -> str:
    """What happened in the cells that the paper marks X."""
    rows = [r for r in against_paper(evidence.records, "vae", RECTIFIED) if r.note.startswith("paper: X")]
    cells = [evidence.cell("vae", r.label, r.tau or 0) for r in rows]
    ends = np.concatenate([c.values(ELBO) for c in cells] or [np.zeros(0)])
    if not ends.size:
        raise GappedError("records: no cell that the paper marks X, which the block failing needs")
    met = sum(not r.disagrees for r in rows)
    ended = ends[np.isfinite(ends)]
    bad = int((~(ends <= FAILED_ABOVE)).sum())
    lowest = f"; they end between {ended.min():.2f} and {ended.max():.2f} nats" if ended.size else ""
    every = f"all {len(rows)}" if met == len(rows) else f"{met} of the {len(rows)}"
    broken = evidence.summary("ablation", "NZ-GST-1.0", 0.5)
    return (
        f"By this definition {every} cells marked X fail here too: {bad} of their {ends.size} runs end above "
        f"{FAILED_ABOVE} nats{lowest}. For comparison, NZ-GST-1.0, which the ablation shows not to learn, "
        f"has {broken.mean:.2f}.\n"
    )


def second_look(evidence: Evidence) -> str:
    """First seeds, fresh seeds and both, beside the paper, for the cells that were looked at again."""
    fresh = evidence.group("second-look")
    published = {(r.label, r.tau): r for r in _compared(evidence)}
    body, said = [], []
    for cell in fresh:
        row = published.get((cell.label, cell.tau or 0))
        if row is None:
            raise GappedError(f"records: {cell.label} at {cell.tau} has no published number, nor first seeds")
        first, again = _first_values(evidence, cell), cell.values(ELBO)
        paper = _published(row)
        parts = {"first": first, "fresh": again, "pooled": np.concatenate([first, again])}
        body += [_entries(cell, which, summary(values), paper) for which, values in parts.items()]
        said.append(_said(cell, first, again, paper))
    columns = ("estimator", "τ", "seeds", "runs", "ours", "paper", "difference", "std. errors")
    notes = ("Mean ± standard deviation over seeds.", *said)
    return to_markdown(Table(columns, tuple(body), notes))


def _compared(evidence: Evidence) -> list[PaperRow]:
    """Each published cell once, even where two tables show it."""
    rows = [
        (recipe == "mixed-temperature", r.label, r.tau, r)
        for recipe in TABLES
        for r in _rows(evidence, recipe)
    ]
    return list({(mixed, label, tau): r for mixed, label, tau, r in rows}.values())


def _rows(evidence: Evidence, recipe: str, protocol: str | None = RECTIFIED) -> list[PaperRow]:
    """Rows with a published mean and spread that have two values here, or runs that were lost."""
    made = against_paper(evidence.records, recipe, protocol)
    return [r for r in made if r.ours and r.paper_std is not None and (r.lost or r.ours.count > 1)]


def _published(row: PaperRow) -> Summary:
    return from_moments(row.paper_mean or 0.0, row.paper_std or 0.0, row.paper_count or 0)


def _name(row: PaperRow) -> str:
    return f"{row.label} at τ={row.tau:g}"


def _distance(row: PaperRow) -> str:
    """A cell that disagrees, and how far it is off."""
    if row.lost:
        return f"{_name(row)} ({row.lost} lost run{'s' * (row.lost > 1)})"
    return f"{_name(row)} ({row.standard_errors:+.1f})"


def _first_values(evidence: Evidence, cell: Cell) -> Floats:
    """The runs of the same cell in the table that published it."""
    for recipe in TABLES[:2]:
        for one in evidence.group(recipe):
            if (one.label, one.tau) == (cell.label, cell.tau):
                return one.values(ELBO)
    raise GappedError(f"records: no first seeds of {cell.label} at {cell.tau} in {' or '.join(TABLES[:2])}")


def _entries(cell: Cell, which: str, ours: Summary, paper: Summary) -> tuple[Entry, ...]:
    gap = ours.mean - paper.mean
    errors = standard_errors(ours, paper.mean, paper.std, paper.count)
    return (
        Entry(cell.label),
        tau_entry(cell.tau),
        Entry(which),
        Entry(str(ours.count), ours.count),
        Entry(mean_std(ours), ours.mean),
        Entry(mean_std(paper), paper.mean),
        Entry(f"{gap:+.2f}", gap),
        Entry(f"{errors:+.1f}", errors),
    )


def _said(cell: Cell, first: Floats, again: Floats, paper: Summary) -> str:
    """What the fresh seeds show, in words that follow from the numbers."""
    fresh, both = summary(again), summary(np.concatenate([first, again]))
    errors = standard_errors(fresh, paper.mean, paper.std, paper.count)
    pooled = standard_errors(both, paper.mean, paper.std, paper.count)
    gap = between(fresh, paper)
    own = difference(again, first)
    agrees = abs(errors) <= 2
    closer = "agree with the paper" if agrees else "disagree with the paper as well"
    still = "within" if abs(pooled) <= 2 else "still beyond"
    same = np.sign(gap.mean) == np.sign(summary(first).mean - paper.mean)
    verdict = (
        "So the deviation did not repeat, which is what chance predicts; a true difference inside that "
        "interval is not excluded."
        if agrees
        else "So the deviation repeated: chance does not explain it."
        if same
        else "So the deviation turned round, which neither chance nor a fixed difference explains well."
    )
    return (
        f"**{cell.label} at τ={cell.tau:g}.** The fresh seeds {closer}: {gap.mean:+.2f} nats, 95% interval "
        f"{gap.low:+.2f} to {gap.high:+.2f}. They differ from our own first seeds by {own.mean:+.2f} nats "
        f"(p = {own.p:.3f}), with the same settings. All {both.count} together are {still} two "
        f"standard errors ({pooled:+.1f}); that number contains the seeds that were looked at again because "
        f"they disagreed, and leans their way. {verdict}"
    )
