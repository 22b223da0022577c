"""The registry: estimators by name, by text, or the recommended one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

import gapped
from gapped import texts
from gapped.errors import reject
from gapped.pathwise import Pathwise
from gapped.score import Score
from gapped.simplex import expected_gap
from gapped.texts import DEFAULT, DEFAULT_TAU, check_agreement, kind_of, split_text

Estimator = Pathwise | Score
# The functions that an option may name.
_FUNCTIONS = MappingProxyType({"expected": expected_gap})


def _members(family: type[Estimator]) -> Mapping[str, type[Estimator]]:
    """The public classes of a family by their `name`, in the order of `gapped/__init__.pyi`."""
    folder = f"{family.__module__}."
    homes = {name: home for name, home in gapped._HOME.items() if home.startswith(folder)}
    values = [getattr(import_module(home), name) for name, home in homes.items()]
    kinds = [value for value in values if isinstance(value, type) and issubclass(value, family)]
    return MappingProxyType({kind.name: kind for kind in kinds})


_FAMILIES = MappingProxyType({"pathwise": _members(Pathwise), "score": _members(Score)})
_REGISTRY: Mapping[str, type[Estimator]] = MappingProxyType({**_FAMILIES["pathwise"], **_FAMILIES["score"]})


def estimators(family: Literal["pathwise", "score"] | None = None) -> Mapping[str, type[Estimator]]:
    """All known estimators, or those of one family.

    Arguments:
        family: "pathwise", whose samples carry the gradient; "score", which need the costs of their samples
            and are used through `gapped.expectation`; or None for both.

    Returns:
        A read-only mapping from names to classes.

    >>> "rloo" in estimators("score"), "rloo" in estimators("pathwise")
    (True, False)
    """
    if family is None:
        return _REGISTRY
    if family not in _FAMILIES:
        raise reject("family", family, f"one of {', '.join(_FAMILIES)}, or None for both")
    return _FAMILIES[family]


def estimator(text: str, **options: Any) -> Estimator:
    """Make an estimator by its name, such as "gst" or "gst:gap=1.2".

    Arguments:
        text: `name` or `name:option=value,...`, as on the command line, in recipes and in records. The value
            "expected" of `gap` is `gapped.expected_gap`.
        options: Options as keyword arguments, in place of those in the text or besides them.

    Returns:
        The estimator, with its options checked. A temperature that is not given is 1, the default of every
        class; `gapped.compare` and the commands take the recommended one instead.

    >>> estimator("gst:gap=1.2")
    GST(tau=1.0, hard=True, draw='sample', gap=1.2, detach=True)
    >>> estimator("gst", gap=1.2) == estimator("gst:gap=1.2")
    True
    """
    return texts.read(_REGISTRY, text, options, _FUNCTIONS)


def options_of(name: str) -> list[str]:
    """The options that the estimator called `name` has.

    >>> options_of("rloo")
    ['samples']
    """
    return list(signature(kind_of(_REGISTRY, name)).parameters)


def build(kinds: Mapping[str, type[Estimator]], name: str, options: Mapping[str, Any]) -> Estimator:
    """The estimator of that name among `kinds`; options that name a function become that function."""
    return texts.build(kinds, name, options, _FUNCTIONS)


def resolve(
    estimator: Estimator | str | None, tau: float | Tensor | None = None, hard: bool | None = None
) -> Estimator:
    """The object that an argument called `estimator` stands for.

    Text is read as `gapped.estimator` reads it, and None is the recommended default, `DEFAULT`, at `tau` or
    else at `DEFAULT_TAU`. A caller whose own arguments are `tau` and `hard`, with the defaults of
    `F.gumbel_softmax`, passes them on: they are used where text leaves them open. An object has both itself;
    arguments that say otherwise, and are not those defaults, are refused.

    >>> resolve(None)
    GST(tau=0.85, hard=True, draw='sample', gap='auto', detach=True)
    >>> resolve("reinmax", 2.0, True)
    ReinMax(tau=2.0, hard=True, draw='sample')
    >>> resolve("gst:tau=0.5", tau=0.7)
    Traceback (most recent call last):
    gapped.errors.GappedError: tau: got 0.7, but the estimator has tau=0.5 of its own, expected one of them
    """
    given = {name: value for name, value in (("tau", tau), ("hard", hard)) if value is not None}
    if isinstance(estimator, Pathwise | Score):
        check_agreement(given, {name: getattr(estimator, name) for name in given if hasattr(estimator, name)})
        return estimator
    if estimator is None:
        estimator, given = DEFAULT, {"tau": DEFAULT_TAU, **given}
    elif not isinstance(estimator, str):
        accepted = "an estimator such as gapped.GST() or gapped.RLOO(2), or its text such as 'gst:gap=1.2'"
        raise reject("estimator", f"an object of type {type(estimator).__name__}", accepted)
    name, own = split_text(estimator)
    check_agreement(given, own)
    known = options_of(name)
    return build(_REGISTRY, name, {**{key: v for key, v in given.items() if key in known}, **own})


def resolve_pathwise(
    estimator: Pathwise | str | None, tau: float | Tensor | None = None, hard: bool | None = None
) -> Pathwise:
    """`resolve` for callers that draw a sample: estimators of the other family are refused."""
    # Reading text takes longer than drawing a few samples. A compiler would have to trace the cache.
    if isinstance(estimator, Pathwise) or isinstance(tau, Tensor) or torch.compiler.is_compiling():
        return _pathwise(estimator, tau, hard)
    try:
        return _cached_pathwise(estimator, tau, hard)
    except TypeError:  # an argument of a type that cannot be hashed
        return _pathwise(estimator, tau, hard)


def _pathwise(estimator: Pathwise | str | None, tau: float | Tensor | None, hard: bool | None) -> Pathwise:
    resolved = resolve(estimator, tau, hard)
    if not isinstance(resolved, Pathwise):
        accepted = "a pathwise estimator such as gapped.GST() or 'gst'; others go into gapped.expectation"
        raise reject("estimator", estimator, accepted)
    return resolved


_cached_pathwise = lru_cache(maxsize=256, typed=True)(_pathwise)
