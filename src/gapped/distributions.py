"""A one-hot categorical distribution with `rsample`, for everything that takes `torch.distributions`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.distributions import OneHotCategorical as TorchOneHotCategorical

from gapped import simplex
from gapped.checks import check_logits, check_mask, holds
from gapped.errors import GappedError, reject
from gapped.pathwise.gst import GST
from gapped.registry import Pathwise

__all__ = ["OneHotCategorical"]


class OneHotCategorical(Distribution):
    r"""One-hot categorical distribution whose samples carry a gradient.

    Parameters: `logits` or `probs` (exactly one, categories on the last axis), the pathwise `estimator`
    behind `rsample` (GST by default), and a boolean `mask` of the categories that exist.

    All but `rsample` know the categorical distribution of the logits alone: take an estimator that draws from
    it, which all do but `DecoupledGumbelSoftmax` with another forward temperature than 1.

    `log_prob` is :math:`\langle z, \log p\rangle`, differentiable in the logits and in the sample, and
    :math:`0 \log 0 = 0` throughout: categories without mass add nothing to entropies and divergences.

    >>> q = OneHotCategorical(logits=torch.zeros(2, 4), estimator=GST(tau=0.5))
    >>> q.rsample().shape, q.entropy()
    (torch.Size([2, 4]), tensor([1.3863, 1.3863]))
    """

    arg_constraints: ClassVar = {"logits": constraints.real_vector, "probs": constraints.simplex}
    support = constraints.one_hot
    has_rsample = True
    has_enumerate_support = True

    def __init__(
        self,
        logits: Tensor | None = None,
        probs: Tensor | None = None,
        estimator: Pathwise | None = None,
        mask: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if (logits is None) == (probs is None):
            raise GappedError("OneHotCategorical: give either logits or probs, not both or none")
        self.estimator = GST() if estimator is None else estimator
        if not isinstance(self.estimator, Pathwise):
            raise reject("estimator", estimator, "a pathwise estimator such as gapped.GST()")
        scores = _log(probs) if logits is None else logits
        check_logits(scores)
        check_mask(mask, scores)
        validate = __debug__ if validate_args is None else validate_args
        if validate and holds(scores.isnan() | (scores == torch.inf)):
            if logits is None:
                raise reject("probs", "values out of range", "finite numbers that are not negative")
            raise reject("logits", "values out of range", "finite numbers, or -inf for an absent category")
        self.logits = simplex.log_softmax(simplex.masked(scores, mask))
        # -inf logits are categories that do not exist, not invalid ones.
        super().__init__(self.logits.shape[:-1], self.logits.shape[-1:], validate_args=False)
        self._validate_args = validate

    @property
    def probs(self) -> Tensor:
        return self.logits.exp()

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def variance(self) -> Tensor:
        return self.probs * (1 - self.probs)

    @property
    def mode(self) -> Tensor:
        return simplex.one_hot(simplex.argmax_index(self.logits), self.event_shape[0], self.logits.dtype)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        return self.estimator.sample(
            self.logits.expand(self._extended_shape(sample_shape)), generator=generator
        )

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            rows = simplex.computed(self.logits).expand(self._extended_shape(sample_shape))
            index = simplex.draw_index(rows, generator)
            return simplex.one_hot(index, self.event_shape[0], self.logits.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        # Where the sample is zero the logit is replaced, not multiplied away: 0 * -inf is NaN.
        return (value * self._finite_logits(value != 0)).sum(-1)

    def entropy(self) -> Tensor:
        probs = self.probs
        return -(probs * self._finite_logits(probs > 0)).sum(-1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> OneHotCategorical:
        new: OneHotCategorical = self._get_checked_instance(OneHotCategorical, _instance)  # type: ignore[no-untyped-call]
        batch_shape = torch.Size(batch_shape)
        new.estimator = self.estimator
        new.logits = self.logits.expand(batch_shape + self.event_shape)
        Distribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def enumerate_support(self, expand: bool = True) -> Tensor:
        categories = self.event_shape[0]
        values = torch.eye(categories, dtype=self.logits.dtype, device=self.logits.device)
        values = values.view((categories,) + (1,) * len(self.batch_shape) + (categories,))
        return values.expand((categories, *self.batch_shape, categories)) if expand else values

    def _finite_logits(self, where: Tensor) -> Tensor:
        return torch.where(where, self.logits, 0.0)


def _log(probs: object) -> Tensor:
    """Logits of `probs`; those of zeros, -inf, have no slope instead of an infinite one."""
    if not isinstance(probs, Tensor):
        kind = f"an object of type {type(probs).__name__}"
        raise reject("probs", kind, "a floating-point tensor of probabilities, one per category")
    empty = probs == 0
    return torch.where(empty, 1.0, probs).log().masked_fill(empty, -torch.inf)


def _divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    p = p_logits.exp()
    # Selected before multiplying: a category without mass must not bring 0 * inf into the gradient.
    difference = torch.where(p > 0, p_logits, 0.0) - torch.where(p > 0, q_logits, 0.0)
    return (p * difference).sum(-1)


@register_kl(OneHotCategorical, OneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_ours_ours(p: OneHotCategorical, q: OneHotCategorical) -> Tensor:
    return _divergence(p.logits, q.logits)


@register_kl(OneHotCategorical, TorchOneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_ours_torch(p: OneHotCategorical, q: TorchOneHotCategorical) -> Tensor:
    return _divergence(p.logits, q.logits)


@register_kl(TorchOneHotCategorical, OneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_torch_ours(p: TorchOneHotCategorical, q: OneHotCategorical) -> Tensor:
    return _divergence(p.logits, q.logits)
