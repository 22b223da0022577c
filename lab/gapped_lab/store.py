"""A folder of results with what training keeps in it beside them: plans and checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from gapped._version import __version__
from gapped.comparison.records import Record, RunLine
from gapped.comparison.store import Store as RecordStore
from gapped.comparison.store import atomic_write, partial_path
from gapped.errors import GappedError

_FORMAT = 2
"""Of checkpoints; another number whenever a state means something else."""
_CHECKSUM_BYTES = 32


class Store(RecordStore):
    """Where a recipe's results go: records and their like, and the plans and checkpoints of its fleets."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for each in (self.folder, self._checkpoints):
            writers(each / "*")

    def keep(self, key: str, lines: Iterable[RunLine]) -> None:
        """Add the lines of a fleet, then remove its checkpoint, unless it has failed."""
        lines = list(lines)
        self.add(lines)
        if not any(isinstance(line, Record) and line.failed for line in lines):
            self.drop_checkpoint(key)

    def save_plan(self, request: str, fleets: dict[str, list[str]]) -> None:
        """Keep which runs form the fleets of a request, by their keys, until it is finished."""
        with atomic_write(plan_path(self.folder, request)) as file:
            file.write(json.dumps(fleets).encode())

    def load_plan(self, request: str) -> dict[str, list[str]]:
        """The runs of each fleet of a request that was interrupted, by the fleet's key; none if there is no
        such request."""
        return _read_plan(plan_path(self.folder, request))

    def tidy(self) -> None:
        """Remove plans whose runs are finished, and checkpoints that no other plan has a use for."""
        finished = {record.id for record in self.finished().values()}
        # Looked for before the plans: whoever makes a checkpoint has made his plan before.
        checkpoints = list(self._checkpoints.glob("*.pt"))
        try:
            plans = {path: _read_plan(path) for path in list(self._checkpoints.glob("*.plan.json"))}
        except GappedError:
            return  # It is not known which checkpoints are still of use.
        unfinished: set[str] = set()
        for path, fleets in plans.items():
            keys = {key for key, ids in fleets.items() if not finished.issuperset(ids)}
            unfinished |= keys
            if not keys:
                path.unlink(missing_ok=True)
        for path in checkpoints:
            if path.stem not in unfinished:
                path.unlink(missing_ok=True)
        self._remove_empty()

    @contextmanager
    def occupy(self) -> Iterator[None]:
        """A block in which this process trains into the folder; a warning if another one does so already.

        Processes of other machines are not seen.
        """
        mark = self.folder / "training"
        if others := writers(mark):
            warnings.warn(
                f"{self.folder}: process {others[0]} trains into this folder, too; "
                "what both are asked for is trained twice and recorded once",
                stacklevel=3,
            )
        own = partial_path(mark)
        own.touch()
        try:
            yield
        finally:
            # Where the folder is gone, or a file by now, the error that comes of it says more.
            with suppress(OSError):
                own.unlink()

    def save_checkpoint(self, key: str, state: dict[str, Any]) -> None:
        """Save a fleet's state: a checksum of all that follows, a line that says whose it is, the state."""
        with atomic_write(self._checkpoint(key)) as file:
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

    def has_checkpoint(self, key: str = "*") -> bool:
        """Whether there is a checkpoint of the fleet `key`, or else of any."""
        return any(self._checkpoints.glob(f"{key}.pt"))

    def pass_over(self, key: str, why: str) -> None:
        """Say that a fleet's checkpoint is not used."""
        warnings.warn(f"{self._checkpoint(key)}: {why}; its fleet starts over", stacklevel=2)

    def drop_checkpoint(self, key: str) -> None:
        self._checkpoint(key).unlink(missing_ok=True)
        self._remove_empty()

    def _remove_empty(self) -> None:
        # Not there, or not empty: both are fine.
        with suppress(OSError):
            self._checkpoints.rmdir()

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _checkpoint(self, key: str) -> Path:
        return self._checkpoints / f"{key}.pt"


def writers(path: Path) -> list[int]:
    """The other processes of this machine that have a file under `partial_path`; those of dead ones go.

    The path may hold a star.
    """
    own, live = partial_path(path).name.removesuffix(f".{os.getpid()}.part"), []
    with suppress(FileNotFoundError):  # the folder is gone since it was looked for
        for partial in path.parent.glob(f"{own}.*.part"):
            owner = partial.name.rsplit(".", 2)[1]
            if owner.isdigit() and not _is_running(int(owner)):
                partial.unlink(missing_ok=True)
            elif owner.isdigit() and int(owner) != os.getpid():
                live.append(int(owner))
    return live


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as problem:
        return isinstance(problem, PermissionError)
    return True


def plan_path(folder: Path, request: str) -> Path:
    return folder / "checkpoints" / f"{request}.plan.json"


def _read_plan(path: Path) -> dict[str, list[str]]:
    """The runs of each fleet, by the fleet's key; none if there is no such file."""
    try:
        return {key: [str(each) for each in ids] for key, ids in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise GappedError(f"{path}: not a plan that can be read; remove it to start over") from None


def _identity(key: str) -> dict[str, Any]:
    """The header of a checkpoint."""
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
    origin, here = json.loads(file.readline()), _identity(key)
    if origin["fleet"] != here["fleet"]:
        return "a checkpoint of another fleet"
    if origin != here:
        theirs, ours = (
            f"gapped {each['gapped']} with torch {each['torch']} (format {each['format']})"
            for each in (origin, here)
        )
        raise GappedError(
            f"{file.name}: made by {theirs}, here is {ours}; go on with the former, or remove the file"
        )
    return None


def _checksum(file: IO[bytes]) -> bytes:
    """Of all that follows the place of the checksum."""
    file.seek(_CHECKSUM_BYTES)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
