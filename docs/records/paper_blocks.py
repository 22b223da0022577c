"""Blocks that set our numbers beside the paper's: tables, how far they agree, and what fresh seeds show."""

from __future__ import annotations

from dataclasses import fields
from math import prod
from typing import Any

import numpy as np
from coupled_claims import before_divergence
from evidence import (
    COUPLED,
    ELBO,
    RECTIFIED,
    Evidence,
    judge,
    mean_std,
    require,
    require_better,
    require_not_separated,
)
from mnist_claims import memory_of_runs, mixed_against_constant
from scipy.special import bdtr, stdtr
from template import fill
from verdicts import pending

from gapped.errors import GappedError, listing
from gapped_lab.report.cells import Cell, finite, rows_of
from gapped_lab.report.paper import FAILED_ABOVE, MARGIN, NATS, PaperRow, against_paper, paper
from gapped_lab.report.statistics import (
    Floats,
    Summary,
    between,
    difference,
    freedom,
    from_moments,
    standard_errors,
    summary,
)
from gapped_lab.report.tabular import (
    NOTHING,
    Entry,
    Table,
    fence,
    tau_entry,
    to_markdown,
)
from gapped_lab.report.trees import brackets, details, examples
from gapped_lab.tasks import vae_protocol

TABLES = ("ablation", "vae", "mixed-temperature")

# The protocols of the paper's VAEs, and what their constants are where a name does not say it.
PROTOCOLS = ("paper-30x10", "plain-30x10", "paper-32x64", "coupled-32x64")
WORDS = {
    "latents": "categorical variables an image",
    "categories": "categories of each",
    "hidden": "hidden widths of the encoder; the decoder mirrors them",
    "slope": "slope of the leaky ReLU between layers; 0 is the ReLU",
    "rectified_logits": "ReLU on the logits",
    "binarised": "pixels drawn anew at every access",
    "batch": "batch size",
    "learning_rate": "learning rate of Adam",
    "train_images": "training images, from the first; – is all",
    "glorot": "Glorot initialisation with zero biases, instead of torch's",
    "centred": "encoder input less the mean image",
    "signed": "decoder input 2 z - 1",
    "mean_output": "last bias starts at the logit of the mean image",
    "prior_rate": "learning rate of the prior; – is a uniform prior",
    "sampled_divergence": "divergence sampled, instead of its closed form",
    "bound_samples": "samples in the test bound",
}

Values = dict[str, Any]


def agreement(evidence: Evidence) -> Values:
    """Every published mean of the VAE with a standard deviation, and how far ours lie from them."""
    rows = _compared(evidence)
    repeated = sum(len(_rows(evidence, recipe)) for recipe in TABLES) - len(rows)
    statistics = fill("agreement-statistics", _statistics(rows, f"{NATS} nats"))
    return {"cells": len(rows), "repeated": repeated, "statistics": statistics}


def listops_agreement(evidence: Evidence) -> Values:
    """Every published accuracy on ListOps, how far ours lie from them, and the extremes of single runs."""
    rows = _rows(evidence, "listops", None)
    runs = sorted(
        (value, cell.name(True))
        for cell in evidence.group("listops", "paper")
        for value in cell.values("test_accuracy")
        if np.isfinite(value)
    )
    extremes = {
        f"{name}_{what}": entry
        for name, run in (("lowest", runs[0]), ("second", runs[-2]), ("highest", runs[-1]))
        for what, entry in zip(("value", "cell"), run, strict=True)
    }
    statistics = fill("agreement-statistics", _statistics(rows, f"{MARGIN['listops']} of accuracy"))
    wide = max(rows, key=lambda r: r.paper_std or 0.0)
    gap = wide.ours.mean - (wide.paper_mean or 0.0) if wide.ours else 0.0
    require("the widest cell agrees by its width alone", not wide.disagrees and gap > 10 * MARGIN["listops"])
    widest = {"wide": f"{wide.label} at τ={wide.tau:g}", "wide_std": wide.paper_std, "wide_gap": gap}
    return {"cells": len(rows), "statistics": statistics, **widest, **extremes}


def _statistics(rows: list[PaperRow], margin: str) -> Values:
    """How many of `rows` agree, and how many would by chance."""
    apart = [r for r in rows if r.disagrees]
    pairs = [(r.ours, _published(r)) for r in rows if r.ours and r.standard_errors is not None]
    errors = [abs(standard_errors(a, b.mean, b.std, b.count)) for a, b in pairs]
    gaps = np.array([a.mean - b.mean for a, b in pairs])
    above, below = int((gaps > 0).sum()), int((gaps < 0).sum())
    return {
        "cells": len(rows),
        "agreeing": len(rows) - len(apart),
        "margin": margin,
        "apart": listing(map(_distance, apart)),
        "expected_beyond": sum(_chance_beyond(a, b, 2) for a, b in pairs),
        "beyond": sum(e > 2 for e in errors),
        "expected_within": sum(1 - _chance_beyond(a, b, 1) for a, b in pairs),
        "within": sum(e <= 1 for e in errors),
        "largest": max(errors),
        "chance_of_largest": 1 - prod(1 - _chance_beyond(a, b, max(errors)) for a, b in pairs),
        "above": above,
        "below": below,
        # The two-sided sign test.
        "p": min(1.0, 2 * float(bdtr(min(above, below), above + below, 0.5))),
        "median": float(np.median(gaps)),
    }


def _chance_beyond(first: Summary, second: Summary, errors: float) -> float:
    """How often two means of the same law lie more than `errors` standard errors apart (Welch's t)."""
    return float(2 * stdtr(freedom(first, second), -abs(errors)))


def _distance(row: PaperRow) -> str:
    """A cell that disagrees, and how far it is off."""
    off = f"{row.lost} lost runs" if row.lost else f"{row.standard_errors:+.1f}"
    return f"{row.label} at τ={row.tau:g} ({off})"


def failing(evidence: Evidence) -> Values:
    """What happened in the cells that the paper marks X."""
    rows = [r for r in against_paper(evidence.records, "vae", RECTIFIED) if r.note.startswith("paper: X")]
    require("all cells marked X fail", bool(rows) and not any(r.disagrees for r in rows))
    ends = np.concatenate([evidence.cell("vae", r.label, r.tau).values(ELBO) for r in rows])
    require("all runs of cells marked X end with a value", bool(np.isfinite(ends).all()))
    return {
        "cells": len(rows),
        "failed": int((ends > FAILED_ABOVE).sum()),
        "runs": ends.size,
        "limit": FAILED_ABOVE,
        "low": ends.min(),
        "high": ends.max(),
        "broken": evidence.summary("ablation", "NZ-GST-1.0", 0.5),
    }


def second_look(evidence: Evidence) -> Values:
    """First seeds, fresh seeds and both, beside the paper, for the cells that were looked at again."""
    published = {(r.label, r.tau): _published(r) for r in _compared(evidence)}
    body, texts = [], []
    for cell in evidence.group("second-look"):
        paper = published[cell.label, cell.tau]
        first, again = _first_values(evidence, cell), cell.values(ELBO)
        series = {"first": first, "fresh": again, "pooled": np.concatenate([first, again])}
        body += [_entries(cell, name, summary(values), paper) for name, values in series.items()]
        texts.append(fill("second-look-cell", _fresh_seeds(cell, first, again, paper)))
    columns = ("estimator", "τ", "seeds", "runs", "ours", "paper", "difference", "std. errors")
    return {"table": Table(columns, tuple(body)), "cells": "\n\n".join(texts)}


def _fresh_seeds(cell: Cell, first: Floats, again: Floats, paper: Summary) -> Values:
    """What the fresh seeds of a cell show."""
    pooled = summary(np.concatenate([first, again]))
    errors, pooled_errors = (
        standard_errors(s, paper.mean, paper.std, paper.count) for s in (summary(again), pooled)
    )
    require(f"the fresh seeds of {cell.name(True)} agree with the paper", abs(errors) <= 2)
    require(f"all seeds of {cell.name(True)} together disagree", abs(pooled_errors) > 2)
    return {
        "cell": cell,
        "gap": between(summary(again), paper),
        "own": difference(again, first),
        "pooled": pooled,
        "pooled_errors": pooled_errors,
    }


def _entries(cell: Cell, which: str, ours: Summary, paper: Summary) -> tuple[Entry, ...]:
    gap = ours.mean - paper.mean
    errors = standard_errors(ours, paper.mean, paper.std, paper.count)
    return (
        Entry(cell.label),
        tau_entry(cell.tau),
        Entry(which),
        Entry(str(ours.count), ours.count),
        Entry(mean_std(ours), ours.mean),
        Entry(mean_std(paper), paper.mean),
        Entry(f"{gap:+.2f}", gap),
        Entry(f"{errors:+.1f}", errors),
    )


def coupled_findings(evidence: Evidence) -> Values:
    """The comparison with coupled estimators: who leads, and whether Gumbel-Rao survives."""
    cells = {cell.label: cell for cell in evidence.group("coupled", COUPLED)}
    require("no run of GR-MC100 diverges", all(r.status == "ok" for r in cells["GR-MC100"].records))
    before = before_divergence(evidence)
    require("GR-MC100 agrees with the paper at epoch 50", abs(before["errors"]) <= 2)
    return {
        **before,
        "off": standard_errors(summary(cells["GST-1.0"].values(ELBO)), *_coupled_row("GST-1.0")),
        "fresh": _fresh_coupled(evidence),
        "rao_10": require_not_separated(cells["GST-1.0"], cells["GR-MC100"]),
        "rao_12": require_not_separated(cells["GST-1.2"], cells["GR-MC100"]),
        "tree": require_not_separated(cells["DisARM-Tree"], cells["RLOO"]),
        "stgs": require_better(cells["STGS"], cells["DisARM-Tree"]),
        "gst_10": require_better(cells["GST-1.0"], cells["STGS"]),
        "gst_12": require_better(cells["GST-1.2"], cells["STGS"]),
    }


def mixed_findings(evidence: Evidence) -> Values:
    """What the low temperature of the mixed training adds to training at the middle one: nothing."""
    pairs = mixed_against_constant(evidence)
    groups = {word: [p for p in pairs if judge(p.lead) == word] for word in ("better", "worse")}
    require("no mixed training is ahead of the middle temperature alone", not groups["better"])
    require("one mixed training is behind it", len(groups["worse"]) == 1)
    period = paper()["mixed-temperature"]["period"]
    return {
        "cells": len(pairs),
        "equal": len(pairs) - 1,
        "middle": paper()["mixed-temperature"]["mid_temperature"],
        "share": (period - 1) / period,
        "worse": groups["worse"][0].name,
        "lead": groups["worse"][0].lead,
        "widest": max(p.lead.high - p.lead.low for p in pairs) / 2,
    }


def protocols(evidence: Evidence) -> Values:
    """Every constant of the VAE's protocols, beside each other."""
    kinds = [vae_protocol(name) for name in PROTOCOLS]
    # What only other VAEs have: patches and selected pixels, RAdam and AdamW.
    others = ("name", "patch", "selects", "rectified_adam", "weight_decay")
    names = [f.name for f in fields(kinds[0]) if f.name not in others]
    body = [
        (Entry(WORDS.get(name, name.replace("_", " "))), *(_constant(getattr(k, name)) for k in kinds))
        for name in names
    ]
    table = Table(("constant", *PROTOCOLS), tuple(body))
    devices = {r.environment.get("device") for r in evidence.records if r.recipe in (*TABLES, "coupled")}
    precision = {r.environment.get("precision") for r in evidence.records if r.recipe in (*TABLES, "coupled")}
    require("all runs were trained with TF32 products", precision == {"tf32"})
    return {"table": table, "device": listing(str(device) for device in sorted(map(str, devices)))}


def _constant(value: object) -> Entry:
    if isinstance(value, bool) or value is None:
        return Entry({True: "yes", False: "no", None: NOTHING}[value])
    if isinstance(value, tuple):
        return Entry("–".join(map(str, value)))
    form = ",d" if isinstance(value, int) else "g" if isinstance(value, float) else ""
    return Entry(format(value, form))


def coupled_own(evidence: Evidence) -> str:
    """The rows that the paper quotes, run by run under their own protocol, once they have been run."""
    group = evidence.group("coupled-own", "coupled-32x64")
    if not group:
        return fill("coupled-own", {})
    train, test = "train_negative_elbo", "test_100_sample_negative_elbo"
    epochs = evidence.curves[group[0].records[0].id].epoch
    body = []
    learned: list[tuple[float, float]] = []
    stuck: list[tuple[float, float]] = []
    for record in (record for cell in group for record in cell.records):
        begin = finite(evidence.curves[record.id].series[train][0])
        end = finite(record.metrics[train])
        (stuck if abs(begin - end) < 1 else learned).append((end, abs(begin - end)))
        numbers = (begin, end, finite(record.metrics[test]))
        body.append((Entry(record.label), Entry(str(record.seed)), *(Entry(f"{x:.2f}", x) for x in numbers)))
    require("some runs learn and some do not", bool(learned and stuck))
    columns = (
        "estimator",
        "seed",
        f"training, epoch {epochs[0]}",
        "training, at the end",
        "test, 100 samples",
    )
    values: dict[str, Any] = {
        "table": Table(columns, tuple(body)),
        "first": epochs[0],
        "epochs": epochs[-1],
        "stuck": len(stuck),
        "runs": len(body),
        "level": max(stuck)[0],
        "moved": max(move for _, move in stuck),
        "best": min(learned)[0],
        "worst": max(learned)[0],
    }
    for name, label in (("rloo", "RLOO"), ("tree", "DisARM-Tree")):
        values[name] = "{:.2f} ± {:.2f}".format(*_coupled_row(label)[:2])
    return fill("coupled-own-rows", values | {"start": _coupled_start(evidence)})


def _coupled_start(evidence: Evidence) -> str:
    """How many runs leave the beginning with either input of the decoder."""
    if "coupled-start" not in evidence.recipes():
        return fill("coupled-start-missing", {})
    left, numbers = [], []
    for protocol in ("coupled-32x64", "coupled-unsigned-32x64"):
        (cell,) = evidence.group("coupled-start", protocol)
        ends = cell.values("train_negative_elbo")
        starts = [finite(evidence.curves[r.id].series["train_negative_elbo"][0]) for r in cell.records]
        left.append(int((ends < np.array(starts) - 1).sum()))
        numbers.append((ends.min(), ends.max(), len(ends)))
    require("the decoder's input is what holds runs", left[0] == 0 and left[1] == numbers[1][2])
    (low, high, runs), (best, worst, _) = numbers
    epochs = cell.records[0].epochs
    values = {"low": low, "high": high, "best": best, "worst": worst, "runs": runs, "epochs": epochs}
    return fill("coupled-start", values)


def _coupled_row(label: str) -> tuple[float, float, int]:
    """Mean, standard deviation and seeds of a row of the paper's coupled comparison."""
    mean, std = next(row[2:] for row in paper()["coupled"]["rows"] if row[0] == label)
    return mean, std, paper()["coupled"]["seeds"]


def _fresh_coupled(evidence: Evidence) -> str:
    """What fresh seeds of GST-1.0 in the coupled comparison show, once they have been run."""
    if "coupled-fresh" not in evidence.recipes():
        return f"fresh seeds: {pending('coupled-fresh')}."
    again, first = (
        evidence.cell(recipe, "GST-1.0", 0.5, COUPLED).values(ELBO) for recipe in ("coupled-fresh", "coupled")
    )
    fresh, pooled = summary(again), summary(np.concatenate([first, again]))
    row = _coupled_row("GST-1.0")
    values = {
        "fresh": mean_std(fresh),
        "count": fresh.count,
        "gap": between(fresh, from_moments(*row)),
        "errors": standard_errors(fresh, *row),
        "pooled": pooled.count,
        "pooled_errors": standard_errors(pooled, *row),
    }
    return fill("coupled-fresh", values)


def efficiency_notes(evidence: Evidence) -> str:
    """Whose memory the table of memory and time shows."""
    memory = memory_of_runs(evidence)
    low, high = min(memory.values()), max(memory.values())
    require("Gumbel-Rao needs no more memory than the others", high < 1.2 * low)
    return fill("efficiency-alone", {"low": low, "high": high})


def latent_trees(evidence: Evidence) -> Values:
    """What the trees are like: accuracy by length and by depth, F1, one expression in brackets."""
    group = [cell for recipe in ("listops", "listops-more") for cell in evidence.group(recipe, "paper")]
    rows = rows_of(group, "test_accuracy")
    pairs = examples(rows, evidence.trees)
    _, tree = pairs[0]
    lines = [f"true parse, value {tree.label}: {brackets(tree.tokens, tree.true)}"]
    for row, tree in pairs:
        lines.append(f"{row.name}, answer {tree.predicted}: {brackets(tree.tokens, tree.found)}")
    tables = "\n".join(to_markdown(table) for _, table in details(rows))
    return {"tables": tables, "lines": "\n".join(lines), "fence": fence("".join(lines), 3)}


def _compared(evidence: Evidence) -> list[PaperRow]:
    """Each published cell once, even where two tables show it."""
    cells = {
        (recipe == "mixed-temperature", r.label, r.tau): r
        for recipe in TABLES
        for r in _rows(evidence, recipe)
    }
    return list(cells.values())


def _rows(evidence: Evidence, recipe: str, protocol: str | None = RECTIFIED) -> list[PaperRow]:
    """Rows with a published mean and spread that have two values here, or runs that were lost."""
    rows = against_paper(evidence.records, recipe, protocol)
    return [r for r in rows if r.ours and r.paper_std is not None and (r.lost or r.ours.count > 1)]


def _published(row: PaperRow) -> Summary:
    return from_moments(row.paper_mean or 0.0, row.paper_std or 0.0, row.paper_count or 0)


def _first_values(evidence: Evidence, cell: Cell) -> Floats:
    """The runs of the same cell in the table that published it."""
    for recipe in TABLES[:2]:
        for other in evidence.group(recipe):
            if (other.label, other.tau) == (cell.label, cell.tau):
                return other.values(ELBO)
    raise GappedError(f"records: no first seeds of {cell.name(True)} in {' or '.join(TABLES[:2])}")
