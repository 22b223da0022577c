"""Append-only files of JSON lines: the form in which results outlive the process that made them.

A finished run is one line of ``records.jsonl``. Lines are only ever appended, in one write followed by
an fsync, so the worst that a kill or a full disk can leave behind is a torn last line; `load` passes over
it with a warning and `append` cuts it off before it writes. A last line that lacks but its newline is whole.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gapped.schema import SCHEMA, Line, read_line

__all__ = ["SCHEMA", "Line", "append", "atomic_write", "load", "locked", "sweep"]


def load(path: Path) -> list[Line]:
    """All complete lines of `path`, in order; an absent file has none."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    complete = _complete_length(raw)
    if complete < len(raw):
        warnings.warn(f"{path}: the last line is torn (an interrupted write) and is ignored", stacklevel=2)
    lines = []
    for number, text in enumerate(raw[:complete].split(b"\n"), start=1):
        if not text.strip():
            continue
        lines.append(read_line(text, path, number))
    return lines


def append(path: Path, lines: Iterable[Line]) -> None:
    """Append `lines` to `path` in one durable write."""
    text = "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)
    if not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(0)
        raw = file.read()
        complete = _complete_length(raw)
        if complete < len(raw):
            file.truncate(complete)
        lacks_newline = raw[:complete][-1:] not in (b"", b"\n")
        file.write(b"\n" * lacks_newline + text.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{_machine()}.{os.getpid()}.part")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left of their `atomic_write`s in `folder`."""
    for partial in folder.glob(f".*.{_machine()}.*.part"):
        owner = partial.name.rsplit(".", 2)[1]
        if owner.isdigit() and not _is_running(int(owner)):
            partial.unlink(missing_ok=True)


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


def _complete_length(raw: bytes) -> int:
    """How many bytes are whole lines. The last may lack its newline: no part of a JSON object is one."""
    ended = raw.rfind(b"\n") + 1
    try:
        whole = isinstance(json.loads(raw[ended:]), dict)
    except (ValueError, RecursionError):
        whole = False
    return len(raw) if whole else ended
