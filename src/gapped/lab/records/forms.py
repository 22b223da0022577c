"""What an object from a file must be, as a type; an error names the field, what came, what is accepted.

A form is `str`, `int`, `float` (finite), `bool`, `None`, `Any`, a union, a `Literal`, a `list`, a `dict` with
texts for keys, a `TypedDict`, or one of these in `Annotated` with limits.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf
from sys import float_info
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from gapped.errors import GappedError


@dataclass(frozen=True)
class Within:
    """In `Annotated`: limits of a number, or of the length of a text or a list."""

    least: float = 0
    most: float = inf


@dataclass(frozen=True)
class Rest:
    """In `Annotated`, of a `TypedDict`: the form of fields that it does not name, else anything."""

    form: Any


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


@cache
def _compiled(form: Any) -> tuple[str, Check]:
    """What a form accepts, in words, and the function that finds the first fault of a value."""
    if form in _SIMPLE:
        return _plain(*_SIMPLE[form])
    if is_typeddict(form):
        return _object(form, Any)
    origin, parts = get_origin(form), get_args(form)
    if origin is Annotated:
        base, limit = parts
        return _object(base, limit.form) if isinstance(limit, Rest) else _limited(base, limit)
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


def _object(form: Any, rest: Any) -> tuple[str, Check]:
    hints = get_type_hints(form, include_extras=True)
    forms = {
        name: get_args(hint)[0] if get_origin(hint) is Required else hint for name, hint in hints.items()
    }
    fields = {name: _compiled(one)[1] for name, one in forms.items()}
    # Not __required_keys__: it is wrong where annotations are postponed.
    needed = [name for name, hint in hints.items() if form.__total__ or get_origin(hint) is Required]
    required = {name: _compiled(forms[name])[0] for name in needed}
    other = _compiled(rest)[1]

    def find(value: Any) -> Fault | None:
        if not isinstance(value, dict):
            return "", value, "an object"
        for name, accepted in required.items():
            if name not in value:
                return f".{name}", _ABSENT, accepted
        for name, one in value.items():
            fault = fields.get(name, other)(one)
            if fault is not None:
                return f".{name}{fault[0]}", *fault[1:]
        return None

    return "an object", find
