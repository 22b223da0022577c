"""Blocks on the question which estimator to take: the default, and its losses by task."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from evidence import RECTIFIED, Evidence, require
from field_board import default_of_vaes

from gapped.texts import DEFAULT
from gapped_lab.defaults import TEMPERATURES
from gapped_lab.records import Record
from gapped_lab.report.cells import groups, higher_is_better, primary
from gapped_lab.report.tabular import NOTHING, Entry, Table, tau_entry
from gapped_lab.tasks import POLYNOMIAL_PROTOCOLS

Values = dict[str, Any]
Cell = tuple[str, float | None]

RECIPE = "defaults"
LARGEST = "defaults-8192"
# What each label of the recipe is in `lab.defaults`, and how a reader writes it.
TEXTS = {
    "GST-auto": DEFAULT,
    "GST-1.0": "gst",
    "GR-MC10": "gumbel-rao",
    "STGS": "gumbel-softmax",
    "ReinMax": "reinmax",
    "ST": "straight-through",
}
CALLS = {
    "GST-auto": 'gapped.gst(logits, tau={tau:g}, hard=True, gap="auto")',
    "GST-1.0": "gapped.gst(logits, tau={tau:g}, hard=True)",
    "GR-MC10": "gapped.gumbel_rao(logits, tau={tau:g}, hard=True, samples=10)",
    "STGS": "gapped.gumbel_softmax(logits, tau={tau:g}, hard=True)",
    "ReinMax": "gapped.reinmax(logits, tau={tau:g})",
    "ST": "gapped.straight_through(logits, tau={tau:g}, hard=True)",
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
        self.results = _results(records)
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
        """The mean shortfall over the tasks without a ReLU that all cells were run on."""
        tasks = [task for task in self.plain if all((task, *each) in self.results for each in self.cells)]
        return float(np.mean([self.shortfall(task, cell) for task in tasks]))

    def worst(self, cell: Cell) -> str:
        """The task without a ReLU where it falls short most."""
        return max(self.plain, key=lambda task: np.nan_to_num(self.shortfall(task, cell), nan=-1.0))

    def recommended(self) -> dict[str, Cell]:
        """Each estimator of `TEXTS` at its temperature; refused if that is not what the records say."""
        chosen = {}
        for label, text in TEXTS.items():
            own = [cell for cell in self.cells if cell[0] == label]
            chosen[label] = min(own, key=self.mean)
            require(f"{text} is best at τ={TEMPERATURES[text]:g}", chosen[label][1] == TEMPERATURES[text])
        best = min(chosen, key=lambda label: self.mean(chosen[label]))
        require(f"{DEFAULT} is the best default", TEXTS[best] == DEFAULT)
        return chosen


def default(evidence: Evidence) -> Values:
    """The default where nothing is known, in a sentence."""
    study = Study.of(evidence)
    chosen = study.recommended()
    mine = chosen["GST-auto"]
    others = sorted((cell for cell in chosen.values() if cell != mine), key=study.mean)
    worst = study.worst(mine)
    fixed = chosen["GST-1.0"]
    require("GST with a gap of 1 is the best cell with the ReLU", study.best[RECTIFIED][1:] == fixed)
    require("the default is not within 1% everywhere", study.shortfall(worst, mine) > 1)
    for task in ("codes-49x64", "codes-49x512"):
        for cell in (("GST-auto", 0.7), ("GR-MC10", 0.5)):
            require(f"{_named(cell)} is within 0.5% on {task}", study.shortfall(task, cell) < 0.5)
            off = study.shortfall("select-25x784", cell)
            require(f"{_named(cell)} is 4 to 8% off on pixels", 4 < off < 8)
    gaps = [("GST-1.0", 0.5), ("GST-2.0", 0.5), ("GST-3.0", 0.5)]
    for task, best, fails in (("codes-49x10", gaps[0], gaps[2]), ("codes-49x512", gaps[2], gaps[0])):
        order = sorted(gaps, key=partial(study.above, task))
        require(f"{best[0]} is the best fixed gap on {task}", order[0] == best)
        require(f"{fails[0]} fails on {task}", study.above(task, fails) > 10)
    losses = [study.shortfall(study.worst(cell), cell) for cell in study.cells]
    require("no cell is within 1% everywhere", min(losses) > 1)
    return {
        "call": CALLS["GST-auto"].format(tau=mine[1]),
        "tasks": len(study.plain),
        "most": max(int(task.rpartition("x")[2]) for task in study.plain),
        "cells": len(study.cells),
        "mean": study.mean(mine),
        "worst": study.shortfall(worst, mine),
        "where": TASKS[worst],
        "next": _named(others[0]),
        "next_mean": study.mean(others[0]),
        "next_worst": study.shortfall(study.worst(others[0]), others[0]),
        "stgs_mean": study.mean(chosen["STGS"]),
        "stgs_worst": study.shortfall(study.worst(chosen["STGS"]), chosen["STGS"]),
        "relu": study.above(RECTIFIED, mine),
        "fixed": _named(fixed),
        "fixed_worst": study.above(study.worst(fixed), fixed),
        "fixed_where": TASKS[study.worst(fixed)],
        **_polynomials(evidence),
        **{f"board_{name}": value for name, value in default_of_vaes(evidence).items()},
    }


def _polynomials(evidence: Evidence) -> Values:
    """Polynomial programming: how far above the least cost, in per cent, the default and others end."""
    above: dict[str, list[float]] = {}
    for name, rules in POLYNOMIAL_PROTOCOLS.items():
        least = rules.target**rules.power
        for cell in evidence.group("field-polynomial", name):
            excess = float(cell.values("test_expected_cost").mean()) / least - 1
            above.setdefault(cell.label, []).append(100 * excess)
    exact = [label for label, values in above.items() if max(values) < 2]
    require("ReinMax and DoubleCV come close", {"ReinMax", "MVE", "RLOO-2", "DoubleCV-2"} <= set(exact))
    return {
        "least_polynomial": min(above["default"]),
        "most_polynomial": max(above["default"]),
        "exact_polynomial": max(max(above[label]) for label in exact),
    }


def shortfalls(evidence: Evidence) -> Values:
    """All cells on all tasks, the best mean first; recommended ones are marked."""
    study = Study.of(evidence)
    chosen = set(study.recommended().values())
    body = []
    for cell in sorted(study.cells, key=study.mean):
        worst = study.shortfall(study.worst(cell), cell)
        numbers = [study.above(task, cell) for task in study.tasks]
        mean = study.mean(cell)
        body.append(
            (
                Entry(f"{cell[0]}{' ✓' if cell in chosen else ''}"),
                tau_entry(cell[1]),
                Entry(f"{mean:.1f}%", mean),
                Entry(f"{worst:.1f}%", worst),
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


def when(evidence: Evidence) -> Values:
    """When to take what: a row for each situation, with the records behind it."""
    study = Study.of(evidence)
    chosen = study.recommended()
    mine, fixed, rao = (chosen[label] for label in ("GST-auto", "GST-1.0", "GR-MC10"))
    few = ("plain-30x10", RECTIFIED)
    require("gap 1 is best on the VAE of the paper", all(study.best[task][1:] == fixed for task in few))
    require("ReinMax is best on digits", study.best["digits-8x8"][1] == "ReinMax")
    require("gap 1 loses ten nats at 512 categories", study.above("codes-49x512", fixed) > 10)
    shown = {label: CALLS[label].format(tau=cell[1]) for label, cell in chosen.items()}
    worst = study.worst(mine)
    return {
        "default": shown["GST-auto"],
        "default_mean": study.mean(mine),
        "default_worst": study.shortfall(worst, mine),
        "default_where": TASKS[worst],
        "default_relu": study.shortfall(RECTIFIED, mine),
        "codes": CALLS["GST-auto"].format(tau=0.7),
        "codes_worst": max(study.shortfall(f"codes-49x{k}", ("GST-auto", 0.7)) for k in (64, 512, 8192)),
        "codes_torch": max(study.shortfall(f"codes-49x{k}", ("STGS", 0.5)) for k in (64, 512)),
        "fixed": shown["GST-1.0"],
        "fixed_plain": -_lead(study, "plain-30x10", fixed),
        "fixed_512": study.above("codes-49x512", fixed),
        "rao": shown["GR-MC10"],
        "rao_mean": study.mean(rao),
        "rao_worst": study.shortfall(study.worst(rao), rao),
        "reinmax": shown["ReinMax"],
        "reinmax_worst": study.shortfall(study.worst(chosen["ReinMax"]), chosen["ReinMax"]),
        "reinmax_where": TASKS[study.worst(chosen["ReinMax"])],
    }


def _lead(study: Study, task: str, cell: Cell) -> float:
    """Nats by which a cell is below the best straight-through Gumbel-softmax; negative is better."""
    rival = min(study.results[task, "STGS", tau] for label, tau in study.cells if label == "STGS")
    return study.results[(task, *cell)] - rival


def _named(cell: Cell) -> str:
    return f"{cell[0]} (τ={cell[1]:g})"


def _results(records: list[Record]) -> dict[tuple[str, str, float | None], float]:
    """The mean result of each cell, by protocol, label and temperature; lower is better.

    A cell with a run that diverged is the worst of its task.
    """
    means: dict[tuple[str, str, float | None], float] = {}
    for (_, protocol), cells in groups(records).items():
        metric = primary(cells)
        for cell in cells:
            mean = float(np.mean(cell.values(metric)))
            sign = -1 if higher_is_better(metric) else 1
            means[protocol, cell.label, cell.tau] = sign * mean if np.isfinite(mean) else np.inf
    return means
