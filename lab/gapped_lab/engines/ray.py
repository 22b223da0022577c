"""The Ray engine: one task per fleet, on a cluster or on this machine; the driver writes all records.

A task whose worker dies is given to another one. It goes on from the fleet's checkpoint if it sees the
driver's folder, and starts over if it does not: the numbers are the same.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gapped.comparison import ray_tasks
from gapped.comparison.ray_tasks import POLL_SECONDS, RETRIES, answer, check_installed, connected, device_type
from gapped.comparison.records import Record, RunLine
from gapped.errors import MissingExtra, reject
from gapped_lab.planning import Fleet, conclude, prepare, remaining
from gapped_lab.progress import Callbacks, Snapshot
from gapped_lab.recipe import Recipe
from gapped_lab.results import failure_records
from gapped_lab.store import Store, plan_path
from gapped_lab.training import Interrupted, Settings, attempt


class Ray:
    """A Ray cluster: the one at `address`, the one this process is connected to already, or a local one."""

    def __init__(self, device: str, address: str | None = None) -> None:
        check_installed()
        if device not in ("auto", "cpu", "cuda"):
            raise reject("device", device, "auto, cpu or cuda: Ray chooses which")
        self.device, self.address = device, address or os.environ.get("RAY_ADDRESS")

    def run(self, recipes: Sequence[Recipe], store: Store, settings: Settings) -> list[Record]:
        with store.occupy():
            work = prepare(recipes, store)
            pending = remaining(work, store)
            settings.callbacks.start(pending)
            if pending:
                plan = plan_path(store.folder.resolve(), work.request)
                with connected(self.address):
                    job = _Job(plan, device_type(self.device, self.address), settings)
                    _train_all(pending, store, job)
            return conclude(work, store)


@dataclass(frozen=True)
class _Job:
    """The state that the tasks of a command share."""

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
            """The messages since the last time."""
            self.stop = stop
            news, self.news = self.news, []
            return news

        def stops(self) -> bool:
            return self.stop

    # Lost with its machine, it is made again, and the calls to it are repeated.
    return ray_tasks.ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Board).remote()


def _train_all(pending: Sequence[Fleet], store: Store, job: _Job) -> None:
    """Give every fleet to Ray, and write down what comes back as it comes."""
    board, callbacks = _board(), job.settings.callbacks
    # The callbacks stay here.
    job = replace(job, settings=replace(job.settings, callbacks=Callbacks()))
    task = ray_tasks.ray.remote(num_cpus=1, num_gpus=int(job.device == "cuda"), max_retries=RETRIES)(_task)
    fleets = {fleet.key: fleet for fleet in pending}
    running = {task.remote(fleet, job, board): fleet for fleet in pending}
    stopped = False
    while running:
        ready, _ = ray_tasks.ray.wait(list(running), timeout=POLL_SECONDS)
        for key, snapshot in ray_tasks.ray.get(board.read.remote(callbacks.wants_stop())):
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
    """The result of a task; where its worker was lost for good, the records of a failed fleet."""
    lines: Sequence[RunLine] | Exception | None = answer(reference)
    if isinstance(lines, MissingExtra):
        raise lines from None
    return failure_records(fleet, lines, 0.0, torch.device("cpu")) if isinstance(lines, Exception) else lines
