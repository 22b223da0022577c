"""The study behind the default: how far every cell lies above the best one, task by task."""

from __future__ import annotations

from typing import Any

import numpy as np
from evidence import RECTIFIED, Evidence

from gapped.comparison.records import Record
from gapped.comparison.table import NOTHING, Entry, Table, tau_entry
from gapped_lab.report.cells import groups, primary

Cell = tuple[str, float | None]

RECIPE = "defaults"
FAMILY = "gapmax-family"
LARGEST, LARGEST_TASK = "defaults-8192", "codes-49x8192"
DEFAULT: Cell = ("GapMax", 1.0)
# The estimators that get a temperature, by the label that the recipe has for them.
TEXTS = {
    "GapMax": "gapmax",
    "GST-auto": "gst",
    "GST-1.0": "gst:gap=1",
    "GR-MC10": "gumbel-rao",
    "STGS": "gumbel-softmax",
    "ReinMax": "reinmax",
    "ST": "straight-through",
}
TASKS = {
    "paper-30x10": "MNIST VAE, ReLU",
    "plain-30x10": "MNIST VAE",
    "digits-8x8": "digits VAE",
    "select-25x784": "25 of 784 pixels",
    "codes-49x2": "codes, K=2",
    "codes-49x10": "K=10",
    "codes-49x64": "K=64",
    "codes-49x512": "K=512",
    "codes-49x8192": "K=8192",
}


class Study:
    """Every cell of the recipe on every task, and how far it lies above the best one."""

    def __init__(self, records: list[Record]) -> None:
        self.results = {
            (protocol, cell.label, cell.tau): float(cell.values(primary(cells)).mean())
            for (_, protocol), cells in groups(records).items()
            for cell in cells
        }
        self.tasks = [name for name in TASKS if any(key[0] == name for key in self.results)]
        self.cells: list[Cell] = list(dict.fromkeys((label, tau) for _, label, tau in self.results))
        self.best = {
            task: min((key for key in self.results if key[0] == task), key=lambda key: self.results[key])
            for task in self.tasks
        }
        self.plain = [task for task in self.tasks if task != RECTIFIED]

    @classmethod
    def of(cls, evidence: Evidence) -> Study:
        return cls([record for record in evidence.records if record.recipe.startswith(RECIPE)])

    def above(self, task: str, cell: Cell) -> float:
        """Nats above the best cell of a task; NaN where the cell was not run."""
        return self.results.get((task, *cell), np.nan) - self.results[self.best[task]]

    def shortfall(self, task: str, cell: Cell) -> float:
        """The same in per cent of the best result."""
        return 100 * self.above(task, cell) / self.results[self.best[task]]

    def mean(self, cell: Cell) -> float:
        """The mean shortfall over the tasks without a ReLU but the largest; NaN if one is missing."""
        tasks = [task for task in self.plain if task != LARGEST_TASK]
        return float(np.mean([self.shortfall(task, cell) for task in tasks]))

    def worst(self, cell: Cell) -> str:
        """The task without a ReLU where it falls short most."""
        return max(self.plain, key=lambda task: np.nan_to_num(self.shortfall(task, cell), nan=-1.0))

    def rank(self) -> list[Cell]:
        """The cells, the least mean shortfall first, those without one last."""
        return sorted(self.cells, key=lambda cell: np.nan_to_num(self.mean(cell), nan=np.inf))

    def recommend(self) -> dict[str, Cell]:
        """Each estimator of `TEXTS` at the temperature with the least mean shortfall."""
        return {label: next(cell for cell in self.rank() if cell[0] == label) for label in TEXTS}


def spell(label: str) -> str:
    """The text of an estimator, by the label that the recipe has for it."""
    name, _, gap = label.partition("-")
    return TEXTS.get(label) or (f"gst:gap={float(gap):g}" if name == "GST" else label.lower())


def shortfalls(evidence: Evidence) -> dict[str, Any]:
    """All cells on all tasks, the best mean first; recommended ones are marked."""
    study = Study.of(evidence)
    chosen = set(study.recommend().values())
    body = []
    for cell in study.rank():
        mean = study.mean(cell)
        worst = np.nan if np.isnan(mean) else study.shortfall(study.worst(cell), cell)
        numbers = [study.above(task, cell) for task in study.tasks]
        body.append(
            (
                Entry(f"{spell(cell[0])}{' ✓' if cell in chosen else ''}"),
                tau_entry(cell[1]),
                *(Entry(NOTHING if np.isnan(n) else f"{n:.1f}%", n) for n in (mean, worst)),
                *(Entry(NOTHING if np.isnan(n) else f"{n:.1f}", n) for n in numbers),
            )
        )
    names = [TASKS[task] for task in study.tasks]
    best = ", ".join(f"{TASKS[task]} {study.results[study.best[task]]:.1f}" for task in study.tasks)
    largest = [r for r in evidence.records if r.recipe == LARGEST]
    return {
        "table": Table(("estimator", "τ", "mean", "worst", *names), tuple(body)),
        "best": best,
        "seeds": len({r.seed for r in evidence.records if r.recipe == RECIPE}),
        "few": len({r.seed for r in largest}),
        "epochs": largest[0].epochs,
        "runs": sum(r.recipe.startswith(RECIPE) for r in evidence.records),
    }


def family(evidence: Evidence) -> Table:
    """The relatives of the default against it, in per cent of its loss, on the tasks that they finished."""
    study = Study.of(evidence)
    relatives = Study([record for record in evidence.records if record.recipe == FAMILY])
    numbers: dict[tuple[str, float | None], tuple[float, ...]] = {}
    for cell in relatives.cells:
        ratios = [relatives.results[task, *cell] / study.results[task, *DEFAULT] for task in relatives.tasks]
        above = [100 * (ratio - 1) for ratio in ratios]
        numbers[cell] = (float(np.mean(above)), *above)
    body = tuple(
        (Entry(cell[0]), tau_entry(cell[1]), *(Entry(f"{n:+.1f}%", n) for n in numbers[cell]))
        for cell in sorted(numbers, key=lambda cell: numbers[cell][0])
    )
    return Table(("relative", "τ", "mean", *(TASKS[task] for task in relatives.tasks)), body)
