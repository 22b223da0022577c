"""A folder of results: records, curves, pictures, trees, checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Generic, TypeVar

import torch

from gapped._version import __version__
from gapped.errors import GappedError
from gapped.lab import records
from gapped.lab.records import Line

K = TypeVar("K")
V = TypeVar("V")

_FORMAT = 1
"""Of checkpoints; another number whenever a state means something else."""
_CHECKSUM_BYTES = 32


class Store:
    """Where a recipe's results go. What is in it is never recomputed and never overwritten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = _Index(
            folder / "records.jsonl", lambda line: (line["recipe"], line["id"]), lambda line: line
        )
        self._beside: dict[str, _Index[str, None]] = {}
        self._probe()

    def lines(self) -> Mapping[tuple[str, str], Line]:
        """Records by recipe and id, the last of each; those of failed runs, too."""
        return self._records.entries()

    def done(self) -> dict[tuple[str, str], Line]:
        """The records of finished runs, by recipe and id."""
        return {key: line for key, line in self.lines().items() if not records.has_failed(line)}

    def add(self, made: Iterable[Line], beside: Mapping[str, Iterable[Line]] = MappingProxyType({})) -> None:
        """Add what is not there yet: records, and beside them lines that go into files of their own.

        Records come last: a run whose record exists has everything else too. That of a failed run may be
        followed by those of later attempts. Where a record was removed and its run trained again, what stands
        beside it may be another's, and is followed by the run's own: the last line of a run counts. Several
        processes may add to one folder at the same time.
        """
        made, others = list(made), {name: list(lines) for name, lines in beside.items()}
        if not made and not any(others.values()):
            return
        with records.locked(self._records.path):
            for name, lines in others.items():
                self._add_beside(name, {line["id"]: line for line in lines})
            known = self.lines()
            fresh = {(line["recipe"], line["id"]): line for line in made}
            records.append(
                self._records.path,
                [line for key, line in fresh.items() if key not in known or records.has_failed(known[key])],
            )

    def _add_beside(self, name: str, lines: dict[str, Line]) -> None:
        path = self.folder / f"{name}.jsonl"
        index = self._beside.setdefault(name, _Index(path, lambda line: line["id"], lambda _: None))
        known = index.entries()
        if again := known.keys() & lines.keys():
            again -= {run_id for _, run_id in self.done()}
            before = {line["id"]: line for line in records.load(path) if line["id"] in again}
            again = {key for key in again if before[key] != lines[key]}
        records.append(path, [line for key, line in lines.items() if key not in known or key in again])

    def keep(self, key: str, made: list[Line], beside: Mapping[str, list[Line]]) -> None:
        """Add the lines of a fleet, then remove its checkpoint, unless it has failed."""
        self.add(made, beside)
        if not any(map(records.has_failed, made)):
            self.drop_checkpoint(key)

    def save_plan(self, request: str, fleets: dict[str, list[str]]) -> None:
        """Keep which runs form the fleets of a request, by their keys, until it is finished."""
        with records.atomic_write(plan_path(self.folder, request)) as file:
            file.write(json.dumps(fleets).encode())

    def load_plan(self, request: str) -> list[list[str]]:
        """The runs of each fleet of a request that was interrupted; none if there is no such request."""
        return list(_read_plan(plan_path(self.folder, request)).values())

    def finish(self) -> None:
        """Remove plans whose runs are finished, and checkpoints that no other plan has a use for."""
        finished = {run_id for _, run_id in self.done()}
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
        self._tidy()

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """A block in which this process trains into the folder; a warning if another one does so already.

        Processes of other machines are not seen.
        """
        mark = self.folder / "training"
        if others := records.writers(mark):
            warnings.warn(
                f"{self.folder}: process {others[0]} trains into this folder, too; "
                "what both are asked for is trained twice and recorded once",
                stacklevel=3,
            )
        own = records.partial_path(mark)
        own.touch()
        try:
            yield
        finally:
            # Where the folder is gone, or a file by now, the error that comes of it says more.
            with suppress(OSError):
                own.unlink()

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

    def has_checkpoint(self, key: str = "*") -> bool:
        """Whether there is a checkpoint of the fleet `key`, or else of any."""
        return any(self._checkpoints.glob(f"{key}.pt"))

    def pass_over(self, key: str, why: str) -> None:
        """Say that a fleet's checkpoint is not used."""
        warnings.warn(f"{self._checkpoint(key)}: {why}; its fleet starts over", stacklevel=2)

    def drop_checkpoint(self, key: str) -> None:
        self._checkpoint(key).unlink(missing_ok=True)
        self._tidy()

    def _tidy(self) -> None:
        # Not there, or not empty: both are fine.
        with suppress(OSError):
            self._checkpoints.rmdir()

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _checkpoint(self, key: str) -> Path:
        return self._checkpoints / f"{key}.pt"

    def _probe(self) -> None:
        """Fail before any work is done if nothing can be written here."""
        probe = self.folder / f".probe.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x")
            probe.unlink()
            records.sweep(self.folder)
            records.sweep(self._checkpoints)
        except OSError as problem:
            raise GappedError(f"{self.folder}: cannot write here ({problem.strerror})") from None


class _Index(Generic[K, V]):
    """The lines of a growing file by key, the last of each; only what was appended since is read again."""

    def __init__(self, path: Path, key: Callable[[Line], K], value: Callable[[Line], V]) -> None:
        self.path, self._key, self._value = path, key, value
        self._entries: dict[K, V] = {}
        self._file, self._size = 0, 0

    def entries(self) -> Mapping[K, V]:
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file or status.st_size < self._size:
                    # Another file than before, or one that was cut: lines are otherwise only appended.
                    self._forget()
                file.seek(self._size)
                raw = file.read()
        except FileNotFoundError:
            self._forget()
            return self._entries
        try:
            lines, size = records.dictionaries(self.path, raw)
        except GappedError:
            records.load(self.path)  # raises the same with the number of the line
            raise
        self._file, self._size = status.st_ino, self._size + size
        self._entries.update((self._key(line), self._value(line)) for line in lines)
        return self._entries

    def _forget(self) -> None:
        self._entries, self._file, self._size = {}, 0, 0


def plan_path(folder: Path, request: str) -> Path:
    return folder / "checkpoints" / f"{request}.plan.json"


def _read_plan(path: Path) -> dict[str, list[str]]:
    """The runs of each fleet, by the fleet's key; none if there is no such file."""
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        plan = None
    if not isinstance(plan, dict) or not all(
        isinstance(ids, list) and all(isinstance(each, str) for each in ids) for ids in plan.values()
    ):
        raise GappedError(f"{path}: not a plan that can be read; remove it to start over")
    return plan


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
    if made["fleet"] != here["fleet"]:
        return "a checkpoint of another fleet"
    if made != here:
        theirs, ours = (
            f"gapped {each['gapped']} with torch {each['torch']} (format {each['format']})"
            for each in (made, here)
        )
        raise GappedError(
            f"{file.name}: made by {theirs}, here is {ours}; go on with the former, or remove the file"
        )
    return None


def _checksum(file: IO[bytes]) -> bytes:
    """Of all that follows the place of the checksum."""
    file.seek(_CHECKSUM_BYTES)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
