"""The points of the paper's pictures: surrogates on the simplex, GST's movements, simulated gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gapped import simplex
from gapped.pathwise import Draw, Pathwise
from gapped.pathwise.gst import GST
from gapped.pathwise.straight_through import StraightThrough


def surrogates(
    estimator: Pathwise, logits: Sequence[float], count: int, generator: torch.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw `count` times from one row of logits, in float64.

    The drawn categories `(n,)`, and the points `(m, n, K)` whose means over `m` are the surrogates.
    """
    rows = simplex.shift(torch.tensor(logits, dtype=torch.float64)).expand(count, -1)
    draws = estimator.draw_category(rows, generator, True)
    return draws.category.numpy(), estimator.points(rows, draws).points.numpy()


def movements(estimator: GST, logits: Sequence[float]) -> NDArray[np.float64]:
    """Where GST's surrogate starts, where m1 takes it, and m2 then: `(K, 3, K)`, drawn category first.

    Without a gap m2 is zero (section 4.2 of the paper), so that a GST of gap 0 stops after m1.
    """
    theta = torch.tensor(logits, dtype=torch.float64)
    rows, draws = simplex.shift(theta).expand(len(theta), -1), Draw(torch.arange(len(theta)))
    stages = (StraightThrough(estimator.tau), GST(estimator.tau, gap=0.0), estimator)
    return torch.stack([stage.points(rows, draws).points[0] for stage in stages], 1).numpy()


def simulated_gaps(
    probabilities: Sequence[float], draws: int, generator: torch.Generator
) -> NDArray[np.float64]:
    """Gaps of Gumbel noise given that a category of each probability wins, `(draws, len(probabilities))`.

    There are three categories; the other two share the rest as 2 to 1.
    """
    p = torch.tensor(probabilities, dtype=torch.float64)
    log_p = torch.stack([p, (1 - p) * 2 / 3, (1 - p) / 3], -1).log()
    scores = simplex.conditional_gumbel(log_p, torch.zeros(len(p), dtype=torch.int64), draws, generator)
    return (scores[..., 0] - scores[..., 1:].amax(-1)).numpy()
