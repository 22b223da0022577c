"""What the paper's pictures show, as arrays: surrogates, the movements of GST, the gaps of Gumbel noise.

Everything is computed by the estimators themselves, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gapped import simplex
from gapped.pathwise import Draw, Pathwise
from gapped.pathwise.gst import GST
from gapped.pathwise.straight_through import StraightThrough

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Surrogates:
    """The drawn categories ``(n,)``, their surrogates ``(n, K)``, and what these average, ``(m, n, K)``."""

    chosen: NDArray[np.int64]
    points: Floats
    parts: Floats


@dataclass(frozen=True)
class Gaps:
    """Lemma 1 at winning probabilities `p`: draws of the gap ``(draws, len(p))`` and its expectation."""

    p: Floats
    drawn: Floats
    expected: Floats


def surrogates(
    estimator: Pathwise, logits: Sequence[float], count: int, generator: torch.Generator
) -> Surrogates:
    """Draw `count` times from one row of logits."""
    rows = simplex.shift(torch.tensor(logits, dtype=torch.float64)).expand(count, -1)
    drawn = estimator.draw(rows, generator, True)
    parts = estimator.points(rows, drawn).points
    return Surrogates(drawn.category.numpy(), parts.mean(0).numpy(), parts.numpy())


def movements(estimator: GST, logits: Sequence[float]) -> Floats:
    """Where GST's surrogate starts, where m1 takes it, and m2 then: ``(K, 3, K)``, drawn category first.

    Without a gap m2 is zero (section 4.2 of the paper), so that a GST of gap 0 stops after m1.
    """
    theta = torch.tensor(logits, dtype=torch.float64)
    rows, drawn = simplex.shift(theta).expand(len(theta), -1), Draw(torch.arange(len(theta)))
    stages = (StraightThrough(estimator.tau), GST(estimator.tau, gap=0.0), estimator)
    stops: list[Tensor] = [stage.points(rows, drawn).points[0] for stage in stages]
    return torch.stack(stops, 1).numpy()


def gaps(probabilities: Sequence[float], draws: int, generator: torch.Generator) -> Gaps:
    """Draw Gumbel noise given the winner, three categories, the other two sharing the rest as 2 to 1."""
    p = torch.tensor(probabilities, dtype=torch.float64)
    log_p = torch.stack([p, (1 - p) * 2 / 3, (1 - p) / 3], -1).log()
    scores = simplex.conditional_gumbel(log_p, torch.zeros(len(p), dtype=torch.int64), draws, generator)
    lead = scores[..., 0] - scores[..., 1:].amax(-1)
    return Gaps(p.numpy(), lead.numpy(), simplex.expected_gap(p).numpy())
