"""`gapped diagnose`: bias and variance of estimators on a built-in problem, or on a cost of the user."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from zipfile import ZipFile, is_zipfile

import typer

from gapped.cli import command
from gapped.cli.command import console, say
from gapped.errors import GappedError, one_line, reject

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from gapped.diagnostics.diagnosis import Diagnosis
    from gapped.diagnostics.gradients import Progress

# Beside `registry.RECOMMENDED`.
UNBIASED = ("rloo:samples=4", "disarm-tree")
PROBLEMS = ("linear", "quadratic", "cubic", "classic", "vae")
METRICS = ("mse", "bias", "relative-bias", "variance")
# The largest logits that are read from a file.
_BYTES = 256 * 2**20

Place = tuple[str, tuple[float, ...]]
"""An estimator of a sweep: its text, and the values of the options that are swept."""


def diagnose(
    problem: Annotated[
        str, typer.Option(help="The cost: linear, quadratic, cubic, classic or vae.")
    ] = "quadratic",
    function: Annotated[
        str | None,
        typer.Option(help="module:function of your own; it maps one-hot samples (n, L, K) to costs (n,)."),
    ] = None,
    shape: Annotated[str, typer.Option(help="VARIABLESxCATEGORIES of the logits.")] = "3x4",
    logits: Annotated[
        Path | None, typer.Option(help="Logits saved by torch.save; by default, normal random ones.")
    ] = None,
    estimator: Annotated[list[str] | None, command.estimator_option("Eight")] = None,
    tau: command.Tau = None,
    samples: Annotated[int, typer.Option(help="Gradients drawn from each estimator.")] = 1000,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the problem and of the samples.")
    ] = 0,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure at several values, option=first:last:count, such as tau=0.1:2:8; once or twice."
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="Shown in the heat map of a sweep: mse, bias, relative-bias or variance.")
    ] = "mse",
    reference: Annotated[
        str,
        typer.Option(help="Where the exact gradient comes from: auto, exact, coordinate, double-cv or rloo."),
    ] = "auto",
    out: Annotated[Path, typer.Option(help="diagnosis.json and pictures go here.")] = Path("runs/diagnose"),
) -> None:
    """Debug a gradient: bias and variance against the exact one.

    Mean squared error and cosine are measured too. None of these ranks estimators by how well they train:
    that is for gapped compare. The cost is a problem that comes with the package, or a
    function of your own.

    \b
    Examples:
      gapped diagnose --problem cubic --estimator gapmax --estimator reinmax
      gapped diagnose --function mymodel:cost --shape 8x16 --samples 5000
      gapped diagnose --problem cubic --sweep tau=0.1:2:8 --sweep gap=0:2:5
    """
    if metric not in METRICS:
        raise reject("--metric", metric, f"one of {', '.join(METRICS)}")
    axes = dict(_axis(text) for text in sweep or ())
    if len(axes) != len(sweep or ()) or len(axes) > 2:
        raise reject("--sweep", " ".join(sweep or ()), "one or two different options")
    sizes = _shape(shape)

    import torch

    from gapped import diagnostics
    from gapped.comparison.runs import describe
    from gapped.comparison.store import Store, write_text

    members, places = _members(estimator, tau, axes)
    if function is None:
        f, point = find_problem(problem, seed, sizes)
    else:
        normal = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
        f, point = _user_function(function), normal
    if logits is not None:
        own, point = point, _load(logits)
        if function is None and point.shape != own.shape:
            accepted = f"{tuple(own.shape)}, the problem's shape (see --shape)"
            raise reject("--logits", f"a tensor of shape {tuple(point.shape)}", accepted)
    diagnostics.check_settings(samples)
    Store(out)  # fails here, not after minutes, if nothing can be written
    screen, noise = console(), torch.Generator().manual_seed(seed)
    with _progress_bar(screen, len(members)) as bar:
        diagnosis = diagnostics.diagnose(f, point, members, samples, reference, generator=noise, progress=bar)
    screen.print(diagnosis.text(screen.width), soft_wrap=True)
    where = function or problem
    settings = {"problem": where, "shape": list(point.shape), "seed": seed, "sweep": axes, "tau": tau}
    record = settings | diagnosis.to_dict() | {"environment": describe(point.device)}
    files = {"diagnosis.json": json.dumps(record, indent=1, allow_nan=False) + "\n"}
    files |= _pictures(diagnosis, places, axes, metric, where)
    for name, text in files.items():
        write_text(out / name, text)
    say(screen, f"Written to {out}: {', '.join(files)}")


def find_problem(
    name: str, seed: int = 0, shape: tuple[int, int] = (3, 4)
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    r"""The problem called `name`: a cost, and the logits at which its expectation is differentiated.

    - ``linear``, ``quadratic``, ``cubic``: powers of
      :math:`\sum_l \langle w_l, z_l\rangle / \sqrt L - 0.3` with normal weights, for `shape` variables and
      categories, at normal logits.
    - ``classic``: :math:`(b - 0.499)^2` for one bit, at a logit of zero.
    - ``vae``: the reconstruction error of two digits by a small VAE after ten epochs of training; 8
      variables of 8 categories each.
    """
    if name not in PROBLEMS:
        raise reject("--problem", name, f"one of {', '.join(PROBLEMS)}")
    import torch

    if name == "vae":
        f, logits = command.laboratory("vae", "--problem vae")(seed)
        return f, logits
    if name == "classic":
        return lambda z: (z[..., 1] - 0.499).square(), torch.zeros(2, dtype=torch.float64)
    noise = torch.Generator().manual_seed(seed)
    weights, logits = torch.randn(2, *shape, generator=noise, dtype=torch.float64)
    power = ("linear", "quadratic", "cubic").index(name) + 1
    return lambda z: ((z * weights).sum((-2, -1)) / math.sqrt(shape[0]) - 0.3) ** power, logits


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
        variables, categories = (int(part) for part in text.split("x"))
    except ValueError:
        raise reject("--shape", text, "VARIABLESxCATEGORIES, such as 3x4") from None
    if variables < 1 or categories < 2:
        raise reject("--shape", text, "at least one variable and two categories")
    return variables, categories


def _members(
    texts: Sequence[str] | None, tau: float | None, axes: Mapping[str, Sequence[float]]
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Estimators by label, and the places of those that are swept."""
    from gapped.registry import RECOMMENDED, options_of, spell
    from gapped.registry import estimator as make
    from gapped.texts import split_text

    texts = texts or (("gst",) if "gap" in axes else (*RECOMMENDED, *UNBIASED))
    labels: list[str] = []
    places: dict[str, Place] = {}
    for text in texts:
        name, options = split_text(text)
        member = make(text)
        if tau is not None and "tau" not in options and "tau" in options_of(name) and "tau" not in axes:
            options["tau"] = tau
        known = {each.name for each in fields(member)} if is_dataclass(member) else set()
        is_swept = bool(axes) and known.issuperset(axes)
        for values in product(*axes.values()) if is_swept else [()]:
            label = spell(name, options | dict(zip(axes, values, strict=False)))
            labels.append(label)
            if is_swept:
                places[label] = (text, values)
    if axes and not places:
        raise reject("--sweep", ", ".join(axes), f"options of one of the estimators {', '.join(texts)}")
    return {label: make(label) for label in labels}, places


def _load(path: Path) -> Tensor:
    import torch

    size, most = path.stat().st_size, f"{_BYTES // 2**20} MiB at most"
    try:
        # torch.save writes a zip file; a compressed one may hold far more than its size.
        if is_zipfile(path):
            with ZipFile(path) as file:
                size = max(size, sum(entry.file_size for entry in file.infolist()))
        logits = torch.load(path, map_location="cpu", weights_only=True) if size <= _BYTES else None
    except OSError:
        raise
    except Exception:  # a damaged file may fail in any way
        logits = None
    if not isinstance(logits, torch.Tensor) or logits.layout != torch.strided or logits.device.type != "cpu":
        accepted = f"a file with one dense tensor, written by torch.save, of {most}"
        raise reject("--logits", str(path), accepted)
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    # An expanded tensor is larger than its file.
    if logits.dtype not in dtypes or logits.nbytes > _BYTES:
        got = f"a tensor of dtype {logits.dtype} and shape {tuple(logits.shape)}"
        raise reject("--logits", got, f"floating-point numbers of {most}")
    return logits.detach()


def _user_function(text: str) -> Callable[[Tensor], Tensor]:
    """The function called ``module:function``; its exceptions become errors of one line."""
    function = command.load_function("--function", text)

    def cost(samples: Tensor) -> Tensor:
        try:
            return function(samples)  # type: ignore[no-any-return]
        except GappedError:
            raise
        except Exception as problem:
            given = f"samples of shape {tuple(samples.shape)}"
            raise GappedError(f"{text}: failed on {given}: {one_line(problem)}") from problem

    return cost


@contextmanager
def _progress_bar(screen: Console, members: int) -> Iterator[Progress]:
    """A bar with the time left; a line for each estimator where the output is no terminal."""
    from rich import progress

    description = progress.TextColumn("{task.description}", markup=False)
    columns = (description, progress.BarColumn(), progress.TimeRemainingColumn())
    shares: dict[str, float] = {}

    def update(label: str, done: int, total: int) -> None:
        shares[label] = done / total
        completed = sum(share for name, share in shares.items() if name != "reference")
        bar.update(task, description=label, completed=completed)
        if done == total and not screen.is_terminal:
            screen.print(f"measured {label}")

    with progress.Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("measuring", total=members)
        yield update


def _pictures(
    diagnosis: Diagnosis,
    places: Mapping[str, Place],
    axes: Mapping[str, Sequence[float]],
    metric: str,
    where: str,
) -> dict[str, str]:
    """The diagnosis, and heat maps of a sweep: of two options one for each estimator, of one a single one."""
    from gapped.comparison.figures import heat_map, style, to_svg

    with style("diagnosis"):
        picture = to_svg(diagnosis.plot(), f"Bias, variance and mean squared error on {where}", [])
    pictures, name = {"diagnosis.svg": picture}, metric.replace("-", "_")
    swept = [row for row in diagnosis.rows if row.label in places]
    # A vanishing gradient has no variance and no merit: its field gets no number.
    values = {places[row.label]: math.nan if row.vanishes else getattr(row, name).value for row in swept}
    what = f"{metric.replace('-', ' ').replace('mse', 'mean squared error')} on {where}"
    grid: dict[tuple[Any, Any], float]
    if len(axes) == 1:
        names = ("estimator", next(iter(axes)))
        grid = {(text, at[0]): value for (text, at), value in values.items()}
        over = f"of estimators over {names[1]}"
        pictures["heat.svg"] = heat_map(grid, what, name, "heat", names, over, "vanishes")
    elif axes:
        right, up = axes
        for text in dict.fromkeys(text for text, _ in values):
            grid = {(at[1], at[0]): value for (owner, at), value in values.items() if owner == text}
            stem = "heat-" + "".join(c if c.isalnum() else "-" for c in text)
            title, over = f"{what}, {text}", f"over {up} and {right}"
            pictures[f"{stem}.svg"] = heat_map(grid, title, name, stem, (up, right), over, "vanishes")
    return pictures
