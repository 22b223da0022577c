"""Engines: who trains the fleets of a command. The fleets, and so the numbers, are the same with each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gapped.comparison.records import Record
from gapped.errors import GappedError, reject
from gapped_lab.recipe import Recipe
from gapped_lab.store import Store
from gapped_lab.training import Settings


class Engine(Protocol):
    """Trains what is not finished yet, wherever and with however many processes."""

    def run(self, recipes: Sequence[Recipe], store: Store, settings: Settings) -> list[Record]:
        """Train what is not finished yet, and return the records of all entries of `recipes`.

        A fleet that fails does not keep the others from being trained: its runs' records have the status
        `failed` and the error. They do not count as finished, so that a repeated command tries them again.

        Which runs form a fleet is settled, and kept, before the first step: a repeated command continues
        where an interrupted one stopped and ends with the same numbers.
        """


def engine(name: str, device: str, *, workers: int = 1, ray_address: str | None = None) -> Engine:
    """The engine called `name`; fails at once if it cannot work here, or not on `device`."""
    if ray_address is not None and name != "ray":
        raise GappedError(f"--ray-address: got {ray_address!r}, expected only with --engine ray")
    if name == "local":
        from gapped_lab.engines.local import Local

        return Local(device, workers)
    if name == "ray":
        if workers != 1:
            raise GappedError("--workers: goes with --engine local; Ray has as many as its cluster")
        from gapped_lab.engines.ray import Ray

        return Ray(device, ray_address)
    raise reject("--engine", name, "local or ray")
