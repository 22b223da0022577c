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
    GumbelRao,
    GumbelSoftmax,
    Level,
    Pathwise,
    ReinMax,
    StraightThrough,
)
from gapped.jax.score import RLOO, DisARMTree, DoubleCV, Exact, Score
from gapped.jax.simplex import expected_gap

Estimator = Pathwise | Score
# The functions that an option may name.
_FUNCTIONS = MappingProxyType({"expected": expected_gap})
_PATHWISE = (GST, GumbelSoftmax, StraightThrough, GumbelRao, ReinMax, DecoupledGumbelSoftmax)
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


def resolve(
    estimator: Estimator | str | None, tau: Level | None = None, hard: bool | None = None
) -> Estimator:
    """The object that an argument called `estimator` stands for; None is the recommended default.

    `tau` and `hard` are used where text leaves them open. An object has both itself; arguments that say
    otherwise, and are not the defaults of the functions, are refused.
    """
    given = {name: value for name, value in (("tau", tau), ("hard", hard)) if value is not None}
    if isinstance(estimator, Pathwise | Score):
        own = {name: getattr(estimator, name) for name in given if hasattr(estimator, name)}
        texts.check_agreement(given, own)
        return estimator
    if estimator is None:
        estimator, given = texts.DEFAULT, {"tau": texts.DEFAULT_TAU, **given}
    elif not isinstance(estimator, str):
        accepted = "an estimator such as gapped.jax.GST() or gapped.jax.RLOO(2), or its text such as 'gst'"
        raise reject("estimator", describe(estimator), accepted)
    name, options = texts.split_text(estimator)
    texts.check_agreement(given, options)
    return texts.build(_REGISTRY, name, {**given, **options}, _FUNCTIONS)


def resolve_pathwise(
    estimator: Estimator | str | None, tau: Level | None = None, hard: bool | None = None
) -> Pathwise:
    """`resolve` for callers that draw a sample: estimators of the other family are refused."""
    resolved = resolve(estimator, tau, hard)
    if not isinstance(resolved, Pathwise):
        accepted = "a pathwise estimator such as gapped.jax.GST() or 'gst'; others go into expectation"
        raise reject("estimator", estimator, accepted)
    return resolved
