"""Files that several processes may write: atomic, locked, and named by whoever is writing them."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gapped.errors import GappedError

# How often a folder may vanish between its making and its first file.
_ATTEMPTS = 100


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes out of the block while this one is in it; `path` is made if it is not there.

    The lock goes with the process, so a kill cannot leave it behind. On Windows there is none: there, one
    process at a time may write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        if sys.platform != "win32":
            import fcntl

            # Not fcntl.lockf: its locks end as soon as the process closes any descriptor of the file.
            fcntl.flock(file, fcntl.LOCK_EX)
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A block whose OSErrors name `path`, also those that torch hides behind an error of its own."""
    try:
        yield
    except (OSError, RuntimeError) as problem:
        cause = problem if isinstance(problem, OSError) else problem.__context__
        if not isinstance(cause, OSError):
            raise
        cause.filename = cause.filename or str(path)
        raise cause from None


def _new_file(path: Path) -> IO[bytes]:
    """A file in a folder that another process may remove as long as it is empty."""
    for attempt in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return open(path, "w+b")
        except (FileNotFoundError, FileExistsError):
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def partial_path(path: Path) -> Path:
    """What a file is called while this process writes it."""
    return path.with_name(f".{path.name}.{_machine()}.{os.getpid()}.part")


def writers(path: Path) -> list[int]:
    """The other live processes of this machine that have a file under `partial_path`."""
    owners = [owner for _, owner in _partials(path.parent, path.name)]
    return [owner for owner in owners if owner != os.getpid() and _is_running(owner)]


def sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left of their `atomic_write`s in `folder`."""
    for partial, owner in _partials(folder, "*"):
        if not _is_running(owner):
            partial.unlink(missing_ok=True)


def _partials(folder: Path, name: str) -> list[tuple[Path, int]]:
    """The partial files of this machine's processes in `folder`, each with the number of its process."""
    try:
        partials = list(folder.glob(f".{name}.{_machine()}.*.part"))
    except FileNotFoundError:  # gone since it was looked for
        return []
    owners = [(partial, partial.name.rsplit(".", 2)[1]) for partial in partials]
    return [(partial, int(owner)) for partial, owner in owners if owner.isdigit()]


def _machine() -> str:
    """A folder may be shared by machines, each with process numbers of its own."""
    return platform.node().partition(".")[0] or "localhost"


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def file_name(text: str) -> str:
    """A name for a file or folder, on any system, that stays where it is put.

    >>> file_name("gst:gap=1.2"), file_name("../../x"), file_name(".."), file_name("vae-30x10")
    ('gst_gap=1.2', '_.._x', '_', 'vae-30x10')
    """
    return re.sub(r"[^\w.,=+() -]", "_", text)[:100].strip(". ") or "_"
