"""`gapped estimators`: every estimator in a line; `gapped properties`: which properties one has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import gapped
from gapped.cli import command
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
    command.show_rows(
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


def properties(
    estimator: Annotated[list[str] | None, command.estimator_option("All")] = None,
    draws: Annotated[int, typer.Option(help="Samples per row of logits.")] = 4000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the logits and of the samples.")
    ] = 0,
) -> None:
    """Measure which of the paper's four properties hold.

    Each finding comes with its evidence, from random logits.

    \b
    Examples:
      gapped properties
      gapped properties --estimator gst:gap=0.0 --estimator decoupled:tau=0.5
    """
    import torch

    from gapped import registry
    from gapped.pathwise import Pathwise

    texts = estimator or list(registry.estimators("pathwise"))
    members = [registry.estimator(text) for text in texts]
    for i, member in enumerate(members):
        if not isinstance(member, Pathwise):
            known = ", ".join(registry.estimators("pathwise"))
            raise reject("estimator", texts[i], f"one whose sample carries the gradient: {known}")
        report = gapped.properties(member, draws=draws, generator=torch.Generator().manual_seed(seed))
        print("\n" * (i > 0) + str(report))
