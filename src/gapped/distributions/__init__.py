"""Discrete distributions with `rsample`, for everything that takes `torch.distributions`."""

from gapped.distributions.bernoulli import Bernoulli
from gapped.distributions.categorical import OneHotCategorical

__all__ = ["Bernoulli", "OneHotCategorical"]
