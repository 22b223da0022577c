"""`gapped properties`: which of the paper's properties an estimator has, with the evidence."""

from __future__ import annotations

from typing import Annotated

import typer

from gapped.cli import command


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

    from gapped.diagnostics.surrogate_properties import properties as measure
    from gapped.errors import reject
    from gapped.pathwise import Pathwise
    from gapped.registry import estimator as make
    from gapped.registry import estimators

    texts = estimator or list(estimators("pathwise"))
    members = [make(text) for text in texts]
    for i, member in enumerate(members):
        if not isinstance(member, Pathwise):
            known = ", ".join(estimators("pathwise"))
            raise reject("estimator", texts[i], f"one whose sample carries the gradient: {known}")
        report = measure(member, draws=draws, generator=torch.Generator().manual_seed(seed))
        print("\n" * (i > 0) + str(report))
