"""`gapped diagnose`: bias and variance of estimators on a built-in problem, or on a cost of the user."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from zipfile import ZipFile, is_zipfile

import typer

from gapped.errors import GappedError, reject

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from gapped.diagnostics.diagnosis import Diagnosis


DEFAULT = (
    "gumbel-softmax",
    "straight-through:tau=1.0",
    "gumbel-rao:samples=10",
    "gst",
    "reinmax:tau=1.0",
    "rloo:samples=4",
    "disarm-tree",
)
METRICS = ("mse", "bias", "relative-bias", "variance")
SWEPT = ("gst",)
# The most that logits from a file may take.
_BYTES = 256 * 2**20


def diagnose(
    problem: Annotated[str, typer.Option(help="linear, quadratic, cubic, classic or vae.")] = "quadratic",
    function: Annotated[
        str | None,
        typer.Option(
            help="module:function of your own: one-hot samples (n, L, K) to costs (n,).", show_default=False
        ),
    ] = None,
    shape: Annotated[str, typer.Option(help="L,K: variables and categories.")] = "3,4",
    logits: Annotated[
        Path | None,
        typer.Option(help="A tensor saved by torch.save; normal ones by default.", show_default=False),
    ] = None,
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            help="name or name:option=value,...; repeatable. Some of both families by default.",
            show_default=False,
        ),
    ] = None,
    tau: Annotated[float, typer.Option(help="Temperature of estimators that do not name their own.")] = 1.0,
    samples: Annotated[int, typer.Option(help="Gradients drawn from each estimator.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the problem and of the samples.")] = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="option=first:last:count, such as tau=0.1:2:8; once or twice.", show_default=False),
    ] = None,
    metric: Annotated[str, typer.Option(help="What the heat map of a sweep shows.")] = "mse",
    reference: Annotated[str, typer.Option(help="auto, exact, coordinate or rloo.")] = "auto",
    out: Annotated[Path, typer.Option(help="diagnosis.json and pictures go here.")] = Path("runs/diagnose"),
) -> int:
    """Measure bias, variance, mean squared error and cosine of estimators against the exact gradient.

    \b
    Examples:
      gapped diagnose --problem cubic --estimator gst:gap=1.2 --estimator reinmax
      gapped diagnose --function mymodel:cost --shape 8,16 --samples 5000
      gapped diagnose --problem cubic --sweep tau=0.1:2:8 --sweep gap=0:2:5
    """
    if metric not in METRICS:
        raise reject("--metric", metric, f"one of {', '.join(METRICS)}")
    axes = dict(_axis(text) for text in sweep or ())
    if len(axes) != len(sweep or ()) or len(axes) > 2:
        raise reject("--sweep", " ".join(sweep or ()), "one or two different options")
    names = _shape(shape)

    import torch

    from gapped.diagnostics.measure import check_settings
    from gapped.diagnostics.measure import diagnose as measure
    from gapped.lab.environment import describe
    from gapped.lab.problems import Problem
    from gapped.lab.problems import problem as known_problem
    from gapped.lab.report.terminal import console, say
    from gapped.lab.store import Store

    members, places = _members(estimator, tau, axes)
    where = function or problem
    if function is None:
        f, point = known_problem(problem, seed, names)
    else:
        f, point = Problem(_users(function), _normal(names, seed))
    if logits is not None:
        own, point = point, _load(logits)
        if function is None and point.shape != own.shape:
            shown, accepted = tuple(point.shape), f"{tuple(own.shape)}, the problem's shape (see --shape)"
            raise reject("--logits", f"a tensor of shape {shown}", accepted)
    check_settings(samples)
    Store(out)  # fails here, not after minutes, if nothing can be written
    screen = console()
    with _Bar(screen, len(members)) as bar:
        found = measure(
            f,
            point,
            members,
            samples,
            reference,
            generator=torch.Generator().manual_seed(seed),
            progress=bar,
        )
    screen.print(str(found), soft_wrap=True)
    settings = {"problem": where, "shape": list(point.shape), "tau": tau, "seed": seed, "sweep": axes}
    record = {**settings, **found.to_dict(), "environment": describe(point.device)}
    _write(out / "diagnosis.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
    pictures = {"diagnosis": _picture(found, where), **_heat_maps(found, places, axes, metric, where)}
    for name, svg in pictures.items():
        _write(out / f"{name}.svg", svg)
    written = ", ".join(["diagnosis.json", *(f"{name}.svg" for name in pictures)])
    say(screen, f"Written to {out}: {written}")
    return 0


def _axis(text: str) -> tuple[str, list[float]]:
    """``tau=0.1:2:8`` as a name and evenly spaced values."""
    accepted = "option=first:last:count, such as tau=0.1:2:8"
    name, _, span = text.partition("=")
    try:
        first, last, count = span.split(":")
        low, high, steps = float(first), float(last), int(count)
    except ValueError:
        raise reject("--sweep", text, accepted) from None
    if not name or steps < 2:
        raise reject("--sweep", text, f"{accepted}, with two values or more")
    return name, [float(f"{low + (high - low) * i / (steps - 1):.4g}") for i in range(steps)]


def _shape(text: str) -> tuple[int, int]:
    try:
        variables, categories = (int(part) for part in text.split(","))
    except ValueError:
        raise reject("--shape", text, "L,K, such as 3,4") from None
    if variables < 1 or categories < 2:
        raise reject("--shape", text, "at least one variable and two categories")
    return variables, categories


Place = tuple[str, tuple[float, ...]]


def _members(
    texts: Sequence[str] | None, tau: float, axes: Mapping[str, Sequence[float]]
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Estimators by label, and for those of a sweep their text and place in it."""
    from gapped.lab.text import make, parse, show
    from gapped.pathwise import Pathwise
    from gapped.registry import estimators

    # Those of the defaults that go by a name.
    default = SWEPT if "gap" in axes else DEFAULT
    chosen = texts or [text for text in default if text.partition(":")[0] in estimators()]
    members: dict[str, Any] = {}
    places: dict[str, Place] = {}
    for text in chosen:
        name, options = parse(text)
        made = make(name, options)
        if isinstance(made, Pathwise) and "tau" not in options and "tau" not in axes:
            options["tau"] = tau
        own = {each.name for each in fields(made)} if is_dataclass(made) else set()
        if not axes or not own.issuperset(axes):
            members[text] = make(name, options)
            continue
        for values in product(*axes.values()):
            set_here = {**options, **dict(zip(axes, values, strict=True))}
            label = show(name, set_here)
            members[label] = make(name, set_here)
            places[label] = (text, values)
    if axes and not places:
        raise reject("--sweep", ", ".join(axes), f"options of one of the estimators {', '.join(chosen)}")
    return members, places


def _normal(shape: tuple[int, int], seed: int) -> Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _load(path: Path) -> Tensor:
    import torch

    size = path.stat().st_size
    try:
        if is_zipfile(
            path
        ):  # as torch.save writes it; one that is compressed may hold far more than its size
            with ZipFile(path) as file:
                size = max(size, sum(part.file_size for part in file.infolist()))
        logits = torch.load(path, map_location="cpu", weights_only=True) if size <= _BYTES else None
    except OSError:
        raise
    except Exception:  # a damaged file may fail in any way
        logits = None
    if not isinstance(logits, torch.Tensor) or logits.layout != torch.strided or logits.device.type != "cpu":
        accepted = f"a file with one dense tensor, written by torch.save, of {_BYTES // 2**20} MiB at most"
        raise reject("--logits", str(path), accepted)
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    # One that was expanded is larger than its file.
    if logits.dtype not in kinds or logits.numel() * logits.itemsize > _BYTES:
        got = f"a tensor of dtype {logits.dtype} and shape {tuple(logits.shape)}"
        raise reject("--logits", got, f"floating-point numbers of {_BYTES // 2**20} MiB at most")
    return logits.detach()


def _users(text: str) -> Callable[[Tensor], Tensor]:
    """The function called ``module:function``; whatever it raises is told in one line."""
    from importlib import import_module

    accepted = "module:function, importable from here"
    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise reject("--function", text, accepted)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = import_module(module_name)
    except Exception as problem:
        raise GappedError(f"--function: {module_name}: {_line(problem)}") from problem
    found = getattr(module, name, None)
    if not callable(found):
        what = "no such name" if found is None else f"an object of type {type(found).__name__}"
        raise reject("--function", f"{text}, {what}", f"a function in {module_name}")

    def cost(samples: Tensor) -> Tensor:
        try:
            return found(samples)  # type: ignore[no-any-return]
        except GappedError:
            raise
        except Exception as problem:
            given = f"samples of shape {tuple(samples.shape)}"
            raise GappedError(f"{text}: failed on {given}: {_line(problem)}") from problem

    return cost


def _line(problem: Exception) -> str:
    return " ".join(f"{type(problem).__name__}: {problem}".split())


class _Bar:
    """A bar with the time left; a line for each estimator where the output is no terminal."""

    def __init__(self, screen: Console, members: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        self.screen = screen
        self.progress = Progress(*columns, console=screen, transient=True)
        self.bar = self.progress.add_task("measuring", total=members)
        self.done: dict[str, float] = {}

    def __enter__(self) -> _Bar:
        if self.screen.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, label: str, done: int, total: int) -> None:
        self.done[label] = done / total
        measured = sum(share for name, share in self.done.items() if name != "reference")
        self.progress.update(self.bar, description=label, completed=measured)
        if done == total and not self.screen.is_terminal:
            self.screen.print(f"measured {label}")


def _picture(found: Diagnosis, where: str) -> str:
    from gapped.lab.report.svg import style, to_svg

    with style("diagnosis"):
        return to_svg(found.plot(), f"Bias, variance and mean squared error on {where}", [])


def _heat_maps(
    found: Diagnosis,
    places: Mapping[str, Place],
    axes: Mapping[str, Sequence[float]],
    metric: str,
    where: str,
) -> dict[str, str]:
    """For two options a map of each estimator; for one, a single map with a line for each."""
    from gapped.lab.report.figures import heat_map

    name = metric.replace("-", "_")
    values = {places[row.label]: getattr(row, name).value for row in found.rows if row.label in places}
    if not values:
        return {}
    what = f"{metric.replace('-', ' ').replace('mse', 'mean squared error')} on {where}"
    if len(axes) == 1:
        grid: dict[tuple[Any, Any], float] = {(text, at[0]): value for (text, at), value in values.items()}
        over = f"of estimators over {next(iter(axes))}"
        return {"heat": heat_map(grid, what, name, "heat", ("estimator", next(iter(axes))), over)}
    right, up = axes
    maps = {}
    for text in dict.fromkeys(text for text, _ in values):
        grid = {(at[1], at[0]): value for (owner, at), value in values.items() if owner == text}
        file = "heat-" + "".join(c if c.isalnum() else "-" for c in text)
        over = f"over {up} and {right}"
        maps[file] = heat_map(grid, f"{what}, {text}", name, file, (up, right), over)
    return maps


def _write(path: Path, text: str) -> None:
    from gapped.lab.records import atomic_write

    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))
