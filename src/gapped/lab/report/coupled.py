"""The comparison with coupled estimators, in words."""

from __future__ import annotations

import numpy as np

from gapped.lab.report.cells import Cell
from gapped.lab.report.evidence import ELBO, Evidence, interval, judge

PROTOCOL = "paper-32x64"


def coupled_findings(evidence: Evidence) -> str:
    """Who is ahead of whom, and what became of the runs that diverged in the paper."""
    cells = {cell.label: cell for cell in evidence.group("coupled", PROTOCOL)}
    pairs = (("DisARM-Tree", "RLOO"), ("STGS", "DisARM-Tree"), ("GST-1.0", "STGS"), ("GST-1.2", "STGS"))
    said = [_order(cells[a], cells[b]) for a, b in pairs if a in cells and b in cells]
    if "GR-MC100" in cells:
        said.append(_survivors(cells["GR-MC100"]))
    return "\n".join(f"- {text}" for text in said or ["None of the paper's cells has been run."]) + "\n"


def _order(first: Cell, second: Cell) -> str:
    """Whether the paper's order holds here: `first` ahead of `second`."""
    values = first.values(ELBO), second.values(ELBO)
    if any(np.isfinite(x).sum() < 2 for x in values):
        return (
            f"{first.label} and {second.label} cannot be told apart: fewer than two runs of one have ended."
        )
    gain, word = judge(*values)
    if word == "not separated":
        lead = f"{gain.low:+.2f} to {gain.high:+.2f}"
        return f"{first.label} is not separated from {second.label}: 95% interval of its lead {lead} nats."
    if word == "worse":
        return f"{first.label} is behind {second.label}, by {interval(judge(*values[::-1])[0])}."
    return f"{first.label} is ahead of {second.label}, by {interval(gain)}."


def _survivors(cell: Cell) -> str:
    lost = cell.count("diverged")
    ended = "none of its runs diverges" if not lost else f"{lost} of its {len(cell.records)} runs diverge"
    return f"{cell.label} diverged in the paper; here, with the noise in log space, {ended}."
