"""A folder of results that several processes may write: locked, atomic, and never overwritten."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gapped.comparison import records
from gapped.comparison.records import Record, RunLine, naming
from gapped.errors import GappedError

# How often a folder may vanish between its making and its first file.
_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True)
class OldRecord(Record):
    """The record of a run that was to be trained anew."""

    FILE = "records.old.jsonl"


class Store:
    """The records and curves of a folder. What is in it is never recomputed and never overwritten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[Hashable, Record] = {}
        self._file, self._size = 0, 0
        # In place of lines beside records their digests, by key, as far as this process has seen them.
        self._others: dict[type[RunLine], tuple[int, dict[Hashable, int]]] = {}
        # Fail before any work is done if nothing can be written here.
        probe = folder / f".probe.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as problem:
            raise GappedError(f"{folder}: cannot write here ({problem.strerror})") from None

    def records(self) -> Mapping[Hashable, Record]:
        """Records by recipe and id, the last of each; those of failed runs, too.

        Only new lines are read: a file that is another one than before, or was cut, is read from its start.
        """
        path = self.folder / Record.FILE
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file or status.st_size < self._size:
                    self._records, self._file, self._size = {}, status.st_ino, 0
                file.seek(self._size)
                raw = file.read()
        except FileNotFoundError:
            self._records, self._size = {}, 0
            return self._records
        try:
            lines, size = records.parse(path, raw, Record)
        except GappedError:
            records.read(self.folder, Record)  # raises the same with the number of the line
            raise
        self._size += size
        self._records.update((line.key, line) for line in lines)
        return self._records

    def finished(self) -> dict[Hashable, Record]:
        """The records of finished runs, by recipe and id."""
        return {key: record for key, record in self.records().items() if not record.failed}

    def add(self, lines: Iterable[RunLine], sync: bool = True) -> None:
        """Add the lines of runs that are not finished yet, each to its file.

        Records come last: a run whose record exists has everything else too. A run that is trained again,
        since it failed or its record was removed, adds its other lines again where they are not the same:
        the last one counts. Several processes may add to one folder at the same time.
        """
        kinds: dict[type[RunLine], dict[Hashable, RunLine]] = {}
        for line in lines:
            kinds.setdefault(type(line), {})[line.key] = line
        if not kinds:
            return
        with locked(self.folder):
            own = kinds.pop(Record, {})
            ended = {record.id for record in self.finished().values()} if kinds else set()
            for kind, others in kinds.items():
                size, seen = self._others.get(kind, (0, {}))
                if size != self._size_of(kind):  # another process has added lines
                    before = records.read(self.folder, kind)
                    seen = {line.key: hash(line.encode()) for line in before}
                digests = {key: hash(line.encode()) for key, line in others.items() if line.id not in ended}
                changed = [others[key] for key, digest in digests.items() if seen.get(key) != digest]
                records.write(self.folder, changed, sync)
                self._others[kind] = self._size_of(kind), seen | digests
            known = self.records()
            new = [line for key, line in own.items() if key not in known or known[key].failed]
            records.write(self.folder, new, sync)

    def _size_of(self, kind: type[RunLine]) -> int:
        path = self.folder / kind.FILE
        return path.stat().st_size if path.exists() else 0

    def set_aside(self, old: Callable[[Record], bool]) -> None:
        """Move such records to another file, so that their runs count as never trained."""
        with locked(self.folder):
            lines = records.read(self.folder, Record)
            moved = [OldRecord(**vars(line)) for line in lines if old(line)]
            records.write(self.folder, moved)
            if moved:
                with atomic_write(self.folder / Record.FILE) as file:
                    file.writelines(line.encode() + b"\n" for line in lines if not old(line))


class Claims:
    """The runs of a folder that this process trains: a locked byte of a file for each.

    The system frees the bytes of a process that ends, in whatever way; a forked one does not hold them.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / ".claims", "ab+")  # noqa: SIM115
        self.close = self._file.close

    def take(self, run: str) -> bool:
        """Whether no other process trains the run: then this one does from now on."""
        with suppress(OSError):
            self._lock(run, True)
            return True
        return False

    def drop(self, run: str) -> None:
        self._lock(run, False)

    def _lock(self, run: str, hold: bool) -> None:
        place = int(run[:15], 16)
        if sys.platform == "win32":
            import msvcrt

            self._file.seek(place)
            msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK if hold else msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            how = fcntl.LOCK_EX | fcntl.LOCK_NB if hold else fcntl.LOCK_UN
            fcntl.lockf(self._file, how, 1, place)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the block while this one is in it. The lock goes with the process."""
    from filelock import FileLock

    # A file that holds nothing: to lock one may mean to empty it.
    with FileLock(folder / ".lock"):
        yield


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name complete or not at all."""
    partial = partial_path(path)
    try:
        with naming(path):
            with _new_file(partial) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole file by `atomic_write`; an error is one line."""
    try:
        with atomic_write(path) as file:
            file.write(text.encode("utf-8"))
    except OSError as problem:
        raise GappedError(f"{path}: cannot be written ({problem.strerror})") from None


def _new_file(path: Path) -> IO[bytes]:
    """A file in a folder that another process may remove as long as it is empty."""
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError, FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "w+b")
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "w+b")


def partial_path(path: Path) -> Path:
    """The name of a file while this process writes it. Machines share folders, not process numbers."""
    machine = platform.node().partition(".")[0] or "localhost"
    return path.with_name(f".{path.name}.{machine}.{os.getpid()}.part")
