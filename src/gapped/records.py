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
from typing import IO, Annotated, Any, Literal, Required, TypedDict

from gapped.errors import GappedError
from gapped.forms import Rest, Within, check
from gapped.plain import printable

__all__ = ["SCHEMA", "Line", "Name", "Size", "append", "atomic_write", "load", "locked", "sweep"]

SCHEMA = 1

Line = dict[str, Any]

Name = Annotated[str, Within(0, 200)]
Count = Annotated[int, Within()]
Size = Annotated[int, Within(1)]
Scalar = bool | float | Name | None


class Record(TypedDict, total=False):
    """A line of ``records.jsonl``: a run in a table."""

    recipe: Required[Name]
    id: Required[Name]
    label: Name | None
    quick: bool
    task: Name
    data: Name | None
    protocol: Name | None
    estimator: Name
    options: dict[str, Scalar] | None
    tau: float | None
    schedule: dict[str, Scalar] | None
    learning_rate: float | None
    rate_decay: Name
    split: Name
    seed: Count
    epochs: Count | None
    status: Literal["ok", "diverged", "failed"]
    error: str | None
    fleet: Name
    metrics: dict[str, float | None] | None
    seconds: Annotated[float, Within()] | None
    runs_in_fleet: Size | None
    fleet_gpu_memory_gb: float | None
    environment: dict[str, Scalar] | None


class Curve(TypedDict, total=False):
    """A line of ``curves.jsonl``: what a run logged, series by series."""

    id: Required[Name]
    epoch: list[float] | None


class Images(TypedDict, total=False):
    """A line of ``images.jsonl``: `count` pictures a kind, grey bytes in base64."""

    id: Required[Name]
    count: Size
    height: Size
    width: Size
    original: str | None
    reconstruction: str | None
    sample: str | None


class Tree(TypedDict):
    """An expression with its true parse and the tree that a run found, as ranges of tokens."""

    tokens: Annotated[list[Name], Within(1)]
    true: list[Annotated[list[Count], Within(2, 2)]]
    found: list[Annotated[list[Count], Within(2, 2)]]
    label: int
    predicted: int


class Trees(TypedDict):
    """A line of ``trees.jsonl``."""

    id: Name
    examples: Annotated[list[Tree], Within(1)]


class Timing(TypedDict):
    """Milliseconds: the median, and between what eight of ten lie."""

    median: Annotated[float, Within()]
    low: Annotated[float, Within()]
    high: Annotated[float, Within()]


class Bench(TypedDict, total=False):
    """A line of ``bench.jsonl``: a sampler at a shape."""

    run: Required[Name]
    shape: Required[Name]
    rows: Required[Size]
    categories: Required[Size]
    width: Size | None
    dtype: Required[Literal["f64", "f32", "bf16", "f16"]]
    estimator: Required[Name]
    backend: Required[Literal["eager", "compiled", "torch", "triton"]]
    form: Required[Name]
    status: Required[str]
    milliseconds: Timing | None
    copy: Timing | None
    memory: float | None
    environment: dict[str, Scalar] | None


class Startup(TypedDict, total=False):
    """A line of ``bench.jsonl``: what an import costs."""

    what: Required[Name]
    milliseconds: Required[Timing]
    environment: dict[str, Scalar] | None


# The forms of lines by file; those of a bench come in kinds.
_FORMS: dict[str, Any] = {
    "records.jsonl": Record,
    "curves.jsonl": Annotated[Curve, Rest(list[float | None] | Scalar)],
    "images.jsonl": Images,
    "trees.jsonl": Trees,
}
_KINDS: dict[str, Any] = {"bench": Bench, "startup": Startup}


def load(path: Path) -> list[Line]:
    """All complete lines of `path`, in order; an absent file has none.

    They have the form that the file's name stands for. Characters that do not print come as escapes.
    """
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
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as problem:  # JSONDecodeError and UnicodeDecodeError among them
            raise GappedError(f"{path}, line {number}: not a JSON object ({problem})") from None
        if not isinstance(line, dict):
            raise GappedError(f"{path}, line {number}: not a JSON object")
        if line.get("schema", SCHEMA) != SCHEMA:
            raise GappedError(
                f"{path}, line {number}: schema {line['schema']!r}, this version reads {SCHEMA}"
            )
        form = _KINDS.get(str(line.get("kind"))) if path.name == "bench.jsonl" else _FORMS.get(path.name)
        check(line, form or Any, f"{path}, line {number}")
        # JSON that is plain ASCII without escapes holds nothing that does not print.
        usual = text.isascii() and b"\\" not in text and b"\x7f" not in text
        lines.append(line if usual else _shown(line))
    return lines


def _shown(value: Any) -> Any:
    """The value with all of its texts fit to be shown, whoever wrote them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _shown(each) for key, each in value.items()}
    return value


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
    except ValueError:
        whole = False
    return len(raw) if whole else ended
