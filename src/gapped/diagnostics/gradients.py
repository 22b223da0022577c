"""Independent gradients of a cost or of a whole model, and the reference that they are measured against.

A reference is given, enumerated, or the mean of unbiased gradients.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapped import simplex
from gapped.diagnostics.moments import (
    LEAST,
    GradientStream,
    Interval,
    Moments,
    mean_interval,
    norm_interval,
    normal_quantile,
)
from gapped.errors import GappedError, reject
from gapped.objective import expectation
from gapped.pathwise import Pathwise
from gapped.score import Cost, Draws, Score, check_costs, draw_independent
from gapped.score.double_cv import DoubleCV
from gapped.score.exact import LIMIT, Exact
from gapped.score.nvil import NVIL
from gapped.score.reinforce import RLOO
from gapped.score.trainable import Trainable

Progress = Callable[[str, int, int], None]
"""A callback: what is being measured, how many of its gradients are done, and how many there will be."""

# Numbers given to the cost in one call, which stay in a cache, and the most gradients drawn together.
_GROUP, _LARGEST_GROUP = 2**17, 512
# Random samples that a cost is tried on.
_PROBES = 64
_KINDS = ("auto", "exact", "coordinate", "double-cv", "rloo")
# Samples of an unbiased gradient, and groups of gradients that show what the slopes of the cost gain.
_SAMPLES, _PILOTS = 16, 8
# The most numbers in an enumeration, and per gradient with coordinates summed out.
_ENUMERATED, _SUMMED = 2**24, 2**22


@contextmanager
def _evaluation(estimator: Any) -> Iterator[None]:
    """Evaluation mode for an estimator with a state, which leaves that state and the modes as they are."""
    modules = list(estimator.modules()) if isinstance(estimator, Trainable) else []
    modes = [each.training for each in modules]
    try:
        for each in modules:
            each.training = False
        yield
    finally:
        for each, training in zip(modules, modes, strict=True):
            each.training = training


def _private(device: torch.device) -> torch.Generator:
    """A generator of our own, seeded out of torch's: a cost that seeds that one must not repeat our noise."""
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))


class CostGradients:
    """Gradients of the expected cost with respect to logits.

    Independent repetitions are a batch axis of the logits. The cost sees them folded into its leading axis,
    as more samples of the same examples, so it needs to know nothing about them.
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        logits: Tensor,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        context: Tensor | None = None,
    ) -> None:
        self.f, self.logits, self.mask = f, logits.detach(), mask
        self.generator, self.context = generator or _private(logits.device), context
        self.size, self.device = logits.numel(), logits.device
        self.parameters: Mapping[str, Tensor] = {}
        self.eps = torch.finfo(logits.dtype).eps
        """The relative rounding error of a gradient."""
        self.batch_axes = _batch_axes(f, self.logits, mask)
        """How many of the logits' axes are the batch."""
        self._evaluations = 0

    def draw(self, estimator: Pathwise | Score, count: int) -> Tensor:
        """Independent gradients `(count, size)`."""
        with _evaluation(estimator):
            if getattr(estimator, "network", None) is None:
                gradients = self._gradients(estimator, self.logits.expand(count, *self.logits.shape))
            else:  # the estimator's own network need not accept another axis
                gradients = torch.stack([self._gradients(estimator, self.logits) for _ in range(count)])
        return gradients.reshape(count, -1)

    def evaluations(self, estimator: Pathwise | Score) -> float:
        """How many samples the cost is evaluated at for one gradient, counted."""
        before = self._evaluations
        self.draw(estimator, 1)
        return float(self._evaluations - before)

    def _gradients(self, estimator: Pathwise | Score, logits: Tensor) -> Tensor:
        folded = logits.dim() - self.logits.dim()

        def cost(points: Tensor) -> Tensor:
            samples = points.flatten(0, folded)
            self._evaluations += samples.shape[0]
            costs = self.f(samples)
            check_costs(costs, samples)
            return costs.reshape(*points.shape[: folded + 1], *costs.shape[1:])

        context = self.context if isinstance(estimator, NVIL) and estimator.network is not None else None
        with torch.enable_grad():
            leaf = logits.clone().requires_grad_()
            value = expectation(
                cost, leaf, estimator, mask=self.mask, generator=self.generator, context=context
            )
            (gradient,) = torch.autograd.grad(value.sum(), leaf, allow_unused=True)
        if gradient is None or not gradient.isfinite().all():
            what = "no derivative" if gradient is None else "a derivative that is not finite"
            raise reject(
                "f",
                f"{what} with respect to f's input, for {type(estimator).__name__}",
                "a differentiable function of it, or an estimator that needs none such as gapped.RLOO(2)",
            )
        return gradient


def _batch_axes(f: Callable[[Tensor], Tensor], logits: Tensor, mask: Tensor | None) -> int:
    """How many of the logits' axes are the batch, after checking that `f` is a cost that can be measured.

    The costs of random samples must have the right shape, be finite, be equal in a second call, depend on
    the sample, and not depend on the other samples of the call.
    """
    exists = simplex.masked(logits, mask) > -torch.inf
    if not (exists.sum(-1) > 1).any():
        raise reject("logits", "no row with a choice", "at least one row with two categories or more")
    # Every category that exists is equally likely.
    levels = torch.where(exists, 0.0, -torch.inf).expand(_PROBES, *exists.shape)
    index = simplex.draw_index(levels, torch.Generator(exists.device).manual_seed(0))
    points = simplex.one_hot(index, exists.shape[-1], logits.dtype)

    @torch.no_grad()
    def costs_of(points: Tensor) -> Tensor:
        # A copy: a cost that writes into its input must not change the next call.
        costs = f(points.clone())
        check_costs(costs, points)
        return costs

    first = costs_of(points)
    if not first.isfinite().all():
        raise reject("f", "costs that are not all finite", "finite costs")
    # The cost may compute in the dtype of its samples, whatever dtype it returns.
    eps = max(torch.finfo(each.dtype).eps for each in (first, points))
    tolerance = eps * first.abs().max()
    # On a GPU, a second call may add in another order.
    slack = 0.0 if first.device.type == "cpu" else 16 * tolerance
    if ((costs_of(points) - first).abs() > slack).any():
        raise GappedError("f: not deterministic: the same samples got other costs when asked again")
    if (first.amax(0) - first.amin(0) <= 16 * tolerance).all():
        raise GappedError(
            f"f: ignores its input: {_PROBES} random samples all cost the same, expected a cost that depends "
            "on the sample"
        )
    alone = torch.cat([costs_of(points[i : i + 1]) for i in range(4)])
    # Products of other shapes round differently; a mean over the samples differs by far more.
    if ((alone - first[:4]).abs() > 1e3 * tolerance).any():
        raise GappedError(
            "f: the cost of a sample depends on the other samples of the call, expected a function of each "
            "alone (no mean over the leading axis, no batch normalisation)"
        )
    return first.dim() - 1


class ModelGradients:
    """Gradients of a loss with respect to parameters."""

    def __init__(
        self,
        loss_fn: Callable[[Any, torch.Generator | None], Tensor],
        parameters: Mapping[str, Tensor],
        generator: torch.Generator | None,
    ) -> None:
        self.loss_fn, self.parameters = loss_fn, parameters
        self.size = sum(each.numel() for each in parameters.values())
        first = next(iter(parameters.values()))
        self.generator = generator or _private(first.device)
        self.device, self.eps = first.device, torch.finfo(first.dtype).eps

    def draw(self, estimator: Any, count: int) -> Tensor:
        """Independent gradients `(count, size)`."""
        with _evaluation(estimator):
            return torch.stack([self._gradient(estimator) for _ in range(count)])

    def evaluations(self, estimator: Any) -> None:
        """Unknown: the loss decides how often it evaluates which cost."""

    def _gradient(self, estimator: Any) -> Tensor:
        with torch.enable_grad():
            loss = self.loss_fn(estimator, self.generator)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise reject("loss_fn", f"a result of shape or type {got}", "a loss, one number in a tensor")
        if not loss.isfinite():
            raise reject("loss_fn", "a loss that is not finite", "a finite loss")
        if not loss.requires_grad:
            raise GappedError("loss_fn: the loss depends on no parameter that requires a gradient")
        gradients = torch.autograd.grad(loss.sum(), list(self.parameters.values()), allow_unused=True)
        for name, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                raise GappedError(f"loss_fn: the loss does not depend on the parameter {name!r}")
            if not gradient.isfinite().all():
                raise GappedError(f"loss_fn: the gradient of {name!r} is not finite")
        return torch.cat([gradient.reshape(-1) for gradient in gradients])


Source = CostGradients | ModelGradients


def collect(
    source: Source,
    estimator: Any,
    samples: int,
    label: str,
    progress: Progress | None,
    target: Tensor | None = None,
) -> tuple[GradientStream, Moments]:
    """Draw `samples` gradients, group by group: their moments, and those of the seconds per gradient."""
    stream, seconds = GradientStream(source.size, source.device, target), Moments(torch.zeros(()))
    numbers = source.size * int(source.evaluations(estimator) or 1)
    # As many as fit, but several groups, from which the time gets its interval.
    size = max(LEAST, min(_GROUP // max(numbers, 1), _LARGEST_GROUP, samples // 8))
    groups = max(samples // size, 1)
    for i in range(groups):
        count = samples * (i + 1) // groups - stream.count
        synchronize(source.device)
        start = time.perf_counter()
        gradients = source.draw(estimator, count)
        synchronize(source.device)
        seconds.add(torch.tensor((time.perf_counter() - start) / count, dtype=torch.float64))
        stream.add(gradients)
        if progress is not None:
            progress(label, stream.count, samples)
    return stream, seconds


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; on a CPU nothing is left to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Coordinates(Score):
    r"""One variable summed out at a time: the other variables are drawn, this one takes all its values.

    With :math:`f_{lk}` the cost of the sample after its variable :math:`l` is set to :math:`k`,

    .. math:: \nabla_{\theta_l} = p_l \odot \bigl(f_l - \langle p_l, f_l\rangle\bigr).

    It is the exact gradient given the other variables, so it is unbiased, with no more variance than any
    estimator that draws all variables independently. `L K` evaluations, and one to learn which axes are the
    batch. With one variable it is exact.

    References: Titsias and Lázaro-Gredilla (2015).
    """

    def estimate(
        self, cost: Cost, generator: torch.Generator | None, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits, categories = cost.logits, cost.logits.shape[-1]
        with torch.no_grad():
            draws = draw_independent(logits, 1, generator)
            batch = cost(simplex.one_hot(draws, categories, logits.dtype)).shape[1:]
            p = simplex.normalised(logits).reshape(*batch, -1, categories)
            index = _substitute(draws.reshape(*batch, -1), p > 0)
            points = simplex.one_hot(index.reshape(-1, *logits.shape[:-1]), categories, logits.dtype)
        # (L K, *batch) to (*batch, L, K)
        costs = cost(points).reshape(-1, categories, *batch).movedim((0, 1), (-2, -1))
        value = (p * costs).sum(-1).mean(-1)
        if not wanted:
            return value, None
        with torch.no_grad():
            # Relative to the cost of the likeliest category, in float64: costs far from zero keep their
            # differences, and p, which sums to 1 only up to rounding, multiplies no large number.
            costs = simplex.accumulated(costs)
            relative = costs - costs.gather(-1, p.argmax(-1, keepdim=True))
            gradient = p * (relative - (p * relative).sum(-1, keepdim=True))
        return value, gradient.reshape(logits.shape).to(logits.dtype)

    def gradient(self, cost: Cost, draws: Draws) -> Tensor:
        raise NotImplementedError("what is evaluated depends on which axes are the batch")


def _substitute(index: Tensor, possible: Tensor) -> Tensor:
    """`index` `(*batch, L)` with each entry set to each category in turn, `(L, K, *batch, L)`.

    Where a category is impossible the entry stays: the cost need not be defined there.
    """
    variables, categories = possible.shape[-2:]
    batch = (1,) * (index.dim() - 1)
    here = torch.eye(variables, dtype=torch.bool, device=index.device).view(variables, 1, *batch, variables)
    value = torch.arange(categories, device=index.device).view(1, categories, *batch, 1)
    return torch.where(here & possible.movedim(-1, 0).unsqueeze(0), value, index)


@dataclass(frozen=True, eq=False)
class Reference:
    """A gradient, and how well it is known."""

    kind: str
    """Where it comes from."""
    gradient: Tensor
    """The flat gradient `(d,)`, float64."""
    noise: float = 0.0
    """The trace of the covariance of its error; 0 if it is exact."""
    overlap: float = 0.0
    """The trace of the square of that covariance."""
    is_exact: bool = True

    @classmethod
    def of(cls, name: str, stream: GradientStream) -> Reference:
        """The mean of a stream of unbiased gradients; `name` says which ones."""
        count = stream.count
        overlap = float(stream.overlap.mean) / count**2
        kind = f"{name}, {count:,} gradients"
        return cls(kind, stream.gradient.mean.clone(), stream.variance / count, overlap, False)

    def norm(self, confidence: float) -> Interval:
        """The length of the exact gradient."""
        square = float(self.gradient.square().sum())
        # The root of the overlap bounds the variance along any direction.
        return norm_interval(square, self.noise, self.overlap, math.sqrt(self.overlap), confidence)

    def errors_of(self, stream: GradientStream, confidence: float, eps: float) -> dict[str, Any]:
        """What a `Row` says of the stream's gradients beside this one, by the name of its field.

        `eps` is the relative rounding error of a gradient. A reference of length zero has no direction, and
        then there is no cosine.
        """
        n, mean = stream.count, stream.gradient.mean
        square = float((mean - self.gradient).square().sum())
        noise = stream.variance / n + self.noise
        # The root of an overlap bounds the variance along any direction, and, by Cauchy and Schwarz, what
        # the errors of estimator and reference have in common.
        own, root = math.sqrt(max(float(stream.overlap.mean), 0.0)) / n, math.sqrt(self.overlap)
        length = self.norm(confidence).value
        resolution = 16 * eps * (length + float(mean.norm()))

        def bias_at(level: float) -> Interval:
            return norm_interval(square, noise, (own + root) ** 2, stream.along / n + root, level, resolution)

        # Two limits enter a ratio: each gets half of the error unless the length is known exactly.
        level = confidence if self.is_exact else (1 + confidence) / 2
        size = norm_interval(float(mean.square().sum()), stream.variance / n, own**2, own, level)
        z = normal_quantile(confidence)
        doubt = 4 * max(square - noise, 0.0) * root + 2 * self.overlap
        error, cosine = stream.error, None
        mse = mean_interval(float(error.mean) - self.noise, float(error.variance), n, confidence)
        if length > 0:
            middle, spread = float(stream.cosine.mean) / length, float(stream.cosine.variance) / length**2
            cosine = mean_interval(middle, spread, n, confidence)
            cosine = cosine.widen(z * self.overlap**0.25 / length).clamp(-1.0, 1.0)
        return {
            "bias": bias_at(confidence),
            "relative_bias": bias_at(level) / self.norm(level),
            "mse": mse.widen(z * math.sqrt(doubt)).clamp(0.0),
            "cosine": cosine,
            "relative_norm": size / self.norm(level),
        }


def reference_of(
    source: CostGradients, reference: str | Tensor, samples: int, progress: Progress | None
) -> Reference:
    """The reference that `gapped.diagnose` is asked for."""
    if isinstance(reference, Tensor):
        if reference.shape != source.logits.shape or not reference.isfinite().all():
            accepted = f"a finite tensor of the logits' shape {tuple(source.logits.shape)}"
            raise reject("reference", f"a tensor of shape {tuple(reference.shape)}", accepted)
        return Reference("the gradient that was given", reference.detach().double().reshape(-1))
    if reference not in _KINDS:
        raise reject("reference", reference, f"one of {', '.join(_KINDS)}, or a tensor")
    is_open = reference == "auto"
    if is_open:
        reference = _affordable(source.logits, source.batch_axes)
    if reference == "exact":
        return Reference("exact, by enumeration", source.draw(Exact(), 1)[0].double())
    if reference == "coordinate":
        stream, _ = collect(source, Coordinates(), max(samples // 4, 64), "reference", progress)
        return Reference.of("one variable summed out at a time", stream)
    unbiased: Score = RLOO(_SAMPLES)
    if reference == "double-cv" and (not is_open or _has_slopes(source)):
        alpha, ratio = _best_factor(source)
        if not is_open or ratio < 0.5:  # a derivative costs about as much as the evaluations
            unbiased = DoubleCV(_SAMPLES, alpha=alpha)
    stream, _ = collect(source, unbiased, samples, "reference", progress)
    return Reference.of(f"{type(unbiased).__name__} with {_SAMPLES} samples", stream)


def _has_slopes(source: CostGradients) -> bool:
    try:
        source.draw(DoubleCV(2), 1)
    except GappedError:
        return False
    return True


def _best_factor(source: CostGradients) -> tuple[float, float]:
    """The factor of `DoubleCV` with the least variance, and its variance as a fraction of RLOO's.

    The gradient is linear in the factor, so two values with the same noise tell all. The gradients of the
    reference itself are others: its factor may not depend on them.
    """
    pilot = copy.copy(source)
    product = square = variance = 0.0
    for _ in range(_PILOTS):
        seed = int(torch.randint(2**63 - 1, (), generator=source.generator, device=source.device))
        at = []
        for alpha in (0.0, 1.0):
            pilot.generator = torch.Generator(source.device).manual_seed(seed)
            at.append(pilot.draw(DoubleCV(_SAMPLES, alpha=alpha), LEAST).double())
        plain, change = at[0] - at[0].mean(0), at[1] - at[0]
        change = change - change.mean(0)
        product += float((plain * change).sum())
        square += float(change.square().sum())
        variance += float(plain.square().sum())
    alpha = -product / square if square > 0 else 0.0
    return alpha, 1 - product**2 / (square * variance) if square * variance > 0 else 1.0


def _affordable(logits: Tensor, batch_axes: int) -> str:
    """The most precise kind of reference that is affordable."""
    categories, variables = logits.shape[-1], math.prod(logits.shape[batch_axes:-1])
    # Any larger exponent is far beyond the limit, and slow to compute.
    combinations = categories ** min(variables, 64)
    if combinations <= LIMIT and combinations * logits.numel() <= _ENUMERATED:
        return "exact"
    return "coordinate" if variables * categories * logits.numel() <= _SUMMED else "double-cv"
