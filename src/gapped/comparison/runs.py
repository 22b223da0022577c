"""A run of a training function of the user: one estimator, one seed; its record and its curve."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from gapped._version import __version__
from gapped.checks import check_count
from gapped.comparison.identity import fingerprint, name_of
from gapped.comparison.records import Curve, Record, RunLine, derived_hash, plain
from gapped.errors import GappedError, one_line, printable, reject
from gapped.registry import RECOMMENDED, label_estimators, label_of
from gapped.registry import estimator as make

Train = Callable[[Any, int], Any]
Lines = list[RunLine]

# The longest label that a record holds.
_LONGEST = 200
# Fields of a curve, which no series can be called.
_FIELDS = ("id", "epoch", "schema")
# Values that a curve keeps; above twice as many, every other one goes.
LONGEST_CURVE = 1000
# A function that goes on after its time is interrupted again, this many seconds later.
_AGAIN = 1.0
# A commit's digits, and as many of them as records hold.
_WHOLE, _DIGITS = 40, 12


@dataclass(frozen=True)
class UserRun:
    """One estimator and seed; `text` says what the estimator is, whatever its label."""

    function: str
    label: str
    text: str
    estimator: Any
    seed: int
    maximize: bool
    code: str
    """A hash of the function and of what it uses."""
    contents: str
    """A hash of the estimator, of which `text` may not say all."""
    grid: str = ""
    """The label of the grid that it is a setting of, if it is."""

    @functools.cached_property
    def id(self) -> str:
        return derived_hash(self.question, self.code)

    @property
    def question(self) -> tuple[object, ...]:
        """What the run asks, whatever the function has become since: the same of its records of any time."""
        return self.function, self.label, self.text[:_LONGEST], self.seed, self.contents

    @property
    def key(self) -> tuple[str, str]:
        """The key of its record."""
        return self.function, self.id

    def lines(self, train: Train, timeout: float | None = None) -> Lines:
        """Train, and return what there is to write: a record, and a curve if `train` yields."""
        start, error, where, result = time.perf_counter(), "", "", None
        points, process = Points(), os.getpid()
        reset_peak()
        try:
            with time_limit(timeout):
                result = train(deepcopy(self.estimator), self.seed)
                deadline = inf if timeout is None else time.monotonic() + timeout
                for each in result if isinstance(result, Iterator) else [result]:
                    points.add(_numbers(each))
                    # For where nothing interrupts the function.
                    if isinstance(result, Iterator) and time.monotonic() > deadline:
                        raise TimedOut
            if not points.count:
                raise GappedError("train yielded nothing, expected a number or a dict of numbers")
        except KeyboardInterrupt:
            raise
        except TimedOut:
            error = f"out of time: it still trained after {timeout:g} s"
        except BaseException as problem:
            error, where = one_line(problem), place_of(problem)
        if os.getpid() != process:
            # A fork that `train` made has come back here. The process that was forked writes the record.
            os._exit(0)
        seconds = time.perf_counter() - start
        curve = [points.curve(self.id)] if points.count and isinstance(result, Iterator) else []
        if error:
            return [*curve, self.failure(error, seconds, where)]
        last = points.last
        metric = next(iter(last))
        record = self._record(
            status="ok" if isfinite(last[metric]) else "diverged",
            metrics={name: plain(value) for name, value in last.items()},
            metric=metric,
            seconds=seconds,
        )
        return [*curve, record]

    def failure(self, error: str, seconds: float = 0.0, where: str = "") -> Record:
        """The record of a run that an error ended."""
        return self._record(where, status="failed", error=error, metric="value", seconds=seconds)

    def _record(self, where: str = "", **result: Any) -> Record:
        device = torch.device("cuda" if uses_cuda() else "cpu")
        said = {"where": where, "memory_gb": peak_gb(), "grid": self.grid}
        return Record(
            id=self.id,
            recipe=self.function,
            label=self.label,
            estimator=self.text[:_LONGEST],
            seed=self.seed,
            maximize=self.maximize,
            options={"code": self.code, "contents": self.contents, **{k: v for k, v in said.items() if v}},
            fleet_gpu_memory_gb=torch.cuda.max_memory_allocated() / 1e9 if uses_cuda() else None,
            environment=_environment(device),
            **result,
        )


def plan(train: Train, estimators: Any, seeds: int | Sequence[int], maximize: bool) -> list[UserRun]:
    """All runs, seed by seed, so that a budget leaves estimators with about as many runs each."""
    if not isinstance(seeds, Iterable):
        check_count("seeds", seeds)
        seeds = range(seeds)
    numbers = list(dict.fromkeys(seeds))
    if not numbers or not all(isinstance(seed, Integral) and seed >= 0 for seed in numbers):
        raise reject("seeds", seeds, "a count, or integers from 0")
    members = {}
    chosen = RECOMMENDED if isinstance(estimators, str) and estimators == "recommended" else estimators
    for name, given in label_estimators(chosen).items():
        grid = settings_of(given)
        for member in grid:
            label = printable(name if len(grid) == 1 else member if name == given else f"{name} ({member})")
            if len(label) > _LONGEST:
                raise reject("estimators", f"a label of {len(label)} characters", f"at most {_LONGEST}")
            is_text = isinstance(member, str)
            text, estimator = (member, make(member)) if is_text else (label_of(member), member)
            choice = printable(name)[:_LONGEST] if len(grid) > 1 else ""
            members[label] = text, estimator, fingerprint(estimator, train), choice
    if len(numbers) < 2 and any(choice for *_, choice in members.values()):
        raise reject("seeds", numbers, "two or more: some choose the setting of a grid, others judge it")
    function, code = name_of(train)[-_LONGEST:], fingerprint(train, train)
    return [
        UserRun(function, label, text, estimator, int(seed), maximize, code, contents, choice)
        for seed in numbers
        for label, (text, estimator, contents, choice) in members.items()
    ]


def settings_of(estimator: Any) -> list[Any]:
    """The estimator, or the texts of a grid.

    >>> settings_of("gst:tau=0.5|1,gap=1")
    ['gst:tau=0.5,gap=1', 'gst:tau=1,gap=1']
    """
    if not isinstance(estimator, str) or "|" not in estimator:
        return [estimator]
    name, _, options = estimator.partition(":")
    pieces = [piece.partition("=") for piece in options.split(",")]
    choices = [[f"{key}{sign}{value.strip()}" for value in rest.split("|")] for key, sign, rest in pieces]
    return [f"{name}:{','.join(each)}" for each in itertools.product(*choices)]


def question(record: Record) -> tuple[object, ...]:
    """`UserRun.question` of the run that left a record."""
    return record.recipe, record.label, record.estimator, record.seed, record.options.get("contents")


def reset_peak() -> None:
    """Measure the largest memory from here on, where the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if uses_cuda():
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float | None:
    """The most memory that this process has had since, what was there before included."""
    with suppress(OSError):
        sizes = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(sizes[0]) / 1e6 if sizes else None
    return None


def place_of(problem: BaseException) -> str:
    """The last line of a user's own file that an error went through."""
    frames = [(Path(each.filename), each.lineno) for each in extract_tb(problem.__traceback__)]
    installed = (Path(__file__).parents[1], Path(os.__file__).parent, Path(torch.__file__).parents[1])
    own = [each for each in frames if not any(map(each[0].is_relative_to, installed))]
    return printable(f"{own[-1][0].name}, line {own[-1][1]}")[:_LONGEST] if own else ""


def uses_cuda() -> bool:
    """Whether this process has begun to use a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _numbers(result: Any) -> dict[str, float]:
    """What `train` returned, as numbers by name; what is no number in a dict is left out."""
    values = result if isinstance(result, Mapping) else {"value": result}
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if not numbers:
        raise GappedError(f"train returned {type(result).__name__}, expected a number or a dict of numbers")
    if not all(0 < len(name) <= _LONGEST for name in numbers):
        raise GappedError(f"train returned a dict, expected names of 1 to {_LONGEST} characters in it")
    return numbers


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


class TimedOut(BaseException):
    """A run has taken too long. No Exception: training functions may pass over those."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """A block that `TimedOut` interrupts, where the system has alarms and this is the main thread."""
    on_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not on_main or not hasattr(signal, "setitimer"):
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Points:
    """The values that a run has yielded: all of up to twice `LONGEST_CURVE`, beyond that evenly spaced ones.

    The last value is kept in any case.
    """

    def __init__(self) -> None:
        self.count, self._stride = 0, 1
        self._kept: list[tuple[int, Mapping[str, float]]] = []
        self.last: Mapping[str, float] = {}

    def add(self, value: Mapping[str, float]) -> None:
        self.count, self.last = self.count + 1, value
        if (self.count - 1) % self._stride == 0:
            self._kept.append((self.count, value))
        if len(self._kept) > 2 * LONGEST_CURVE:
            self._kept, self._stride = self._kept[::2], 2 * self._stride

    def curve(self, run: str) -> Curve:
        """The values that are kept as the curve of a run, whose epochs count them from 1."""
        # The last one, too.
        kept = dict(self._kept) | {self.count: self.last}
        names = dict.fromkeys(name for value in kept.values() for name in value if name not in _FIELDS)
        series: Any = {name: [plain(value.get(name)) for value in kept.values()] for name in names}
        return Curve(id=run, epoch=[float(number) for number in kept], more=series)


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and the commit of the code."""
    on_gpu = device.type == "cuda"
    threads = torch.get_num_threads()
    cpu = f"CPU, {threads} thread{'s' * (threads != 1)}"
    return {
        "gapped": __version__,
        "commit": _commit(),
        "torch": torch.__version__.split("+")[0],
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu,
        "python": platform.python_version(),
        "precision": "tf32" if on_gpu else "float32",
    }


# A commit is asked for once, not for each run.
_environment = functools.cache(describe)


def _commit() -> str | None:
    """``$GAPPED_COMMIT`` if it is set, else the commit of this package's own checkout, if it is in one.

    A checkout of something else that it is installed or copied into says nothing about this code.
    """
    if commit := os.environ.get("GAPPED_COMMIT"):
        return commit[:_DIGITS] if len(commit) == _WHOLE else commit[:_WHOLE]
    root = Path(__file__).resolve().parents[3]
    # A hook's GIT_DIR would be asked in place of the folder.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        if 'name = "gapped"' not in (root / "pyproject.toml").read_text(encoding="utf-8").splitlines():
            return None
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--show-prefix", f"--short={_DIGITS}", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env=plain,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    prefix, commit = answer.stdout.split("\n")[:2]
    return commit if not prefix else None
