"""Engines: who trains the fleets of a command. The fleets, and so the numbers, are the same with each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gapped.errors import GappedError, reject
from gapped.lab import local
from gapped.lab.environment import pick_device
from gapped.lab.local import CHECKPOINT_SECONDS, Watch
from gapped.lab.recipe import Recipe
from gapped.lab.records import Line
from gapped.lab.store import Store

__all__ = ["Engine", "Local", "engine"]


class Engine(Protocol):
    """Trains what is not finished yet, wherever and with however many processes."""

    @property
    def leads(self) -> bool:
        """Whether this process shows progress and writes the report; one of them does."""

    @property
    def restarts(self) -> bool:
        """Whether this process is started again if it ends with another status than 0."""

    def run(
        self,
        recipes: Sequence[Recipe],
        store: Store,
        *,
        data_dir: Path | None = None,
        watch: Watch | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> list[Line]:
        """The records of all entries of `recipes`, once every one of them is in `store`."""


class Local:
    """One fleet after the other, in this process."""

    leads = True
    restarts = False

    def __init__(self, device: str) -> None:
        self.device = pick_device(device)

    def run(
        self,
        recipes: Sequence[Recipe],
        store: Store,
        *,
        data_dir: Path | None = None,
        watch: Watch | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> list[Line]:
        return local.run(
            recipes,
            store,
            self.device,
            data_dir=data_dir,
            watch=watch,
            checkpoint_seconds=checkpoint_seconds,
        )


def engine(name: str, device: str, *, ray_address: str | None = None) -> Engine:
    """The engine called `name`; fails at once if it cannot work here, or not on `device`."""
    if ray_address is not None and name != "ray":
        raise GappedError(f"--ray-address: got {ray_address!r}, expected only with --engine ray")
    if name == "local":
        return Local(device)
    if name == "torchrun":
        from gapped.lab.engines.torchrun import Torchrun

        return Torchrun(device)
    if name == "ray":
        from gapped.lab.engines.ray import Ray

        return Ray(device, ray_address)
    raise reject("--engine", name, "local, torchrun or ray")
