"""`gapped compare`: the same model, several estimators and seeds, one fleet, one verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from gapped.cli import command
from gapped.cli.command import Stopped, console, say
from gapped.errors import GappedError, reject

# Options that need --train, and those that a training function of the user and the demonstration share.
ONLY_OWN = {"maximize", "timeout", "margin", "fresh", "keep"}
SHARED = {"train", "estimator", "seeds", "out", "minutes", "engine", "ray_address", "workers", "help"}
ENGINE = ("engine", "workers", "ray_address")

SEEDS = 5
"""The default of `gapped.compare`."""


class Grouped(TyperCommand):
    """The command whose help has the options that need --train, and those that it excludes, by themselves."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parts: dict[str, list[tuple[str, str]]] = {"Options": [], "With --train": [], "Without --train": []}
        for each in self.get_params(ctx):
            name = "Options" if each.name in SHARED else list(parts)[1 + (each.name not in ONLY_OWN)]
            parts[name] += filter(None, [each.get_help_record(ctx)])
        for name, rows in parts.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def compare(
    context: typer.Context,
    train: Annotated[
        str | None, typer.Option(help="module:function of your own; train(estimator, seed) returns a number.")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that train fleets, or runs of --train, side by side; without Ray.")
    ] = 1,
    maximize: Annotated[bool, typer.Option("--maximize", help="Higher numbers are better.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds that one run may take.")] = None,
    margin: Annotated[
        str, typer.Option(help="How far from the best is as good as it: a share such as 1%, or a number.")
    ] = "1%",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train every run anew, also where nothing has changed.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Take finished runs although the function has changed since.")
    ] = False,
    data: Annotated[str, typer.Option(help="digits, mnist or fashion-mnist.")] = "digits",
    estimator: Annotated[list[str] | None, command.estimator_option("Six")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Runs per estimator; 5 by default, 3 without --train.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data; each data set has its own default.")
    ] = None,
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
    """Train one model with several estimators; say which is best.

    The model is a small VAE; all estimators and seeds train together, as one fleet.

    With --train, a function of your own trains instead, run by run. If it yields its numbers epoch by epoch,
    an estimator that is clearly worse after 3, 6, 12, ... seeds gets no further seeds. The best estimator is
    stopped in this way with a chance of at most 1%. Each function has a folder of its own, unless --out
    names one. Runs in it are not trained again, unless the function, or what it uses, has changed.

    \b
    Examples:
      gapped compare
      gapped compare --estimator gapmax --estimator gumbel-rao --seeds 5
      gapped compare --engine ray --runs-per-fleet 5
      gapped compare --train mymodule:train --estimator gapmax --estimator reinmax
    """
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}

    if train is not None:
        if unused := sorted(given - SHARED - ONLY_OWN):
            raise GappedError(f"--train: cannot be combined with --{', --'.join(unused)}".replace("_", "-"))
        if ray_address is not None and engine != "ray":
            raise reject("--ray-address", ray_address, "only with --engine ray")
        function = command.load_function("--train", train)
        if "out" not in given:
            from gapped.comparison.identity import name_of

            out = out / name_of(function)
        how = {name: context.params[name] for name in (*ONLY_OWN, *ENGINE)}
        count = SEEDS if seeds is None else seeds
        compare_function(function, estimator or "recommended", count, minutes, out, **how)
        return
    if unused := sorted(given & ONLY_OWN):
        raise GappedError(f"--{unused[0]}: only together with --train")
    train_demo = command.laboratory("demo", "gapped compare without --train")
    overrides = {"seeds": seeds, "epochs": epochs, "runs_per_fleet": runs_per_fleet}
    how = {name: context.params[name] for name in ("device", "data_dir", "tensorboard", "minutes", *ENGINE)}
    train_demo(data, estimator, tau, out, overrides, **how)


def compare_function(
    train: Callable[..., Any],
    estimators: Sequence[str] | Mapping[str, Any] | str,
    seeds: int,
    minutes: float | None,
    out: Path,
    **how: Any,
) -> None:
    """Compare estimators in a function of the user, a line for each run; then table, verdict and page."""
    from gapped.comparison.compare import execute
    from gapped.comparison.records import Record
    from gapped.comparison.workers import adopt_orphans, end_children

    screen, errors = console(), set()

    def report(record: Record) -> None:
        value = record.metrics.get(record.metric)
        result = record.status if value is None else f"{record.metric} {value:.4g}"
        if record.error and record.error not in errors:
            result = f"failed: {record.error}"
            errors.add(record.error)
        say(screen, f"{record.label}, seed {record.seed}: {result}, {record.seconds:.1f} s")

    if minutes == 0:
        raise reject("--minutes", minutes, "a positive number with --train")
    budget = None if minutes is None else 60 * minutes
    adopt_orphans()
    try:
        result = execute(train, estimators, seeds, report, budget, out=out, **how)
    except KeyboardInterrupt:
        raise Stopped("interrupted; the same command goes on from there") from None
    finally:
        end_children()
    for line in str(result).split("\n"):
        say(screen, line)
    say(screen, f"Report: {result.save_html(out / 'report.html')}")
    failed = sum(record.failed for record in result.records)
    if failed and failed == len(result.records):
        raise Stopped(f"all {failed} runs failed", 1)
    if result.is_empty and not result.missing:
        raise Stopped("nothing can be said: every run diverged, or train ignores its estimator", 1)
    if result.missing:
        raise Stopped(f"out of time; the same command trains the {len(result.missing)} missing runs", 3)
    if failed:
        raise Stopped(f"{failed} of {len(result.records)} runs failed; the same command tries them again", 1)
