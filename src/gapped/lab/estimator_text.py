"""Estimators as text, ``name`` or ``name:option=value,...``: the only place where text becomes one."""

from __future__ import annotations

from inspect import signature
from typing import Any

from gapped import registry
from gapped.errors import GappedError, reject
from gapped.lab.paper_variants import VARIANTS
from gapped.registry import Estimator, estimator
from gapped.simplex import expected_gap

Option = bool | int | float | str

# The functions that an option may name.
_FUNCTIONS = {"expected": expected_gap}


def parse(text: str) -> tuple[str, dict[str, Option]]:
    """Split an estimator's text into its name and options, and check both.

    >>> parse("gst:gap=1.2,tau=0.5")
    ('gst', {'gap': 1.2, 'tau': 0.5})
    """
    name, _, rest = text.strip().partition(":")
    options: dict[str, Option] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise reject("estimator", text, "name or name:option=value,..., such as gst:gap=1.2,tau=0.5")
        if key in options:
            raise GappedError(f"estimator: {text}: option {key!r} is given twice")
        options[key] = _value(value)
    make(name, options)
    return name, options


def make(name: str, options: dict[str, Any]) -> Estimator:
    """The estimator for a name and options as they stand in recipes and records.

    >>> make("gst", {"gap": "expected"}).gap.__name__
    'expected_gap'
    """
    resolved: dict[str, Any] = {
        key: _FUNCTIONS.get(v, v) if isinstance(v, str) else v for key, v in options.items()
    }
    if name not in VARIANTS:
        return estimator(name, **resolved)
    for option in options:
        if option not in options_of(name):
            raise reject(f"{name}: option", option, f"one of {', '.join(options_of(name))}")
    return VARIANTS[name](**resolved)


def options_of(name: str) -> list[str]:
    """The options of an estimator of the registry, or of a variant that recipes compare.

    >>> options_of("gst-raised") == options_of("gst")
    True
    """
    return list(signature(VARIANTS[name]).parameters) if name in VARIANTS else registry.options_of(name)


def show(name: str, options: dict[str, Option]) -> str:
    """The text that `parse` reads back.

    >>> show("gst", {"gap": 1.0})
    'gst:gap=1.0'
    """
    return name + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")


def _value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
