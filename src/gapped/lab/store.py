"""A folder of results: records, curves, pictures, trees, checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch

from gapped import records
from gapped.errors import GappedError
from gapped.forms import Within, check
from gapped.records import Line

__all__ = ["Store", "plan_path"]


class Store:
    """Where a recipe's results go. What is in it is never recomputed and never overwritten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._probe()

    def done(self) -> dict[tuple[str, str], Line]:
        """Records by recipe and id."""
        return {(line["recipe"], line["id"]): line for line in records.load(self.folder / "records.jsonl")}

    def add(self, made: Iterable[Line], beside: Mapping[str, Iterable[Line]] = MappingProxyType({})) -> None:
        """Add what is not there yet: records, and beside them lines that go into files of their own.

        Records come last: a run whose record exists has everything else too. Several processes may add to
        one folder at the same time.
        """
        made, others = list(made), {name: list(lines) for name, lines in beside.items()}
        if not made and not any(others.values()):
            return
        with records.locked(self.folder / "records.jsonl"):
            for name, lines in others.items():
                path = self.folder / f"{name}.jsonl"
                known = {line["id"] for line in records.load(path)}
                new = {line["id"]: line for line in lines}
                records.append(path, [line for key, line in new.items() if key not in known])
            done = self.done()
            fresh = {(line["recipe"], line["id"]): line for line in made}
            path = self.folder / "records.jsonl"
            records.append(path, [line for key, line in fresh.items() if key not in done])

    def keep(self, key: str, made: list[Line], beside: Mapping[str, list[Line]]) -> None:
        """Add the lines of a finished fleet, then remove its checkpoint."""
        self.add(made, beside)
        self.drop_checkpoint(key)

    def save_plan(self, request: str, fleets: list[list[str]]) -> None:
        """Keep which runs form the fleets of a request until it is finished."""
        with records.atomic_write(self._plan(request)) as file:
            file.write(json.dumps(fleets).encode())

    def load_plan(self, request: str) -> list[list[str]] | None:
        """The plan of a request that was interrupted, or None."""
        path = self._plan(request)
        if not path.exists():
            return None
        try:
            plan: list[list[str]] = json.loads(path.read_bytes())
            check(plan, list[Annotated[list[str], Within(1)]], "not a list of fleets")
        except (ValueError, RecursionError) as problem:
            raise GappedError(f"{path}: no plan ({problem}); remove it to start over") from None
        return plan

    def finish(self, request: str, keys: Iterable[str]) -> None:
        """Remove what a finished request leaves: its plan, and checkpoints that a kill kept from removal."""
        for key in keys:
            self._checkpoint(key).unlink(missing_ok=True)
        self._plan(request).unlink(missing_ok=True)
        self._tidy()

    def save_checkpoint(self, key: str, state: dict[str, Any]) -> None:
        with records.atomic_write(self._checkpoint(key)) as file:
            torch.save(state, file)

    def load_checkpoint(self, key: str, device: torch.device) -> dict[str, Any] | None:
        """The state saved under `key`, or None. Only tensors and plain containers are accepted."""
        path = self._checkpoint(key)
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        except Exception:
            # Whatever torch says here, its advice to load without restrictions is not ours.
            raise unreadable(path) from None
        return state

    def drop_checkpoint(self, key: str) -> None:
        self._checkpoint(key).unlink(missing_ok=True)
        self._tidy()

    def _tidy(self) -> None:
        # Not there, or not empty: both are fine.
        with suppress(OSError):
            (self.folder / "checkpoints").rmdir()

    def unreadable(self, key: str) -> GappedError:
        return unreadable(self._checkpoint(key))

    def _plan(self, request: str) -> Path:
        return plan_path(self.folder, request)

    def _checkpoint(self, key: str) -> Path:
        return self.folder / "checkpoints" / f"{key}.pt"

    def _probe(self) -> None:
        """Fail before any work is done if nothing can be written here."""
        probe = self.folder / f".probe.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x")
            probe.unlink()
            records.sweep(self.folder)
            records.sweep(self.folder / "checkpoints")
        except OSError as problem:
            raise GappedError(f"{self.folder}: cannot write here ({problem.strerror})") from None


def plan_path(folder: Path, request: str) -> Path:
    return folder / "checkpoints" / f"{request}.plan.json"


def unreadable(path: Path) -> GappedError:
    return GappedError(f"{path}: not a checkpoint that can be read safely; remove it to start over")
