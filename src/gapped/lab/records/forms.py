"""Check a JSON value against a type; an error names the field, what came, and what is accepted.

A form is `str`, `int`, `float` (finite), `bool`, `None`, `Any`, a union, a `Literal`, a `list`, a `dict` with
text keys, a dataclass, or one of these in `Annotated` with limits. `construct` makes the dataclasses.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import inf
from sys import float_info
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gapped.errors import GappedError

T = TypeVar("T")


@dataclass(frozen=True)
class Within:
    """In `Annotated`: limits of a number, or of the length of a text or a list."""

    least: float = 0
    most: float = inf


@dataclass(frozen=True)
class Rest:
    """In `Annotated`, of one `dict` field of a dataclass: it holds the keys that no other field names."""


# Where in the object, what came there, and what is accepted.
Fault = tuple[str, object, str]
Check = Callable[[Any], Fault | None]

_ABSENT = object()
_SIMPLE: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("anything", lambda value: True),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: type(value) is int and -(2**63) <= value < 2**63),
    # NaN is within no limits.
    float: ("a number", lambda value: type(value) in (int, float) and abs(value) <= float_info.max),
    NoneType: ("nothing", lambda value: value is None),
}
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 60
_BRIEF.maxlevel = 2


def check(value: object, form: Any, where: str) -> None:
    """Refuse a value that does not have the form; `where` is the file, and the line, it came from.

    >>> check({"seconds": [0.5, "1"]}, dict[str, list[float]], "a.json")
    Traceback (most recent call last):
    gapped.errors.GappedError: a.json: seconds[1]: got '1', expected a number
    """
    fault = _compiled(form)[1](value)
    if fault is not None:
        field, got, accepted = fault
        shown = "nothing" if got is _ABSENT else _BRIEF.repr(got)
        raise GappedError(f"{where}: {field.lstrip('.')}{': ' * bool(field)}got {shown}, expected {accepted}")


def construct(value: dict[str, Any], form: Callable[..., T]) -> T:
    """The dataclass `form`, with those inside of it, of an object that `check` accepts."""
    instance: T = _object_constructor(form)(value)
    return instance


@cache
def _compiled(form: Any) -> tuple[str, Check]:
    """What a form accepts, in words, and the function that finds the first fault of a value."""
    if form in _SIMPLE:
        return _plain(*_SIMPLE[form])
    if is_dataclass(form):
        return _object(form)
    origin, parts = get_origin(form), get_args(form)
    if origin is Annotated:
        base, limit = parts
        return _compiled(base) if isinstance(limit, Rest) else _limited(base, limit)
    if origin is Literal:
        return _plain(" or ".join(map(repr, parts)), lambda value: any(value == part for part in parts))
    if origin in (Union, UnionType):
        return _union([_compiled(part) for part in parts])
    if origin in (list, dict):
        return _container(origin, _compiled(parts[-1])[1])
    raise TypeError(f"not a form: {form!r}")


def _plain(accepted: str, accepts: Callable[[Any], bool]) -> tuple[str, Check]:
    return accepted, lambda value: None if accepts(value) else ("", value, accepted)


def _limited(base: Any, limit: Within) -> tuple[str, Check]:
    what, basic = _compiled(base)
    ends = f"from {limit.least:g}" + (f" to {limit.most:g}" if limit.most < inf else "")
    units = {str: " characters", list: " entries"}.get(get_origin(base) or base)
    accepted = f"{what} {ends}" if units is None else f"{what} of {ends.removeprefix('from ')}{units}"

    def find(value: Any) -> Fault | None:
        fault = basic(value)
        if fault is None and not limit.least <= (len(value) if units else value) <= limit.most:
            return "", value, accepted
        return fault

    return accepted, find


def _union(members: list[tuple[str, Check]]) -> tuple[str, Check]:
    accepted, checks = " or ".join(what for what, _ in members), [find for _, find in members]

    def find(value: Any) -> Fault | None:
        for each in checks:
            if each(value) is None:
                return None
        # A fault inside of the value says more than that it is neither.
        return next((fault for each in checks if (fault := each(value)) and fault[0]), ("", value, accepted))

    return accepted, find


def _container(kind: Any, entry: Check) -> tuple[str, Check]:
    accepted = "a list" if kind is list else "an object"

    def find(value: Any) -> Fault | None:
        if not isinstance(value, kind):
            return "", value, accepted
        for key, one in value.items() if kind is dict else enumerate(value):
            fault = entry(one)
            if fault is not None:
                return f".{key}{fault[0]}" if kind is dict else f"[{key}]{fault[0]}", *fault[1:]
        return None

    return accepted, find


def _object(form: Any) -> tuple[str, Check]:
    hints, rest = _fields(form)
    known = {name: _compiled(hint) for name, hint in hints.items()}
    required = [
        each.name for each in fields(form) if each.default is MISSING and each.default_factory is MISSING
    ]
    other = _compiled(get_args(rest[1])[-1] if rest else Any)

    def find(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return "", value, "an object"
        for name in required:
            if name not in value:
                return f".{name}", _ABSENT, known[name][0]
        for name, one in value.items():
            fault = known.get(name, other)[1](one)
            if fault is not None:
                return f".{name}{fault[0]}", *fault[1:]
        return None

    return "an object", find


def _fields(form: Any) -> tuple[dict[str, Any], tuple[str, Any] | None]:
    """The forms of a dataclass's fields by name, and apart from them the field that holds all other keys."""
    hints = get_type_hints(form, include_extras=True)
    named = {each.name: hints[each.name] for each in fields(form)}
    rest = [name for name, hint in named.items() if any(isinstance(part, Rest) for part in get_args(hint))]
    return named, (rest[0], get_args(named.pop(rest[0]))[0]) if rest else None


@cache
def _constructor(form: Any) -> Callable[[Any], Any] | None:
    """What makes the dataclasses of a form out of a checked value; None where the form has none."""
    if isinstance(form, type) and is_dataclass(form):
        return _object_constructor(form)
    inner = next(filter(None, map(_constructor, get_args(form))), None)
    if inner is None or get_origin(form) is Annotated:
        return inner
    if get_origin(form) is list:
        return lambda value: [inner(each) for each in value]
    return lambda value: None if value is None else inner(value)


@cache
def _object_constructor(form: Any) -> Callable[[dict[str, Any]], Any]:
    hints, rest = _fields(form)
    inner = {name: each for name, hint in hints.items() if (each := _constructor(hint))}

    def make(value: dict[str, Any]) -> Any:
        own = {name: value[name] for name in hints if name in value}
        own |= {name: each(own[name]) for name, each in inner.items() if name in own}
        if rest is not None:
            own[rest[0]] = {name: one for name, one in value.items() if name not in hints}
        return form(**own)

    return make
