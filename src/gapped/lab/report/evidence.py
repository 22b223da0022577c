"""A folder of records as evidence for sentences: cells by name, and differences in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gapped.errors import GappedError
from gapped.lab.records import load
from gapped.lab.report.cells import Cell, Record, cells, read
from gapped.lab.report.curves import Line
from gapped.lab.report.statistics import Difference, Floats, Summary, difference, summary

ELBO = "test_negative_elbo"

# The two protocols that differ in nothing but the ReLU on the logits.
RECTIFIED = "paper-30x10"
PLAIN = "plain-30x10"


@dataclass(frozen=True)
class Evidence:
    """All records, gathered into cells, curves and trees by the id of their run, and the lines of a bench."""

    records: tuple[Record, ...]
    cells: tuple[Cell, ...]
    curves: Mapping[str, Line]
    bench: tuple[Record, ...] = ()
    trees: Mapping[str, Line] = field(default_factory=dict)

    def recipes(self) -> list[str]:
        """The recipes that the records hold, in order of first appearance."""
        return list(dict.fromkeys(cell.recipe for cell in self.cells))

    def group(self, recipe: str, protocol: str = RECTIFIED) -> list[Cell]:
        """The cells of a recipe under a protocol."""
        return [c for c in self.cells if (c.recipe, c.protocol) == (recipe, protocol)]

    def cell(self, recipe: str, label: str, tau: float, protocol: str = RECTIFIED) -> Cell:
        """One cell; its absence is an error, since something is to be said about it."""
        for cell in self.group(recipe, protocol):
            if (cell.label, cell.tau) == (label, tau):
                return cell
        raise GappedError(
            f"records: no run of {label} at {tau:g} in {recipe} {protocol}, which a block needs"
        )

    def values(self, recipe: str, label: str, tau: float, protocol: str = RECTIFIED) -> Floats:
        """What its runs ended with on the test set."""
        return self.cell(recipe, label, tau, protocol).values(ELBO)

    def summary(self, recipe: str, label: str, tau: float, protocol: str = RECTIFIED) -> Summary:
        """The same, summarised."""
        return summary(self.values(recipe, label, tau, protocol))


def gather(folder: Path) -> Evidence:
    """The evidence in a folder."""
    bench = load(folder / "bench.jsonl")
    # A bench needs no runs beside it.
    records = [] if bench and not (folder / "records.jsonl").exists() else read(folder)
    curves, trees = (
        {str(line.get("id")): line for line in load(folder / f"{name}.jsonl")} for name in ("curves", "trees")
    )
    return Evidence(tuple(records), tuple(cells(records)), curves, tuple(bench), trees)


def judge(better: Floats, worse: Floats) -> tuple[Difference, str]:
    """How many nats `better` lies below `worse`, and in a word whether that is so (95%, Welch)."""
    gain = difference(worse, better)
    return gain, "better" if gain.low > 0 else "worse" if gain.high < 0 else "not separated"


def interval(gain: Difference) -> str:
    """A difference with its interval.

    >>> interval(Difference(3.781, 3.3333, 4.2222, 0.0))
    '3.78 nats (3.33 to 4.22)'
    """
    return f"{gain.mean:.2f} nats ({gain.low:.2f} to {gain.high:.2f})"


def mean_std(s: Summary) -> str:
    """Mean and standard deviation in nats."""
    return f"{s.mean:.2f} ± {s.std:.2f}" if s.count > 1 else f"{s.mean:.2f}"
