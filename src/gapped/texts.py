"""Estimators as text, `name` or `name:option=value,...`: the part that needs no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeVar

from gapped.errors import GappedError, reject, suggestion

Option = bool | int | float | str

DEFAULT = "gapmax"
"""The estimator of everything that is given none: docs/defaults.md says how records decide."""

# Names that the literature uses too.
_ALSO_CALLED = MappingProxyType(
    {
        **dict.fromkeys(("stgs", "gs", "gumbel", "concrete"), "gumbel-softmax"),
        **dict.fromkeys(("st", "ste", "simple"), "straight-through"),
        "zgr": "reinmax",
    }
)
_E = TypeVar("_E")


def split_text(text: object) -> tuple[str, dict[str, Option]]:
    """The name and the options in an estimator's text, as they stand there.

    >>> split_text("gst:gap=1.2,tau=0.5")
    ('gst', {'gap': 1.2, 'tau': 0.5})
    """
    accepted = "name or name:option=value,..., such as gst:gap=1.2,tau=0.5"
    if not isinstance(text, str):
        raise reject("estimator", text, accepted)
    name, _, rest = text.strip().partition(":")
    options: dict[str, Option] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise reject("estimator", text, accepted)
        if key in options:
            raise GappedError(f"estimator: {text}: option {key!r} is given twice")
        options[key] = _value(value)
    return name, options


def kind_of(kinds: Mapping[str, type[_E]], name: object) -> type[_E]:
    """The class of that name; an unknown name is an error that lists the known ones."""
    if not isinstance(name, str) or name not in kinds:
        known = ", ".join(sorted(kinds))
        if isinstance(name, str) and (hint := _hint(kinds, name)):
            raise GappedError(f"estimator: got {name!r}{hint} Expected one of {known}")
        raise reject("estimator", name, f"one of {known}")
    return kinds[name]


def _hint(kinds: Mapping[str, type[_E]], name: str) -> str:
    """Which text may be meant by a name that is none."""
    first, _, rest = name.partition(",")
    if rest and first in kinds:
        return f"; did you mean {first}:{rest}?"
    return suggestion(_ALSO_CALLED.get(name.lower(), name), kinds)


def read(
    kinds: Mapping[str, type[_E]], text: object, options: Mapping[str, Any], functions: Mapping[str, Any]
) -> _E:
    """The estimator among `kinds` that `text` names, with its options and further ones."""
    if not isinstance(text, str):
        kind_of(kinds, text)
    name, own = split_text(text)
    for option in options:
        if option in own:
            raise GappedError(f"estimator: {text}: option {option!r} is given twice")
    return build(kinds, name, {**own, **options}, functions)


def build(
    kinds: Mapping[str, type[_E]], name: str, options: Mapping[str, Any], functions: Mapping[str, Any]
) -> _E:
    """The estimator of that name among `kinds`; options that name one of the `functions` become it."""
    kind = kind_of(kinds, name)
    names = list(signature(kind).parameters)
    for option in options:
        if option not in names:
            accepted = f"one of {', '.join(names)}" if names else "none"
            message = f"{name}: unknown option {option!r}, expected {accepted}"
            raise GappedError(message + suggestion(option, names))
    return kind(**{key: functions.get(v, v) if isinstance(v, str) else v for key, v in options.items()})


def of_sets(
    estimator: object,
    k: int,
    gst: type,
    simple: type,
    resolve: Callable[[str], Any],
    level: str,
    **fixed: object,
) -> Any:
    """The estimator of subsets of `k` elements, of the class `gst` or `simple`; None for "simple".

    Options that are `fixed` cannot have other values than these for several elements.
    """
    accepted: str = '"simple" (or "straight-through"), or a gap as in "gst:gap=1"'
    if estimator is None or estimator == "simple":
        return None
    if isinstance(estimator, str):
        if estimator.partition(":")[0] not in ("gst", "straight-through"):
            raise reject("estimator", estimator, accepted)
        estimator = resolve(estimator)
    if not isinstance(estimator, gst | simple):
        raise reject("estimator", f"an object of type {type(estimator).__name__}", accepted)
    own: Any = estimator
    if not isinstance(own.tau, Real) or own.tau not in (1, type(own).tau) or not own.hard:
        accepted = "one with no option but the gap: tau and hard are arguments here"
        raise reject("estimator", estimator, accepted)
    for name, only in fixed.items():
        if k > 1 and getattr(own, name, only) != only:
            raise reject(name, getattr(own, name), f"{only!r} if more than one element is selected")
    gap = getattr(own, "gap", None)
    if k > 1 and (callable(gap) or isinstance(gap, str)):
        accepted = f'a number or {level}, as in "gst:gap=1": the others are for one selected element'
        raise reject("gap", gap, accepted)
    return own


def _value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
