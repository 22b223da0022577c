"""`gapped properties`: which of the paper's properties an estimator has, with the evidence."""

from __future__ import annotations

from typing import Annotated

import typer


def properties(
    estimator: Annotated[
        list[str] | None,
        typer.Option(help="name or name:option=value,...; repeatable. All by default.", show_default=False),
    ] = None,
    draws: Annotated[int, typer.Option(help="Samples a row of logits.")] = 4000,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of logits and samples.")] = 0,
) -> None:
    """Measure properties 0 to 3 of the paper on random logits.

    \b
    Examples:
      gapped properties
      gapped properties --estimator gst:gap=0.0 --estimator decoupled:tau=0.5
    """
    import torch

    from gapped.diagnostics.properties import properties as measure
    from gapped.errors import reject
    from gapped.lab.text import make, parse
    from gapped.pathwise import Pathwise
    from gapped.registry import estimators

    names = estimator or list(estimators("pathwise"))
    chosen = [make(*parse(text)) for text in names]
    for i, one in enumerate(chosen):
        if not isinstance(one, Pathwise):
            known = ", ".join(estimators("pathwise"))
            raise reject("estimator", names[i], f"one whose sample carries the gradient: {known}")
        print("\n" * (i > 0) + str(measure(one, draws=draws, generator=torch.Generator().manual_seed(seed))))
