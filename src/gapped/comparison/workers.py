"""Who trains the runs of a comparison: this process, processes side by side, or tasks of Ray."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from math import inf
from multiprocessing import active_children, connection, get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from gapped.comparison.identity import definition
from gapped.comparison.runs import Lines, Train, UserRun
from gapped.errors import GappedError, one_line, reject

Executor = Callable[[Iterator[UserRun], Path], Generator[Lines]]
"""The lines of each run as it finishes, in a folder. The next run is asked for when there is room for it."""
# Seconds between two looks at processes, and what one has to end by itself after its time.
_POLL, _GRACE = 1.0, 5.0
# Of prctl: what a process leaves behind becomes a child of this one.
_SET_CHILD_SUBREAPER = 36
# A process that is ended leaves its own children here: so many times.
_GENERATIONS = 5


@contextmanager
def executor(
    engine: str,
    train: Train,
    runs: Sequence[UserRun],
    workers: int,
    address: str | None,
    timeout: float | None = None,
) -> Iterator[Executor]:
    """The executor of an engine, for a block; fails at once if it cannot work here."""
    if engine == "ray":
        if workers > 1:
            raise GappedError("workers: goes with engine 'local'; Ray has as many as its cluster")
        from gapped.comparison.ray_tasks import check_installed

        check_installed()
        with ExitStack() as stack:
            yield functools.partial(_in_tasks, stack, address, train, timeout, runs)
    elif engine != "local":
        raise reject("engine", engine, "local or ray")
    elif workers == 1:
        yield lambda due, folder: (run.lines(train, timeout) for run in due)
    else:
        yield functools.partial(_in_processes, _context(train, runs), train, workers, timeout)


def _in_tasks(
    stack: ExitStack,
    address: str | None,
    train: Train,
    timeout: float | None,
    runs: Sequence[UserRun],
    due: Iterator[UserRun],
    folder: Path,
) -> Generator[Lines]:
    """Each run as a task of Ray: one that loses its worker for good costs that run."""
    from gapped.comparison.ray_tasks import connected, in_tasks

    def task(place: int) -> Lines:
        return runs[place].lines(train, timeout)

    places = {run.key: place for place, run in enumerate(runs)}
    if (first := next(due, None)) is None:
        return
    # Where this process is connected already, this does nothing.
    stack.enter_context(connected(address or os.environ.get("RAY_ADDRESS")))
    items = (places[run.key] for run in chain([first], due))
    for place, lines in in_tasks(task, items):
        yield [runs[place].failure(one_line(lines))] if isinstance(lines, Exception) else lines


def _context(train: Train, runs: Sequence[UserRun]) -> Any:
    """How processes start: by a fork, which takes any function, where that is safe; else the safe way."""
    if _can_fork():
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


def _can_fork() -> bool:
    """Whether a forked process can use CUDA and JAX, whose threads stay behind: it may wait for them in vain.

    To ask whether there is a GPU can be enough for CUDA to refuse.
    """
    if sys.platform != "linux" or "jax" in sys.modules:
        return False
    probe = get_context("fork").Process(target=lambda: sys.exit(torch.cuda._is_in_bad_fork()))
    probe.start()
    probe.join()
    # None where the signal of a child's end is ignored.
    return probe.exitcode in (0, None)


def _in_processes(
    context: Any, train: Train, workers: int, timeout: float | None, due: Iterator[UserRun], folder: Path
) -> Generator[Lines]:
    """The lines of each run as it finishes, each in a process of its own: what kills one costs that run.

    Where there are GPUs, processes share them in turn, one each.
    """
    active: dict[Any, tuple[UserRun, Any, float, str]] = {}
    gpus = _gpus()
    free = [gpus[place % len(gpus)] for place in range(workers)]
    limit = inf if timeout is None else timeout + _GRACE
    try:
        while True:
            while free and (run := next(due, None)) is not None:
                receiver, sender = context.Pipe(duplex=False)
                gpu, output = free.pop(0), folder / "output" / f"{run.id}.txt"
                process = context.Process(target=_work, args=(train, run, timeout, sender, gpu, output))
                process.start()
                sender.close()
                active[receiver] = run, process, time.monotonic() + limit, gpu
            if not active:
                return
            ready: list[Any] = list(connection.wait(list(active), _POLL))
            for receiver, (run, process, end, gpu) in list(active.items()):
                lines, error = None, ""
                if receiver in ready:
                    try:
                        lines = receiver.recv()
                    except EOFError:
                        process.join()
                elif time.monotonic() > end:
                    error = f"out of time: it still trained after {timeout:g} s"
                elif process.is_alive() or receiver.poll():
                    continue
                # Else a process that the run left behind holds the other end of the pipe.
                del active[receiver]
                free.append(gpu)
                # It has nothing more to do, but may wait for a thread that `train` left behind.
                process.kill()
                process.join()
                error = error or f"its process ended with exit code {process.exitcode}"
                yield lines or [run.failure(error, where=f"output/{run.id}.txt")]
    finally:
        for _, process, *_ in active.values():
            process.kill()
            process.join()


def _gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; one empty name if none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(torch.cuda.device_count())) if named is None else named.split(",")
    return list(filter(None, names)) or [""]


def _work(train: Train, run: UserRun, timeout: float | None, sender: Any, gpu: str, output: Path) -> None:
    if gpu:
        # Before the first use of CUDA, which looks once.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    _redirect(output)
    # Threads of OpenMP do not survive a fork: one that waits for them would wait for ever.
    torch.set_num_threads(1)
    # Ctrl-C goes to all processes of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    lines = run.lines(train, timeout)
    end_children()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if not output.stat().st_size:
        output.unlink()
    sender.send(lines)
    sender.close()


def _redirect(output: Path) -> None:
    """What this process and its programs print goes to a file from here on."""
    output.parent.mkdir(exist_ok=True)
    with open(output, "wb") as file:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            os.dup2(file.fileno(), number)
            # A notebook's has none, and that of another stream has its own.
            with suppress(OSError, ValueError, AttributeError):
                os.dup2(file.fileno(), stream.fileno())


def leave_with_parent() -> None:
    """End this process when the one that started it is gone: nobody would record what it trains."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def adopt_orphans() -> None:
    """Make processes whose parent is gone children of this process, where the system can do that."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """End the processes that this one has started; where orphans are adopted, those that these left, too."""
    for process in active_children():
        process.kill()
    for _ in range(_GENERATIONS):
        for child in _children():
            # One that may not be ended, and one that has ended, need no further care.
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _children() -> list[int]:
    """The processes that this one has started, where the system lists them."""
    from multiprocessing.resource_tracker import _resource_tracker

    # That of Python itself ends with this process, and says so if it is ended before.
    own = getattr(_resource_tracker, "_pid", None)
    lists = Path("/proc/self/task").glob("*/children")
    return [child for each in lists for child in map(int, each.read_text().split()) if child != own]
