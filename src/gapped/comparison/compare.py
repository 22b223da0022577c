"""Estimators compared in a training function of the user: runs, records as they finish, and a verdict."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any

from gapped.checks import check_count
from gapped.comparison.outcome import Comparison, hopeless
from gapped.comparison.records import Record
from gapped.comparison.runs import Lines, Train, UserRun, plan, question
from gapped.comparison.statistics import LEVEL, STOP_LEVEL, check_margin, looks, losers
from gapped.comparison.store import Claims, Store
from gapped.comparison.table import cells, own_metric
from gapped.comparison.workers import executor
from gapped.errors import GappedError, reject

# Seconds between two looks at runs that other processes train.
_PATIENCE = 0.2


def compare(
    train: Train,
    estimators: Iterable[Any] | Mapping[str, Any] = "recommended",
    seeds: int | Sequence[int] = 5,
    *,
    budget: float | None = None,
    maximize: bool = False,
    out: str | Path | None = None,
    engine: str = "local",
    workers: int = 1,
    timeout: float | None = None,
    margin: float | str | None = "1%",
    fresh: bool = False,
    keep: bool = False,
) -> Comparison:
    """Train with each estimator and seed, and say which estimator is best.

    Arguments:
        train: Your own function `train(estimator, seed)`. It returns a number, or a dict of numbers whose
            first one is compared, or yields one of these per epoch, of which the last counts. Of more than
            2,000 values the curve keeps some, evenly spaced. All randomness should come from `seed`: gapped
            itself seeds nothing.
        estimators: Texts such as "gst:tau=0.5", objects, or a mapping from labels to either; "recommended" is
            `gapped.registry.RECOMMENDED`. A text without a temperature runs at the default of its class.
            Every run gets a copy of its own. "gst:tau=0.3|0.5|1" is a grid: the first half of the seeds
            chooses its best setting, and the others judge it, so that more tuning is no advantage.
        seeds: How many (0, 1, ...), or which.
        budget: Seconds after which no further run starts. The verdict says which are missing.
        maximize: Whether higher is better.
        out: The folder of the records. The same call again goes on where it was interrupted; runs that failed
            are tried again. A run is known by its estimator with all options, its seed, and `train`: its
            name, and a hash of its code and of what it can be seen to use in its file or package. After a
            change of these it is trained anew. Not seen are installed packages, data in files, the
            environment and weights of networks. By default it is a temporary folder, which is removed with
            the result, and stays after an interruption, whose traceback names it.
        engine: "local", or "ray": a task for each run, on the cluster that this process is connected to, the
            one that RAY_ADDRESS names, or else one on this machine. A task takes a GPU if the cluster has
            any, else a CPU; a module that `train` comes from must be importable there.
        workers: Processes of the local engine that train side by side, each on one thread, and on one GPU
            where there are any. A run's output goes to `output/` in the folder.
        timeout: Seconds that one run may take. One that takes longer has failed; its curve is kept. It is
            interrupted as by a signal; without that (on Windows, or outside of the main thread) `train` is
            stopped when it yields, and processes side by side are killed.
        margin: How much worse than the best one an estimator may be to count as good as it: a share of the
            best mean, or a number. The verdict says which ones are shown to be within it.
        fresh: Train every run anew, also where nothing has changed; earlier ones move to another file.
        keep: Take the finished runs of `train` as it was, although it has changed since.

    Returns:
        A `gapped.Comparison`. It prints as a table and a verdict: which estimator is best, which ones tie
        with it, and how many seeds would separate the two best. Its `best`, `tied`, `worse`, `within` and
        `["label"]` say so to code. All statements together are wrong in at most 5% of comparisons.

    A run that raises an error, or ends with a value that is not finite, costs that run alone. Once every
    estimator has raised one, two runs or more, and none has finished, no further run starts.

    If `train` is a generator function, clear losers are stopped early: they get no further seeds. After 3, 6,
    12, ... seeds, an estimator is out if a one-sided t-test on the final values of these seeds finds it worse
    than the leader. The best estimator, or one that ties for it, is stopped with a chance of at most 1%, all
    tests together, if final values are normal. No run is cut short, since learning curves cross. Estimators
    with a run that failed or diverged take no part. A `train` that returns gets all its seeds.

    >>> result = compare(lambda estimator, seed: estimator.tau + seed / 100, ["gst:tau=0.5", "gst:tau=2"], 3)
    >>> result
    Comparison(6 runs of 2 estimators, best: gst:tau=0.5)
    gst:tau=0.5 wins: lowest value (mean 0.51, std 0.01, 3 seeds), better than
    gst:tau=2. Shown to be within 1% of the best, whichever that is: gst:tau=0.5.
    All of this together is wrong in at most 5% of comparisons (seed by seed).
    >>> result.best, result.worse, result["gst:tau=2"].value.count
    ('gst:tau=0.5', ['gst:tau=2'], 3)
    """
    return execute(**locals())


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
    ray_address: str | None = None,
    timeout: float | None = None,
    margin: float | str | None = "1%",
    fresh: bool = False,
    keep: bool = False,
) -> Comparison:
    """`compare` with a callback that gets the record of each run as it finishes, and an address for Ray."""
    if not callable(train):
        raise reject("train", train, "a function of an estimator and a seed")
    for name, seconds in (("budget", budget), ("timeout", timeout)):
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise reject(name, seconds, "a positive number of seconds, or None")
    check_count("workers", workers)
    check_margin(margin)
    if fresh and keep:
        raise GappedError("fresh: cannot be combined with keep, which takes runs of earlier calls")
    runs = plan(train, estimators, seeds, maximize)
    deadline = inf if budget is None else time.monotonic() + budget
    with ExitStack() as stack:
        finish = stack.enter_context(executor(engine, train, runs, workers, ray_address, timeout))
        folder = stack.enter_context(_folder(out))
        store = Store(folder)
        if fresh:
            asked = {run.question for run in runs}
            store.set_aside(lambda record: question(record) in asked)
        before = store.finished()
        old = {question(record): record for record in before.values()}
        changed = [run for run in runs if run.key not in before and run.question in old]
        kept: dict[Hashable, Record] = {run.key: old[run.question] for run in changed} if keep else {}
        before |= kept
        queue = stack.enter_context(closing(_Queue(store, runs, before, deadline)))
        stops: dict[str, tuple[int, str]] = {}
        batches = list(_batches(runs, _is_generator(train)))
        for batch, seeds_done, tests in batches:
            queue.due = [run for run in batch if run.label not in stops and run.key not in before]
            while queue.due and not queue.is_over:
                with closing(finish(iter(queue), folder)) as results:
                    for lines in results:
                        record = queue.add(lines)
                        if report is not None:
                            report(record)
                queue.wait()
            if queue.is_over:
                break
            if tests:
                stops = {**_losers(runs, {**store.records(), **kept}, seeds_done, tests, maximize), **stops}
        known = {**store.records(), **kept}
    absent = [run for run in runs if run.key not in known]
    result = Comparison(
        tuple(_record_of(run, known[run.key]) for run in runs if run.key in known),
        tuple((run.label, run.seed) for run in absent if run.label not in stops),
        folder,
        tuple((label, *stops[label]) for label in dict.fromkeys(r.label for r in absent) if label in stops),
        sum(run.key in before for run in runs),
        margin,
        len(changed) - len(kept),
        LEVEL - STOP_LEVEL * any(tests for _, _, tests in batches),
    )
    if out is None:
        weakref.finalize(result, _remove, folder, os.getpid())
    return result


def _record_of(run: UserRun, record: Record) -> Record:
    """A record, which another call may have left, as this call asks for it."""
    options = {name: value for name, value in record.options.items() if name != "grid"}
    options |= {"grid": run.grid} if run.grid else {}
    return replace(record, maximize=run.maximize, options=options)


def _batches(runs: Sequence[UserRun], stops: bool) -> Iterator[tuple[Sequence[UserRun], int, int]]:
    """The runs up to each look for losers, how many seeds that makes, and how many tests there are in all.

    The last batch ends without a look: 0 tests. A look has all runs up to it and no others, so what it finds
    does not depend on which run finished first.
    """
    members = len({run.label for run in runs})
    seeds = len(runs) // members
    ends = looks(seeds) if stops and members > 1 else []
    for start, end in pairwise([0, *ends, seeds]):
        tests = len(ends) * (members - 1) if end < seeds else 0
        yield runs[start * members : end * members], end, tests


def _losers(
    runs: Sequence[UserRun], known: Mapping[Any, Record], seeds: int, tests: int, maximize: bool
) -> dict[str, tuple[int, str]]:
    """What a look after so many seeds finds: the clear losers, each with this number and the leader."""
    first = set(list(dict.fromkeys(run.seed for run in runs))[:seeds])
    group = cells(known[run.key] for run in runs if run.seed in first and run.key in known)
    values = {cell.label: cell.values(own_metric(group)) for cell in group}
    whole = {label: x for label, x in values.items() if len(x) == seeds and all(map(isfinite, x))}
    return {label: (seeds, leader) for label, leader in losers(whole, maximize, tests).items()}


def _is_generator(train: Train) -> bool:
    return any(map(inspect.isgeneratorfunction, (train, getattr(train, "__call__", None))))  # noqa: B004


class _Queue:
    """The runs that are due, one after another as there is room, without those that other processes train."""

    def __init__(
        self, store: Store, runs: Sequence[UserRun], before: Mapping[Hashable, Record], deadline: float
    ) -> None:
        self.store, self.deadline = store, deadline
        self.due: list[UserRun] = []
        self.is_over = False
        self._synced = 0.0
        self._labels = {run.label for run in runs}
        self._start = dict(store.records())
        self._ended = [before[run.key] for run in runs if run.key in before]
        self._claims = Claims(store.folder)
        self.close = self._claims.close

    def __iter__(self) -> Iterator[UserRun]:
        for run in self.due:
            self.is_over = time.monotonic() >= self.deadline or hopeless(self._ended, self._labels)
            if self.is_over:
                return
            if self._claims.take(run.id):
                if not self._has_ended(run):
                    yield run
                else:
                    self._claims.drop(run.id)

    def add(self, lines: Lines) -> Record:
        """Write what a run of this process has left; its record."""
        # Runs that take milliseconds do not wait for the disk each: a loss of power may cost a second.
        sync = time.perf_counter() - self._synced > 1
        self.store.add(lines, sync)
        self._synced = time.perf_counter() if sync else self._synced
        record = next(line for line in lines if isinstance(line, Record))
        self._ended.append(record)
        self._claims.drop(record.id)
        return record

    def wait(self) -> None:
        """Drop from the queue what has ended; what is left is with other processes: give them time."""
        self.due = [run for run in self.due if not self._has_ended(run)]
        if self.due and not self.is_over:
            time.sleep(_PATIENCE)

    def _has_ended(self, run: UserRun) -> bool:
        """Whether a process has finished the run, or failed in it, since this call began."""
        record = self.store.records().get(run.key)
        return record is not None and record != self._start.get(run.key)


@contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    """The folder of the records; an error that leaves a temporary one behind says where it is."""
    if out is not None:
        # A training function may go to another folder.
        yield Path(out).absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="gapped-compare-"))
    try:
        yield folder
    except BaseException as problem:
        if (folder / Record.FILE).exists():
            problem.add_note(f"Finished runs are kept: the same call with out={str(folder)!r} goes on.")
        else:
            _remove(folder, os.getpid())
        raise


def _remove(folder: Path, process: int) -> None:
    # A process that was forked has a copy of the object whose end removes the folder.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
