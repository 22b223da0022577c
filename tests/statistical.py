"""Tests of random things, with a declared rate of false failures.

All law tests together fail a correct package with probability at most `SUITE_RATE` over the choice of
seeds. The rate is divided equally among at most `ASSERTIONS` comparisons; `require_law` counts them and
refuses to make more. Seeds are fixed, so a suite that passes once keeps passing.

The rate is as exact as the p-values: chi-squared and z use the large-sample law (cells are pooled until
each expects 25 draws), Kolmogorov-Smirnov and binomial are exact or conservative at the sizes used.

Each law test also shows that it can fail: a wrong twin goes through the same comparison and
`require_rejected` demands that it be caught at the very same level. Twins cost nothing of the rate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

SUITE_RATE = 1e-6
ASSERTIONS = 400
LEVEL = SUITE_RATE / ASSERTIONS

LEDGER: Path | None = None
"""A file that all processes of a test run share, with one byte for each comparison; set by conftest.py."""


def require_law(p_value: float) -> None:
    """The data are compatible with the law that gave `p_value`."""
    assert LEDGER is not None
    with open(LEDGER, "ab") as ledger:
        ledger.write(b".")
    spent = LEDGER.stat().st_size
    assert spent <= ASSERTIONS, "more law assertions than the declared rate was divided by: raise ASSERTIONS"
    assert p_value >= LEVEL, f"p-value {p_value:.3g} is below {LEVEL:.3g}"


def require_rejected(p_value: float) -> None:
    """The comparison catches a wrong law."""
    assert p_value < LEVEL, f"the wrong twin passed with p-value {p_value:.3g}: the test has no power"


def counts_of(index: Tensor, categories: int) -> np.ndarray:
    return torch.bincount(index.reshape(-1), minlength=categories).numpy()


def chi_squared(counts: np.ndarray, probabilities: Tensor, smallest_cell: float = 25.0) -> float:
    """P-value of category counts under `probabilities`, rare categories pooled, impossible ones decisive."""
    law = probabilities.reshape(-1).double().numpy()
    assert counts.shape == law.shape
    if counts[law == 0].any():
        return 0.0
    observed, expected = counts[law > 0].astype(float), law[law > 0] * counts.sum()
    observed, expected = _pooled(observed, expected, smallest_cell)
    assert len(expected) > 1, "everything was pooled into one cell: draw more"
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def _pooled(observed: np.ndarray, expected: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in ascending order of expectation, merged until every cell expects at least `smallest`."""
    cells: list[list[float]] = [[0.0, 0.0]]
    for position in np.argsort(expected):
        if cells[-1][1] >= smallest:
            cells.append([0.0, 0.0])
        cells[-1][0] += observed[position]
        cells[-1][1] += expected[position]
    if len(cells) > 1 and cells[-1][1] < smallest:
        last = cells.pop()
        cells[-1] = [cells[-1][0] + last[0], cells[-1][1] + last[1]]
    merged = np.array(cells)
    return merged[:, 0], merged[:, 1]


def binomial(successes: int, trials: int, probability: float) -> float:
    return float(stats.binomtest(successes, trials, probability).pvalue)


def two_sample(first: Tensor, second: Tensor) -> float:
    """Kolmogorov-Smirnov: do two samples have one law?"""
    return float(stats.ks_2samp(first.numpy(), second.numpy(), method="asymp").pvalue)


def gumbel_law(sample: Tensor) -> float:
    """Kolmogorov-Smirnov against the standard Gumbel law, exp(-exp(-x))."""
    return float(stats.kstest(sample.double().numpy(), stats.gumbel_r.cdf, method="asymp").pvalue)


def mean_is(sample: Tensor, expected: float) -> float:
    """Two-sided p-value of the mean of many independent draws, by their own standard error."""
    sample = sample.double()
    error = sample.std() / len(sample) ** 0.5
    return float(2 * stats.norm.sf(abs((sample.mean() - expected) / error)))
