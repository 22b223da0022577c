"""Estimators compared in a training function of the user: runs, records as they finish, and a verdict."""

from __future__ import annotations

import functools
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from html import escape
from math import isfinite
from multiprocessing import connection, get_context
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch

from gapped.checks import check_count
from gapped.diagnostics import label_of, labelled
from gapped.errors import GappedError, listing, one_line, printable, reject, require
from gapped.lab.environment import describe
from gapped.lab.estimator_text import make, parse, show, temperature
from gapped.lab.fleet import derived_hash
from gapped.lab.records import Curve, Record, RunLine
from gapped.lab.records.files import write_text
from gapped.lab.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from gapped.lab.report.cells import Cell, Row
    from gapped.lab.report.tabular import Table

Train = Callable[[Any, int], Any]
Lines = list[RunLine]

# The longest label that a record holds, and the width of a table as text.
_LONGEST, _WIDTH = 200, 80
# Fields of a curve, which no series can be called.
_FIELDS = ("id", "epoch", "schema")


def compare(
    train: Train,
    estimators: Iterable[Any] | Mapping[str, Any],
    seeds: int | Sequence[int] = 5,
    *,
    budget: float | None = None,
    maximize: bool = False,
    out: str | Path | None = None,
    engine: str = "local",
    workers: int = 1,
) -> Comparison:
    """Train with each estimator and seed, and say which estimator is best and how sure that is.

    - `train(estimator, seed)`: your own function. It returns a number, or a dict of numbers whose first one
      is compared, or yields one of these per epoch, of which the last counts. All randomness should come
      from `seed`: gapped itself seeds nothing.
    - `estimators`: texts such as ``"gst:tau=0.5"``, objects, or a mapping from labels to either. A text
      without a temperature runs at the recommended one. Every run gets a copy of its own.
    - `seeds`: how many (0, 1, ...), or which.
    - `budget`: seconds after which no further run starts. The verdict says which are missing.
    - `maximize`: whether higher is better.
    - `out`: the folder of the records, a temporary one by default. The same call again goes on where it
      was interrupted; runs that failed are tried again. A run is known by the name of `train`, estimator
      and seed: after a change of `train`, or of what it depends on, use another folder.
    - `workers`: processes that train side by side, each on one thread.

    A run that raises an error, or ends with a value that is not finite, costs that run alone.

    >>> result = compare(lambda estimator, seed: estimator.tau + seed / 100, ["gst:tau=0.5", "gst:tau=2"], 3)
    >>> result
    Comparison(6 runs of 2 estimators, best: gst:tau=0.5)
    """
    return execute(train, estimators, seeds, None, budget, maximize, out, engine, workers)


def execute(
    train: Train,
    estimators: Iterable[Any] | Mapping[str, Any],
    seeds: int | Sequence[int],
    report: Callable[[Record], object] | None = None,
    budget: float | None = None,
    maximize: bool = False,
    out: str | Path | None = None,
    engine: str = "local",
    workers: int = 1,
) -> Comparison:
    """`compare` with a callback that gets the record of each run as it finishes."""
    require("gapped.compare", "numpy", "scipy", "rich", "jinja2")
    if not callable(train):
        raise reject("train", train, "a function of an estimator and a seed")
    if engine == "ray":
        raise GappedError("engine: 'ray' is not available for a training function yet; use workers=N")
    if engine != "local":
        raise reject("engine", engine, "local")
    if budget is not None and not budget > 0:
        raise reject("budget", budget, "a positive number of seconds, or None")
    check_count("workers", workers)
    runs = _plan(train, estimators, seeds, maximize)
    context = _context(train, runs[0].estimator) if workers > 1 else None
    store = Store(Path(tempfile.mkdtemp(prefix="gapped-compare-") if out is None else out))
    deadline = None if budget is None else time.monotonic() + budget
    finished = store.finished()
    pending = [run for run in runs if run.key not in finished]
    due = _until(deadline, pending)
    in_turn: Iterator[Lines] = (run.lines(train) for run in due)
    for lines in in_turn if context is None else _in_processes(context, train, due, workers):
        store.add(lines)
        for line in lines:
            if report is not None and isinstance(line, Record):
                report(line)
    known = store.records()
    return Comparison(
        tuple(replace(known[run.key], maximize=maximize) for run in runs if run.key in known),
        tuple((run.label, run.seed) for run in runs if run.key not in known),
        store.folder,
    )


@dataclass(frozen=True)
class _Run:
    """One estimator and seed; `text` says what the estimator is, whatever its label."""

    function: str
    label: str
    text: str
    estimator: Any
    seed: int
    maximize: bool

    @property
    def id(self) -> str:
        return derived_hash(json.dumps([self.function, self.label, self.text, self.seed]))

    @property
    def key(self) -> tuple[str, str]:
        """The key of its record."""
        return self.function, self.id

    def lines(self, train: Train) -> Lines:
        """Train, and return what there is to write: a record, and a curve if `train` yields."""
        start, points, error = time.perf_counter(), [], ""
        try:
            result = train(deepcopy(self.estimator), self.seed)
            if isinstance(result, Iterator):
                points = [_numbers(each) for each in result]
                if not points:
                    raise GappedError("train yielded nothing, expected a number or a dict of numbers")
            else:
                points = [_numbers(result)]
        except Exception as problem:
            error = one_line(problem)
        seconds = time.perf_counter() - start
        if error:
            return [self.failure(error, seconds)]
        last = points[-1]
        metric = next(iter(last))
        record = self._record(
            status="ok" if isfinite(last[metric]) else "diverged",
            metrics={name: _finite(value) for name, value in last.items()},
            metric=metric,
            seconds=seconds,
        )
        if not isinstance(result, Iterator):
            return [record]
        names = dict.fromkeys(name for point in points for name in point if name not in _FIELDS)
        series: Any = {name: [_finite(point.get(name)) for point in points] for name in names}
        return [Curve(id=self.id, epoch=[float(i + 1) for i in range(len(points))], more=series), record]

    def failure(self, error: str, seconds: float = 0.0) -> Record:
        """The record of a run that an error ended."""
        return self._record(status="failed", error=error, metric="value", seconds=seconds)

    def _record(self, **result: Any) -> Record:
        device = torch.device("cuda" if _uses_cuda() else "cpu")
        return Record(
            id=self.id,
            recipe=self.function,
            label=self.label,
            estimator=self.text[:_LONGEST],
            seed=self.seed,
            maximize=self.maximize,
            environment=_environment(device),
            **result,
        )


@functools.cache
def _environment(device: torch.device) -> dict[str, Any]:
    return dict(describe(device))


def _plan(train: Train, estimators: Any, seeds: int | Sequence[int], maximize: bool) -> list[_Run]:
    """All runs, seed by seed, so that a budget leaves estimators with about as many runs each."""
    if isinstance(seeds, int):
        check_count("seeds", seeds)
    numbers = list(range(seeds) if isinstance(seeds, int) else dict.fromkeys(seeds))
    if not numbers or not all(isinstance(seed, int) and seed >= 0 for seed in numbers):
        raise reject("seeds", seeds, "a count, or integers from 0")
    members = {}
    for name, member in labelled(estimators).items():
        if len(label := printable(name)) > _LONGEST:
            raise reject("estimators", f"a label of {len(label)} characters", f"at most {_LONGEST}")
        if isinstance(member, str):
            kind, options = parse(member)
            if (tau := temperature(member)) is not None:
                options["tau"] = tau
            members[label] = show(kind, options), make(kind, options)
        else:
            members[label] = label_of(member), member
    inner: Any = train.func if isinstance(train, functools.partial) else train
    home = inner if hasattr(inner, "__qualname__") else type(inner)
    function = f"{home.__module__}.{home.__qualname__}"[-_LONGEST:]
    return [
        _Run(function, label, text, estimator, seed, maximize)
        for seed in numbers
        for label, (text, estimator) in members.items()
    ]


def _until(deadline: float | None, runs: Sequence[_Run]) -> Iterator[_Run]:
    """The runs, one after another as they are asked for, up to the deadline."""
    for run in runs:
        if deadline is not None and time.monotonic() >= deadline:
            return
        yield run


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _context(train: Train, estimator: Any) -> Any:
    """How processes start: by a fork, which takes any function, where that is safe; else the safe way."""
    if sys.platform == "linux" and not _uses_cuda():
        return get_context("fork")
    try:
        pickle.dumps((train, estimator))
    except Exception as problem:
        raise GappedError(
            f"train: with workers > 1 it must be a function at the top of a module here ({problem})"
        ) from None
    return get_context("spawn")


def _in_processes(context: Any, train: Train, runs: Iterator[_Run], workers: int) -> Iterator[Lines]:
    """The lines of each run as it finishes, each in a process of its own: what kills one costs that run."""
    active: dict[Any, tuple[_Run, Any]] = {}
    try:
        while True:
            while len(active) < workers and (run := next(runs, None)) is not None:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(train, run, sender))
                process.start()
                sender.close()
                active[receiver] = run, process
            if not active:
                return
            ready: list[Any] = list(connection.wait(list(active)))
            for receiver in ready:
                run, process = active.pop(receiver)
                try:
                    lines = receiver.recv()
                except EOFError:
                    process.join()
                    lines = [run.failure(f"its process ended with exit code {process.exitcode}")]
                process.join()
                yield lines
    finally:
        for _, process in active.values():
            process.terminate()


def _work(train: Train, run: _Run, sender: Any) -> None:
    # Threads of OpenMP do not survive a fork: one that waits for them would wait for ever.
    torch.set_num_threads(1)
    sender.send(run.lines(train))
    sender.close()


def _numbers(result: Any) -> dict[str, float]:
    """What `train` returned, as numbers by name; what is no number in a dict is left out."""
    values = result if isinstance(result, Mapping) else {"value": result}
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if not numbers:
        raise GappedError(f"train returned {type(result).__name__}, expected a number or a dict of numbers")
    return numbers


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Estimators in a training function of the user: see `gapped.compare`. Prints as table and verdict."""

    records: tuple[Record, ...]
    """One for each run, seed by seed."""
    missing: tuple[tuple[str, int], ...]
    """Label and seed of the runs that the budget left no time for."""
    folder: Path
    """Where the records are."""

    @property
    def _cells(self) -> list[Cell]:
        from gapped.lab.report.cells import cells

        return cells(self.records)

    @property
    def rows(self) -> list[Row]:
        """A summary of each estimator, best first."""
        from gapped.lab.report.cells import rows_of

        return rows_of(self._cells) if self.records else []

    @property
    def verdict(self) -> str:
        """Who is best, who ties, who is cheapest in the tie, and what would separate the two best."""
        from gapped.lab.report.cells import failures, verdict_of

        texts = [verdict_of(self._cells) if self.records else "No run has finished."]
        texts += [f"{line.removeprefix(f'{self.records[0].recipe}: ')}." for line in failures(self.records)]
        if self.missing:
            runs = listing([f"{label} (seed {seed})" for label, seed in self.missing], most=8)
            texts.append(f"The budget left no time for {runs}: the same call goes on.")
        return " ".join(texts)

    @property
    def table(self) -> str:
        """The estimators as a table, best first."""
        from rich.console import Console

        from gapped.lab.report.tabular import to_rich

        if not self.records:
            return ""
        screen = Console(width=_WIDTH, markup=False, emoji=False, highlight=False, color_system=None)
        with screen.capture() as capture:
            screen.print(to_rich(self._table, "", screen.width))
        return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())

    @property
    def _table(self) -> Table:
        from gapped.lab.report.tabular import summary_table

        return summary_table(self.rows)

    def __repr__(self) -> str:
        labels = {record.label for record in self.records} | {label for label, _ in self.missing}
        best = next((row.name for row in self.rows if row.value.count), "none")
        return f"Comparison({len(self.records)} runs of {len(labels)} estimators, best: {best})"

    def __str__(self) -> str:
        return f"{self.table}\n\n{fill(self.verdict, _WIDTH, break_on_hyphens=False)}"

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each run: estimator, seed, status, seconds, error and the metrics."""
        import pandas

        return pandas.DataFrame(
            {
                "estimator": r.label,
                "seed": r.seed,
                "status": r.status,
                "seconds": r.seconds,
                "error": r.error,
                **r.metrics,
            }
            for r in self.records
        )

    def plot(self) -> Figure:
        """A matplotlib figure: the mean of each estimator with its 95% interval, best on top."""
        require("Comparison.plot", "matplotlib")
        from gapped.lab.report.cells import metric_name
        from gapped.lab.report.plots import final_figure
        from gapped.lab.report.svg import style

        rows = [row for row in self.rows if row.value.count]
        if not rows:
            raise GappedError("Comparison.plot: no run finished with a value")
        with style("comparison"):
            return final_figure(rows, metric_name(rows[0].metric), {}, {})[0]

    def save_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file: verdict, figures, learning curves, table."""
        require("Comparison.save_html", "matplotlib")
        from gapped.lab.report.cells import failures
        from gapped.lab.report.page import render_html, sections_of

        write_text(Path(path), render_html(sections_of(self.records, self.folder), failures(self.records)))
        return Path(path)

    def _repr_html_(self) -> str:
        from gapped.lab.report.tabular import to_html

        table = to_html(self._table) if self.records else ""
        return f"{table}<p>{escape(self.verdict)}</p>"
