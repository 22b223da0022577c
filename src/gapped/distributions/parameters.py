"""What the distributions share: their parameters, and divergences in log space."""

from __future__ import annotations

import numbers
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import GappedError, reject


class Enumerable:
    """What Pyro asks of a distribution that can be enumerated as well as sampled with a gradient."""

    def score_parts(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Pyro's parts of a gradient estimator. Pyro alone calls this.

        By `has_rsample` alone Pyro would take values that it enumerated for samples that carry a gradient,
        and would leave their probabilities out.
        """
        # By name: the package does not need Pyro, which is there when it calls.
        ScoreParts = import_module("pyro.distributions.score_parts").ScoreParts
        log_prob = self.log_prob(x, *args, **kwargs)
        is_pathwise = self.has_rsample and x.requires_grad
        return ScoreParts(log_prob, *((0, log_prob) if is_pathwise else (log_prob, 0)))


def number_to_tensor(parameter: Any) -> Any:
    """A number as a tensor of the default dtype, as torch's distributions take it; all else as it is."""
    is_number = isinstance(parameter, numbers.Real)
    return torch.tensor(parameter, dtype=torch.get_default_dtype()) if is_number else parameter


def only_one(name: str, probs: Tensor | None, logits: Tensor | None) -> Tensor:
    """The parameter that was given."""
    if logits is not None and probs is None:
        return logits
    if logits is None and probs is not None:
        return probs
    raise GappedError(f"{name}: give either probs or logits, not both or none")


def log_of(probs: object) -> Tensor:
    """Logits of `probs`; those of zeros, -inf, have no slope instead of an infinite one."""
    accepted = "a floating-point tensor of probabilities"
    if not isinstance(probs, Tensor):
        raise reject("probs", f"an object of type {type(probs).__name__}", accepted)
    if not probs.is_floating_point():
        raise reject("probs", f"a tensor of dtype {probs.dtype}", accepted)
    probs = simplex.computed(probs)
    empty = probs == 0
    return torch.where(empty, 1.0, probs).log().masked_fill(empty, -torch.inf)


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of two laws by log-probabilities, outcomes on the last axis."""
    mass = log_p.exp()
    # Selected before multiplying: an outcome without mass must not bring 0 * inf into the gradient.
    difference = torch.where(mass > 0, log_p, 0.0) - torch.where(mass > 0, log_q, 0.0)
    return (mass * difference).sum(-1)
