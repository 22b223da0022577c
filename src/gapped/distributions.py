"""Discrete distributions with `rsample`, for everything that takes `torch.distributions`."""

from __future__ import annotations

import numbers
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch import distributions as theirs
from torch.distributions import Distribution, register_kl

from gapped import simplex
from gapped.checks import check_logits, check_mask, check_scores, check_tensor, holds
from gapped.errors import GappedError, reject
from gapped.pathwise import Pathwise, resolve_pathwise
from gapped.pathwise.straight_through import StraightThrough

__all__ = ["Bernoulli", "OneHotCategorical"]

# A hard sample of the law itself, without noise for a gradient.
_SAMPLE = StraightThrough()


def __dir__() -> list[str]:
    return __all__


class _Law(Distribution):
    """The part that both share: scores in float32 or float64, shown in the dtype of the parameter."""

    has_rsample = True
    estimator: Pathwise
    _scores: Tensor
    """Log-odds, or normalised log-probabilities."""
    _dtype: torch.dtype

    @property
    def logits(self) -> Tensor:
        return self._scores.to(self._dtype)

    @property
    def _param(self) -> Tensor:
        return self.logits

    @property
    def mean(self) -> Tensor:
        probs: Tensor = self.probs  # type: ignore[attr-defined]
        return probs

    def _extended_scores(self, sample_shape: Any) -> Tensor:
        return self._scores.expand(self._extended_shape(sample_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        kind = OneHotCategorical if isinstance(self, OneHotCategorical) else Bernoulli
        new: Any = self._get_checked_instance(kind, _instance)  # type: ignore[no-untyped-call]
        batch_shape = torch.Size(batch_shape)
        new.estimator, new._dtype = self.estimator, self._dtype
        new._scores = self._scores.expand(batch_shape + self.event_shape)
        Distribution.__init__(new, batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Pyro's parts of a gradient estimator. Pyro alone calls this.

        By `has_rsample` alone Pyro would take values that it enumerated for samples that carry a gradient,
        and would leave their probabilities out.
        """
        # By name: the package does not need Pyro, which is there when it calls.
        ScoreParts = import_module("pyro.distributions.score_parts").ScoreParts
        log_prob = self.log_prob(x, *args, **kwargs)
        is_pathwise = self.has_rsample and x.requires_grad
        return ScoreParts(log_prob, *((0, log_prob) if is_pathwise else (log_prob, 0)))


class OneHotCategorical(_Law, theirs.OneHotCategorical):
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

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        estimator: Pathwise | str | None = None,
        mask: Tensor | None = None,
    ) -> None:
        parameter = _only_one("OneHotCategorical", probs, logits)
        self.estimator = resolve_pathwise(estimator)
        scores = _log_of(probs) if logits is None else logits
        check_logits(scores)
        check_mask(mask, scores)
        validate = Distribution._validate_args if validate_args is None else validate_args
        if validate and holds(scores.isnan() | (scores == torch.inf)):
            if logits is None:
                raise reject("probs", "values out of range", "finite numbers that are not negative")
            raise reject("logits", "values out of range", "finite numbers, or -inf for an absent category")
        self._dtype = parameter.dtype
        self._scores = simplex.log_softmax(simplex.masked(simplex.computed(scores), mask))
        # -inf logits are categories that do not exist, not invalid ones.
        Distribution.__init__(self, self._scores.shape[:-1], self._scores.shape[-1:], validate_args=False)
        self._validate_args = validate

    @property
    def probs(self) -> Tensor:
        return self._scores.exp().to(self._dtype)

    @property
    def _categorical(self) -> theirs.Categorical:  # type: ignore[override]
        """The law of the index, an attribute of torch's class that code around it reads."""
        return theirs.Categorical(logits=self.logits, validate_args=False)

    @property
    def variance(self) -> Tensor:
        probs = self._scores.exp()
        return (probs * (1 - probs)).to(self._dtype)

    @property
    def mode(self) -> Tensor:
        return simplex.one_hot(simplex.argmax_index(self._scores), self.event_shape[0], self._dtype)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        rows = self._extended_scores(sample_shape)
        return self.estimator.sample(rows, generator=generator).to(self._dtype)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            index = simplex.draw_index(self._extended_scores(sample_shape), generator)
            return simplex.one_hot(index, self.event_shape[0], self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        # 0 * -inf would be NaN: such a logit is replaced. All others stay, for the derivative by the sample.
        log_p = torch.where((value == 0) & (self._scores == -torch.inf), 0.0, self._scores)
        return (value * log_p).sum(-1).to(torch.promote_types(value.dtype, self._dtype))

    def entropy(self) -> Tensor:
        probs = self._scores.exp()
        return -(probs * torch.where(probs > 0, self._scores, 0.0)).sum(-1).to(self._dtype)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        categories = self.event_shape[0]
        values = torch.eye(categories, dtype=self._dtype, device=self._scores.device)
        values = values.view((categories,) + (1,) * len(self.batch_shape) + (categories,))
        return values.expand((categories, *self.batch_shape, categories)) if expand else values


class Bernoulli(_Law, theirs.Bernoulli):  # type: ignore[override]
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

    def __init__(
        self,
        probs: Tensor | float | None = None,
        logits: Tensor | float | None = None,
        validate_args: bool | None = None,
        *,
        estimator: Pathwise | str | None = None,
        mask: Tensor | None = None,
    ) -> None:
        parameter = _only_one("Bernoulli", _number_to_tensor(probs), _number_to_tensor(logits))
        self.estimator = resolve_pathwise(estimator)
        scores = parameter
        if probs is not None:
            scores = _log_of(parameter) - _log_of(1 - simplex.computed(parameter))
        check_scores(scores)
        check_mask(mask, scores)
        self._dtype = parameter.dtype
        self._scores = simplex.masked(simplex.computed(scores), mask)
        validate = Distribution._validate_args if validate_args is None else validate_args
        if validate and holds(self._scores.isnan()):
            if probs is not None:
                raise reject("probs", "values out of range", "numbers from 0 to 1")
            raise reject("logits", "values out of range", "log-odds, which may be infinite")
        Distribution.__init__(self, self._scores.shape, validate_args=False)
        self._validate_args = validate

    @property
    def probs(self) -> Tensor:
        return self._scores.sigmoid().to(self._dtype)

    @property
    def variance(self) -> Tensor:
        return (self._scores.sigmoid() * (-self._scores).sigmoid()).to(self._dtype)

    @property
    def mode(self) -> Tensor:
        mode = (self._scores > 0).to(self._dtype)
        # As torch has it: neither value is the mode of a fair coin.
        return torch.where((self._scores == 0) | self._scores.isnan(), torch.nan, mode)

    def rsample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        odds = self._extended_scores(sample_shape)
        return self.estimator.gate(odds, generator=generator).to(self._dtype)

    def sample(self, sample_shape: Any = (), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            odds = self._extended_scores(sample_shape)
            return _SAMPLE.gate(odds, generator=generator).to(self._dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        value, masses = _number_to_tensor(value), _log_masses(self._scores)
        weights = torch.stack([value, 1 - value], -1).to(torch.promote_types(value.dtype, self._dtype))
        # 0 * -inf would be NaN: such a logarithm is replaced. All others stay, for the sample's derivative.
        log_p = masses.masked_fill((weights == 0) & (masses == -torch.inf), 0.0)
        return (weights * log_p).sum(-1).to(weights)

    def entropy(self) -> Tensor:
        masses = _log_masses(self._scores)
        return -(masses.exp() * masses.masked_fill(masses == -torch.inf, 0.0)).sum(-1).to(self._dtype)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        values = torch.arange(2, dtype=self._dtype, device=self._scores.device)
        values = values.view((2,) + (1,) * len(self.batch_shape))
        return values.expand((2, *self.batch_shape)) if expand else values


def _number_to_tensor(parameter: Any) -> Any:
    """A number as a tensor of the default dtype, as torch's distributions take it; all else as it is."""
    is_number = isinstance(parameter, numbers.Real)
    return torch.tensor(parameter, dtype=torch.get_default_dtype()) if is_number else parameter


def _only_one(name: str, probs: Tensor | None, logits: Tensor | None) -> Tensor:
    """The parameter that was given."""
    given = [each for each in (probs, logits) if each is not None]
    if len(given) != 1:
        raise GappedError(f"{name}: give either probs or logits, not both or none")
    return given[0]


def _log_of(probs: object) -> Tensor:
    """Logits of `probs`; those of zeros, -inf, have no slope instead of an infinite one."""
    accepted = "a floating-point tensor of probabilities"
    probs = check_tensor("probs", probs, accepted)
    if not probs.is_floating_point():
        raise reject("probs", f"a tensor of dtype {probs.dtype}", accepted)
    probs = simplex.computed(probs)
    empty = probs == 0
    return torch.where(empty, 1.0, probs).log().masked_fill(empty, -torch.inf)


def _log_masses(odds: Tensor) -> Tensor:
    """The logarithms of the probabilities of 1 and 0, `(*odds.shape, 2)`; those of 0 have no slope."""
    both = torch.stack([odds, -odds], -1)
    certain = both.isinf()
    finite = torch.nn.functional.logsigmoid(both.masked_fill(certain, 0.0))
    return torch.where(certain, both.detach().clamp(max=0.0), finite)


@register_kl(OneHotCategorical, OneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(OneHotCategorical, theirs.OneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(theirs.OneHotCategorical, OneHotCategorical)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(Bernoulli, Bernoulli)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(Bernoulli, theirs.Bernoulli)  # type: ignore[no-untyped-call, untyped-decorator]
@register_kl(theirs.Bernoulli, Bernoulli)  # type: ignore[no-untyped-call, untyped-decorator]
def _divergence(p: Any, q: Any) -> Tensor:
    """The Kullback-Leibler divergence, by log-probabilities of outcomes on the last axis."""
    log_p, log_q = (d._scores if isinstance(d, _Law) else d.logits for d in (p, q))
    if isinstance(p, theirs.Bernoulli):
        log_p, log_q = _log_masses(log_p), _log_masses(log_q)
    mass = log_p.exp()
    # Selected before multiplying: an outcome without mass must not bring 0 * inf into the gradient.
    difference = torch.where(mass > 0, log_p, 0.0) - torch.where(mass > 0, log_q, 0.0)
    return (mass * difference).sum(-1).to(torch.promote_types(p.logits.dtype, q.logits.dtype))
