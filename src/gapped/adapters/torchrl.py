"""Estimators for torchrl: actions of a one-hot policy, and states of DreamerV3's world model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchrl.modules import distributions
from torchrl.modules.models import model_based

from gapped.drop_in import Place
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.simplex import unimix


class _Estimated:
    """The part of both distributions: `grad_method` may be an estimator, and is the default one."""

    def __init__(self, *args: Any, grad_method: Any = None, **kwargs: Any) -> None:
        if not isinstance(grad_method, distributions.ReparamGradientStrategy):
            grad_method = resolve_pathwise(grad_method)
        super().__init__(*args, grad_method=grad_method, **kwargs)  # type: ignore[call-arg]

    def rsample(self: Any, sample_shape: Any = None) -> Tensor:
        if not isinstance(self.grad_method, Pathwise):
            result: Tensor = super().rsample(sample_shape)  # type: ignore[misc]
            return result
        logits = self.logits
        if getattr(self, "_sparse_mask", False):
            # Indices of the actions that are allowed: all others have no mass. Padding, which may be any
            # number, goes to a place of its own.
            allowed, padding = self._mask.expand(logits.shape), self._padding_value
            where = allowed if padding is None else allowed.masked_fill(allowed == padding, self.num_samples)
            absent = logits.new_full((*logits.shape[:-1], self.num_samples + 1), -torch.inf)
            logits = absent.scatter(-1, where, logits)[..., :-1]
        return self.grad_method.sample(logits.expand(*(sample_shape or ()), *logits.shape))


class OneHotCategorical(_Estimated, distributions.OneHotCategorical):
    """torchrl's one-hot categorical distribution whose `rsample` is a gapped estimator's.

    Arguments:
        logits, probs: As in torchrl.
        grad_method: A pathwise estimator, an object or its text, or a strategy of torchrl; None is the
            recommended default.
    """


class MaskedOneHotCategorical(_Estimated, distributions.MaskedOneHotCategorical):
    """torchrl's masked one-hot categorical distribution whose `rsample` is a gapped estimator's.

    Arguments:
        logits, probs, mask, indices, neg_inf, padding_value: As in torchrl.
        grad_method: As in `OneHotCategorical`.
    """


_PLACE = Place(model_based, "_straight_through_categorical")


@contextmanager
def replacing_straight_through(estimator: Pathwise | str | None = None) -> Iterator[None]:
    """Context in which the states of torchrl's DreamerV3 modules are drawn by an estimator.

    Arguments:
        estimator: A pathwise estimator, an object or its text; None is the recommended default.

    The share of the uniform distribution is that of each module, `unimix`. Uniforms that a rollout has drawn
    beforehand are not used. Contexts may overlap, and warn as those of `gapped.replacing_torch`.
    """
    resolved = resolve_pathwise(estimator)

    def draw(logits: Tensor, unimix_share: float = 0.0, uniform: Tensor | None = None) -> Tensor:
        return resolved.sample(unimix(logits, unimix_share) if unimix_share else logits)

    with _PLACE.hold(draw, "replacing_straight_through: no module of torchrl drew a state"):
        yield
