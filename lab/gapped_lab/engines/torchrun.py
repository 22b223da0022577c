"""The torchrun engine: every rank trains its share of the fleets; the folder is shared.

Ranks agree on the fleets through the plan in the folder, which rank 0 makes before the others look. A rank
that is free takes the next fleet of it. They tell each other what is taken and what is done through the
key-value store that torchrun keeps for its workers; no tensor ever travels. When a worker dies, torchrun
restarts all of them, and fleets go on from their checkpoints.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Protocol

import torch
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from gapped.comparison.records import Record
from gapped.errors import GappedError
from gapped_lab.environment import pick_device
from gapped_lab.planning import Fleet, Work, conclude, prepare, remaining, request_hash
from gapped_lab.progress import Callbacks, Snapshot
from gapped_lab.recipe import Recipe
from gapped_lab.store import Store
from gapped_lab.training import Interrupted, Settings, attempt, check_data

_POLL_SECONDS = 0.05
# A network file system may take its time to show a file to other machines.
_SHARED_SECONDS = 60.0
_HOW = "torchrun --nproc-per-node 2 -m gapped reproduce smoke --engine torchrun"
# Every rank makes the same calls in the same order, so that the n-th call of one is the n-th of all.
_calls = count()


class Channel(Protocol):
    """What is used of torch's key-value stores."""

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def wait(self, keys: list[str]) -> None: ...


class Torchrun:
    """One of the processes that torchrun started."""

    restarts = True

    def __init__(self, device: str) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise GappedError(f"--engine torchrun: torchrun has to start the command, such as: {_HOW}")
        self.rank = int(os.environ["RANK"])
        self.device = pick_device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def run(self, recipes: Sequence[Recipe], store: Store, settings: Settings) -> list[Record]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        channel = _channel()
        with store.occupied() if self.leads else nullcontext(), _sigterm() as signals:
            work = self._agree(recipes, store, channel)
            pending = remaining(work, store)
            check_data(pending, settings.data_dir)
            group = _GroupCallbacks(settings.callbacks, channel, work.fleets, signals)
            group.start(pending)
            for fleet in _taken(work.fleets, channel):
                if fleet in pending:
                    lines = attempt(fleet, self.device, store, replace(settings, callbacks=group))
                    store.keep(fleet.key, lines)
                channel.set(fleet.key, "done")
                group.look()
            group.wait()
        return conclude(work, store)

    def _agree(self, recipes: Sequence[Recipe], store: Store, channel: Channel) -> Work:
        """Plan once for all ranks: rank 0 plans, the others read its plan."""
        if self.leads:
            work = prepare(recipes, store)
            channel.set("planned", "")
            return work
        channel.wait(["planned"])
        deadline = time.monotonic() + _SHARED_SECONDS
        while not _sees_plan(recipes, store):
            if time.monotonic() > deadline:
                raise GappedError(
                    f"{store.folder}: rank {self.rank} does not see what rank 0 has written there; "
                    "all machines of --engine torchrun need one shared folder"
                )
            time.sleep(_POLL_SECONDS)
        return prepare(recipes, store)


class _GroupCallbacks(Callbacks):
    """Callbacks that also know what other ranks have finished, and when torchrun wants its workers to end."""

    def __init__(
        self, own: Callbacks, channel: Channel, fleets: Sequence[Fleet], signals: Sequence[int]
    ) -> None:
        self.own, self.channel, self.signals = own, channel, signals
        self.open = list(fleets)
        self.pending: set[str] = set()

    def start(self, fleets: Sequence[Fleet]) -> None:
        self.pending = {fleet.key for fleet in fleets}
        self.own.start(fleets)

    def step(self, fleet: Fleet, epochs: float) -> None:
        self.own.step(fleet, epochs)

    def epoch(self, fleet: Fleet, snapshot: Snapshot) -> None:
        self.own.epoch(fleet, snapshot)
        self.look()

    def wants_stop(self) -> bool:
        return bool(self.signals) or self.own.wants_stop()

    def wait(self) -> None:
        """Until all ranks have finished. No rank may leave before: torchrun could not restart it."""
        while self.look():
            if self.wants_stop():
                raise Interrupted
            time.sleep(_POLL_SECONDS)

    def look(self) -> bool:
        """Show what has been finished since the last time, by whichever rank; whether anything is left."""
        finished = [fleet for fleet in self.open if self.channel.check([fleet.key])]
        self.open = [fleet for fleet in self.open if fleet not in finished]
        for fleet in finished:
            if fleet.key in self.pending:
                self.own.done(fleet)
        return bool(self.open)


def _channel() -> Channel:
    """The key-value store of torchrun's workers, anew for each start: what failed before is open again."""
    workers, _, _ = next(iter(rendezvous("env://")))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    channel: Channel = PrefixStore(f"gapped/{start}/{next(_calls)}", workers)
    return channel


def _taken(fleets: Sequence[Fleet], channel: Channel) -> Iterator[Fleet]:
    """The fleets that this rank takes, one at a time, as long as there are any that no rank has taken."""
    while (number := channel.add("taken", 1)) <= len(fleets):
        yield fleets[number - 1]


def _sees_plan(recipes: Sequence[Recipe], store: Store) -> bool:
    """There is no plan where everything is finished."""
    if store.load_plan(request_hash(recipes)):
        return True
    finished = store.finished()
    return all(entry.key in finished for recipe in recipes for entry in recipe.entries)


@contextmanager
def _sigterm() -> Iterator[list[int]]:
    """A list that SIGTERM is added to: torchrun ends the other workers with it when one dies."""
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)
