"""`gapped doctor`: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

import gapped
from gapped._version import __version__
from gapped.cli import command
from gapped.errors import MissingExtra, printable

if TYPE_CHECKING:
    import torch


# What the extras of pyproject.toml bring, and what it is for.
PACKAGES = {
    "numpy": "comparisons and Triton",
    "scipy": "tests and intervals of the report",
    "matplotlib": "the figures of the report",
    "jinja2": "report.html",
    "filelock": "records that several processes write",
    "rich": "tables and progress in a terminal",
    "typer": "this command line",
}
TRITON = {"triton": "fused kernels on a GPU"}
OK, ABSENT, BROKEN = "ok", "absent", "broken"


class Finding(NamedTuple):
    """One line: a component, its state (`ok`, `absent` or `broken`), details, and what would help."""

    component: str
    state: str
    details: str
    hint: str = ""


def doctor(data_dir: command.DataDir = None) -> int:
    """Show versions, devices and data, and what is missing.

    The exit status is 1 if something is broken; absent packages are optional.
    """
    findings = [
        Finding("gapped", OK, f"{__version__} in {Path(gapped.__file__).parent}"),
        Finding("python", OK, f"{platform.python_version()} at {sys.executable}"),
        *find_versions(PACKAGES, 'pip install "gapped[compare]"'),
        *find_versions(TRITON, 'pip install "gapped[triton]"'),
        *_machine(),
    ]
    has_torch = findings[-1].component != "torch"
    try:
        findings += command.laboratory("doctor", "gapped data")(data_dir, has_torch)
    except MissingExtra as problem:
        findings.append(Finding("laboratory", ABSENT, "the paper's experiments", str(problem)))
    show_findings(findings)
    return int(any(finding.state == BROKEN for finding in findings))


def show_findings(findings: Sequence[Finding]) -> None:
    """A line for each finding, broken at 80 characters."""
    first = max(len(finding.component) for finding in findings)
    indent = " " * (first + 10)
    for component, state, *texts in findings:
        lead = f"{component:<{first}}  {state:<8}"
        for text in filter(None, texts):
            print(fill(printable(text), 80, initial_indent=lead, subsequent_indent=indent))
            lead = indent


def find_versions(packages: Mapping[str, str], remedy: str) -> Iterator[Finding]:
    """The version of each package, or what it is needed for, and what would install it."""
    # Slow to import, and only needed here.
    from importlib.metadata import PackageNotFoundError, version

    for name, purpose in packages.items():
        try:
            yield Finding(name, OK, version(name))
        except PackageNotFoundError:
            yield Finding(name, ABSENT, f"needed for {purpose}", remedy)


def _machine() -> Iterator[Finding]:
    """torch, its devices, and one hard sample with its gradient on each of them."""
    try:
        import torch
    except (ImportError, OSError) as problem:
        yield Finding("torch", BROKEN, _first_line(problem), "reinstall torch: https://pytorch.org")
        return
    yield Finding("torch", OK, torch.__version__)
    yield _sample(torch.device("cpu"), f"threads: {torch.get_num_threads()}")
    if not torch.cuda.is_available():
        reason = "this build of torch has no CUDA" if torch.version.cuda is None else "no CUDA device seen"
        yield Finding("cuda", ABSENT, reason, "everything runs on the CPU, without fused kernels")
        return
    for index in range(torch.cuda.device_count()):
        yield _sample(torch.device("cuda", index), torch.cuda.get_device_name(index))


def _sample(device: torch.device, what: str) -> Finding:
    """Whether a sample drawn on `device` is one-hot and carries a finite gradient; names the backend."""
    import torch

    try:
        logits = torch.zeros(4, 3, device=device, requires_grad=True)
        sample = gapped.gst(logits, tau=0.5, hard=True, generator=torch.Generator(device).manual_seed(0))
        (gradient,) = torch.autograd.grad(sample[:, 0].sum(), logits)
        good = bool((sample.sum(-1) == 1).all() and gradient.isfinite().all())
    except Exception as problem:
        return Finding(str(device), BROKEN, f"{what}: {_first_line(problem)}")
    backend = gapped.backend_used()
    if not good:
        return Finding(str(device), BROKEN, f"{what}: {backend} drew a wrong sample")
    return Finding(str(device), OK, f"{what}; samples by {backend}")


def _first_line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".partition("\n")[0][:200]
