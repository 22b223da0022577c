"""The records as evidence for sentences: cells by name, differences with intervals, and checks of claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gapped.errors import GappedError
from gapped_lab.records import (
    Bench,
    Curve,
    Gradient,
    LinearTiming,
    Record,
    Startup,
    Trees,
    Tuning,
    Work,
    read,
)
from gapped_lab.report.cells import Cell, cells, finished_runs
from gapped_lab.report.statistics import Difference, Summary, difference, summary

ELBO = "test_negative_elbo"
VALIDATION = "validation_negative_elbo"
ACCURACY = "test_accuracy"

# The two protocols that differ in nothing but the ReLU on the logits.
RECTIFIED = "paper-30x10"
PLAIN = "plain-30x10"
# The paper's protocol of the comparison with coupled estimators.
COUPLED = "paper-32x64"


@dataclass(frozen=True)
class Evidence:
    """All records, gathered into cells, curves and trees by the id of their run, and the lines of a bench."""

    records: Sequence[Record]
    cells: Sequence[Cell]
    curves: Mapping[str, Curve]
    trees: Mapping[str, Trees]
    bench: Sequence[Bench]
    works: Sequence[Work]
    startups: Sequence[Startup]
    gradients: Sequence[Gradient] = ()
    linear: Sequence[LinearTiming] = ()
    tunings: Sequence[Tuning] = ()

    def recipes(self) -> list[str]:
        """The recipes that the records hold, in order of first appearance."""
        return list(dict.fromkeys(cell.recipe for cell in self.cells))

    def group(self, recipe: str, protocol: str = RECTIFIED) -> list[Cell]:
        """The cells of a recipe under a protocol."""
        return [c for c in self.cells if (c.recipe, c.protocol) == (recipe, protocol)]

    def cell(self, recipe: str, label: str, tau: float | None, protocol: str = RECTIFIED) -> Cell:
        """One cell; its absence is an error, since a sentence is about it."""
        for cell in self.group(recipe, protocol):
            if (cell.label, cell.tau) == (label, tau):
                return cell
        raise GappedError(
            f"records: no run of {label} at τ={tau} in {recipe} {protocol}, which a block needs"
        )

    def summary(self, recipe: str, label: str, tau: float, protocol: str = RECTIFIED) -> Summary:
        """The test negative ELBO of one cell."""
        return summary(self.cell(recipe, label, tau, protocol).values(ELBO))


def gather(folder: Path) -> Evidence:
    """The evidence in a folder."""
    records = finished_runs(folder)
    return Evidence(
        records,
        cells(records),
        {curve.id: curve for curve in read(folder, Curve)},
        {trees.id: trees for trees in read(folder, Trees)},
        read(folder, Bench),
        read(folder, Work),
        read(folder, Startup),
        read(folder, Gradient),
        read(folder, LinearTiming),
        read(folder, Tuning),
    )


def require(claim: str, holds: bool) -> None:
    """Refuse to write a sentence whose words the records no longer carry; its template must be rewritten."""
    if not holds:
        raise GappedError(f"the records no longer show that {claim}: rewrite the sentence")


def lead(mine: Cell, other: Cell) -> Difference:
    """How many nats `mine` lies below `other` on the test set, with Welch's 95% interval."""
    return difference(other.values(ELBO), mine.values(ELBO))


def judge(gain: Difference) -> str:
    """Whether a lead is one, in a word."""
    return "better" if gain.low > 0 else "worse" if gain.high < 0 else "not separated"


def require_better(mine: Cell, other: Cell) -> Difference:
    """The lead of a cell that a sentence calls better."""
    gain = lead(mine, other)
    require(f"{mine.name(True)} is better than {other.name(True)}", judge(gain) == "better")
    return gain


def require_not_separated(mine: Cell, other: Cell) -> Difference:
    """The lead of a cell that a sentence calls not separated from another."""
    gain = lead(mine, other)
    require(f"{mine.name(True)} is not separated from {other.name(True)}", judge(gain) == "not separated")
    return gain


def mean_std(s: Summary) -> str:
    """Mean and standard deviation in nats."""
    return f"{s.mean:.2f} ± {s.std:.2f}" if s.count > 1 else f"{s.mean:.2f}"
