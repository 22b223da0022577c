"""The tables of the README, and the one that opens the page on choosing."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

from evidence import PLAIN, RECTIFIED, Evidence
from field_board import contests, standings
from study import DEFAULT, TASKS, TEXTS, Cell, Study
from vocabulary import LINEAR, cases
from workloads import at_their_best

from gapped.comparison.table import Entry, Table, tau_entry
from gapped_lab.report.cells import cells, groups, rows_of
from gapped_lab.report.timings import REFERENCE, Timings, time, timings

TOKENIZER, TOKENS = "tokenizer: 1024 codes", "tokens: tokens"
ROUTER = "router: 8 experts top 2"
FEWEST = 64
"""Categories of the rows that are quoted: shorter ones are bound by the host."""


def gains(evidence: Evidence) -> dict[str, Any]:
    """Numbers of the last runs on a GPU; of a sample, of the last that timed `gapped.gumbel_softmax`."""
    having = {line.run for line in evidence.bench if line.estimator == "gumbel-softmax"}
    lines = [line for line in evidence.bench if line.width or line.run in having]
    benches = [each for each in timings(lines) if not each.device.startswith("CPU")]
    large = [each for each in benches if not each.width and each.find("gumbel-softmax", "triton")]
    large = [each for each in large if _categories(each) >= FEWEST]
    ratios = [_ratios(each, "gumbel-softmax", "triton") for each in large]
    index = next(each for each in benches if each.width)
    own = ("gapmax", "triton", "index")
    by_index = next(line for line in index.lines if (line.estimator, line.backend, line.form) == own)
    dense = index.find(REFERENCE, "eager")
    spent = time(by_index), time(dense)
    assert dense is not None
    assert dense.memory is not None
    assert by_index.memory is not None
    assert spent[0] is not None
    assert spent[1] is not None
    device = benches[0].device
    linear = {
        key: ways for key, ways in cases(evidence.linear)[device].items() if {LINEAR, "torch"} <= ways.keys()
    }
    rows, width, categories, _ = key = max(linear, key=lambda key: key[2])
    return {
        "study": _study(evidence),
        "board": _board(evidence),
        "device": device,
        "time": f"{1 / max(t for t, _ in ratios):.1f} to {1 / min(t for t, _ in ratios):.1f}",
        "memory": f"{max(m for _, m in ratios):.2f}",
        "sizes": f"{rows:,} × {width:,} × {categories:,}",
        "linear": f"{linear[key][LINEAR].memory:,.0f}",
        "torch": f"{linear[key]['torch'].memory:,.0f}",
        "index": f"{spent[0] / spent[1]:.2f}",
        "index_memory": f"{by_index.memory / dense.memory:.2f}",
        "index_shape": index.title,
    }


def situations(evidence: Evidence) -> dict[str, Any]:
    """Where the default is ahead, and where another estimator is."""
    study = Study.of(evidence)
    codes = [task for task in study.tasks if task.startswith("codes-")]
    power = [each.above for each in standings(evidence) if each.protocol.startswith("power-")]
    far = study.shortfall("codes-49x512", ("GST-1.0", 0.5)) - study.shortfall("codes-49x512", DEFAULT)
    return {
        "codes": _bound(study.shortfall(task, DEFAULT) for task in codes),
        "power": f"{min(power):.0f} to {max(power):.0f}%",
        "reinmax": _bound(_reinmax(evidence)),
        "dense": f"{study.shortfall(PLAIN, DEFAULT):.1f}",
        "rectified": f"{study.shortfall(RECTIFIED, DEFAULT):.1f}",
        "far": f"{far:.1f}",
        "fsq": f"{_behind(evidence, TOKENIZER, 'gapmax', 'fsq'):.0f}",
        "vq": f"{_behind(evidence, TOKENIZER, 'gapmax', 'vq-ema'):.0f}",
        "router": f"{_behind(evidence, ROUTER, 'reinmax:draw=argmax', 'top-k'):.1f}",
        "drawn": f"{_behind(evidence, ROUTER, 'reinmax, others=mean', 'top-k'):.1f}",
        "tokens": f"{-_result(evidence, TOKENS, 'gapmax'):.1f}",
        "straight": f"{-_result(evidence, TOKENS, 'straight-through'):.1f}",
        "grpo": f"{-_result(evidence, TOKENS, 'grpo'):.1f}",
    }


def _result(evidence: Evidence, setting: str, way: str) -> float:
    """The mean result of a way in a workload, at its best learning rate."""
    rows = rows_of(at_their_best(cells(evidence.workloads[setting])))
    (row,) = (row for row in rows if row.label.partition(", rate ")[0] == way)
    return row.value.mean


def _behind(evidence: Evidence, setting: str, way: str, other: str) -> float:
    """How far a way ends above another one in a workload, in per cent."""
    return 100 * (_result(evidence, setting, way) / _result(evidence, setting, other) - 1)


def _bound(numbers: Iterable[float]) -> str:
    """A number with one decimal that all of these lie below."""
    return f"{ceil(10 * max(numbers)) / 10:.1f}"


def _reinmax(evidence: Evidence) -> list[float]:
    """How far ReinMax ends above the best cell, in per cent, on each task without a network."""
    (contest,) = (each for each in contests() if each.name == "field-polynomial")
    own = [record for record in evidence.records if record.recipe == contest.name]
    found = []
    for group in groups(own).values():
        best, *rows = rows_of(group)
        (row,) = (row for row in [best, *rows] if (row.label, row.tau) == ("ReinMax", 1.0))
        found.append(100 * (row.value.mean / best.value.mean - 1))
    return found


def recommended(evidence: Evidence) -> dict[str, Any]:
    """Each widely used estimator at its best temperature for all tasks."""
    study = Study.of(evidence)
    chosen = study.recommend()
    body = []
    for label, cell in sorted(chosen.items(), key=lambda pair: study.mean(pair[1])):
        worst = study.worst(cell)
        percents = study.mean(cell), study.shortfall(worst, cell)
        numbers = (Entry(f"{number:.1f}%", number) for number in percents)
        task = TASKS[worst].replace("K=", "codes, K=").replace("codes, codes", "codes")
        body.append((Entry(TEXTS[label], code=True), tau_entry(cell[1]), *numbers, Entry(task)))
    columns = ("estimator", "τ", "mean", "worst", "on")
    return {"table": Table(columns, tuple(body)), "cells": len(study.cells), "board": _board(evidence)}


def _study(evidence: Evidence) -> str:
    """How far the default lies above the best setting of the study, beside the line that it replaces."""
    study = Study.of(evidence)

    def distance(cell: Cell) -> str:
        return f"{study.mean(cell):.1f}% on average, {study.shortfall(study.worst(cell), cell):.1f}% at worst"

    return (
        f"above the best of {len(study.cells)} tuned settings, over the tasks of our study without a ReLU "
        f"on the logits: {distance(DEFAULT)}; `F.gumbel_softmax` with tau=1: {distance(('STGS', 1.0))}"
    )


def _board(evidence: Evidence) -> str:
    """The same on the board's VAEs, which have a network between choice and cost."""
    own = [each for each in standings(evidence) if not each.protocol.startswith("power-")]
    worst = max(own, key=lambda each: each.above)
    mean = sum(each.above for each in own) / len(own)
    return f"{mean:.1f}% above the best on average over {len(own)} VAEs, at most {worst.above:.1f}%"


def _categories(bench: Timings) -> int:
    return int(bench.title.split()[2].replace(",", ""))


def _ratios(bench: Timings, estimator: str, backend: str) -> tuple[float, float]:
    """Time and memory as fractions of torch's own sampler in eager mode."""
    ours, torchs = bench.find(estimator, backend), bench.find(REFERENCE, "eager")
    assert ours is not None
    assert torchs is not None
    spent = time(ours), time(torchs)
    assert spent[0] is not None
    assert spent[1] is not None
    assert ours.memory is not None
    assert torchs.memory is not None
    return spent[0] / spent[1], ours.memory / torchs.memory
