"""`gapped reproduce`: the paper's tables and figures, beside its numbers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from gapped.cli import command
from gapped.errors import GappedError, listing
from gapped_lab.cli.training import execute
from gapped_lab.recipe_files import FIELD, WORKLOAD_TITLES, known_recipes, recipe_titles

if TYPE_CHECKING:
    from gapped_lab.recipe import Recipe

FIGURES = "figures"
"""The name that stands for the pictures of the paper that need no training."""
BOARD = ("field-reinmax", "field-flows", "field-polynomial", "field-codes")
WORKLOADS = "workloads"
"""The name that stands for all workloads."""
PICTURES = ("simplex-samples.svg", "simplex-movements.svg", "expected-gap.svg")

# The logits of the top, left and right category; at temperature 1 every movement starts at p itself.
LOGITS = (0.8, 0.1, -0.5)
TAU, GAP, SAMPLES = 1.0, 1.0, 100
PROBABILITIES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
SEED = 0


class RecipesHelp(TyperCommand):
    """Help that ends with the recipes, a line each."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        further = {
            FIGURES: "The paper's pictures, which need no training",
            **WORKLOAD_TITLES,
            WORKLOADS: f"These four: {listing(WORKLOAD_TITLES)}",
            FIELD: f"Newer estimators on their authors' tasks: {listing(BOARD)}",
            "all": "All recipes but smoke, and the figures; no workloads",
        }
        with formatter.section("Names"):
            formatter.write_dl([*recipe_titles().items(), *further.items()])


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Names from the list below, or paths of .toml files."),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Scaled down for a laptop, and marked as such.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(help="Runs per estimator, in place of the recipe's.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data, in place of the recipe's.")
    ] = None,
    device: command.Device = "auto",
    out: Annotated[Path | None, typer.Option(help="Results go here; runs/NAME by default.")] = None,
    data_dir: command.DataDir = None,
    tensorboard: command.TensorBoard = False,
    minutes: command.Minutes = None,
    engine: command.Engine = "local",
    workers: Annotated[
        int, typer.Option(help="Processes that train fleets side by side, on this machine's GPUs in turn.")
    ] = 1,
    ray_address: command.RayAddress = None,
    runs_per_fleet: command.RunsPerFleet = None,
) -> None:
    """Run tables of the paper, and studies beyond it.

    Each name below is a recipe: which estimators, tasks and seeds. Several recipes are trained together, and
    share the runs that they have in common.

    \b
    Examples:
      gapped reproduce ablation vae --device cuda
      gapped reproduce variance --quick
      gapped reproduce figures
      gapped reproduce field --minutes 9
      gapped reproduce vae --engine ray --ray-address auto
      gapped reproduce vae --workers 8 --runs-per-fleet 40
      gapped reproduce tokenizer --workers 12 --minutes 9
    """
    if workloads := find_workloads(names):
        own_out = out or Path("runs", "-".join(names + ["quick"] * quick))
        train_workloads(workloads, quick, seeds, minutes, own_out, workers)
        return
    overrides = {"seeds": seeds, "epochs": epochs, "runs_per_fleet": runs_per_fleet}
    recipes, figures = find_recipes(names, quick=quick, **overrides)
    own = [FIELD] if names == [FIELD] else [recipe.name for recipe in recipes] + [FIGURES] * figures
    words = own + ["quick"] * quick
    folder = out or Path("runs", "-".join(words))
    if figures:
        draw_figures(folder, quick)
    if recipes:
        execute(recipes, folder, device, data_dir, tensorboard, minutes, engine, workers, ray_address)


def find_workloads(names: list[str]) -> list[str]:
    """The workloads that `names` stand for, if they do; workloads and recipes are not trained together."""
    found = [name for name in names if name in (*WORKLOAD_TITLES, WORKLOADS)]
    if found and (others := [name for name in names if name not in found]):
        raise GappedError(f"{found[0]}: cannot be combined with {others[0]}")
    return list(WORKLOAD_TITLES) if WORKLOADS in found else found


def train_workloads(
    names: list[str], quick: bool, seeds: int | None, minutes: float | None, out: Path, workers: int
) -> None:
    """Compare the cells of each setting: five seeds, three for clear losers; one of each when quick."""
    from gapped.cli.command import console, say
    from gapped.cli.compare import compare_function
    from gapped_lab.workloads import find_workload

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    for name in names:
        workload = find_workload(name)
        for setting, cells in workload.settings(quick).items():
            say(console(), f"{name}, {setting}: {len(cells)} cells")
            left = None if deadline is None else max((deadline - time.monotonic()) / 60, 0.01)
            folder = out / name / setting.replace(",", "").replace(" ", "-")
            compare_function(
                workload.train, cells, seeds or (1 if quick else 5), left, folder, workers=workers
            )


def find_recipes(names: list[str], **how: Any) -> tuple[list[Recipe], bool]:
    """The recipes called `names`, and whether the figures are among them."""
    from gapped_lab.recipe import find_recipe

    if names == ["all"]:
        names = [*(name for name in known_recipes() if name != "smoke"), FIGURES]
    stands = {FIELD: BOARD, FIGURES: ()}
    recipes = dict.fromkeys(each for name in names for each in stands.get(name, (name,)))
    also = [*stands, *WORKLOAD_TITLES, WORKLOADS]
    return [find_recipe(name, also=also, **how) for name in recipes], FIGURES in names


def draw_figures(folder: Path, quick: bool) -> None:
    """Write the pictures that need no training into `folder`, and say so."""
    from gapped.cli.command import console, say
    from gapped.comparison.store import write_text

    screen = console()
    for name, text in figures(quick).items():
        path = folder / name
        same = path.is_file() and path.read_bytes() == text.encode("utf-8")
        if not same:
            write_text(path, text)
        say(screen, f"{'unchanged' if same else 'written'}: {path}")


def figures(quick: bool = False) -> dict[str, str]:
    """The files by name: figures 1 and 2 of the paper, and Lemma 1."""
    import numpy as np
    import torch

    from gapped.pathwise.gst import GST
    from gapped.pathwise.gumbel_rao import GumbelRao
    from gapped.pathwise.gumbel_softmax import GumbelSoftmax
    from gapped.simplex import expected_gap
    from gapped_lab.movements import movements, simulated_gaps, surrogates
    from gapped_lab.report.triangle import Cloud, Setting, draw_gaps, draw_movements, draw_samples

    generator = torch.Generator().manual_seed(SEED)
    count = 100 if quick else 400
    stgs, stgs_points = surrogates(GumbelSoftmax(TAU), LOGITS, count, generator)
    rao, rao_points = surrogates(GumbelRao(TAU, samples=SAMPLES), LOGITS, count // 2, generator)
    gst, gst_points = surrogates(GST(TAU, gap=GAP), LOGITS, count, generator)
    stops = movements(GST(TAU, gap=GAP), LOGITS)
    clouds = [
        Cloud("STGS", stgs, stgs_points.mean(0)),
        Cloud(f"GR-MC{SAMPLES}", rao, rao_points.mean(0), rao_points[:, 0]),
        Cloud(f"GST-{GAP:.1f}", gst, gst_points.mean(0)),
    ]
    setting = Setting(LOGITS, TAU)
    words = f"logits {', '.join(f'{x:g}' for x in LOGITS)}, temperature {TAU:g}, gap {GAP:g}"
    gaps = simulated_gaps(PROBABILITIES, 300 if quick else 3000, generator)
    p = np.linspace(0.0, 0.985, 198)
    curve = expected_gap(torch.from_numpy(p)).numpy()
    contents = (
        draw_samples(clouds, stops, setting, f"Soft samples of STGS, GR-MC and GST: {words}"),
        draw_movements(stops, setting, f"The movements m1 and m2 of GST: {words}"),
        draw_gaps(np.array(PROBABILITIES), gaps, (p, curve)),
    )
    return dict(zip(PICTURES, contents, strict=True))
