"""The local engine: one fleet after the other in this process, or several side by side in processes of it.

This process hands fleets out and writes all records. A worker that dies is replaced. Its fleet goes on from
its checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch

from gapped.checks import check_count
from gapped.comparison.records import Record
from gapped.comparison.workers import leave_with_parent
from gapped.errors import GappedError, MissingExtra
from gapped_lab.environment import current, pick_device
from gapped_lab.planning import Fleet, conclude, prepare, remaining
from gapped_lab.progress import Callbacks, Snapshot
from gapped_lab.recipe import Recipe
from gapped_lab.results import failure_records
from gapped_lab.store import Store
from gapped_lab.training import Interrupted, Settings, attempt, check_data

# How often a fleet may lose its worker.
RETRIES = 3
_POLL_SECONDS = 0.2


class Local:
    """This machine: this process on one device, or `workers` processes on its GPUs in turn."""

    def __init__(self, device: str, workers: int = 1) -> None:
        check_count("--workers", workers)
        self.device, self.workers = pick_device(device), workers

    def run(self, recipes: Sequence[Recipe], store: Store, settings: Settings) -> list[Record]:
        with store.occupy():
            work = prepare(recipes, store)
            pending = remaining(work, store)
            check_data(pending, settings.data_dir)
            settings.callbacks.start(pending)
            if min(self.workers, len(pending)) > 1:
                train_all(pending, self.devices()[: len(pending)], store, settings)
            else:
                with current(self.device):
                    for fleet in pending:
                        store.keep(fleet.key, attempt(fleet, self.device, store, settings))
                        settings.callbacks.done(fleet)
            return conclude(work, store)

    def devices(self) -> list[torch.device]:
        """The device of each worker."""
        if self.device.type == "cpu" or self.device.index is not None:
            return [self.device] * self.workers
        gpus = torch.cuda.device_count()
        return [torch.device("cuda", worker % gpus) for worker in range(self.workers)]


class _Worker:
    """A process that trains the fleets it is given, one at a time, until its pipe is closed."""

    fleet: Fleet | None = None

    def __init__(self, context: Any, device: torch.device, *common: Any) -> None:
        self.device = device
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=train_fleets, args=(other, device, *common))
        self.process.start()
        other.close()

    def take(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.pipe.send(fleet)


def train_all(
    pending: Sequence[Fleet], devices: Sequence[torch.device], store: Store, settings: Settings
) -> None:
    """Train the fleets with a worker on each of the `devices`, and write down what comes back as it comes."""
    context = get_context("spawn")
    # Without a lock, which a worker that is killed would keep.
    stop, callbacks = context.RawValue("b", 0), settings.callbacks
    # The callbacks stay here.
    common = (store.folder, replace(settings, callbacks=Callbacks()), stop)
    due, lost, stopped = list(reversed(pending)), Counter[str](), False
    workers = [_Worker(context, device, *common) for device in devices]
    try:
        while True:
            for worker in workers:
                if worker.fleet is None and due and not stop.value:
                    worker.take(due.pop())
            busy = {worker.pipe: worker for worker in workers if worker.fleet is not None}
            if not busy:
                break
            stop.value = callbacks.wants_stop()
            for pipe in connection.wait(list(busy), _POLL_SECONDS):
                worker = busy[pipe]
                fleet = worker.fleet
                assert fleet is not None
                try:
                    news = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    lost[fleet.key] += 1
                    workers[workers.index(worker)] = _Worker(context, worker.device, *common)
                    if lost[fleet.key] <= RETRIES:
                        due.append(fleet)
                        continue
                    problem = GappedError(f"its worker ended with exit code {worker.process.exitcode}")
                    news = failure_records(fleet, problem, 0.0, worker.device)
                if isinstance(news, Snapshot):
                    callbacks.epoch(fleet, news)
                    continue
                if isinstance(news, MissingExtra):
                    raise news
                worker.fleet = None
                if news is None:
                    stopped = True
                else:
                    store.keep(fleet.key, news)
                    callbacks.done(fleet)
        if stopped or due:
            raise Interrupted
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


class _Reporter(Callbacks):
    """Callbacks in a worker that pass on what they are told."""

    def __init__(self, pipe: Any, stop: Any) -> None:
        self.pipe, self.stop = pipe, stop

    def epoch(self, fleet: Fleet, snapshot: Snapshot) -> None:
        self.pipe.send(snapshot)

    def wants_stop(self) -> bool:
        return bool(self.stop.value)


def train_fleets(pipe: Any, device: torch.device, folder: Path, settings: Settings, stop: Any) -> None:
    """In a worker: answer each fleet with its lines, with None if it was stopped, or with what is missing."""
    # The first process tells the others to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    settings = replace(settings, callbacks=_Reporter(pipe, stop))
    checkpoints = Store(folder)
    answer: Any
    with current(device):
        while True:
            fleet = pipe.recv()
            try:
                answer = attempt(fleet, device, checkpoints, settings)
            except Interrupted:
                answer = None
            except MissingExtra as problem:
                answer = problem
            pipe.send(answer)
