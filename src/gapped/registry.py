"""The registry: estimators by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal

import gapped
from gapped.errors import GappedError, reject
from gapped.pathwise import Pathwise
from gapped.score import Score

Estimator = Pathwise | Score


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
    """All known estimators or those of one family, name to class, read-only.

    The sample of a *pathwise* estimator carries the gradient; a *score* estimator needs the costs of its
    samples, and is used through `gapped.expectation`.

    >>> "rloo" in estimators("score"), "rloo" in estimators("pathwise")
    (True, False)
    """
    if family is None:
        return _REGISTRY
    if family not in _FAMILIES:
        raise reject("family", family, f"one of {', '.join(_FAMILIES)}, or None for both")
    return _FAMILIES[family]


def estimator(name: str, **options: Any) -> Estimator:
    """The estimator called `name`, with its options checked.

    >>> estimator("gst", gap=1.2)
    GST(tau=1.0, hard=True, gap=1.2, detach=True)
    """
    names = options_of(name)
    for option in options:
        if option not in names:
            accepted = f"one of {', '.join(names)}" if names else "none"
            raise GappedError(f"{name}: unknown option {option!r}, expected {accepted}")
    return _REGISTRY[name](**options)


def options_of(name: str) -> list[str]:
    """The options that the estimator called `name` has.

    >>> options_of("rloo")
    ['samples']
    """
    if name not in _REGISTRY:
        raise reject("estimator", name, f"one of {', '.join(sorted(_REGISTRY))}")
    return list(signature(_REGISTRY[name]).parameters)
