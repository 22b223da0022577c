"""Who trains the runs of a comparison: this process, processes side by side, or tasks of Ray."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing import connection, get_context, parent_process
from typing import Any

import torch

from gapped.errors import GappedError, one_line, reject
from gapped.lab.comparison.user_runs import Lines, Train, UserRun, definition, uses_cuda

Executor = Callable[[Iterator[UserRun]], Generator[Lines]]
"""The lines of each run as it finishes. The next run is asked for when there is room for it."""


@contextmanager
def executor(
    engine: str, train: Train, runs: Sequence[UserRun], workers: int, address: str | None
) -> Iterator[Executor]:
    """The executor of an engine, for a block; fails at once if it cannot work here."""
    if engine == "ray":
        if workers > 1:
            raise GappedError("workers: goes with engine 'local'; Ray has as many as its cluster")
        from gapped.lab.engines import ray

        ray.check_installed()
        with ExitStack() as stack:
            yield functools.partial(_in_tasks, stack, address, train, runs)
    elif engine != "local":
        raise reject("engine", engine, "local or ray")
    elif workers == 1:
        yield lambda due: (run.lines(train) for run in due)
    else:
        yield functools.partial(_in_processes, _context(train, runs), train, workers)


def _in_tasks(
    stack: ExitStack, address: str | None, train: Train, runs: Sequence[UserRun], due: Iterator[UserRun]
) -> Generator[Lines]:
    """Each run as a task of Ray: one that loses its worker for good costs that run."""
    from gapped.lab.engines import ray

    places = {run.key: place for place, run in enumerate(runs)}
    first = next(due, None)
    if first is None:
        return
    # Where this process is connected already, this does nothing.
    stack.enter_context(ray.connected(address or os.environ.get("RAY_ADDRESS")))
    items = (places[run.key] for run in chain([first], due))
    for place, lines in ray.in_tasks(functools.partial(_task, train, runs), items):
        yield [runs[place].failure(one_line(lines))] if isinstance(lines, Exception) else lines


def _task(train: Train, runs: Sequence[UserRun], place: int) -> Lines:
    return runs[place].lines(train)


def _context(train: Train, runs: Sequence[UserRun]) -> Any:
    """How processes start: by a fork, which takes any function, where that is safe; else the safe way."""
    # A fork leaves behind the threads of CUDA and JAX, for which its process may wait in vain.
    if sys.platform == "linux" and not uses_cuda() and "jax" not in sys.modules:
        return get_context("fork")
    try:
        pickle.dumps((train, runs))
        script = getattr(sys.modules["__main__"], "__file__", None) or ""
        if definition(train).__module__ == "__main__" and not os.path.isfile(script):
            raise GappedError("a new process does not see what was typed in here")
    except Exception as problem:
        raise GappedError(
            f"train: with workers > 1 it must be a function at the top of a module here ({problem})"
        ) from None
    return get_context("spawn")


def _in_processes(context: Any, train: Train, workers: int, due: Iterator[UserRun]) -> Generator[Lines]:
    """The lines of each run as it finishes, each in a process of its own: what kills one costs that run."""
    active: dict[Any, tuple[UserRun, Any]] = {}
    try:
        while True:
            while len(active) < workers and (run := next(due, None)) is not None:
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
            process.join()


def _work(train: Train, run: UserRun, sender: Any) -> None:
    # Threads of OpenMP do not survive a fork: one that waits for them would wait for ever.
    torch.set_num_threads(1)
    # Ctrl-C goes to all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    sender.send(run.lines(train))
    sender.close()


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone: nobody would record what it trains."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
