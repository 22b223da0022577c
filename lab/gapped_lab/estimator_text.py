"""Estimators as text in recipes and records: the registry's and the paper's variants."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

from torch import Tensor

from gapped import registry
from gapped.registry import Estimator, build
from gapped.texts import Option, split_text
from gapped_lab.paper_variants import VARIANTS

KINDS: Mapping[str, type[Estimator]] = MappingProxyType({**registry.estimators(), **VARIANTS})


def parse(text: str) -> tuple[str, dict[str, Option]]:
    """Split an estimator's text into its name and options, and check both.

    >>> parse("gst:gap=1.2,tau=0.5")
    ('gst', {'gap': 1.2, 'tau': 0.5})
    """
    name, options = split_text(text)
    make(name, options)
    return name, options


def make(name: str, options: dict[str, Any]) -> Estimator:
    """The estimator for a name and options as they stand in recipes and records.

    >>> make("gst", {"gap": "expected"}).gap.__name__
    'expected_gap'
    """
    return build(VARIANTS if name in VARIANTS else registry.estimators(), name, options)


def options_of(name: str) -> list[str]:
    """The options of an estimator of the registry, or of a variant that recipes compare.

    >>> options_of("gst-raised") == options_of("gst")
    True
    """
    return list(signature(KINDS[name]).parameters) if name in KINDS else registry.options_of(name)


def temperature(text: str, tau: float | None = None) -> float | None:
    """The temperature that an estimator's text leaves open: `tau`, or else the default of its class."""
    name, options = parse(text)
    if "tau" in options or "tau" not in options_of(name):
        return None
    if tau is not None:
        return tau
    own = KINDS[name]().tau  # type: ignore[union-attr]
    # REBAR's is a parameter.
    return float(own.detach() if isinstance(own, Tensor) else own)
