"""Discrete distributions with `rsample`, for everything that takes `torch.distributions`."""

from gapped.distributions.bernoulli import Bernoulli
from gapped.distributions.categorical import OneHotCategorical

__all__ = ["Bernoulli", "OneHotCategorical"]


def __dir__() -> list[str]:
    return __all__
