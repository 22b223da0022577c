"""The block of the board that says what its records show so far."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from evidence import COUPLED, ELBO, Evidence, judge, lead, require
from field_variance import median_ratio
from template import fill

from gapped.errors import listing
from gapped.lab.recipe import find_recipe
from gapped.lab.report.cells import Cell
from gapped.lab.report.paper import against_paper, field
from gapped.lab.report.statistics import summary
from gapped.lab.report.tabular import Entry, Table, number, tau_entry

TRAIN = "train_negative_elbo"
SMALL, RATES, LEAKY = "flows-8x64", "flows-rates", "flows-leaky"
# Eight variables of 64 categories: who fits the training images far better than others, and who does not.
FITTED, OTHERS = ("RLOO-2", "DoubleCV-2", "MVE"), ("default", "GST-1.0")


def field_lessons(evidence: Evidence) -> str:
    """A sentence or two for each thing that the records show; those without records are left out."""
    found = set(evidence.recipes())
    lessons = {
        "field-reinmax": _temperature,
        "field-codes": _rao,
        "field-flows": _fit,
        "field-coupled": _unbiased,
    }
    texts = [lesson(evidence) for recipe, lesson in lessons.items() if recipe in found]
    texts += [_slopes(evidence)] if "field-flows" in found else []
    texts += [_disagreement(evidence)] if {"field-flows", RATES} <= found else []
    return "\n".join(f"- {text}" for text in texts)


def _shapes(evidence: Evidence, *recipes: str) -> list[tuple[str, str]]:
    """Recipe and protocol of the VAEs that have been run; by default, those of other papers."""
    found = {(cell.recipe, cell.protocol) for cell in evidence.cells}
    return sorted(each for each in found if each[0] in (recipes or ("field-reinmax", "field-flows")))


def _temperature(evidence: Evidence) -> str:
    """ReinMax at 1, where it is exact for quadratic costs, beside the highest temperature of each recipe."""
    gaps, shares = [], []
    for recipe, protocol in _shapes(evidence):
        cells = evidence.group(recipe, protocol)
        own = {cell.tau: _mean(cell, ELBO) for cell in cells if cell.label == "ReinMax"}
        warm = own[max(tau for tau in own if tau is not None)]
        gaps.append(own[1.0] - warm)
        shares.append(warm / min(_mean(cell, ELBO) for cell in cells) - 1)
    require("ReinMax above 1 is ahead of ReinMax at 1 in each shape", min(gaps) > 0)
    require("it is within 1% of the best of each", max(shares) < 0.01)
    values = {"count": len(gaps), "low": min(gaps), "high": max(gaps), "share": 100 * max(shares)}
    return fill("field-lesson-temperature", values)


def _rao(evidence: Evidence) -> str:
    """ReinMax-Rao at 1 beside the best estimator of each protocol that it was run under."""
    shares = []
    for recipe, protocol in _shapes(evidence, "field-reinmax", "field-codes"):
        cells = evidence.group(recipe, protocol)
        (own,) = (_mean(cell, ELBO) for cell in cells if cell.label == "ReinMax-Rao")
        shares.append(own / min(_mean(cell, ELBO) for cell in cells) - 1)
    require("ReinMax-Rao at 1 is within 1% of the best of each", max(shares) < 0.01)
    values = {
        "count": len(shares),
        "best": shares.count(0.0),
        "mean": 100 * fmean(shares),
        "share": 100 * max(shares),
    }
    return fill("field-lesson-rao", values)


def _fit(evidence: Evidence) -> str:
    """Training and test loss of estimators under the protocol of few variables and many categories."""
    cells = {cell.label: cell for cell in evidence.group("field-flows", SMALL)}
    gaps = {name: _mean(cells[name], ELBO) - _mean(cells[name], TRAIN) for name in FITTED + OTHERS}
    worst = max(gaps[name] for name in OTHERS)
    require("the others fit the training images less", worst < min(gaps[name] for name in FITTED))
    values = {"fitted": _losses(cells, FITTED), "others": _losses(cells, OTHERS), "protocol": SMALL}
    return fill("field-lesson-fit", values)


def _unbiased(evidence: Evidence) -> str:
    """The default beside the best estimator without bias in the coupled comparison."""
    cells = {cell.label: cell for cell in evidence.group("field-coupled", COUPLED)}
    default = cells.pop("default")
    best = min(cells.values(), key=lambda cell: _mean(cell, ELBO))
    gain = lead(default, best)
    require("the default is ahead of unbiased estimators", judge(gain) == "better")
    require("the best of these takes slopes", best.label == "DoubleCV-2")
    slopes = [lead(best, cells[name]) for name in ("RLOO", "DisARM-Tree")]
    require("it is ahead of both others", all(judge(each) == "better" for each in slopes))
    values = {"best": best.label, "gain": gain.mean, "low": gain.low, "high": gain.high}
    values |= {"rloo": slopes[0].mean, "tree": slopes[1].mean}
    return fill("field-lesson-unbiased", values)


def _slopes(evidence: Evidence) -> str:
    """DoubleCV beside RLOO, with two samples each."""
    gains = []
    for recipe, protocol in _shapes(evidence):
        cells = {cell.label: cell for cell in evidence.group(recipe, protocol)}
        gains.append(lead(cells["DoubleCV-2"], cells["RLOO-2"]))
    better = sum(gain.mean > 0 for gain in gains)
    require("DoubleCV-2 is ahead in most shapes", 2 * better > len(gains))
    values = {
        "better": better,
        "count": len(gains),
        "apart": sum(judge(gain) == "better" for gain in gains),
        "mean": fmean(gain.mean for gain in gains),
        "ratio": median_ratio(evidence, "DoubleCV-2"),
    }
    return fill("field-lesson-slopes", values)


def _disagreement(evidence: Evidence) -> str:
    """How far the cells that disagree with published ones are from them, and what does not explain it."""
    protocols = {cell.protocol for cell in evidence.cells if cell.recipe == "field-flows"}
    rows = [
        row
        for protocol in sorted(protocols)
        for row in against_paper(evidence.records, "field-flows", protocol)
        if row.difference is not None
    ]
    gaps = [abs(row.difference) for row in rows if row.disagrees and row.difference is not None]
    best: dict[str, Cell] = {}
    for cell in evidence.cells:
        if cell.recipe == RATES:
            best[_name(cell)] = min(best.get(_name(cell), cell), cell, key=lambda each: _mean(each, TRAIN))
    again = sorted(abs(_mean(cell, TRAIN) - _published(cell)) for cell in best.values())
    require("the best learning rate does not come near the published numbers", again[0] > 1)
    values = {
        "count": len(gaps),
        "cells": len(rows),
        "low": min(gaps),
        "high": max(gaps),
        "again": listing(f"{gap:.1f}" for gap in again),
        "leaky": LEAKY,
    }
    return fill("field-lesson-disagreement", values)


def flows_again(evidence: Evidence) -> str:
    """The cells that disagree, with fresh seeds: at three learning rates, and with leaky rectifiers."""
    texts = []
    for recipe in (RATES, LEAKY):
        cells = [cell for cell in evidence.cells if cell.recipe == recipe]
        rows = [
            (
                Entry(cell.protocol, code=True),
                Entry(_name(cell)),
                tau_entry(cell.tau),
                Entry(f"{cell.records[0].learning_rate:g}", cell.records[0].learning_rate),
                number(summary(cell.values(TRAIN)).mean, TRAIN),
                number(summary(cell.values(TRAIN)).std, TRAIN),
                number(_published(cell), TRAIN),
            )
            for cell in cells
        ]
        columns = ("protocol", "estimator", "τ", "rate", "train loss", "std", "published")
        runs = len(find_recipe(recipe).entries)
        values = {"table": Table(columns, tuple(rows)), "name": recipe, "runs": runs}
        texts.append(fill(recipe if rows else "field-not-run", values))
    return "\n\n".join(texts)


def _name(cell: Cell) -> str:
    """The estimator of a cell whose label also has a learning rate."""
    return cell.label.partition(" at ")[0]


def _published(cell: Cell) -> float:
    """The published training loss of a cell that was trained again; ReinMax has one for each temperature."""
    where = cell.protocol.replace("mve-", "flows-")
    tau = cell.tau if _name(cell) == "ReinMax" else None
    rows = {(protocol, label, tau): mean for protocol, label, tau, mean, _ in field()["field-flows"]["rows"]}
    return float(rows[where, _name(cell), tau])


def _losses(cells: Mapping[str, Cell], names: tuple[str, ...]) -> str:
    return listing(
        f"{name} {_mean(cells[name], TRAIN):.1f} and {_mean(cells[name], ELBO):.1f}" for name in names
    )


def _mean(cell: Cell, metric: str) -> float:
    return summary(cell.values(metric)).mean
