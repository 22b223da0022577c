"""The torchrun engine: every rank trains its share of the fleets; the folder is shared.

Ranks agree on the fleets through the plan in the folder, which rank 0 makes before the others look. Rank r
of W trains fleets r, r + W, r + 2W, ... of it. They tell each other what is done through the key-value
store that torchrun keeps for its workers; no tensor ever travels. When a worker dies, torchrun restarts
all of them: each goes on with its own fleets, from their checkpoints.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from gapped.errors import GappedError
from gapped.lab.environment import pick_device
from gapped.lab.fleets import Fleet
from gapped.lab.local import (
    CHECKPOINT_SECONDS,
    Interrupted,
    Nobody,
    Standing,
    Watch,
    Work,
    attempt,
    check_data,
    conclude,
    prepare,
    remaining,
    request_of,
)
from gapped.lab.recipe import Recipe
from gapped.lab.records import Line
from gapped.lab.store import Store

_POLL_SECONDS = 0.05
# A network file system may take its time to show a file to other machines.
_SHARED_SECONDS = 60.0
_HOW = "torchrun --nproc-per-node 2 -m gapped reproduce smoke --engine torchrun"
# Every rank makes the same calls in the same order, so that the n-th call of one is the n-th of all.
_calls = count()


class Channel(Protocol):
    """What is used of torch's key-value stores."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def wait(self, keys: list[str]) -> None: ...


class Torchrun:
    """One of the processes that torchrun started."""

    restarts = True

    def __init__(self, device: str) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise GappedError(f"--engine torchrun: torchrun has to start the command, such as: {_HOW}")
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = pick_device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def run(
        self,
        recipes: Sequence[Recipe],
        store: Store,
        *,
        data_dir: Path | None = None,
        watch: Watch | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> list[Line]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        channel = _channel()
        with store.occupied() if self.leads else nullcontext(), _terminated() as asked:
            work = self._agree(recipes, store, channel)
            pending = remaining(work, store)
            check_data(pending, data_dir)
            group = _Group(watch or Nobody(), channel, work.fleets, asked)
            group.start(pending)
            for fleet in work.fleets[self.rank :: self.world]:
                if fleet in pending:
                    store.keep(
                        fleet.key, *attempt(fleet, self.device, store, data_dir, group, checkpoint_seconds)
                    )
                channel.set(fleet.key, "done")
                group.look()
            group.wait()
        return conclude(work, store)

    def _agree(self, recipes: Sequence[Recipe], store: Store, channel: Channel) -> Work:
        """The same fleets on every rank: rank 0 plans, the others read its plan."""
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


class _Group:
    """A watch that also knows what other ranks have finished, and when torchrun wants its workers to end."""

    def __init__(self, watch: Watch, channel: Channel, fleets: Sequence[Fleet], asked: list[int]) -> None:
        self.watch, self.channel, self.asked = watch, channel, asked
        self.open = list(fleets)
        self.shown: set[str] = set()

    def start(self, fleets: Sequence[Fleet]) -> None:
        self.shown = {fleet.key for fleet in fleets}
        self.watch.start(fleets)

    def epoch(self, fleet: Fleet, standing: Standing) -> None:
        self.watch.epoch(fleet, standing)
        self.look()

    def done(self, fleet: Fleet) -> None:
        self.watch.done(fleet)

    def wants_stop(self) -> bool:
        return bool(self.asked) or self.watch.wants_stop()

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
            if fleet.key in self.shown:
                self.done(fleet)
        return bool(self.open)


def _channel() -> Channel:
    """The key-value store of torchrun's workers, anew for each start: what failed before is open again."""
    found, _, _ = next(iter(rendezvous("env://")))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    channel: Channel = PrefixStore(f"gapped/{start}/{next(_calls)}", found)
    return channel


def _sees_plan(recipes: Sequence[Recipe], store: Store) -> bool:
    """There is no plan where everything is finished."""
    if store.load_plan(request_of(recipes)):
        return True
    done = store.done()
    return all((entry.recipe, entry.spec.id) in done for recipe in recipes for entry in recipe.entries)


@contextmanager
def _terminated() -> Iterator[list[int]]:
    """A list that is filled by SIGTERM: torchrun ends the others so when a worker dies."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
