"""Estimators by name, by text, or the recommended one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gapped import texts
from gapped.errors import reject
from gapped.jax.checks import describe
from gapped.jax.pathwise import (
    GST,
    DecoupledGumbelSoftmax,
    GapMax,
    GumbelRao,
    GumbelSoftmax,
    Pathwise,
    ReinMax,
    StraightThrough,
)
from gapped.jax.score import RLOO, DisARMTree, DoubleCV, Exact, Score
from gapped.jax.simplex import expected_gap

Estimator = Pathwise | Score
# The functions that an option may name.
_FUNCTIONS = MappingProxyType({"expected": expected_gap})
_PATHWISE = (GapMax, GST, GumbelSoftmax, StraightThrough, GumbelRao, ReinMax, DecoupledGumbelSoftmax)
_SCORE = (RLOO, DoubleCV, DisARMTree, Exact)
_REGISTRY: Mapping[str, type[Estimator]] = MappingProxyType({k.name: k for k in (*_PATHWISE, *_SCORE)})


def estimators() -> Mapping[str, type[Estimator]]:
    """All known estimators: a read-only mapping from names to classes."""
    return _REGISTRY


def estimator(text: str, **options: Any) -> Estimator:
    """Make an estimator by its name, such as "gst" or "gst:gap=1.2".

    Arguments:
        text: `name` or `name:option=value,...`. The value "expected" of `gap` is `gapped.jax.expected_gap`.
        options: Options as keyword arguments, in place of those in the text or besides them.

    Returns:
        The estimator, with its options checked.

    >>> estimator("gst:gap=1.2", tau=0.5)
    GST(tau=0.5, hard=True, gap=1.2)
    """
    return texts.read(_REGISTRY, text, options, _FUNCTIONS)


def resolve(estimator: Estimator | str | None) -> Estimator:
    """The object that an argument called `estimator` stands for: text is read, None is the default."""
    if isinstance(estimator, Pathwise | Score):
        return estimator
    if estimator is not None and not isinstance(estimator, str):
        accepted = "an estimator such as gapped.jax.GST() or gapped.jax.RLOO(2), or its text such as 'gst'"
        raise reject("estimator", describe(estimator), accepted)
    return texts.read(_REGISTRY, texts.DEFAULT if estimator is None else estimator, {}, _FUNCTIONS)


def resolve_pathwise(estimator: Estimator | str | None) -> Pathwise:
    """`resolve` for callers that draw a sample: estimators of the other family are refused."""
    resolved = resolve(estimator)
    if not isinstance(resolved, Pathwise):
        accepted = "a pathwise estimator such as gapped.jax.GST() or 'gst'; others go into expectation"
        raise reject("estimator", estimator, accepted)
    return resolved
