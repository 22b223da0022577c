"""Parse JSON values by type; an error names the field, what came, and what is accepted.

A form is `str`, `int`, `float` (finite), `bool`, `None`, `Any`, a union, a `Literal`, a `list`, a `dict` with
text keys, a dataclass, or one of these in `Annotated` with limits.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import inf
from sys import float_info
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from gapped.errors import GappedError, printable


@dataclass(frozen=True)
class Within:
    """In `Annotated`: limits of a number, or of the length of a text or a list."""

    least: float = 0
    most: float = inf


@dataclass(frozen=True)
class Rest:
    """In `Annotated`, of one `dict` field of a dataclass: it holds the keys that no other field names."""


class _Fault(Exception):
    """Where in the object, what came there, and what is accepted."""

    def __init__(self, got: object, accepted: str, where: str = "") -> None:
        self.got, self.accepted, self.where = got, accepted, where


_Parse = Callable[[Any], Any]
# What a form accepts, in words, and the function that parses a value or raises a `_Fault`.
_Parser = tuple[str, _Parse]

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


def parse(value: object, form: Any, where: str) -> Any:
    """The value with its objects as the dataclasses that the form names; what does not print is escaped.

    A value of another form is refused; `where` is the file, and the line, that it came from.

    >>> parse({"seconds": [0.5, "1"]}, dict[str, list[float]], "a.json")
    Traceback (most recent call last):
    gapped.errors.GappedError: a.json: seconds[1]: got '1', expected a number
    """
    try:
        return _parser(form)[1](value)
    except _Fault as fault:
        got = "nothing" if fault.got is _ABSENT else _BRIEF.repr(fault.got)
        place = f"{fault.where.lstrip('.')}: " if fault.where else ""
        raise GappedError(f"{where}: {place}got {got}, expected {fault.accepted}") from None
    except RecursionError:
        raise GappedError(f"{where}: nested too deeply") from None


@cache
def _parser(form: Any) -> _Parser:
    if form in _SIMPLE:
        return _plain(*_SIMPLE[form])
    if is_dataclass(form):
        return _object(form)
    origin, members = get_origin(form), get_args(form)
    if origin is Annotated:
        return _parser(members[0]) if isinstance(members[1], Rest) else _limited(*members)
    if origin is Literal:
        return _plain(" or ".join(map(repr, members)), lambda value: any(value == each for each in members))
    if origin in (Union, UnionType):
        return _union([_parser(member) for member in members])
    if origin is list:
        return _list(_parser(members[0])[1])
    if origin is dict:
        return _mapping({}, _parser(members[1])[1])
    raise TypeError(f"not a form: {form!r}")


def _plain(accepted: str, accepts: Callable[[Any], bool]) -> _Parser:
    def parse(value: Any) -> Any:
        if not accepts(value):
            raise _Fault(value, accepted)
        return value if isinstance(value, int | float) else _shown(value)

    return accepted, parse


def _shown(value: Any) -> Any:
    """The value with all of its texts fit to be shown, whoever wrote them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _shown(each) for key, each in value.items()}
    return value


def _limited(base: Any, limit: Within) -> _Parser:
    what, parse_base = _parser(base)
    ends = f"from {limit.least:g}" + (f" to {limit.most:g}" if limit.most < inf else "")
    units = {str: " characters", list: " entries"}.get(get_origin(base) or base)
    accepted = f"{what} {ends}" if units is None else f"{what} of {ends.removeprefix('from ')}{units}"

    def parse(value: Any) -> Any:
        result = parse_base(value)
        if not limit.least <= (len(value) if units else value) <= limit.most:
            raise _Fault(value, accepted)
        return result

    return accepted, parse


def _union(members: list[_Parser]) -> _Parser:
    accepted = " or ".join(what for what, _ in members)

    def parse(value: Any) -> Any:
        inner = None
        for _, parse_member in members:
            try:
                return parse_member(value)
            except _Fault as fault:
                # A fault inside of the value says more than that it is neither.
                inner = inner or (fault if fault.where else None)
        raise inner or _Fault(value, accepted)

    return accepted, parse


def _list(parse_entry: _Parse) -> _Parser:
    def parse(value: Any) -> Any:
        if not isinstance(value, list):
            raise _Fault(value, "a list")
        return [_entry(entry, parse_entry, "[{}]", place) for place, entry in enumerate(value)]

    return "a list", parse


def _mapping(known: dict[str, _Parse], other: _Parse) -> _Parser:
    """An object whose `known` keys have parsers of their own."""

    def parse(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Fault(value, "an object")
        return {
            printable(key): _entry(entry, known.get(key, other), ".{}", key) for key, entry in value.items()
        }

    return "an object", parse


def _entry(value: Any, parse: _Parse, place: str, key: object) -> Any:
    try:
        return parse(value)
    except _Fault as fault:
        raise _Fault(fault.got, fault.accepted, place.format(key) + fault.where) from None


def _object(form: Any) -> _Parser:
    """A dataclass; fields without a default are required, and keys that it does not name go to its `Rest`."""
    hints = get_type_hints(form, include_extras=True)
    own = {each.name: hints[each.name] for each in fields(form)}
    rest = next((name for name, hint in own.items() if Rest() in get_args(hint)), None)
    other = _parser(Any if rest is None else get_args(get_args(own.pop(rest))[0])[1])[1]
    known = {name: _parser(hint) for name, hint in own.items()}
    required = [each.name for each in fields(form) if each.default is each.default_factory is MISSING]
    parse_entries = _mapping({name: each for name, (_, each) in known.items()}, other)[1]

    def parse(value: Any) -> Any:
        for name in required if isinstance(value, dict) else ():
            if name not in value:
                raise _Fault(_ABSENT, known[name][0], f".{name}")
        entries = parse_entries(value)
        more = {name: entries.pop(name) for name in [*entries] if name not in known}
        return form(**entries, **({rest: more} if rest else {}))

    return "an object", parse
