"""`gapped reproduce`: the paper's tables and figures, beside its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapped.lab.cli import options
from gapped.lab.cli.execution import execute
from gapped.lab.cli.figures import FIGURES, draw_figures

if TYPE_CHECKING:
    from gapped.lab.recipe import Recipe


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Recipes by name, 'figures', 'all', or a .toml file."),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Scaled down for a laptop, and marked as such.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="Override the recipe's.", show_default=False)] = None,
    epochs: Annotated[int | None, typer.Option(help="Override the recipe's.", show_default=False)] = None,
    device: options.Device = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Results go here; runs/NAME by default.", show_default=False)
    ] = None,
    data_dir: options.DataDir = None,
    tensorboard: options.TensorBoard = False,
    minutes: options.Minutes = None,
    engine: options.Engine = "local",
    ray_address: options.RayAddress = None,
    runs_per_fleet: options.RunsPerFleet = None,
) -> None:
    """Run one or more of the paper's tables; several share their runs and are trained together.

    \b
    Examples:
      gapped reproduce ablation vae --device cuda
      gapped reproduce variance --quick
      gapped reproduce figures              pictures that need no training
      gapped reproduce vae --engine ray --ray-address auto
      torchrun --nproc-per-node 8 -m gapped reproduce vae --engine torchrun --runs-per-fleet 40
    """
    overrides = {"seeds": seeds, "epochs": epochs, "runs_per_fleet": runs_per_fleet}
    recipes, figures = find_recipes(names, quick=quick, **overrides)
    words = [recipe.name for recipe in recipes] + [FIGURES] * figures + ["quick"] * quick
    folder = out or Path("runs", "-".join(words))
    if figures:
        draw_figures(folder, quick)
    if recipes:
        execute(recipes, folder, device, data_dir, tensorboard, minutes, engine, ray_address)


def find_recipes(names: list[str], **how: Any) -> tuple[list[Recipe], bool]:
    """The recipes called `names`, and whether the figures are among them."""
    from gapped.lab.recipe import find_recipe, known_recipes

    if names == ["all"]:
        names = [*(name for name in known_recipes() if name != "smoke"), FIGURES]
    return [find_recipe(name, also=[FIGURES], **how) for name in names if name != FIGURES], FIGURES in names
