"""Descriptions of arguments that several docstrings share, each written once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import cleandoc
from textwrap import fill, indent
from typing import TypeVar

_T = TypeVar("_T", bound=Callable[..., object])


def describing(arguments: Mapping[str, str]) -> Callable[[_T], _T]:
    """A decorator that puts descriptions in the place of each line of names alone, as `(tau, hard)`.

    >>> @describing({"dim": "The category axis."})
    ... def f(dim): "(dim)"
    >>> f.__doc__
    'dim: The category axis.'
    """

    def descriptions(line: re.Match[str]) -> str:
        texts = [f"{name}: {' '.join(arguments[name].split())}" for name in line[2].split(", ")]
        return "\n".join(indent(fill(each, 100, subsequent_indent="    "), line[1]) for each in texts)

    def documented(value: _T) -> _T:
        if value.__doc__:  # there is none under python -OO
            value.__doc__ = re.sub(r"^( *)\(([\w, ]+)\)$", descriptions, cleandoc(value.__doc__), flags=re.M)
        return value

    return documented
