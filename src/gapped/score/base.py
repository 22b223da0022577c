"""What the score-function estimators share: the cost as they see it, and the way from draws to a gradient.

An estimator has three methods. `draw` makes everything random; `index` is a pure function of the logits and
of what was drawn, and says which categories are evaluated; `gradient` is a pure function of these and of the
costs that came back. All get logits in float32 or float64, without a graph, with the categories on the last
axis and relative to the largest of their row (`simplex.shift`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import holds
from gapped.errors import reject
from gapped.kernels import score_launch

__all__ = [
    "Cost",
    "Sampled",
    "Score",
    "check_costs",
    "draw_independent",
    "one_hot_rows",
    "score_product",
]


@dataclass
class Cost:
    """The cost as an estimator sees it."""

    f: Callable[[Tensor], Tensor]
    logits: Tensor
    """``(*batch, *variables, K)``."""
    dtype: torch.dtype
    """What `f` is given: the dtype of the user's logits."""
    context: Tensor | None = None
    """What a learned baseline may look at."""

    def __call__(self, points: Tensor) -> Tensor:
        """The costs ``(n, *batch)`` of `points` ``(n, *batch, *variables, K)``, in the graph of `f`."""
        costs = self.f(points.to(self.dtype))
        check_costs(costs, points)
        return costs

    def slope(self, costs: Tensor, points: Tensor, create_graph: bool = False) -> Tensor:
        """The derivative of `costs` with respect to the `points` that they were computed from."""
        slope = None
        if costs.requires_grad:
            (slope,) = torch.autograd.grad(
                costs.sum(), points, create_graph=create_graph, retain_graph=True, allow_unused=True
            )
        if slope is None:
            raise reject(
                "f", "costs without a derivative with respect to f's input", "a differentiable function of it"
            )
        return slope

    def spread(self, costs: Tensor) -> Tensor:
        """`costs` ``(n, *batch)`` in a form that broadcasts against ``(n, *batch, *variables, K)``."""
        return costs.reshape(costs.shape + (1,) * (self.logits.dim() + 1 - costs.dim()))


class Sampled(NamedTuple):
    """What was drawn, and what it cost."""

    noise: Any
    """Everything random, in the estimator's own form."""
    chosen: Tensor
    """The categories that were evaluated, ``(n, *batch, *variables)``."""
    points: Tensor
    """The same as one-hot rows."""
    costs: Tensor
    """Their costs, ``(n, *batch)``, without a graph, in the dtype of the logits."""


class Score(ABC):
    """An estimator that learns from the costs of its samples: see `gapped.expectation`."""

    derivatives: ClassVar[int] = 0
    """How often the estimator itself differentiates the cost."""

    @property
    def evaluations(self) -> int | None:
        """At how many samples the cost is evaluated, where that is all that happens to it; else None."""
        return None

    def check_size(self, variables: int, categories: int) -> None:  # noqa: B027 - most are made for any
        """Raise unless this estimator is made for examples of so many variables and categories."""

    def check(self, cost: Cost) -> None:
        """Raise unless this estimator is made for these logits and this context."""
        if cost.context is not None:
            raise reject("context", "a tensor", f"None: {type(self).__name__} has no learned baseline")

    def estimate(
        self, cost: Cost, generator: torch.Generator | None, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The value ``batch``, in the graph of `f`, and the gradient of the logits if it is `wanted`."""
        logits = cost.logits
        with torch.no_grad():
            noise = self.draw(logits, generator)
            index = self.index(logits, noise)
            points = self.points(logits, index)
        costs = cost(points)
        value = costs.mean(0)
        if not wanted:
            return value, None
        sampled = Sampled(noise, index, points, costs.detach().to(logits.dtype))
        with torch.no_grad():
            return value, self.gradient(cost, sampled)

    @abstractmethod
    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Any:
        """Everything random about an estimate."""

    def index(self, logits: Tensor, noise: Any) -> Tensor:
        """The categories to evaluate, ``(n, *batch, *variables)``, each by itself a draw from the softmax."""
        drawn: Tensor = noise
        return drawn

    def points(self, logits: Tensor, index: Tensor) -> Tensor:
        """The categories to evaluate as one-hot rows."""
        return one_hot_rows(logits, index)

    @abstractmethod
    def gradient(self, cost: Cost, sampled: Sampled) -> Tensor:
        """The estimated gradient, ``(*batch, *variables, K)``."""


def one_hot_rows(logits: Tensor, index: Tensor) -> Tensor:
    """Categories of rows of `logits` as one-hot rows."""
    if score_launch.applies(logits):
        return score_launch.one_hot(index, logits.shape[-1])
    return simplex.one_hot(index, logits.shape[-1], logits.dtype)


def score_product(cost: Cost, sampled: Sampled, signal: Tensor) -> Tensor:
    r"""The mean of :math:`s\,(D - p)` over the samples, for signals ``(n, *batch)``."""
    if score_launch.applies(cost.logits):
        return score_launch.score(cost.logits, sampled.chosen, signal)
    return (cost.spread(signal) * (sampled.points - simplex.normalised(cost.logits))).mean(0)


def draw_independent(logits: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` independent draws for each row, ``(samples, *rows)``."""
    if score_launch.applies(logits):
        return score_launch.draw(logits, samples, generator)
    return simplex.inverse_cdf(logits.exp().expand(samples, *logits.shape), generator)


def check_costs(costs: object, points: Tensor) -> None:
    """Check what `f` returned for `points` ``(n, *batch, *variables, K)``: finite costs ``(n, *batch)``."""
    n, rows = points.shape[0], tuple(points.shape[1:-1])
    accepted = f"costs of shape (n, *batch): n = {n}, then some or all of the leading axes of {rows}"
    if not isinstance(costs, Tensor):
        raise reject("f", f"a result of type {type(costs).__name__}", accepted)
    if costs.device != points.device:
        raise reject("f", f"costs on {costs.device}", f"costs on {points.device}, where the samples are")
    if not costs.is_floating_point():
        raise reject("f", f"costs of dtype {costs.dtype}", "floating-point costs")
    shape = tuple(costs.shape)
    if not shape or shape[0] != n or shape[1:] != rows[: len(shape) - 1]:
        raise reject("f", f"costs of shape {shape}", accepted)
    if holds(~costs.detach().isfinite()):
        if holds(points.isnan()):
            raise reject("logits", "rows with NaN or +inf", "numbers, or -inf for a category that is absent")
        raise reject("f", "costs that are not all finite", "finite costs")
