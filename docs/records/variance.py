"""The variance of gradients along training, by ranges of epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from evidence import Evidence, require
from template import fill

from gapped.errors import GappedError, listing
from gapped_lab.report.cells import Cell, finite
from gapped_lab.report.statistics import Floats, band
from gapped_lab.report.tabular import Entry, Table

SERIES = "gradient_variance"
OURS = "GST-1.0"
OTHERS = ("STGS", "GR-MC100")
EPOCHS = (1, 2, 3, 5, 10, 20, 40, 60, 80, 100)

# A measurement this many times the median of the ten before it is called out.
OUTLIER = 2.0

Values = dict[str, Any]


def variance(evidence: Evidence) -> Values:
    """Geometric means at some epochs, then in which epochs which estimator has the lowest variance."""
    runs = {name: _runs(evidence, name) for name in (OURS, *OTHERS)}
    means = {name: band(values, log=True)[0] for name, values in runs.items()}
    body = []
    for epoch in EPOCHS:
        at = {name: float(values[epoch - 1]) for name, values in means.items()}
        ratios = [at[OURS] / at[name] for name in OTHERS]
        entries = [Entry(f"{1e4 * value:.2f}", value) for value in at.values()]
        body.append((Entry(str(epoch), epoch), *entries, *(Entry(f"{r:.2f}", r) for r in ratios)))
    outliers = _outliers(evidence)
    require("single measurements stand out", bool(outliers))
    return {
        "table": Table(("epoch", *means, *(f"{OURS} / {name}" for name in OTHERS)), tuple(body)),
        "seeds": len(runs[OURS]),
        "claim": fill("variance-claim", claim(evidence)),
        "factor": OUTLIER,
        "outliers": listing(outliers),
    }


def claim(evidence: Evidence) -> Values:
    """The paper's claim against each of the others: where it holds, and by how much."""
    values: Values = {}
    for other in OTHERS:
        ours, theirs = _runs(evidence, OURS), _runs(evidence, other)
        ratio = band(ours, log=True)[0] / band(theirs, log=True)[0]
        below, above = (np.flatnonzero(side) + 1 for side in (ratio < 1, ratio >= 1))
        require(f"{OURS} is lower than {other} in some epochs only", bool(below.size and above.size))
        key = other.lower().replace("-", "_")
        values |= {
            "epochs": ratio.size,
            f"{key}_below": ranges(below.tolist()),
            f"{key}_above": ranges(above.tolist()),
            f"{key}_apart": int((np.max(ours, axis=0) < np.min(theirs, axis=0)).sum()),
            f"{key}_ratio": np.exp(np.median(np.log(ratio))),
        }
    return values


def ranges(epochs: Iterable[int]) -> str:
    """Epochs as ranges.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1 to 3, 7 and 9 to 10'
    """
    runs: list[list[int]] = []
    for epoch in sorted(epochs):
        if runs and epoch == runs[-1][-1] + 1:
            runs[-1].append(epoch)
        else:
            runs.append([epoch])
    return listing(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _outliers(evidence: Evidence) -> list[str]:
    texts = []
    for name in (OURS, *OTHERS):
        for record, run in zip(_cell(evidence, name).records, _runs(evidence, name), strict=True):
            for epoch in range(10, len(run)):
                usual = float(np.median(run[epoch - 10 : epoch]))
                if run[epoch] > OUTLIER * usual:
                    times = f"{run[epoch] / usual:.1f} times"
                    texts.append(f"{name}, seed {record.seed}, epoch {epoch + 1} ({times})")
    return texts


def _cell(evidence: Evidence, label: str) -> Cell:
    return evidence.cell("variance", label, 0.5)


def _runs(evidence: Evidence, label: str) -> Floats:
    """(seeds, epochs) of one estimator."""
    lines = [evidence.curves[r.id].series.get(SERIES) for r in _cell(evidence, label).records]
    if any(line is None for line in lines):
        raise GappedError(f"records: no curve of {SERIES} of {label} in variance, which a block needs")
    return np.array([[finite(value) for value in line or ()] for line in lines], dtype=np.float64)
