"""The blocks of the variance and the time of unbiased estimators, beside RLOO's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from evidence import Evidence
from template import fill

from gapped_lab.report.cells import Cell
from gapped_lab.report.tabular import Entry, Table
from gapped_lab.tasks import vae_protocol

RECIPE, TIMES = "field-variance", "coupled-time"


def field_variance(evidence: Evidence) -> str:
    """For each estimator the ratio of variances over the epochs; the command if it was not run."""
    cells = [cell for cell in evidence.cells if cell.recipe == RECIPE]
    if not cells:
        return fill("field-variance-missing", {"name": RECIPE})
    columns = ("estimator", "seeds", "epochs", "median ratio", "largest ratio", "epochs above 0.5")
    rows = tuple(_row(evidence, cell) for cell in cells)
    return fill("field-variance-ratio", {"table": Table(columns, rows), "name": RECIPE})


def median_ratio(evidence: Evidence, label: str) -> float:
    """The median over epochs of an estimator's variance over that of RLOO."""
    (cell,) = (cell for cell in evidence.cells if (cell.recipe, cell.label) == (RECIPE, label))
    return float(np.median(np.array(list(_ratios(evidence, cell))).mean(0)))


def _row(evidence: Evidence, cell: Cell) -> tuple[Entry, ...]:
    ratios = np.array(list(_ratios(evidence, cell)))
    means = ratios.mean(0)
    numbers = median_ratio(evidence, cell.label), float(means.max())
    above = int((means > 0.5).sum())
    return (
        Entry(cell.label),
        Entry(str(len(ratios)), len(ratios)),
        Entry(str(means.size), means.size),
        *(Entry(f"{each:.3f}", each) for each in numbers),
        Entry(str(above), above),
    )


def _ratios(evidence: Evidence, cell: Cell) -> Iterator[list[float]]:
    """Of each run, epoch by epoch: its own variance over that beside it."""
    for record in cell.records:
        series = evidence.curves[record.id].series
        own, beside = (series[name] for name in ("gradient_variance", "gradient_variance_beside"))
        yield [a / b for a, b in zip(own, beside, strict=True) if a is not None and b is not None]


def coupled_time(evidence: Evidence) -> str:
    """The time of a step of each estimator in the coupled comparison; the command if it was not run."""
    cells = [cell for cell in evidence.cells if cell.recipe == TIMES]
    if not cells:
        return fill("coupled-time-missing", {"name": TIMES})
    seconds = {cell.label: float(np.median(cell.values("seconds_per_epoch"))) for cell in cells}
    rules = vae_protocol(cells[0].protocol)
    assert rules.train_images is not None
    steps = rules.train_images // rules.batch
    rows = []
    for label, own in seconds.items():
        ratios = (own / seconds[other] for other in ("RLOO", "DisARM-Tree"))
        rows.append(
            (Entry(label), Entry(f"{1e3 * own / steps:.3f}", own), *(Entry(f"{x:.2f}", x) for x in ratios))
        )
    columns = ("estimator", "ms a step", "of RLOO's", "of DisARM-Tree's")
    device = cells[0].records[0].environment["device"]
    return fill(
        "coupled-time",
        {"table": Table(columns, tuple(rows)), "name": TIMES, "device": device, "protocol": rules.name},
    )
