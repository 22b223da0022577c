"""`gapped reproduce`: the paper's tables and figures, beside its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gapped.cli.common import DataDir, Device, Minutes, TensorBoard, execute

__all__ = ["reproduce"]


def reproduce(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Recipes by name, 'all', or a .toml file.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Scaled down for a laptop, and marked as such.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="Override the recipe's.", show_default=False)] = None,
    epochs: Annotated[int | None, typer.Option(help="Override the recipe's.", show_default=False)] = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Results go here; runs/NAME by default.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    tensorboard: TensorBoard = False,
    minutes: Minutes = None,
) -> int:
    """Run one or more of the paper's tables; several share their runs and are trained together.

    \b
    Examples:
      gapped reproduce ablation vae --device cuda
      gapped reproduce variance --quick
    """
    from gapped.lab.recipe import find_recipe, known_recipes

    if names == ["all"]:
        names = [name for name in known_recipes() if name != "smoke"]
    recipes = [find_recipe(name, quick=quick, seeds=seeds, epochs=epochs) for name in names]
    folder = out or Path("runs") / ("-".join(recipe.name for recipe in recipes) + ("-quick" if quick else ""))
    return execute(recipes, folder, device, data_dir, tensorboard, minutes)
