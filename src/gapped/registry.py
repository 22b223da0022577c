"""The registry: estimators by name, by text, or the recommended one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import isclass, isfunction, signature
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

import gapped
from gapped import texts
from gapped.errors import reject
from gapped.pathwise import Pathwise
from gapped.score import Score
from gapped.score.trainable import Trainable
from gapped.simplex import expected_gap
from gapped.texts import DEFAULT, Option, kind_of

Estimator = Pathwise | Score

RECOMMENDED = (
    DEFAULT,
    "gst",
    "gumbel-softmax:tau=1",
    "gumbel-softmax:tau=0.5",
    "reinmax:tau=1.5",
    "straight-through",
)
"""The estimators that `gapped.compare` and commands compare unless told otherwise."""

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
        The estimator, with its options checked. An option that is not given has the default of the class,
        which is the recommended value.

    >>> estimator("gst:gap=1.2")
    GST(tau=0.85, hard=True, draw='sample', gap=1.2, detach=True)
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


def spell(name: str, options: Mapping[str, Option]) -> str:
    """The text of an estimator, as `estimator` reads it.

    >>> spell("gst", {"gap": 1.0})
    'gst:gap=1.0'
    """
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")


def label_estimators(estimators: Any) -> dict[str, Any]:
    """Estimators by label, texts under themselves; equal labels get numbers."""
    accepted = 'a list such as ["gapmax", gapped.GST(tau=0.5)], or a mapping from labels to estimators'
    if isinstance(estimators, str) or not isinstance(estimators, Iterable):
        raise reject("estimators", estimators, accepted)
    pairs = estimators.items() if isinstance(estimators, Mapping) else ((label_of(e), e) for e in estimators)
    members: dict[str, Any] = {}
    for name, estimator in pairs:
        if isfunction(estimator) or isclass(estimator):
            raise reject("estimators", f"the {type(estimator).__name__} {estimator.__name__}", accepted)
        label, number = str(name), 2
        while label in members:
            label, number = f"{name} #{number}", number + 1
        members[label] = estimator
    if not members:
        raise reject("estimators", "none", accepted)
    return members


def label_of(estimator: Any) -> str:
    """The class and the options that are not its defaults; a text is its own label.

    >>> import gapped
    >>> label_of(gapped.GST(tau=0.5)), label_of(gapped.REBAR()), label_of(gapped.DoubleCV(4))
    ('GST(tau=0.5)', 'REBAR', 'DoubleCV(samples=4)')
    """
    if isinstance(estimator, str):
        return estimator
    name = type(estimator).__name__
    if isinstance(estimator, Trainable):
        own = estimator.extra_repr()
        return f"{name}({own})" if own and own != _default_options(type(estimator)) else name
    if not is_dataclass(estimator):
        return name
    options = []
    for each in fields(estimator):
        value = getattr(estimator, each.name)
        if isinstance(value, Tensor):
            value = f"{value.item():.6g}" if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
        elif value == each.default:
            continue
        # A partial has the name of its function: a label must not hold an address, which changes.
        value = getattr(getattr(value, "func", value), "__name__", value)
        options.append(f"{each.name}={re.sub(' at 0x[0-9a-f]+', '', str(value))}")
    return f"{name}({', '.join(options)})" if options else name


def _default_options(kind: type[Trainable]) -> str:
    """The options of an estimator that is made without any; nothing if it needs some."""
    try:
        return kind().extra_repr()
    except TypeError:
        return ""


def build(kinds: Mapping[str, type[Estimator]], name: str, options: Mapping[str, Any]) -> Estimator:
    """The estimator of that name among `kinds`; options that name a function become that function."""
    return texts.build(kinds, name, options, _FUNCTIONS)


def resolve(estimator: Estimator | str | None) -> Estimator:
    """The object that an argument called `estimator` stands for.

    Text is read as `gapped.estimator` reads it, and None is the default.

    >>> resolve(None)
    GapMax(tau=1.0, hard=True, draw='sample')
    >>> resolve("gst:tau=0.5")
    GST(tau=0.5, hard=True, draw='sample', gap='auto', detach=True)
    """
    if isinstance(estimator, Pathwise | Score):
        return estimator
    if estimator is not None and not isinstance(estimator, str):
        accepted = "an estimator such as gapped.GST() or gapped.RLOO(2), or its text such as 'gst:gap=1.2'"
        raise reject("estimator", f"an object of type {type(estimator).__name__}", accepted)
    return texts.read(_REGISTRY, DEFAULT if estimator is None else estimator, {}, _FUNCTIONS)
