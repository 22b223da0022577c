"""The registry: estimators by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from gapped.errors import GappedError, reject
from gapped.pathwise.base import Pathwise
from gapped.pathwise.decoupled import DecoupledGumbelSoftmax
from gapped.pathwise.gst import GST
from gapped.pathwise.gumbel import GumbelSoftmax
from gapped.pathwise.gumbel_rao import GumbelRao
from gapped.pathwise.reinmax import ReinMax
from gapped.pathwise.straight_through import StraightThrough

__all__ = ["Pathwise", "estimator", "estimators"]

_REGISTRY: Mapping[str, type[Pathwise]] = MappingProxyType(
    {
        "gumbel-softmax": GumbelSoftmax,
        "straight-through": StraightThrough,
        "gst": GST,
        "gumbel-rao": GumbelRao,
        "reinmax": ReinMax,
        "decoupled": DecoupledGumbelSoftmax,
    }
)


def estimators() -> Mapping[str, type[Pathwise]]:
    """All known estimators, name to class, read-only."""
    return _REGISTRY


def estimator(name: str, **options: Any) -> Pathwise:
    """The estimator called `name`, with its options checked.

    >>> estimator("gst", gap=1.2)
    GST(tau=1.0, hard=True, gap=1.2, detach=True)
    """
    if name not in _REGISTRY:
        raise reject("estimator", name, f"one of {', '.join(sorted(_REGISTRY))}")
    kind = _REGISTRY[name]
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise GappedError(f"{name}: unknown option {option!r}, expected one of {', '.join(known)}")
    return kind(**options)
