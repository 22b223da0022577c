"""Append-only files of JSON lines: the form in which results outlive the process that made them.

A finished run is one line of ``records.jsonl``. Lines are only ever appended, in one write followed by
an fsync, so the worst that a kill or a full disk can leave behind is a torn last line; `read` passes over
it with a warning and `write` cuts it off before it writes. A last line that lacks but its newline is whole.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gapped.lab.records.forms import parse as parse_form
from gapped.lab.records.schema import (
    SCHEMA,
    Bench,
    Curve,
    Images,
    JsonLine,
    L,
    Record,
    RunLine,
    Startup,
    Timing,
    Tree,
    Trees,
    read_line,
    read_object,
)

__all__ = [
    "SCHEMA",
    "Bench",
    "Curve",
    "Images",
    "JsonLine",
    "Record",
    "RunLine",
    "Startup",
    "Timing",
    "Tree",
    "Trees",
    "atomic_write",
    "file_name",
    "locked",
    "parse",
    "partial_path",
    "read",
    "sweep",
    "write",
    "writers",
]

_BLOCK = 1 << 16
# How often a folder may vanish between its making and its first file.
_ATTEMPTS = 100


def read(folder: Path, kind: type[L]) -> list[L]:
    """The complete lines of one kind in a folder of results, in order; an absent file has none."""
    path = folder / kind.FILE
    return parse(path, path.read_bytes(), kind)[0] if path.exists() else []


def parse(path: Path, raw: bytes, kind: type[L]) -> tuple[list[L], int]:
    """The complete lines of `raw`, the content of `path` or an end of it, and how many bytes they take."""
    texts, complete = _split(path, raw)
    lines = (read_line(text, kind, f"{path}, line {number}") for number, text in texts)
    return [line for line in lines if line is not None], complete


def write(folder: Path, lines: Iterable[JsonLine]) -> None:
    """Append `lines`, all of one file, in one durable write; none of them if `read` would refuse one."""
    lines = list(lines)
    if not lines:
        return
    (name,) = {line.FILE for line in lines}
    path, texts = folder / name, [line.encode() for line in lines]
    for number, (text, line) in enumerate(zip(texts, lines, strict=True), start=1):
        read_line(text, type(line), f"{path}, line {number} of the new ones")
    _append(path, texts)


def _split(path: Path, raw: bytes) -> tuple[list[tuple[int, bytes]], int]:
    """The numbered lines of `raw` that are whole and not blank, and how many bytes are whole."""
    complete = _complete_length(raw)
    if complete < len(raw):
        warnings.warn(f"{path}: the last line is torn (an interrupted write) and is ignored", stacklevel=4)
    numbered = enumerate(raw[:complete].split(b"\n"), start=1)
    return [(number, text) for number, text in numbered if text.strip()], complete


# Lines as dictionaries, for callers that do not use the dataclasses yet.

Line = dict[str, Any]
_KINDS: dict[str, type[JsonLine]] = {kind.FILE: kind for kind in (Record, Curve, Images, Trees)}
_BENCH: dict[str, type[JsonLine]] = {"bench": Bench, "startup": Startup}


def has_failed(record: Line) -> bool:
    return record.get("status") == "failed"


def load(path: Path) -> list[Line]:
    return dictionaries(path, path.read_bytes())[0] if path.exists() else []


def dictionaries(path: Path, raw: bytes) -> tuple[list[Line], int]:
    texts, complete = _split(path, raw)
    return [_dictionary(text, path, number) for number, text in texts], complete


def append(path: Path, lines: Iterable[Line]) -> None:
    texts = [json.dumps(line, sort_keys=True, allow_nan=False).encode() for line in lines]
    for number, text in enumerate(texts, start=1):
        _dictionary(text, path, f"{number} of the new ones")
    if texts:
        _append(path, texts)


def _dictionary(text: bytes, path: Path, number: int | str) -> Line:
    where = f"{path}, line {number}"
    line = read_object(text, where)
    kinds, key = (_BENCH, str(line.get("kind"))) if path.name == Bench.FILE else (_KINDS, path.name)
    lenient = (
        {"label": "", "count": 1, "height": 1, "width": 1} if key in ("records.jsonl", "images.jsonl") else {}
    )
    given = {name: value for name, value in line.items() if value is not None}
    parse_form({**lenient, **given}, kinds.get(key, Any), where)
    printed: Line = parse_form(line, dict[str, Any], where)
    return printed


def _append(path: Path, texts: list[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), open(path, "ab+") as file:
        # Only the last line can be torn: a long file is not read from its beginning.
        start, raw = file.seek(0, os.SEEK_END), b""
        while start and b"\n" not in raw:
            size = min(start, _BLOCK)
            start -= size
            file.seek(start)
            raw = file.read(size) + raw
        complete = _complete_length(raw)
        if complete < len(raw):
            file.truncate(start + complete)
        lacks_newline = raw[:complete][-1:] not in (b"", b"\n")
        file.write(b"\n" * lacks_newline + b"".join(text + b"\n" for text in texts))
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
    partial = partial_path(path)
    try:
        with _naming(path):
            with _new_file(partial) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
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


def _complete_length(raw: bytes) -> int:
    """How many bytes are whole lines. The last may lack its newline: no part of a JSON object is one."""
    ended = raw.rfind(b"\n") + 1
    try:
        whole = isinstance(json.loads(raw[ended:]), dict)
    except (ValueError, RecursionError):
        whole = False
    return len(raw) if whole else ended


def file_name(text: str) -> str:
    """A name for a file or folder, on any system, that stays where it is put.

    >>> file_name("gst:gap=1.2"), file_name("../../x"), file_name(".."), file_name("vae-30x10")
    ('gst_gap=1.2', '_.._x', '_', 'vae-30x10')
    """
    return re.sub(r"[^\w.,=+() -]", "_", text)[:100].strip(". ") or "_"
