"""Blocks beyond the paper: what the ReLU on the logits does, GST's grid, the better number."""

from __future__ import annotations

from typing import Any

import numpy as np
from evidence import ELBO, PLAIN, RECTIFIED, VALIDATION, Evidence, judge, lead, mean_std, require
from template import fill

from gapped.errors import GappedError, listing
from gapped_lab.report.cells import Cell, rows_of, verdict_of
from gapped_lab.report.paper import paper
from gapped_lab.report.statistics import Difference, between, from_moments, standard_errors, summary
from gapped_lab.report.tabular import NOTHING, Entry, Table, tau_entry

ORDER = ("STGS", "GR-MC100", "GR-MC1000", "GST-1.0", "GST-1.2", "ReinMax", "Decoupled", "ST")
SETTINGS = ("protocol", "estimator", "options", "tau", "schedule", "learning_rate", "rate_decay")

Values = dict[str, Any]


def advantage(evidence: Evidence) -> Values:
    """Each estimator's advantage over STGS, with the ReLU on the logits and without."""
    cells = sorted(evidence.group("zoo", PLAIN), key=lambda c: (ORDER.index(c.label), -(c.tau or 0)))
    sides = ("with", "advantage", "95% interval", "without", "advantage", "95% interval")
    columns = ("estimator", "τ", *sides, "left", "seeds")
    body = tuple(_advantage_row(evidence, cell) for cell in cells)
    return {"table": Table(columns, body), "best": _best_table(evidence)}


def best_temperatures(evidence: Evidence) -> Values:
    """Each estimator at the better of its temperatures, against STGS at the better of its own."""
    return {"table": _best_table(evidence)}


def _best_table(evidence: Evidence) -> Table:
    body = []
    for label in ORDER:
        entries = [Entry(label)]
        for protocol in (RECTIFIED, PLAIN):
            mine, reference = (best_of(labelled(evidence, name, protocol)) for name in (label, "STGS"))
            gain, mean = lead(mine, reference), summary(mine.values(ELBO)).mean
            text = f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f}), {judge(gain)}"
            own = label == "STGS"
            entries += [
                tau_entry(mine.tau),
                Entry(f"{mean:.2f}", mean),
                Entry(NOTHING if own else text, None if own else gain.mean),
            ]
        body.append(tuple(entries))
    columns = ("estimator", "τ, ReLU", "loss, ReLU", "advantage, ReLU", "τ", "loss", "advantage")
    return Table(columns, tuple(body))


def gap_grid(evidence: Evidence) -> Values:
    """The best three cells of the grid under each protocol."""
    body = []
    for protocol in (RECTIFIED, PLAIN):
        for row in rows_of(evidence.group("gap-grid", protocol), VALIDATION)[:3]:
            gap = row.cell.gap
            body.append(
                (
                    Entry(protocol, code=True),
                    Entry(f"{gap:g}", gap),
                    tau_entry(row.tau),
                    Entry(mean_std(row.value), row.value.mean),
                    Entry(str(row.value.count), row.value.count),
                )
            )
    return {"table": Table(("protocol", "gap", "τ", "validation negative ELBO", "seeds"), tuple(body))}


def best_of(group: list[Cell]) -> Cell:
    """The cell with the lowest mean on the test set."""
    return rows_of(group, ELBO)[0].cell


def labelled(evidence: Evidence, label: str, protocol: str) -> list[Cell]:
    """An estimator's cells among all estimators that were compared under a protocol."""
    return [c for c in evidence.group("zoo", protocol) if c.label == label]


def reference(evidence: Evidence, tau: float | None, protocol: str) -> Cell:
    """STGS at the same temperature or, where it was not run there, at its best one."""
    own = labelled(evidence, "STGS", protocol)
    return next((c for c in own if c.tau == tau), best_of(own))


def _advantage_row(evidence: Evidence, cell: Cell) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    gains: list[Difference] = []
    own = cell.label == "STGS"
    for protocol in (RECTIFIED, PLAIN):
        mine = evidence.cell("zoo", cell.label, cell.tau, protocol)
        mean, gain = summary(mine.values(ELBO)).mean, lead(mine, reference(evidence, cell.tau, protocol))
        gains.append(gain)
        entries += [
            Entry(f"{mean:.2f}", mean),
            Entry(NOTHING) if own else Entry(f"{gain.mean:+.2f}", gain.mean),
            Entry(NOTHING) if own else Entry(f"{gain.low:+.2f} to {gain.high:+.2f}", gain.low),
        ]
    mark = "" if reference(evidence, cell.tau, PLAIN).tau == cell.tau else "†"
    seeds = summary(cell.values(ELBO)).count
    return (
        Entry(cell.label + mark),
        tau_entry(cell.tau),
        *entries,
        Entry(NOTHING) if own else _left(*gains),
        Entry(str(seeds), seeds),
    )


def _left(first: Difference, second: Difference) -> Entry:
    """What remains of an advantage, as a share."""
    if not first.low > 0:
        return Entry(NOTHING)
    share = second.mean / first.mean
    return Entry(f"{100 * share:.0f}%" if share > 0 else "none", share)


def better(evidence: Evidence) -> Values:
    """The configuration chosen on held-out images, its test number, and what limits it."""
    chosen = chosen_cell(evidence)
    tried, own = validation_cells(evidence), best_of(evidence.group("vae"))
    first, second = (summary(c.values(VALIDATION)) for c in tried[:2])
    ours = summary(chosen.values(ELBO))
    label, tau, mean, std = min(paper()["vae"]["rows"], key=lambda row: float(row[2]))
    published = from_moments(mean, std, paper()["vae"]["seeds"])
    rows = [
        (f"chosen: {_describe(chosen)}", ours),
        (f"the paper's best: {label} (τ={tau:g})", published),
        (f"our best under the paper's protocol: {own.name(True)}", summary(own.values(ELBO))),
    ]
    body = [(Entry(what), Entry(mean_std(s), s.mean), Entry(str(s.count), s.count)) for what, s in rows]
    long = rows_of(evidence.group("variance"), ELBO)[0]
    curve = np.array([evidence.curves[r.id].series[ELBO] for r in chosen.records]).mean(axis=0)
    below_paper, below_own = between(published, ours), lead(chosen, own)
    require("the chosen cell is below the paper's best and our own", min(below_paper.low, below_own.low) > 0)
    require("the chosen runs were still improving", curve[-11] > curve[-1])
    require("more epochs reach further than the choice", judge(lead(long.cell, chosen)) == "better")
    return {
        "table": Table(("what", "test negative ELBO", "seeds"), tuple(body)),
        "tried": len(tried),
        "recipes": listing(f"`{recipe}`" for recipe in dict.fromkeys(c.recipe for c in tried)),
        "seeds": first.count,
        "first": mean_std(first),
        "next": f"{tried[1].name(True)} {_relu(tried[1])}",
        "second": mean_std(second),
        "below_paper": below_paper,
        "errors": abs(standard_errors(ours, published.mean, published.std, published.count)),
        "below_own": below_own,
        "improvement": curve[-11] - curve[-1],
        "long": long,
        "long_epochs": long.cell.records[0].epochs,
        "long_value": mean_std(long.value),
        **_tuning(evidence, chosen),
    }


def _tuning(evidence: Evidence, chosen: Cell) -> Values:
    """How far the best cell of each estimator lies from the chosen one, and what its temperature is worth."""
    distances, gains = [], []
    for label in ("GST-1.0", "GST-1.2", "GR-MC100", "ReinMax", "STGS"):
        ranked = [row.cell for row in rows_of(labelled(evidence, label, PLAIN), ELBO)]
        behind = lead(chosen, ranked[0])
        distances.append(
            f"{ranked[0].name(True)} {behind.mean:+.2f} ({behind.low:+.2f} to {behind.high:+.2f})"
        )
        gains.append(f"{label} {lead(ranked[0], ranked[-1]).mean:.2f}")
    return {"distances": "; ".join(distances), "gains": listing(gains)}


def tuned(evidence: Evidence) -> Values:
    """A finer grid without the ReLU, with fresh seeds: whether the good estimators tie when all are tuned."""
    group = evidence.group("tuned", PLAIN)
    rows = rows_of(group, ELBO)
    families = ("GST", "GR-MC100", "ReinMax")
    best = [next(row.cell for row in rows if row.label.startswith(name)) for name in families]
    leads = [lead(best[0], each) for each in best[1:]]
    tie = all(judge(each) == "not separated" for each in leads)
    body = [
        (
            Entry(row.label),
            tau_entry(row.tau),
            Entry(mean_std(row.value), row.value.mean),
            Entry(str(row.value.count), row.value.count),
        )
        for row in rows
    ]
    return {
        "table": Table(("estimator", "τ", "test negative ELBO", "seeds"), tuple(body)),
        "verdict": verdict_of(group),
        "conclusion": fill("tuned-tie" if tie else "tuned-apart", {}),
        "gst": best[0].name(True),
        "rao": best[1].name(True),
        "rao_lead": leads[0],
        "reinmax": best[2].name(True),
        "reinmax_lead": leads[1],
    }


def soft(evidence: Evidence) -> Values:
    """Training with soft samples beside training with hard ones."""
    body, words = [], []
    for cell in (c for protocol in (RECTIFIED, PLAIN) for c in evidence.group("soft", protocol)):
        hard = evidence.cell("zoo", cell.label, cell.tau, cell.protocol)
        gain = lead(hard, cell)
        words.append(judge(gain))
        body.append(
            (
                Entry(cell.label),
                tau_entry(cell.tau),
                Entry("without" if cell.protocol == PLAIN else "with"),
                *(Entry(mean_std(s), s.mean) for s in (summary(c.values(ELBO)) for c in (cell, hard))),
                Entry(f"{gain.mean:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})", gain.mean),
            )
        )
    return {
        "table": Table(("estimator", "τ", "ReLU", "soft", "hard", "lead"), tuple(body)),
        "cells": len(words),
        "better": words.count("better"),
        "worse": words.count("worse"),
    }


def validation_cells(evidence: Evidence) -> list[Cell]:
    """The cells that were scored on held-out training images, best first."""
    tried = [c for c in evidence.cells if c.records[0].split == "validation"]
    finished = [c for c in tried if summary(c.values(VALIDATION)).count]
    return sorted(finished, key=lambda c: summary(c.values(VALIDATION)).mean)


def chosen_cell(evidence: Evidence) -> Cell:
    """The cell of the recipe `better`, which must be what the validation records choose."""
    cells, tried = [c for c in evidence.cells if c.recipe == "better"], validation_cells(evidence)
    if len(cells) != 1 or not tried or _settings(cells[0]) != _settings(tried[0]):
        raise GappedError("records: the recipe better does not hold the best cell of the validation records")
    return cells[0]


def _settings(cell: Cell) -> list[object]:
    return [getattr(cell.records[0], key) for key in SETTINGS]


def _describe(cell: Cell) -> str:
    record = cell.records[0]
    options = ", ".join(f"{key} {value}" for key, value in record.options.items())
    rate = f", learning rate {record.learning_rate:g}" if record.learning_rate else ""
    return f"{record.estimator}, {options}, τ={cell.tau:g}, {_relu(cell)} on the logits{rate}"


def _relu(cell: Cell) -> str:
    return "without the ReLU" if cell.protocol == PLAIN else "with the ReLU"
