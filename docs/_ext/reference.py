"""Estimators in the API reference: `.. classes of score estimators` stands for all that are registered."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import gapped

if TYPE_CHECKING:
    from sphinx.application import Sphinx

KINDS = {"functions": ("autofunction", inspect.isfunction), "classes": ("autoclass", inspect.isclass)}
LINE = re.compile(r"^\.\. (functions|classes) of (pathwise|score) estimators$", flags=re.M)


def directives(match: re.Match[str]) -> str:
    """A directive for each public function or class in the files of a family of estimators."""
    homes = {kind.__module__ for kind in gapped.estimators(match[2]).values()}
    directive, is_kind = KINDS[match[1]]
    values = [getattr(gapped, name) for name in gapped.__all__]
    names = [each.__name__ for each in values if is_kind(each) and each.__module__ in homes]
    return "\n".join(f".. {directive}:: {name}" for name in names)


def expand(text: str) -> str:
    """The text of a page with the estimators in their places."""
    return LINE.sub(directives, text)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = expand(source[0])


def hide(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str, *rest: str
) -> Any:
    """Classes that functions return have no signature: their fields are not for callers."""
    return ("", None) if what == "class" and re.search(r"[(,] ?_\w+:", signature or "") else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("autodoc-process-signature", hide)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
