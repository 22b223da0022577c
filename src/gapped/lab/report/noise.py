"""The variance of gradients along training, by ranges of epochs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gapped.errors import GappedError, listing
from gapped.lab.report.cells import Record, finite
from gapped.lab.report.evidence import Evidence
from gapped.lab.report.statistics import Floats, band
from gapped.lab.report.tables import Entry, Table, to_markdown

SERIES = "gradient_variance"
OURS = "GST-1.0"
OTHERS = ("STGS", "GR-MC100")
SHOWN = (1, 2, 3, 5, 10, 20, 40, 60, 80, 100)

# A measurement this many times the median of the ten before it is called out.
OUTLIER = 2.0


def variance(evidence: Evidence) -> str:
    """Geometric means at some epochs, then in which epochs which estimator has the lowest variance."""
    runs = {name: _runs(evidence, name) for name in (OURS, *OTHERS)}
    means = {name: band(values, log=True)[0] for name, values in runs.items()}
    count = len(means[OURS])
    body = []
    for epoch in (e for e in SHOWN if e <= count):
        row = [Entry(f"{1e4 * values[epoch - 1]:.2f}", float(values[epoch - 1])) for values in means.values()]
        ratios = [float(means[OURS][epoch - 1] / means[name][epoch - 1]) for name in OTHERS]
        body.append((Entry(str(epoch), epoch), *row, *(Entry(f"{r:.2f}", r) for r in ratios)))
    columns = ("epoch", *means, *(f"{OURS} / {name}" for name in OTHERS))
    seeds = len(runs[OURS])
    note = f"Variance per encoder weight in units of 10⁻⁴, geometric mean over {seeds} seeds."
    table = to_markdown(Table(columns, tuple(body), (note,)))
    said = [claim(evidence), *_outliers(evidence)]
    return table + "\n" + "\n\n".join(said) + "\n"


def claim(evidence: Evidence) -> str:
    """The paper's claim, against each of the others."""
    return "The paper finds the variance of GST lower than that of both others throughout training. " + (
        " ".join(_against(evidence, name) for name in OTHERS)
    )


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


def _against(evidence: Evidence, other: str) -> str:
    ours, theirs = _runs(evidence, OURS), _runs(evidence, other)
    lower = band(ours, log=True)[0] < band(theirs, log=True)[0]
    below = [int(e) + 1 for e in np.flatnonzero(lower)]
    above = [int(e) + 1 for e in np.flatnonzero(~lower)]
    apart = int((np.max(ours, axis=0) < np.min(theirs, axis=0)).sum())
    where = "throughout" if not above else f"in epochs {ranges(below)} and higher in {ranges(above)}"
    ratio = np.exp(np.median(np.log(band(ours, log=True)[0] / band(theirs, log=True)[0])))
    return (
        f"Against {other}, our {OURS} is lower {where}. In {apart} of {lower.size} epochs every seed of "
        f"{OURS} lies below every seed of {other}. The median ratio of the two is {ratio:.2f}."
    )


def _outliers(evidence: Evidence) -> list[str]:
    found = []
    for name in (OURS, *OTHERS):
        for seed, run in zip(_seeds(evidence, name), _runs(evidence, name), strict=True):
            for epoch in range(10, len(run)):
                usual = float(np.median(run[epoch - 10 : epoch]))
                if run[epoch] > OUTLIER * usual:
                    found.append(f"{name}, seed {seed}, epoch {epoch + 1} ({run[epoch] / usual:.1f} times)")
    if not found:
        return []
    return [
        f"Single measurements of more than {OUTLIER:g} times the median of the ten before: "
        f"{listing(found)}. They are kept in all means."
    ]


def _records(evidence: Evidence, label: str) -> Sequence[Record]:
    return next((c.records for c in evidence.group("variance") if c.label == label), ())


def _seeds(evidence: Evidence, label: str) -> list[int]:
    return [int(r.get("seed") or 0) for r in _records(evidence, label)]


def _runs(evidence: Evidence, label: str) -> Floats:
    """(seeds, epochs) of one estimator."""
    lines = [evidence.curves.get(str(r["id"]), {}).get(SERIES) for r in _records(evidence, label)]
    if not lines or any(line is None for line in lines):
        raise GappedError(f"records: no curve of {SERIES} of {label} in variance, which a block needs")
    return np.array([[finite(value) for value in line or ()] for line in lines], dtype=np.float64)
