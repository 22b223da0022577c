"""Section 4.3 of the paper as numbers: the two terms of Gumbel-Rao's variance, and the variance of GST."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from evidence import Evidence, require
from torch import Tensor

from gapped import simplex
from gapped.pathwise import Draw
from gapped.pathwise.gst import GST
from gapped_lab.report.statistics import Summary, summary
from gapped_lab.report.tabular import Entry, Table, tau_entry

# Rows of logits, each with a random quadratic cost of its own; categories as in the paper's VAE.
ROWS, CATEGORIES = 60, 10
# Noise vectors behind each conditional mean and variance.
DRAWS = 300
TAUS = (1.0, 0.5, 0.1)
GAP = 1.0

Values = dict[str, Any]


class Terms(NamedTuple):
    """Variances summed over the categories, one for each row."""

    noise: Tensor
    """Term (a) at K = 1: what the noise adds when the category is known."""
    choice: Tensor
    """Term (b): the variance of the conditional mean."""
    ours: Tensor
    """Of GST, whose gradient is known when the category is."""
    distance: Tensor
    """The mean squared distance of GST's gradient from the conditional mean, relative to the mean square."""


def decomposition(evidence: Evidence) -> Values:
    """The terms at three temperatures, over logits with and without a ReLU."""
    body = []
    for rectified in (True, False):
        for tau in TAUS:
            terms = measured(tau, rectified)
            a, b, ours, distance = (float(term.mean()) for term in terms)
            body.append(
                (
                    Entry("with" if rectified else "without"),
                    tau_entry(tau),
                    *(Entry(f"{value:.3f}", value) for value in (a, b, a + b, a / 100 + b, ours)),
                    _interval(ratio(terms)),
                    Entry(f"{distance:.2f}", distance),
                )
            )
    columns = ("ReLU", "τ", "(a)", "(b)", "STGS", "GR-MC100", "GST-1.0", "GST-1.0 / (b)", "distance")
    for rectified in (True, False):
        at = {tau: measured(tau, rectified) for tau in TAUS}
        below = [float(t.ours.mean()) < float((t.noise + t.choice).mean()) for t in at.values()]
        require("GST has less variance than STGS on average", all(below))
        require("GST is close to term (b) at temperature 1", 0.5 < ratio(at[1.0]).mean < 2)
        require("GST has more than term (b) at 0.5", ratio(at[0.5]).low > 1)
        require("GST's gradient vanishes at 0.1", float(at[0.1].ours.max()) < 1e-3)
    return {"table": Table(columns, tuple(body)), "rows": ROWS, "categories": CATEGORIES, "draws": DRAWS}


def ratio(terms: Terms) -> Summary:
    """GST's variance over term (b), over rows."""
    return summary((terms.ours / terms.choice).numpy())


@cache
def measured(tau: float, rectified: bool) -> Terms:
    """The terms for normal logits, after a ReLU or not; all settings share rows, costs and noise."""
    generator = torch.Generator().manual_seed(0)
    shape = (ROWS, CATEGORIES)
    logits, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    curvature = torch.randn(*shape, CATEGORIES, generator=generator, dtype=torch.float64)
    curvature = (curvature + curvature.mT) / 2
    theta = simplex.shift(logits.relu() if rectified else logits)
    log_p = theta.log_softmax(-1)
    means, variances, ours = [], [], []
    for i in range(CATEGORIES):
        category = torch.full((ROWS,), i)
        g = curvature[:, i] + slope
        scores = simplex.conditional_gumbel(log_p, category, DRAWS, generator)
        gradient = _product(torch.softmax(scores / tau, -1), g) / tau
        means.append(gradient.mean(0))
        variances.append(gradient.var(0))
        ours.append(_product(GST(tau, gap=GAP).points(theta, Draw(category)).points[0], g) / tau)
    mean, variance, own = (torch.stack(each, 1) for each in (means, variances, ours))
    p = log_p.exp().unsqueeze(-1)
    # The means of finitely many draws vary too: that is taken out again.
    excess = variance / DRAWS
    return Terms(
        (p * variance).sum((1, 2)),
        _spread(mean, p) - (p * (1 - p) * excess).sum((1, 2)),
        _spread(own, p),
        (p * ((mean - own).square() - excess)).sum((1, 2)) / (p * mean.square()).sum((1, 2)),
    )


def _product(q: Tensor, g: Tensor) -> Tensor:
    """J(q) g."""
    return q * (g - (q * g).sum(-1, keepdim=True))


def _spread(x: Tensor, p: Tensor) -> Tensor:
    """The variance over the drawn category, summed over the entries."""
    return (p * (x - (p * x).sum(1, keepdim=True)).square()).sum((1, 2))


def _interval(s: Summary) -> Entry:
    return Entry(f"{s.mean:.2f} ({s.low:.2f} to {s.high:.2f})", s.mean)
