"""`gapped estimators`: every estimator in a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import gapped
from gapped.cli.command import show_rows
from gapped.errors import reject

_FAMILIES = ("pathwise", "score")


def estimators(
    family: Annotated[
        str | None,
        typer.Option(help="pathwise (samples carry the gradient) or score (it is computed from costs)."),
    ] = None,
) -> None:
    """List the estimators, a line each.

    Commands take an estimator as NAME or NAME:OPTION=VALUE,..., such as gst:gap=auto,tau=0.85; so do recipes
    and, in Python, gapped.estimator. The options are those of its class, such as gapped.GST.

    \b
    Examples:
      gapped estimators
      gapped estimators --family pathwise
    """
    if family not in (None, *_FAMILIES):
        raise reject("family", family, f"one of {', '.join(_FAMILIES)}, or None for both")
    show_rows(
        ("name", "what it is"), [row for each in _FAMILIES if family in (None, each) for row in _rows(each)]
    )


def _rows(family: str) -> Iterator[tuple[str, str]]:
    """Name and first line of each estimator of a family, read from its source: an import waits for torch."""
    for public, home in gapped._HOME.items():
        if not home.startswith(f"gapped.{family}."):
            continue
        path = Path(gapped.__file__).parent.joinpath(*home.split(".")[1:]).with_suffix(".py")
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == public and (name := _name(node)):
                yield name, (ast.get_docstring(node) or "").partition("\n")[0]


def _name(node: ast.ClassDef) -> str | None:
    """The value of `name` in the body of a class."""
    for each in node.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "name":
            return str(ast.literal_eval(each.value))
    return None
