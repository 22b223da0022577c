"""The Ray engine: one task per fleet, on a cluster or on this machine; the driver writes all records.

A task whose worker dies is given to another one. It goes on from the fleet's checkpoint if it sees the
driver's folder, and starts over if it does not: the numbers are the same.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gapped.errors import GappedError, MissingExtra, one_line, reject, require
from gapped_lab.planning import Fleet, conclude, prepare, remaining
from gapped_lab.progress import Callbacks, Snapshot
from gapped_lab.recipe import Recipe
from gapped_lab.records import Record, RunLine
from gapped_lab.results import failure_records
from gapped_lab.store import Store, plan_path
from gapped_lab.training import Interrupted, Settings, attempt

try:
    import ray
except ModuleNotFoundError:
    ray = None


# Of a cluster on this machine. By default Ray's workers give way to every other process (niceness 15): on a
# busy machine they would take many times as long as the local engine.
SETTINGS = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 60
# How often a fleet may lose its worker.
_RETRIES = 3


def check_installed() -> None:
    """Say at once, in a line, that Ray is missing."""
    if ray is None:
        require("--engine ray", "ray", extra="ray")


class Ray:
    """A Ray cluster: the one at `address`, the one this process is connected to already, or a local one."""

    leads = True
    restarts = False

    def __init__(self, device: str, address: str | None = None) -> None:
        check_installed()
        if device not in ("auto", "cpu", "cuda"):
            raise reject("device", device, "auto, cpu or cuda: Ray chooses which")
        self.device, self.address = device, address or os.environ.get("RAY_ADDRESS")

    def run(self, recipes: Sequence[Recipe], store: Store, settings: Settings) -> list[Record]:
        with store.occupied():
            work = prepare(recipes, store)
            pending = remaining(work, store)
            settings.callbacks.start(pending)
            if pending:
                plan = plan_path(store.folder.resolve(), work.request)
                with connected(self.address):
                    job = _Job(plan, _device_type(self.device, self.address), settings)
                    _train_all(pending, store, job)
            return conclude(work, store)


@dataclass(frozen=True)
class _Job:
    """What the tasks of a command have in common."""

    plan: Path
    """The driver's plan: a worker that sees it shares the driver's folder."""
    device: str
    settings: Settings


def _board() -> Any:
    """An actor between driver and workers: news in one direction, the wish to stop in the other."""

    # A class inside a function travels as code, and a snapshot is plain: the actor starts without torch.
    class Board:
        def __init__(self) -> None:
            self.news: list[tuple[str, Snapshot | None]] = []
            self.stop = False

        def post(self, key: str, snapshot: Snapshot | None) -> bool:
            """Report how far a fleet is; None is a fleet without checkpoints. Returns whether to stop."""
            self.news.append((key, snapshot))
            return self.stop

        def read(self, stop: bool) -> list[tuple[str, Snapshot | None]]:
            """What came since the last time."""
            self.stop = stop
            news, self.news = self.news, []
            return news

        def stops(self) -> bool:
            return self.stop

    # Lost with its machine, it is made again, and the calls to it are repeated.
    return ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Board).remote()


def _train_all(pending: Sequence[Fleet], store: Store, job: _Job) -> None:
    """Give every fleet to Ray, and write down what comes back as it comes."""
    board, callbacks = _board(), job.settings.callbacks
    # The callbacks stay here.
    job = replace(job, settings=replace(job.settings, callbacks=Callbacks()))
    task = ray.remote(num_cpus=1, num_gpus=int(job.device == "cuda"), max_retries=_RETRIES)(_task)
    fleets = {fleet.key: fleet for fleet in pending}
    running = {task.remote(fleet, job, board): fleet for fleet in pending}
    stopped = False
    while running:
        ready, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
        for key, snapshot in ray.get(board.read.remote(callbacks.wants_stop())):
            if snapshot is None:
                warnings.warn(
                    f"{store.folder}: a worker does not see this folder and keeps no checkpoints; "
                    "if it dies, its fleet starts over",
                    stacklevel=2,
                )
            else:
                callbacks.epoch(fleets[key], snapshot)
        for reference in ready:
            fleet = running.pop(reference)
            lines = _result(reference, fleet)
            if lines is None:
                stopped = True
            else:
                store.keep(fleet.key, lines)
                callbacks.done(fleet)
    if stopped:
        raise Interrupted


def _task(fleet: Fleet, job: _Job, board: Any) -> Sequence[RunLine] | None:
    """Train a fleet in a worker; None if it was stopped."""
    if _ask(board.stops.remote()):
        return None
    reporter = _Reporter(board, fleet)
    checkpoints = Store(job.plan.parent.parent) if job.plan.exists() else None
    if checkpoints is None:
        reporter.post(None)
    settings = replace(job.settings, callbacks=reporter)
    try:
        return attempt(fleet, torch.device(job.device), checkpoints, settings)
    except Interrupted:
        return None


class _Reporter(Callbacks):
    """Callbacks in a worker that pass on what they are told."""

    def __init__(self, board: Any, fleet: Fleet) -> None:
        self.board, self.key, self.stop = board, fleet.key, False

    def post(self, snapshot: Snapshot | None) -> None:
        self.stop = _ask(self.board.post.remote(self.key, snapshot))

    def epoch(self, fleet: Fleet, snapshot: Snapshot) -> None:
        self.post(snapshot)

    def wants_stop(self) -> bool:
        return self.stop


def _ask(reference: Any) -> bool:
    """The answer to a worker. In `ray.get` Ray would take its CPU back, and start a second fleet on it."""
    answer: bool = reference.future().result()
    return answer


def _result(reference: Any, fleet: Fleet) -> Sequence[RunLine] | None:
    """What a task returned; where its worker was lost for good, the records of a failed fleet."""
    lines: Sequence[RunLine] | Exception | None = _answer(reference)
    if isinstance(lines, MissingExtra):
        raise lines from None
    return failure_records(fleet, lines, 0.0, torch.device("cpu")) if isinstance(lines, Exception) else lines


def _answer(reference: Any) -> Any:
    """What a task returned, or the error that lost it."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as problem:
        # Ray's errors carry the traceback of the worker in their text.
        return getattr(problem, "cause", None) or problem


def in_tasks(function: Callable[[int], Any], items: Iterator[int]) -> Iterator[tuple[int, Any]]:
    """`function` of each item, a task each, as they finish: the item, and the result or the error.

    The function travels once, by value where it must. A task takes a GPU if the cluster has any, else a CPU,
    and no more are given to Ray than the cluster has of these: then `items` is asked for the next one.
    """
    kind = "GPU" if _device_type("auto", None) == "cuda" else "CPU"
    try:
        payload = ray.put(ray.cloudpickle.dumps(function))
    except Exception as problem:
        raise GappedError(f"train: it cannot be sent to Ray ({one_line(problem)[:200]})") from problem
    task = ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"), max_retries=_RETRIES)(_unpack_and_call)
    path = [os.path.abspath(each) for each in sys.path]
    running: dict[Any, int] = {}
    try:
        while True:
            room = max(1, int(ray.cluster_resources().get(kind, 0)))
            while len(running) < room and (item := next(items, None)) is not None:
                running[task.remote(payload, path, item)] = item
            if not running:
                return
            ready, _ = ray.wait(list(running), timeout=_POLL_SECONDS)
            for reference in ready:
                yield running.pop(reference), _answer(reference)
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _unpack_and_call(payload: bytes, path: list[str], item: int) -> Any:
    """In a worker: what the driver can import, this process can, if it sees the folder."""
    sys.path += [each for each in path if each not in sys.path]
    return ray.cloudpickle.loads(payload)(item)


def _device_type(device: str, address: str | None) -> str:
    """Ray decides which GPU; whether it is one is decided here."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if device == "auto":
        return "cuda" if gpus else "cpu"
    if device == "cuda" and not gpus and address is None:
        # A cluster may grow; this machine does not.
        raise GappedError("device: got 'cuda', but Ray sees no GPU here; use --device cpu")
    return device


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to the cluster, ended afterwards unless it was there before."""
    if ray.is_initialized():
        yield
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if address is not None:
        _check_answers(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if address is None:
            ray.init("local", include_dashboard=False, logging_level=logging.ERROR)
        else:
            ray.init(address, logging_level=logging.ERROR)
    except Exception as problem:  # a time-out is a bare one
        ray.shutdown()
        what = (
            "--engine ray: Ray did not start here" if address is None else f"--ray-address: got {address!r}"
        )
        raise GappedError(f"{what}: {(str(problem) or repr(problem)).splitlines()[0]}") from problem
    for number, handler in handlers.items():
        # Ray's own for SIGTERM ends the process at once, without a checkpoint.
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Fail if no cluster answers in time: Ray would try for ever. What else may be wrong, Ray itself says."""
    connect = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"
    try:
        subprocess.run(
            [sys.executable, "-c", connect, address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_SECONDS,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        answers = f"no Ray cluster answers within {_ANSWER_SECONDS} seconds"
        raise GappedError(f"--ray-address: got {address!r}, where {answers}") from None
