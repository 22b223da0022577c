"""Estimators that need the cost of each sample, one file each; here is the base class that they share.

An estimator consists of three methods, of which only the last must be written. `draw` generates everything
random: by default, independent samples. `index` is a pure function of the logits and that noise, and returns
the categories to evaluate: by default, the noise itself. `gradient` is a pure function of these and of their
costs. All three get logits in float32 or float64, without a graph, with the categories on the last axis and
relative to the largest of their row (`simplex.shift`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import holds, in_eager_mode, may_decide
from gapped.errors import GappedError, reject
from gapped.kernels import backend


@dataclass
class Cost:
    """The cost as an estimator sees it."""

    f: Callable[[Tensor], Tensor]
    logits: Tensor
    """`(*batch, *variables, K)`."""
    dtype: torch.dtype
    """The dtype of the user's logits, which is that of the samples that `f` gets."""
    context: Tensor | None = None
    """The input of a learned baseline."""

    def __call__(self, points: Tensor) -> Tensor:
        """The costs `(n, *batch)` of `points` `(n, *batch, *variables, K)`, in the graph of `f`."""
        # Points that are differentiated must not change: f gets a copy to write into. Compilers do not tell.
        is_leaf = points.requires_grad or torch.compiler.is_compiling()
        costs = self.f(points.to(self.dtype, copy=is_leaf))
        check_costs(costs, points)
        return costs

    def spread(self, signal: Tensor) -> Tensor:
        """`signal` `(n, *batch)` as a factor of `(n, *batch, *variables, K)`, in the logits' dtype."""
        signal = signal.to(self.logits.dtype)
        return signal.reshape(signal.shape + (1,) * (self.logits.dim() + 1 - signal.dim()))


class Draws(NamedTuple):
    """Samples and their costs."""

    noise: Any
    """Everything random, in the estimator's own form."""
    category: Tensor
    """The evaluated categories, `(n, *batch, *variables)`. The cost owns their one-hot rows and may have
    written into them, so an estimator that needs them builds them again."""
    costs: Tensor
    """Their costs, `(n, *batch)`, without a graph, in float64: costs far from zero keep their differences
    until a baseline is subtracted."""
    slopes: Tensor | None = None
    """The derivatives of the costs at the samples, `(n, *batch, *variables, K)`, without a graph, for an
    estimator that `needs_slopes`."""


class Score(ABC):
    """An estimator that learns from the costs of its samples.

    `gapped.RLOO`, `gapped.REBAR` and the others of this family are its subclasses. They are used as
    `gapped.expectation(f, logits, estimator)`, and have no method `sample`: their gradient needs the cost.
    """

    name: ClassVar[str]
    """Its name in the registry, on the command line and in records."""
    derivatives: ClassVar[int] = 0
    """How often the estimator itself differentiates the cost."""
    needs_slopes: ClassVar[bool] = False
    """Whether `gradient` needs the derivatives of the costs at the samples."""
    samples: int = 1
    """How many independent samples `draw` takes, unless overridden."""
    takes_samples_alone: ClassVar[bool] = False
    """Whether `gradient` needs nothing of the cost but these samples' values, and slopes."""

    @property
    def evaluations(self) -> int | None:
        """At how many samples the cost is evaluated, if nothing but its slopes there is needed; else None."""
        return self.samples if self.takes_samples_alone else None

    @property
    def remembers(self) -> bool:
        """Whether a gradient depends on earlier calls, so that it cannot be computed again later."""
        return False

    def sample(self, *arguments: Any, **options: Any) -> NoReturn:
        """There is none: raises an error that says what to use instead."""
        name = type(self).__name__
        raise GappedError(
            f"{name}.sample: a score-function estimator needs the cost of its samples, "
            f"use gapped.expectation(f, logits, {name}(...)), or a pathwise estimator such as gapped.GST()"
        )

    def check_size(self, variables: int, categories: int) -> None:  # noqa: B027 - most take any size
        """Raise unless this estimator can handle examples of this many variables and categories."""

    def check(self, cost: Cost) -> None:
        """Raise unless this estimator can handle these logits and this context."""
        if cost.context is not None:
            raise reject("context", "a tensor", f"None: {type(self).__name__} has no learned baseline")
        self.check_size(1, cost.logits.shape[-1])

    def estimate(
        self, cost: Cost, generator: torch.Generator | None, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The value `batch`, in the graph of `f`, and, if `wanted`, the gradient of the logits."""
        logits = cost.logits
        with torch.no_grad():
            noise = self.draw(logits, generator)
            index = self.index(logits, noise)
        points, slopes = self.points(logits, index), None
        if wanted and self.needs_slopes:
            costs, pull = pullback(cost, points)
            slopes = drop_absent(pull(torch.ones_like(costs)).detach(), logits)
        else:
            costs = cost(points)
        value = costs.mean(0)
        if not wanted:
            return value, None
        draws = Draws(noise, index, simplex.accumulated(costs.detach()), slopes)
        with torch.no_grad():
            return value, self.gradient(cost, draws)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Any:
        """Everything random about an estimate."""
        return draw_independent(logits, self.samples, generator)

    def index(self, logits: Tensor, noise: Any) -> Tensor:
        """The categories to evaluate, `(n, *batch, *variables)`, each by itself a draw from the softmax."""
        index: Tensor = noise
        return index

    def points(self, logits: Tensor, index: Tensor) -> Tensor:
        """The categories to evaluate as one-hot rows."""
        return one_hot_rows(logits, index)

    @abstractmethod
    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        """The estimated gradient, `(*batch, *variables, K)`."""


def pullback(
    function: Callable[[Tensor], Tensor], x: Tensor, create_graph: bool = False
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`function(x)`, and the function that takes a gradient at it back to `x`.

    Compilers and function transforms support `torch.func` alone. Eager code uses plain autograd, which puts
    no restrictions on `function`.
    """

    def value_of(x: Tensor) -> Tensor:
        value = function(x)
        if not value.requires_grad:
            raise without_derivative()
        return value

    if not in_eager_mode():
        value, pull, *_ = torch.func.vjp(value_of, x)
        return value, lambda grad: pull(grad)[0]
    with torch.enable_grad():
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        value = value_of(leaf)

    def back(grad: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(
            value, leaf, grad, create_graph=create_graph, retain_graph=True, allow_unused=True
        )
        if slope is None:
            raise without_derivative()
        return slope

    return value, back


def drop_absent(slopes: Tensor, logits: Tensor) -> Tensor:
    """Slopes or a gradient, 0 at categories that do not exist: there they may be anything."""
    return torch.where(logits == -torch.inf, 0.0, slopes)


def without_derivative(hint: str = "") -> GappedError:
    """The error for a cost that must be differentiated and cannot be."""
    got, accepted = "costs without a derivative with respect to f's input", "a differentiable function of it"
    return reject("f", got, accepted + hint)


def one_hot_rows(logits: Tensor, index: Tensor) -> Tensor:
    """Categories of rows of `logits` as one-hot rows."""
    if backend.takes_scores(logits):
        from gapped.kernels import scores

        return scores.one_hot(index, logits.shape[-1])
    return simplex.one_hot(index, logits.shape[-1], logits.dtype)


def score_product(cost: Cost, draws: Draws, signal: Tensor) -> Tensor:
    """The mean of `s (D - p)` over the samples, for signals `(n, *batch)`."""
    if backend.takes_scores(cost.logits):
        from gapped.kernels import scores

        return scores.score(cost.logits, draws.category, signal.to(cost.logits.dtype))
    points = one_hot_rows(cost.logits, draws.category)
    return (cost.spread(signal) * (points - simplex.normalised(cost.logits))).mean(0)


def draw_independent(logits: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` independent draws for each row, `(samples, *rows)`."""
    if backend.takes_scores(logits):
        from gapped.kernels import scores

        return scores.draw(logits, samples, generator)
    weights = logits.exp()
    return simplex.inverse_cdf(weights, generator, samples) + weights[..., 0].isnan()


def check_costs(costs: object, points: Tensor) -> None:
    """Check what `f` returned for `points` `(n, *batch, *variables, K)`: finite costs `(n, *batch)`."""
    n, rows = points.shape[0], tuple(points.shape[1:-1])
    accepted = f"a tensor of costs (n, *batch): n = {n}, then some or all of the leading axes of {rows}"
    if not isinstance(costs, Tensor):
        raise reject("f", f"a result of type {type(costs).__name__}", accepted)
    if costs.device != points.device:
        raise reject("f", f"costs on {costs.device}", f"costs on {points.device}, where the samples are")
    if not costs.is_floating_point():
        raise reject("f", f"costs of dtype {costs.dtype}", "floating-point costs")
    shape = tuple(costs.shape)
    if not shape or shape[0] != n or shape[1:] != rows[: len(shape) - 1]:
        raise reject("f", f"costs of shape {shape}", accepted)
    if may_decide(costs) and holds(~costs.detach().isfinite()):
        if holds(points.isnan()):
            raise reject("logits", "rows with NaN or +inf", "numbers, or -inf for a category that is absent")
        raise reject("f", "costs that are not all finite", "finite costs")
