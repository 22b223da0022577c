"""The Bernoulli distribution: gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Distribution, register_kl

from gapped import simplex
from gapped.checks import check_mask, check_scores, holds
from gapped.distributions.parameters import Enumerable, divergence, log_of, number_to_tensor, only_one
from gapped.errors import reject
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.pathwise.straight_through import StraightThrough

# A hard sample of the law itself, without noise for a gradient.
_SAMPLE = StraightThrough()


class Bernoulli(Enumerable, TorchBernoulli):
    """Bernoulli distribution whose samples carry a gradient.

    It takes the place of `torch.distributions.Bernoulli`, and has `rsample` as well.

    Arguments:
        probs: Probabilities of a 1, a tensor or a number. Exactly one of `probs` and `logits` is given.
        logits: Log-odds of a 1, a tensor or a number.
        validate_args: As in torch: whether to check arguments and samples; None is torch's default.
        estimator: The pathwise estimator behind `rsample`, an object or its text; None is the recommended
            default.
        mask: Booleans that broadcast against the parameters; where it is False, the sample is 0 for certain.

    Probabilities of 0 and 1, and infinite odds, are exact, where torch moves them by a rounding. Half
    precision is computed in float32 and rounded once, at the end. `log_prob` is b log p + (1 - b) log(1 - p),
    differentiable in the logits and in the sample b.

    >>> q = Bernoulli(torch.tensor([0.5, 0.9]), estimator="gst:tau=0.5")
    >>> q.rsample().shape, q.entropy()
    (torch.Size([2]), tensor([0.6931, 0.3251]))
    """

    has_rsample = True

    def __init__(
        self,
        probs: Tensor | float | None = None,
        logits: Tensor | float | None = None,
        validate_args: bool | None = None,
        *,
        estimator: Pathwise | str | None = None,
        mask: Tensor | None = None,
    ) -> None:
        parameter = only_one("Bernoulli", number_to_tensor(probs), number_to_tensor(logits))
        self.estimator = resolve_pathwise(estimator)
        scores = parameter
        if probs is not None:
            scores = log_of(parameter) - log_of(1 - simplex.computed(parameter))
        check_scores(scores)
        check_mask(mask, scores)
        self._dtype = parameter.dtype
        self._odds = simplex.masked(simplex.computed(scores), mask)
        validate = Distribution._validate_args if validate_args is None else validate_args
        if validate and holds(self._odds.isnan()):
            if probs is not None:
                raise reject("probs", "values out of range", "numbers from 0 to 1")
            raise reject("logits", "values out of range", "log-odds, which may be infinite")
        Distribution.__init__(self, self._odds.shape, validate_args=False)
        self._validate_args = validate

    @property
    def logits(self) -> Tensor:
        return self._odds.to(self._dtype)

    @property
    def probs(self) -> Tensor:
        return self._odds.sigmoid().to(self._dtype)

    @property
    def _param(self) -> Tensor:  # type: ignore[override]
        return self.logits

    @property
    def param_shape(self) -> torch.Size:
        return self._odds.shape

    @property
    def mean(self) -> Tensor:
        return self.probs

    @property
    def variance(self) -> Tensor:
        return (self._odds.sigmoid() * (-self._odds).sigmoid()).to(self._dtype)

    @property
    def mode(self) -> Tensor:
        mode = (self._odds > 0).to(self._dtype)
        # As torch has it: neither value is the mode of a fair coin.
        return torch.where((self._odds == 0) | self._odds.isnan(), torch.nan, mode)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        odds = self._odds.expand(self._extended_shape(sample_shape))
        return self.estimator.gate(odds, generator=generator).to(self._dtype)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            odds = self._odds.expand(self._extended_shape(sample_shape))
            return _SAMPLE.gate(odds, generator=generator).to(self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        value, masses = number_to_tensor(value), _log_masses(self._odds)
        weights = torch.stack([value, 1 - value], -1).to(torch.promote_types(value.dtype, self._dtype))
        # 0 * -inf would be NaN: such a logarithm is replaced. All others stay, for the sample's derivative.
        return (
            (weights * masses.masked_fill((weights == 0) & (masses == -torch.inf), 0.0)).sum(-1).to(weights)
        )

    def entropy(self) -> Tensor:
        masses = _log_masses(self._odds)
        return -(masses.exp() * masses.masked_fill(masses == -torch.inf, 0.0)).sum(-1).to(self._dtype)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Bernoulli:
        new: Bernoulli = self._get_checked_instance(Bernoulli, _instance)  # type: ignore[no-untyped-call]
        batch_shape = torch.Size(batch_shape)
        new.estimator, new._dtype = self.estimator, self._dtype
        new._odds = self._odds.expand(batch_shape)
        Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def enumerate_support(self, expand: bool = True) -> Tensor:
        values = torch.arange(2, dtype=self._dtype, device=self._odds.device)
        values = values.view((2,) + (1,) * len(self.batch_shape))
        return values.expand((2, *self.batch_shape)) if expand else values


def _log_masses(odds: Tensor) -> Tensor:
    """The logarithms of the probabilities of 1 and 0, `(*odds.shape, 2)`; those of 0 have no slope."""
    both = torch.stack([odds, -odds], -1)
    certain = both.isinf()
    finite = torch.nn.functional.logsigmoid(both.masked_fill(certain, 0.0))
    return torch.where(certain, both.detach().clamp(max=0.0), finite)


@register_kl(Bernoulli, Bernoulli)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(Bernoulli, TorchBernoulli)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(TorchBernoulli, Bernoulli)  # type: ignore[no-untyped-call, untyped-decorator]
def _divergence_of_gates(p: Any, q: Any) -> Tensor:
    first, second = (_log_masses(d._odds if isinstance(d, Bernoulli) else d.logits) for d in (p, q))
    return divergence(first, second).to(torch.promote_types(p.logits.dtype, q.logits.dtype))
