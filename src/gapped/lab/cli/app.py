"""The `gapped` command: what it is made of, and how it ends."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from gapped._version import __version__
from gapped.errors import GappedError, printable
from gapped.lab.cli.bench import bench
from gapped.lab.cli.common import Stopped
from gapped.lab.cli.compare import compare
from gapped.lab.cli.data import data
from gapped.lab.cli.diagnose import diagnose
from gapped.lab.cli.doctor import doctor
from gapped.lab.cli.properties import properties
from gapped.lab.cli.report import report
from gapped.lab.cli.reproduce import reproduce

EXAMPLES = """
Categorical samples that carry a gradient: compare estimators, reproduce the paper, report.

\b
Examples:
  gapped compare                       five estimators on small digits, one minute
  gapped compare --data mnist --estimator gst:gap=1.2 --estimator reinmax:tau=1
  gapped reproduce vae --device cuda   a table of the paper, beside its numbers
  gapped reproduce vae --quick         the same, scaled down for a laptop
  gapped reproduce figures             its pictures, and a page to play with
  gapped diagnose --problem cubic      bias and variance against the exact gradient
  gapped report runs/vae               tables and report.html from records
  gapped properties --estimator gst    which of the paper's properties it has
  gapped data mnist                    fetch and verify a data set
  gapped doctor                        versions, devices, data: what is here, what is missing
  gapped bench                         time and memory beside torch, on this machine
"""

app = typer.Typer(add_completion=True, no_args_is_help=True, help=EXAMPLES, rich_markup_mode=None)
for _command in (compare, reproduce, diagnose, properties, report, data, bench, doctor):
    app.command()(_command)


def _version(asked: bool) -> None:
    if asked:
        print(f"gapped {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. User errors are one line and status 2, anything unforeseen 1, Ctrl-C 130.

    Training that SIGTERM ended has status 143; that --minutes ended, 3, and under torchrun 0.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        return app(arguments, prog_name="gapped", standalone_mode=False) or 0
    except KeyboardInterrupt:
        print("gapped: interrupted", file=sys.stderr)
        return 130
    except Stopped as stop:
        print(*(printable(line) for line in f"gapped: {stop}".split("\n")), sep="\n", file=sys.stderr)
        return stop.status
    except Exception as problem:
        if "--debug" in arguments:
            raise
        line, status = _explain(problem)
        print(f"gapped: {printable(line)}", file=sys.stderr)
        return status


def _explain(problem: Exception) -> tuple[str, int]:
    """One line about what went wrong, and the exit status."""
    if isinstance(problem, GappedError):
        return str(problem), 2
    if isinstance(problem, OSError):
        where = f"{problem.filename}: " if problem.filename else ""
        return f"{where}{problem.strerror or problem}", 2
    format_message = getattr(problem, "format_message", None)
    if format_message is not None:  # click's own errors: wrong options and arguments
        return f"{format_message()} (see gapped --help)", 2
    return f"{type(problem).__name__}: {problem} (--debug shows where)".replace("\n", " "), 1


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as people read it, if it is ours; the source line that gave it says nothing to them."""
    ours = category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[2])
    return (
        f"gapped: {printable(str(message))}\n" if ours else _usual(message, category, filename, lineno, line)
    )


_usual = warnings.formatwarning


def entry() -> None:
    warnings.formatwarning = _one_line
    sys.exit(main())
