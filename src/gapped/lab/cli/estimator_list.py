"""`gapped estimators`: every estimator in a line."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

from gapped.lab.cli.command import show_rows


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
    from gapped.registry import estimators as registered

    kinds = registered(cast(Literal["pathwise", "score"] | None, family))
    rows = [(name, (kind.__doc__ or "").partition("\n")[0]) for name, kind in kinds.items()]
    show_rows(("name", "what it is"), rows)
