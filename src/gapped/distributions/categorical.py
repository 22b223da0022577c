"""The one-hot categorical distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, register_kl
from torch.distributions import OneHotCategorical as TorchOneHotCategorical

from gapped import simplex
from gapped.checks import check_logits, check_mask, holds
from gapped.distributions.parameters import Enumerable, divergence, log_of, only_one
from gapped.errors import reject
from gapped.pathwise import Pathwise, resolve_pathwise


class OneHotCategorical(Enumerable, TorchOneHotCategorical):
    """One-hot categorical distribution whose samples carry a gradient.

    It takes the place of `torch.distributions.OneHotCategorical`, and has `rsample` as well.

    Arguments:
        probs: Probabilities, the categories on the last axis. Exactly one of `probs` and `logits` is given.
        logits: Unnormalised log-probabilities, the categories on the last axis.
        validate_args: As in torch: whether to check arguments and samples; None is torch's default.
        estimator: The pathwise estimator behind `rsample`, an object or its text; None is the recommended
            default.
        mask: Booleans that broadcast against the parameters; categories where it is False do not exist.

    Half precision is computed in float32 and rounded once, at the end. A row without categories, or whose
    `probs` are all 0, is no error, as it is in torch: its samples are zero, which `log_prob` validates as no
    sample.

    All but `rsample` know the categorical distribution of the logits alone: take an estimator that draws from
    it, which all do but `gapped.DecoupledGumbelSoftmax` with another forward temperature than 1.

    `log_prob` is ⟨z, log p⟩, differentiable in the logits and in the sample z, and 0 log 0 = 0 throughout:
    categories without mass add nothing to entropies and divergences.

    >>> q = OneHotCategorical(logits=torch.zeros(2, 4), estimator="gst:tau=0.5")
    >>> q.rsample().shape, q.entropy()
    (torch.Size([2, 4]), tensor([1.3863, 1.3863]))
    """

    has_rsample = True

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        estimator: Pathwise | str | None = None,
        mask: Tensor | None = None,
    ) -> None:
        parameter = only_one("OneHotCategorical", probs, logits)
        self.estimator = resolve_pathwise(estimator)
        scores = log_of(probs) if logits is None else logits
        check_logits(scores)
        check_mask(mask, scores)
        validate = Distribution._validate_args if validate_args is None else validate_args
        if validate and holds(scores.isnan() | (scores == torch.inf)):
            if logits is None:
                raise reject("probs", "values out of range", "finite numbers that are not negative")
            raise reject("logits", "values out of range", "finite numbers, or -inf for an absent category")
        self._dtype = parameter.dtype
        self._log_p = simplex.log_softmax(simplex.masked(simplex.computed(scores), mask))
        # -inf logits are categories that do not exist, not invalid ones.
        Distribution.__init__(self, self._log_p.shape[:-1], self._log_p.shape[-1:], validate_args=False)
        self._validate_args = validate

    @property
    def logits(self) -> Tensor:
        return self._log_p.to(self._dtype)

    @property
    def probs(self) -> Tensor:
        return self._log_p.exp().to(self._dtype)

    @property
    def _categorical(self) -> Categorical:  # type: ignore[override]
        """The law of the index, an attribute of torch's class that code around it reads."""
        return Categorical(logits=self.logits, validate_args=False)

    @property
    def _param(self) -> Tensor:
        return self.logits

    @property
    def param_shape(self) -> torch.Size:
        return self._log_p.shape

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def variance(self) -> Tensor:
        probs = self._log_p.exp()
        return (probs * (1 - probs)).to(self._dtype)

    @property
    def mode(self) -> Tensor:
        return simplex.one_hot(simplex.argmax_index(self._log_p), self.event_shape[0], self._dtype)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        rows = self._log_p.expand(self._extended_shape(sample_shape))
        return self.estimator.sample(rows, generator=generator).to(self._dtype)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            index = simplex.draw_index(self._log_p.expand(self._extended_shape(sample_shape)), generator)
            return simplex.one_hot(index, self.event_shape[0], self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        # 0 * -inf would be NaN: such a logit is replaced. All others stay, for the derivative by the sample.
        log_p = torch.where((value == 0) & (self._log_p == -torch.inf), 0.0, self._log_p)
        return (value * log_p).sum(-1).to(torch.promote_types(value.dtype, self._dtype))

    def entropy(self) -> Tensor:
        probs = self._log_p.exp()
        return -(probs * torch.where(probs > 0, self._log_p, 0.0)).sum(-1).to(self._dtype)

    def expand(self, batch_shape: Any, _instance: Any = None) -> OneHotCategorical:
        new: OneHotCategorical = self._get_checked_instance(OneHotCategorical, _instance)  # type: ignore[no-untyped-call]
        batch_shape = torch.Size(batch_shape)
        new.estimator, new._dtype = self.estimator, self._dtype
        new._log_p = self._log_p.expand(batch_shape + self.event_shape)
        Distribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def enumerate_support(self, expand: bool = True) -> Tensor:
        categories = self.event_shape[0]
        values = torch.eye(categories, dtype=self._dtype, device=self._log_p.device)
        values = values.view((categories,) + (1,) * len(self.batch_shape) + (categories,))
        return values.expand((categories, *self.batch_shape, categories)) if expand else values


@register_kl(OneHotCategorical, OneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(OneHotCategorical, TorchOneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(TorchOneHotCategorical, OneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
def _divergence(p: Any, q: Any) -> Tensor:
    p_logits, q_logits = (d._log_p if isinstance(d, OneHotCategorical) else d.logits for d in (p, q))
    return divergence(p_logits, q_logits).to(torch.promote_types(p.logits.dtype, q.logits.dtype))
