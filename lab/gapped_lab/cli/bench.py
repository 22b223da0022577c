"""`gapped bench`: time and memory of the samplers on this machine, beside torch's own."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gapped.cli import command
from gapped.cli.command import Stopped
from gapped.errors import GappedError, reject
from gapped_lab.cli.reproduce import find_recipes
from gapped_lab.records import Bench, Startup, Work

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from gapped_lab.bench.cases import Job
    from gapped_lab.bench.workloads import Task

TABLES = "tables"
"""The name that stands for the cells of the paper's tables that have numbers."""


def bench(
    estimator: Annotated[list[str] | None, command.estimator_option("Five")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="ROWSxCATEGORIES[:f32|bf16|f16|f64]; repeatable. With a third number, xWIDTH, the sample "
            "selects from an embedding of that width. Those of docs/performance.md by default."
        ),
    ] = None,
    work: Annotated[
        list[str] | None,
        typer.Option(
            help="Workloads instead of shapes, each in several ways: quantizer, channels, gates, masks, "
            "subsets, experts, vocabulary, decoding, router, rollout, mixture, rao, jax, or all; repeatable."
        ),
    ] = None,
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            help="Recipes instead of shapes: seconds of an epoch of each fleet; tables stands for the 240 "
            "runs of the paper's tables; repeatable."
        ),
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Only what the host does around kernels, without a GPU.")
    ] = False,
    constant: Annotated[
        list[str] | None,
        typer.Option(
            help="MODULE.NAME=VALUE of gapped.kernels, such as runner.BLOCK=(512,2), in place of its own; "
            "repeatable."
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="How many epochs of each fleet are timed.", min=1)] = 4,
    data_dir: command.DataDir = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="torch or triton; repeatable. All that run here by default.")
    ] = None,
    compiled: Annotated[bool, typer.Option(help="Also time torch.compile of F.gumbel_softmax.")] = True,
    device: command.Device = "auto",
    seconds: Annotated[float, typer.Option(help="Time to spend on each measurement.")] = 0.5,
    out: Annotated[Path, typer.Option(help="bench.jsonl and bench.svg go here.")] = Path("runs/bench"),
) -> int:
    """Time the samplers beside torch's F.gumbel_softmax.

    Forward and backward are timed, and peak memory is measured. Without --shape and --work, gates and the
    cost of importing the package are measured as well. Small calls come first.

    \b
    Examples:
      gapped bench
      gapped bench --estimator gst --shape 6400x64 --no-compiled
      gapped bench --work gates --work quantizer
      gapped bench --work rao --constant "runner.BLOCK=(512,2)" --out runs/blocks
      gapped bench --fleet tables
    """
    if not 0 < seconds < float("inf"):
        raise reject("--seconds", seconds, "a positive number")
    if work and not shape and (estimator or backend):
        raise GappedError(
            "--work: workloads have their own estimators; --estimator and --backend are for --shape"
        )

    from gapped.cli.command import console, say
    from gapped_lab.bench.cases import plan
    from gapped_lab.bench.fleets import fleet_lines, tables
    from gapped_lab.bench.host import host_lines
    from gapped_lab.bench.workloads import tasks
    from gapped_lab.environment import current, pick_device
    from gapped_lab.store import Store

    where = pick_device(device)
    screen = console()
    constants = dict(map(_change, constant or ()))
    with current(where):
        if fleet or host:
            named = find_recipes([name for name in fleet or () if name != TABLES])[0]
            recipes = [*named, *(tables() if TABLES in (fleet or ()) else ())]
            for line in fleet_lines(recipes, where, epochs, data_dir) if fleet else host_lines():
                say(screen, line)
            return 0
        # People meet gates as often as samples.
        jobs: list[Job | Task] = [*tasks(work or (() if shape else ("gates",)), where)]
        if shape or not work:
            jobs = [*plan(where, shape or (), estimator or (), backend or (), compiled), *jobs]
        Store(out)  # fails here, not after minutes, if nothing can be written
        try:
            lines = _measure(jobs, where, seconds, out, screen, constants, startup=not (shape or work))
        except KeyboardInterrupt:
            raise Stopped(f"interrupted; what was measured is in {out / 'bench.jsonl'}") from None
    present(*lines, out, screen)
    failed = sum(line.status.startswith("failed") for group in lines[:2] for line in group)
    if failed:
        raise Stopped(f"{failed} of the measurements failed, for the reasons above", 1)
    return 0


def _change(text: str) -> tuple[str, str]:
    """Give a constant of the kernels another value; its name and the value, for the records."""
    place, _, value = text.partition("=")
    module, _, name = place.rpartition(".")
    try:
        home = import_module(f"gapped.kernels.{module}")
        getattr(home, name)
        setattr(home, name, literal_eval(value))
    except (ImportError, AttributeError, ValueError, SyntaxError):
        raise reject("--constant", text, "MODULE.NAME=VALUE, such as runner.BLOCK=(512,2)") from None
    return place, value


def _measure(
    jobs: Sequence[Job | Task],
    where: torch.device,
    seconds: float,
    out: Path,
    screen: Console,
    constants: Mapping[str, str],
    startup: bool,
) -> tuple[list[Bench], list[Work], list[Startup]]:
    """Measure everything; each shape and each workload is on disk as soon as it is done."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from gapped.comparison import records
    from gapped_lab.bench import run
    from gapped_lab.bench import startup as import_cost

    benches: list[Bench] = []
    works: list[Work] = []
    startups: list[Startup] = []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        bar = progress.add_task("", total=sum(len(job.cases) + 1 for job in jobs) + startup)

        def watch(what: str) -> None:
            progress.update(bar, advance=1, description=what)

        for lines in run(jobs, where, seconds, watch, constants):
            records.write(out, lines)
            benches += [line for line in lines if isinstance(line, Bench)]
            works += [line for line in lines if isinstance(line, Work)]
        if startup:
            watch("import gapped")
            startups = import_cost(where)
            records.write(out, startups)
    return benches, works, startups


def present(
    lines: Sequence[Bench], works: Sequence[Work], startups: Sequence[Startup], out: Path, screen: Console
) -> None:
    """Print a table for each shape and workload and the reasons for gaps in it; draw the shapes."""
    from gapped.cli.command import say
    from gapped.comparison.store import write_text
    from gapped.comparison.table import to_rich
    from gapped_lab.report import timings

    shapes = timings.timings(lines)
    for shape in shapes:
        screen.print(to_rich(timings.table_of(shape), timings.title_of(shape), screen.width))
        for reason in timings.reasons(shape):
            say(screen, reason)
    for work in timings.work_timings(works):
        screen.print(to_rich(work.table(), work.heading(), screen.width))
        for reason in work.reasons():
            say(screen, reason)
    for startup in timings.last_startups(startups):
        say(screen, f"{startup.what}, after torch: {startup.milliseconds.median:.0f} ms")
    if any(shape.reference("eager") for shape in shapes):
        say(screen, timings.losses(shapes))
        write_text(out / "bench.svg", timings.bench_figure(lines))
        say(screen, f"Plot: {out / 'bench.svg'}")
