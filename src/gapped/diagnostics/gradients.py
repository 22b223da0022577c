"""Sources of independent gradients: a cost, many at a time, or a whole model, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gapped import simplex
from gapped.diagnostics.moments import LEAST, GradientStream, Moments
from gapped.errors import GappedError, reject
from gapped.objective import expectation
from gapped.pathwise import Pathwise
from gapped.score import Score, check_costs
from gapped.score.nvil import NVIL
from gapped.score.trainable import Trainable

Progress = Callable[[str, int, int], None]
"""A callback: what is being measured, how many of its gradients are done, and how many there will be."""

# Numbers given to the cost in one call, which stay in a cache, and the most gradients drawn together.
_GROUP, _LARGEST_GROUP = 2**17, 512
# Random samples that a cost is tried on.
_PROBES = 64


@contextmanager
def _evaluation(estimator: Any) -> Iterator[None]:
    """Evaluation mode for an estimator with a state, which leaves that state as it is.

    On exit each of its modules returns to its own mode.
    """
    modes = (
        [(each, each.training) for each in estimator.modules()] if isinstance(estimator, Trainable) else []
    )
    try:
        for each, _ in modes:
            each.training = False
        yield
    finally:
        for each, training in modes:
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
