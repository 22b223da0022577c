"""The rules of `help` for a public name: plain text that stands alone, with every argument explained."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

# `help` indents by four of the 80 columns of a terminal.
WIDTH = 76
MARKUP = re.compile(r":\w+:`|\.\. \w+::|``|\\[a-zA-Z]")
UNFILLED = re.compile(r"^ +\([\w, ]+\)$", re.MULTILINE)
EXPLAINED = re.compile(r"^ {4}(\w+): \S", re.MULTILINE)


def public_names(module: ModuleType) -> dict[str, Any]:
    """The functions and classes that a module is for."""
    own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    names = getattr(module, "__all__", own)
    values = {name: getattr(module, name) for name in names if not name.startswith("_")}
    return {name: value for name, value in values.items() if callable(value)}


def faults(value: Any) -> list[str]:
    """The faults in the help of a function or a class, in a few words each."""
    text = inspect.cleandoc(value.__doc__ or "")
    found = text_faults(text)
    found += [f"{name} is not explained" for name in set(parameters(value)) - set(EXPLAINED.findall(text))]
    for name, method in vars(value).items() if inspect.isclass(value) else ():
        if inspect.isfunction(method) and not name.startswith("_") and method.__doc__:
            found += [f"{name}: {fault}" for fault in text_faults(inspect.cleandoc(method.__doc__), 100)]
    return found


def text_faults(text: str, width: int = WIDTH) -> list[str]:
    """The faults of a docstring, apart from its arguments; `width` is that of its first line."""
    first, _, rest = text.partition("\n")
    found = [f"markup: {markup}" for markup in MARKUP.findall(text)]
    found += [f"not filled in: {line.strip()}" for line in UNFILLED.findall(text)]
    if not first.endswith(".") or (rest and not rest.startswith("\n")):
        found.append("the first line is not one sentence")
    if len(first) > width:
        found.append(f"a first line of {len(first)} characters")
    if first.startswith("The same"):
        found.append("begins with 'The same'")
    if max(map(len, text.splitlines()), default=0) > 110:
        found.append("a line of more than 110 characters")
    return found + [
        f"there is no {name}" for name in re.findall(r"`(gapped\.[\w.]+)", text) if not exists(name)
    ]


def exists(name: str) -> bool:
    """Whether a dotted name leads to something public."""
    module, _, attribute = name.rstrip(".").rpartition(".")
    if "._" in name:
        return False
    try:
        importlib.import_module(name)
    except ImportError:
        return hasattr(importlib.import_module(module), attribute)
    return True


def parameters(value: Any) -> list[str]:
    """The arguments that people pass."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return []
    return [name for name in inspect.signature(value).parameters if not name.startswith("_")]
