"""What the lines of each file of results must hold, and the one way to read them."""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict

from gapped.errors import GappedError, printable
from gapped.lab.records.forms import Rest, Within, check

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
    "curves.jsonl": Annotated[Curve, Rest(list[float | None] | bool | float | str | None)],
    "images.jsonl": Images,
    "trees.jsonl": Trees,
}
_KINDS: dict[str, Any] = {"bench": Bench, "startup": Startup}


def read_line(text: bytes, path: Path, number: int | str) -> Line:
    """A line of the file `path`, of the form that its name stands for. What does not print comes escaped."""
    where = f"{path}, line {number}"
    try:
        line = json.loads(text, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError) as problem:  # JSONDecodeError and UnicodeDecodeError among them
        raise GappedError(f"{where}: not a JSON object ({problem})") from None
    if not isinstance(line, dict):
        raise GappedError(f"{where}: not a JSON object")
    if line.get("schema", SCHEMA) != SCHEMA:
        raise GappedError(f"{where}: schema {line['schema']!r}, this version reads {SCHEMA}")
    form = _KINDS.get(str(line.get("kind"))) if path.name == "bench.jsonl" else _FORMS.get(path.name)
    check(line, form or Any, where)
    # JSON that is plain ASCII without escapes holds nothing that does not print.
    usual = text.isascii() and b"\\" not in text and b"\x7f" not in text
    return line if usual else {printable(key): _shown(value) for key, value in line.items()}


def _number(text: str) -> float:
    """A finite number; whatever else Python takes for one, no line can be written with."""
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _shown(value: Any) -> Any:
    """The value with all of its texts fit to be shown, whoever wrote them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {printable(key): _shown(each) for key, each in value.items()}
    return value
