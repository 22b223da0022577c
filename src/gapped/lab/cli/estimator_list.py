"""`gapped estimators`: every estimator in a line."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import typer

from gapped.lab.cli.command import show_rows


def estimators(
    family: Annotated[
        str | None, typer.Option(help="pathwise (the sample carries the gradient) or score (the cost does).")
    ] = None,
) -> None:
    """List the estimators, a line each.

    Commands, recipes and gapped.estimator take them as NAME or NAME:OPTION=VALUE,..., such as
    gst:gap=auto,tau=0.85. An unknown option is answered with the known ones.

    \b
    Examples:
      gapped estimators
      gapped estimators --family pathwise
    """
    from gapped.registry import estimators as registered

    kinds = registered(cast(Literal["pathwise", "score"] | None, family))
    rows = [(name, (kind.__doc__ or "").partition("\n")[0]) for name, kind in kinds.items()]
    show_rows(("name", "what it is"), rows)
