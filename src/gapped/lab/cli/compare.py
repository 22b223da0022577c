"""`gapped compare`: the same model, several estimators and seeds, one fleet, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapped.errors import reject
from gapped.lab.cli import command
from gapped.lab.cli.command import execute

if TYPE_CHECKING:
    from gapped.lab.recipe import Recipe

DEFAULT = (
    "gumbel-softmax",
    "straight-through",
    "gumbel-rao:samples=10",
    "gst:gap=1.0",
    "reinmax",
)


def compare(
    data: Annotated[str, typer.Option(help="digits, mnist or fashion-mnist.")] = "digits",
    estimator: Annotated[list[str] | None, command.estimator_option("Five")] = None,
    seeds: Annotated[int, typer.Option(help="Runs per estimator.")] = 3,
    epochs: Annotated[int | None, typer.Option(help="The protocol's own by default.")] = None,
    tau: command.Tau = None,
    device: command.Device = "auto",
    out: Annotated[Path, typer.Option(help="Results and report.html go here.")] = Path("runs/compare"),
    data_dir: command.DataDir = None,
    tensorboard: command.TensorBoard = False,
    minutes: command.Minutes = None,
    engine: command.Engine = "local",
    ray_address: command.RayAddress = None,
    runs_per_fleet: command.RunsPerFleet = None,
) -> None:
    """Train the same VAE with several estimators and seeds together, and say which one did best.

    \b
    Examples:
      gapped compare
      gapped compare --estimator gst:gap=1.2 --estimator gumbel-rao:samples=100 --seeds 5
      gapped compare --engine ray --runs-per-fleet 5
    """
    overrides = {"seeds": seeds, "epochs": epochs, "runs_per_fleet": runs_per_fleet}
    recipe = default_recipe(data, estimator, tau, **overrides)
    execute([recipe], out, device, data_dir, tensorboard, minutes, engine, ray_address)


def default_recipe(
    data: str = "digits", estimators: Sequence[str] | None = None, tau: float | None = None, **overrides: Any
) -> Recipe:
    """The recipe behind the command; `overrides` such as `seeds` and `epochs` come last."""
    from gapped.lab.data import IMAGES
    from gapped.lab.estimator_text import temperature
    from gapped.lab.recipe import recipe_from

    if data not in IMAGES:
        raise reject("--data", data, f"one of {', '.join(IMAGES)}")
    table: dict[str, Any] = {
        "name": "compare",
        "title": f"Estimators on {data}",
        "task": "vae",
        "protocol": "digits-8x8" if data == "digits" else "paper-30x10",
        "data": data,
        "seeds": 3,
        "variance_samples": 30,
        "variance_images": 200,
        "cell": [],
    }
    for text in estimators or DEFAULT:
        own = temperature(text, tau)
        table["cell"].append({"estimator": text} if own is None else {"estimator": text, "tau": own})
    return recipe_from(table, "compare", **overrides)
