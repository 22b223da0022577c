"""The `gapped` command: its subcommands, those of the laboratory, error lines and exit status."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

import gapped
from gapped._version import __version__
from gapped.cli.command import Stopped, complain, missing
from gapped.cli.compare import Grouped, compare
from gapped.cli.diagnose import diagnose
from gapped.cli.doctor import doctor
from gapped.cli.estimators import estimators, properties
from gapped.errors import GappedError, one_line, printable

# The commands of the laboratory, in case it is not installed.
LABORATORY = ("reproduce", "report", "data", "bench")
# Seconds that threads have to end by themselves, as those of an idle pool do.
_GRACE = 3.0

EXAMPLES = """
Discrete choices that learn by gradient. To find the estimator for a model, compare; to debug a gradient,
diagnose.

\b
Examples:
  gapped compare --train my:train    which estimator, on your own training
  gapped diagnose --function my:cost debug a gradient: its bias and variance
  gapped estimators gapmax           one of them, and its options
  gapped doctor                      what is installed, what is missing

\b
With the laboratory, in a clone:
  gapped compare                     six estimators on small digits, a minute
  gapped reproduce vae --quick       a table of the paper, for a laptop

gapped COMMAND --help has the options and more examples.
"""

app = typer.Typer(add_completion=True, no_args_is_help=True, help=EXAMPLES, rich_markup_mode=None)
app.command(cls=Grouped)(compare)
for _command in (diagnose, estimators, properties, doctor):
    app.command()(_command)


def _extend() -> list[Path]:
    """Add the commands that other distributions bring, or else lines that say so. Returns their folders."""
    folders = []
    for point in entry_points(group="gapped.commands"):
        app.add_typer(point.load())
        folders.append(Path(sys.modules[point.module].__file__ or "").parents[1])
    for name in () if folders else LABORATORY:
        anything = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
        app.command(name, hidden=True, context_settings=anything)(_missing)
    return folders


def _missing(context: typer.Context) -> None:
    raise missing(f"gapped {context.info_name}")


_FOLDERS = [Path(gapped.__file__).parent, *_extend()]


def _version(flag: bool) -> None:
    if flag:
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
    """Run the command line and return its exit status: 2 for a user error, 1 for any other, 130 for Ctrl-C.

    An error is one line. Training that SIGTERM ended has status 143; that --minutes ended, 3.
    """
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        return app(arguments, prog_name="gapped", standalone_mode=False) or 0
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except Stopped as stop:
        for line in str(stop).split("\n"):
            complain(line)
        return stop.status
    except Exception as problem:
        if "--debug" in arguments:
            raise
        line, status = _explain(problem)
        complain(line)
        return status


def _explain(problem: Exception) -> tuple[str, int]:
    """One line that says what went wrong, and the exit status."""
    if isinstance(problem, GappedError):
        return str(problem), 2
    if isinstance(problem, OSError):
        where = f"{problem.filename}: " if problem.filename else ""
        return f"{where}{problem.strerror or problem}", 2
    if hasattr(problem, "format_message"):  # click's own errors: wrong options and arguments
        command = getattr(getattr(problem, "ctx", None), "command_path", "gapped")
        return f"{problem.format_message()} (see {command} --help)", 2
    return f"{one_line(problem)} (--debug shows where)", 1


_default_format = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The package's own warnings as one line, without the source line, which says nothing to users."""
    if category is UserWarning and any(map(Path(filename).is_relative_to, _FOLDERS)):
        return f"gapped: {printable(str(message))}\n"
    return _default_format(message, category, filename, lineno, line)


def entry() -> None:
    """Run the command line and exit."""
    warnings.formatwarning = _format_warning
    status = main()
    limit_exit(status)
    sys.exit(status)


def limit_exit(status: int) -> None:
    """Let no thread keep this process from ending with `status`."""
    own = threading.main_thread()
    if any(each is not own and not each.daemon for each in threading.enumerate()):
        timer = threading.Timer(_GRACE, leave, [status])
        timer.daemon = True
        timer.start()


def leave(status: int) -> None:
    """End this process now, whatever still runs in it; what was printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
