"""The block of the board that says what its records show so far."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from evidence import COUPLED, ELBO, Evidence, judge, lead, require
from field_again import count_steps
from field_variance import median_ratio
from template import fill

from gapped.errors import listing
from gapped_lab.report.cells import Cell
from gapped_lab.report.paper import PaperRow, against_paper
from gapped_lab.report.statistics import Difference, difference, standing, summary

TRAIN, BOUND = "train_negative_elbo", "test_100_sample_negative_elbo"
SMALL, MVE, COUNTS, BINARY = "flows-8x64", "field-mve", "field-counts", "field-binary"
# Gumbel-Rao, and with the constant that the public code of MVE's authors has in its noise.
RAO, CONSTANT = "GR-MC20", "GR-MC20 with eps at 0.001"
WIDE = ("mve-32x16", "mve-8x64")
# Unbiased estimators with derivatives, and four samples.
FOUR = ("RODEO-4", "DoubleCV-4")
# Eight variables of 64 categories: whose training and test losses are far apart, and whose are not.
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
    texts += [_binary(evidence)] if BINARY in found else []
    texts += [_counts(evidence)] if COUNTS in found else []
    texts += [_reproduced(evidence)] if MVE in found else []
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


def _counts(evidence: Evidence) -> str:
    """RLOO beside both orders of Fini, by the number of variables."""
    few: list[float] = []
    many: list[float] = []
    orders = []
    for recipe, protocol in _shapes(evidence, COUNTS):
        cells = {cell.label: _mean(cell, TRAIN) for cell in evidence.group(recipe, protocol)}
        orders.append(abs(cells["Fini-2"] - cells["Fini-3"]))
        (few if protocol.endswith("-2") else many).append(cells["RLOO-2"] - cells["Fini-3"])
    require("Fini is ahead of RLOO with many variables", min(many) > 0)
    require("they are close with two", max(map(abs, few)) < min(many))
    values = {"low": min(many), "high": max(many), "few": max(map(abs, few)), "orders": max(orders)}
    return fill("field-lesson-counts", values | {"steps": f"{count_steps(evidence, COUNTS):,}"})


def _binary(evidence: Evidence) -> str:
    """Binary units: estimators by the test bound with many samples, and by the training loss with one."""
    ranges: dict[str, list[float]] = {"": [], "two_": [], "sharp_": [], "bound_": []}
    for recipe, protocol in _shapes(evidence, BINARY):
        cells = {cell.label: cell for cell in evidence.group(recipe, protocol)}
        place = standing({label: cell.values(BOUND) for label, cell in cells.items()})
        assert place is not None
        require("STGS has the best bound", place.best == "STGS")
        require(
            "four samples and the default are not separated from it", {*FOUR, "default"} <= {*place.rivals}
        )
        own = {name: _below_default(cells, name) for name in (*FOUR, "ReinMax")}
        require("these train lower than the default", all(judge(gain) == "better" for gain in own.values()))
        ranges[""] += [own[name].mean for name in FOUR]
        ranges["two_"].append(_mean(cells["RODEO-2"], BOUND) - _mean(cells["STGS"], BOUND))
        ranges["sharp_"].append(own["ReinMax"].mean)
        ranges["bound_"].append(_mean(cells["ReinMax"], BOUND) - _mean(cells["default"], BOUND))
    require("ReinMax has a higher bound than the default", min(ranges["bound_"]) > 0)
    lows = {f"{name}low": min(values) for name, values in ranges.items()}
    return fill("field-lesson-binary", lows | {f"{name}high": max(values) for name, values in ranges.items()})


def _below_default(cells: Mapping[str, Cell], name: str) -> Difference:
    """How many nats of training loss an estimator ends below the default."""
    return difference(cells["default"].values(TRAIN), cells[name].values(TRAIN))


def _reproduced(evidence: Evidence) -> str:
    """Which cells of MVE's authors are met, and why the others are not."""
    rows = {
        (protocol, row.label, row.tau): row
        for _, protocol in _shapes(evidence, MVE)
        for row in against_paper(evidence.records, MVE, protocol)
        if row.difference is not None
    }
    apart = {(protocol, label): row for (protocol, label, _), row in rows.items() if row.disagrees}
    gaps = [-(row.difference or 0.0) for row in apart.values()]
    names = {label.partition(" at ")[0] for _, label in apart}
    require("only Gumbel-Rao's cells are apart", names == {RAO})
    require("they have 16 or 64 categories", {protocol for protocol, _ in apart} == set(WIDE))
    require("they end lower here", min(gaps) > 0)
    values = {"agree": len(rows) - len(apart), "cells": len(rows), "apart": len(apart), "recipe": MVE}
    values |= _with_constant(
        evidence, {protocol: rows[protocol, f"{RAO} at 0.001", 0.1] for protocol in WIDE}
    )
    return fill("field-lesson-reproduced", values | {"low": min(gaps), "high": max(gaps)})


def _with_constant(evidence: Evidence, published: Mapping[str, PaperRow]) -> dict[str, object]:
    """The losses with the constant beside the published ones of the same protocols."""
    cells = {protocol: evidence.cell(MVE, CONSTANT, 0.1, protocol) for protocol in published}
    ours = {protocol: summary(cell.values(TRAIN)) for protocol, cell in cells.items()}
    for protocol, row in published.items():
        gap = abs(ours[protocol].mean - (row.paper_mean or 0.0))
        require("the constant is what keeps them apart", gap < 0.5)
    runs = sum(len(cell.records) for cell in cells.values())
    return {
        "constant": listing(f"{each.mean:.2f}" for each in ours.values()),
        "published": listing(f"{row.paper_mean:.2f} ± {row.paper_std:.2f}" for row in published.values()),
        "lost": runs - sum(each.count for each in ours.values()),
        "runs": runs,
    }


def _losses(cells: Mapping[str, Cell], names: tuple[str, ...]) -> str:
    return listing(
        f"{name} {_mean(cells[name], TRAIN):.1f} and {_mean(cells[name], ELBO):.1f}" for name in names
    )


def _mean(cell: Cell, metric: str) -> float:
    return summary(cell.values(metric)).mean
