"""A folder of results: records, curves, pictures, trees, checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch

from gapped import records
from gapped._version import __version__
from gapped.errors import GappedError
from gapped.records import Line

__all__ = ["Store", "plan_path"]

_FORMAT = 1
"""Of checkpoints; another number whenever a state means something else."""
_CHECKSUM_BYTES = 32


class Store:
    """Where a recipe's results go. What is in it is never recomputed and never overwritten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._probe()

    def lines(self) -> dict[tuple[str, str], Line]:
        """Records by recipe and id, the last of each; those of failed runs, too."""
        return {(line["recipe"], line["id"]): line for line in records.load(self.folder / "records.jsonl")}

    def done(self) -> dict[tuple[str, str], Line]:
        """The records of finished runs, by recipe and id."""
        return {key: line for key, line in self.lines().items() if not records.has_failed(line)}

    def add(self, made: Iterable[Line], beside: Mapping[str, Iterable[Line]] = MappingProxyType({})) -> None:
        """Add what is not there yet: records, and beside them lines that go into files of their own.

        Records come last: a run whose record exists has everything else too. That of a failed run may be
        followed by those of later attempts. Several processes may add to one folder at the same time.
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
        """Add the lines of a fleet, then remove its checkpoint, unless it has failed."""
        self.add(made, beside)
        if not any(map(records.has_failed, made)):
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
        except ValueError:
            raise GappedError(f"{path}: not a plan that can be read; remove it to start over") from None
        return plan

    def finish(self, request: str, keys: Iterable[str]) -> None:
        """Remove what a finished request leaves: its plan, and checkpoints that a kill kept from removal."""
        for key in keys:
            self._checkpoint(key).unlink(missing_ok=True)
        self._plan(request).unlink(missing_ok=True)
        self._tidy()

    def save_checkpoint(self, key: str, state: dict[str, Any]) -> None:
        """Save a fleet's state: a checksum of all that follows, a line that says whose it is, the state."""
        with records.atomic_write(self._checkpoint(key)) as file:
            file.write(bytes(_CHECKSUM_BYTES))
            file.write(json.dumps(_identity(key)).encode() + b"\n")
            torch.save(state, file)
            checksum = _checksum(file)
            file.seek(0)
            file.write(checksum)

    def load_checkpoint(self, key: str, device: torch.device) -> dict[str, Any] | None:
        """The state of the fleet `key`, or None. Only tensors and plain containers are accepted.

        A file that is damaged, or is not what its name says, is passed over with a warning: the next
        checkpoint takes its place. One of other versions is an error, since it may be worth going back to.
        """
        try:
            with open(self._checkpoint(key), "rb") as file:
                why = _objection(file, key)
                if why is None:
                    state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
                    return state
        except FileNotFoundError:
            return None
        except (GappedError, OSError):
            raise
        except Exception:
            # Whatever torch says here, its advice to load without restrictions is not ours.
            why = "not a checkpoint that can be read safely"
        self.pass_over(key, why)
        return None

    def pass_over(self, key: str, why: str) -> None:
        """Say that a fleet's checkpoint is not used."""
        warnings.warn(f"{self._checkpoint(key)}: {why}; its fleet starts over", stacklevel=2)

    def drop_checkpoint(self, key: str) -> None:
        self._checkpoint(key).unlink(missing_ok=True)
        self._tidy()

    def _tidy(self) -> None:
        # Not there, or not empty: both are fine.
        with suppress(OSError):
            (self.folder / "checkpoints").rmdir()

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


def _identity(key: str) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {
        "format": _FORMAT,
        "fleet": key,
        "gapped": __version__,
        "torch": torch.__version__.split("+")[0],
    }


def _objection(file: IO[bytes], key: str) -> str | None:
    """Why this is no checkpoint of the fleet `key`, or None; then `file` is left where its state begins."""
    if file.read(_CHECKSUM_BYTES) != _checksum(file):
        return "damaged, or not a checkpoint of this version"
    file.seek(_CHECKSUM_BYTES)
    made, here = json.loads(file.readline()), _identity(key)
    if any(made[name] != here[name] for name in ("format", "fleet")):
        return "a checkpoint of another fleet or format"
    if made != here:
        theirs, ours = (f"gapped {each['gapped']} with torch {each['torch']}" for each in (made, here))
        raise GappedError(
            f"{file.name}: made by {theirs}, here is {ours}; go on with the former, or remove the file"
        )
    return None


def _checksum(file: IO[bytes]) -> bytes:
    """Of all that follows the place of the checksum."""
    file.seek(_CHECKSUM_BYTES)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
