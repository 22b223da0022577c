"""Which estimator is best, judged by measured numbers alone: mean squared error at equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapped.diagnostics.moments import Interval

if TYPE_CHECKING:
    from gapped.diagnostics.diagnosis import Row


@dataclass(frozen=True)
class Recommendation:
    """The scores of the candidates, and what they say."""

    criterion: str
    """What the scores are."""
    scores: Mapping[str, Interval]
    """By label; the lowest is best."""

    @property
    def order(self) -> list[str]:
        """The candidates, best first."""
        return sorted(self.scores, key=lambda label: self.scores[label].value)

    @property
    def ties(self) -> list[str]:
        """Candidates that the data do not tell from the best one: their intervals overlap."""
        best = self.order[0]
        return [
            label
            for label, score in self.scores.items()
            if label != best and score.overlaps(self.scores[best])
        ]


def recommend(rows: Sequence[Row]) -> Recommendation:
    """Judge all estimators that sample; the budget is that of the one with the most evaluations."""
    candidates = [row for row in rows if not row.enumerates]
    budget = max((row.evaluations or 1.0 for row in candidates), default=1.0)
    criterion = "mean squared error"
    if any(row.mse is None for row in candidates):
        criterion = "variance (no reference, so bias is not measured)"
    elif any(row.evaluations is not None for row in candidates):
        criterion += f" at equal cost, {budget:g} evaluation{'s' * (budget != 1)}"
    return Recommendation(criterion, {row.label: error_at(row, budget) for row in candidates})


def error_at(row: Row, evaluations: float) -> Interval:
    """The squared error if as many gradients are averaged as `evaluations` of the cost pay for.

    Averaging lowers the variance and leaves the bias. Without a bias measured, the variance alone.
    """
    share = 1.0 if row.evaluations is None else row.evaluations / evaluations
    if row.bias is None or row.mse is None:
        return Interval(*(share * variance for variance in row.variance))
    if share == 1:
        return row.mse
    ends = zip(row.bias, row.variance, strict=True)
    return Interval(*(bias**2 + share * variance for bias, variance in ends))
