"""Claims of the paper about surrogates and their variance, measured without training."""

from __future__ import annotations

from functools import cache
from math import sqrt

import numpy as np
import torch
from decomposition import TAUS, measured, ratio
from evidence import Evidence
from verdicts import FAILS, HOLDS, Values

import gapped
from gapped.diagnostics.surrogate_properties import simulated_gaps
from gapped.pathwise import Pathwise
from gapped.simplex import expected_gap
from gapped_lab.cli.reproduce import PROBABILITIES
from gapped_lab.report.statistics import Floats

# Table 1 of the paper and the row of STGS: consistency, a perturbation without a gradient, a strict gap.
MARKS: tuple[tuple[Pathwise, tuple[bool, ...]], ...] = (
    (gapped.StraightThrough(), (False, True, True)),
    (gapped.GST(gap=0.0, detach=False), (True, False, False)),
    (gapped.GST(gap=1.0, detach=False), (True, False, True)),
    (gapped.GST(gap=0.0), (True, True, False)),
    (gapped.GST(gap=1.0), (True, True, True)),
    (gapped.GumbelSoftmax(), (True, True, True)),
)


@cache
def _right_marks() -> int:
    """How many of the marks are right; property 0, that the sample follows the law, is marked for all."""
    right = 0
    for estimator, marks in MARKS:
        report = gapped.properties(estimator, generator=torch.Generator().manual_seed(0))
        right += sum(f.holds == mark for f, mark in zip(report.findings, (True, *marks), strict=True))
    return right


def properties(evidence: Evidence) -> Values:
    marks = 4 * len(MARKS)
    return {"verdict": HOLDS if _right_marks() == marks else FAILS, "right": _right_marks(), "marks": marks}


@cache
def _gaps() -> Floats:
    return simulated_gaps(PROBABILITIES, 3000, torch.Generator().manual_seed(0))


def lemma(evidence: Evidence) -> Values:
    expected = expected_gap(torch.tensor(PROBABILITIES, dtype=torch.float64)).numpy()
    errors = (_gaps().mean(0) - expected) / (_gaps().std(0, ddof=1) / sqrt(len(_gaps())))
    largest = float(np.abs(errors).max())
    # Of eleven means, one beyond 3.5 standard errors comes by chance once in two hundred times.
    verdict = HOLDS if largest < 3.5 else FAILS
    return {"verdict": verdict, "largest": largest, "draws": len(_gaps()), "places": len(PROBABILITIES)}


def decomposition(evidence: Evidence) -> Values:
    ratios = {tau: ratio(measured(tau, False)) for tau in TAUS}
    similar = all(0.5 < each.mean < 2 for each in ratios.values())
    text = "; ".join(f"τ={tau:g}: {s.mean:.2f} ({s.low:.2f} to {s.high:.2f})" for tau, s in ratios.items())
    return {"verdict": HOLDS if similar else FAILS, "ratios": text}
