"""Where gradients come from: many at a time from a cost, one by one from a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from gapped.errors import GappedError, reject
from gapped.objective import expectation
from gapped.pathwise import Pathwise
from gapped.score import Score, check_costs
from gapped.score.nvil import NVIL
from gapped.score.trainable import Trainable


class Source(Protocol):
    """Something that independent gradients can be drawn from."""

    size: int
    """Entries of a gradient."""
    device: torch.device
    evaluations: int
    """How often the cost has been evaluated so far, counted by samples."""

    def draw(self, estimator: Any, count: int) -> Tensor:
        """Independent gradients ``(count, size)``."""


@contextmanager
def _evaluation(estimator: Any) -> Iterator[None]:
    """An estimator with a state is measured in evaluation mode, which does not change it.

    Afterwards each of its modules is in its own mode again.
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


class CostGradients:
    """Gradients of the expected cost with respect to logits.

    Independent repetitions are a batch axis of the logits. The cost sees them folded into its leading axis,
    as more samples of the same examples, so it needs to know nothing about them.
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        logits: Tensor,
        mask: Tensor | None,
        generator: torch.Generator | None,
        context: Tensor | None,
    ) -> None:
        self.f, self.logits, self.mask = f, logits.detach(), mask
        self.generator, self.context = generator, context
        self.size, self.device = logits.numel(), logits.device
        self.evaluations = 0

    def draw(self, estimator: Pathwise | Score, count: int) -> Tensor:
        with _evaluation(estimator):
            if getattr(estimator, "network", None) is None:
                gradients = self._gradients(estimator, self.logits.expand(count, *self.logits.shape))
            else:  # a network of the estimator's own is not asked to take another axis
                gradients = torch.stack([self._gradients(estimator, self.logits) for _ in range(count)])
        return gradients.reshape(count, -1)

    def _gradients(self, estimator: Pathwise | Score, logits: Tensor) -> Tensor:
        folded = logits.dim() - self.logits.dim()

        def cost(points: Tensor) -> Tensor:
            samples = points.flatten(0, folded)
            self.evaluations += samples.shape[0]
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


class ModelGradients:
    """Gradients of a loss with respect to parameters."""

    def __init__(
        self,
        loss_fn: Callable[[Any, torch.Generator | None], Tensor],
        parameters: Mapping[str, Tensor],
        generator: torch.Generator | None,
    ) -> None:
        self.loss_fn, self.parameters, self.generator = loss_fn, parameters, generator
        self.size = sum(each.numel() for each in parameters.values())
        self.device = next(iter(parameters.values())).device
        self.evaluations = 0

    def draw(self, estimator: Any, count: int) -> Tensor:
        with _evaluation(estimator):
            return torch.stack([self._gradient(estimator) for _ in range(count)])

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
        found = torch.autograd.grad(loss.sum(), list(self.parameters.values()), allow_unused=True)
        for name, gradient in zip(self.parameters, found, strict=True):
            if gradient is None:
                raise GappedError(f"loss_fn: the loss does not depend on the parameter {name!r}")
            if not gradient.isfinite().all():
                raise GappedError(f"loss_fn: the gradient of {name!r} is not finite")
        return torch.cat([gradient.reshape(-1) for gradient in found if gradient is not None])
