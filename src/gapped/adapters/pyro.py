"""Estimators for Pyro: its categorical sites with samples that carry a gradient."""

from __future__ import annotations

from typing import Any

from pyro import distributions as dist
from pyro.infer.reparam.reparam import Reparam
from torch.distributions import Independent

from gapped import distributions
from gapped.errors import reject
from gapped.pathwise import Pathwise, resolve_pathwise


class OneHotCategorical(distributions.OneHotCategorical, dist.OneHotCategorical):
    """`gapped.distributions.OneHotCategorical` as a distribution of Pyro; the same arguments."""


class Bernoulli(distributions.Bernoulli, dist.Bernoulli):
    """`gapped.distributions.Bernoulli` as a distribution of Pyro; the same arguments."""


_KINDS = {dist.OneHotCategorical: OneHotCategorical, dist.Bernoulli: Bernoulli}


class EstimatorReparam(Reparam):
    """Sends gradients through the samples of a one-hot categorical or Bernoulli site.

    The law of the site stays; its samples get the estimator's gradient in the place of the score function.

    Arguments:
        estimator: The pathwise estimator, an object or its text; None is the recommended default.

    >>> import pyro, torch
    >>> def guide():
    ...     return pyro.sample("z", dist.OneHotCategorical(logits=torch.zeros(3, requires_grad=True)))
    >>> with pyro.poutine.reparam(config={"z": EstimatorReparam("gst:tau=0.5")}):
    ...     z = guide()
    >>> z.requires_grad
    True
    """

    def __init__(self, estimator: Pathwise | str | None = None) -> None:
        self.estimator = resolve_pathwise(estimator)

    def apply(self, msg: Any) -> Any:
        law, event_dim, masks = msg["fn"], msg["fn"].event_dim, []
        while isinstance(law, Independent | dist.MaskedDistribution):
            masks += [law._mask] if isinstance(law, dist.MaskedDistribution) else []
            law = law.base_dist
        kind = next((ours for theirs, ours in _KINDS.items() if isinstance(law, theirs)), None)
        if kind is None:
            accepted = "a OneHotCategorical or a Bernoulli; a Categorical draws an index, without a gradient"
            raise reject(f"site {msg['name']!r}", f"a {type(law).__name__}", accepted)
        new: Any = kind(logits=law.logits, estimator=self.estimator)
        for mask in masks:
            new = new.mask(mask)
        return {**msg, "fn": new.to_event(event_dim - new.event_dim)}
