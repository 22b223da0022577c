"""Append-only files of JSON lines: the form in which results outlive the process that made them.

A finished run is one line of ``records.jsonl``. Lines are only ever appended, in one write followed by
an fsync, so the worst that a kill or a full disk can leave behind is a torn last line; `read` passes over
it with a warning and `write` cuts it off before it writes. A last line that lacks but its newline is whole.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from gapped.errors import GappedError
from gapped_lab.records.files import naming
from gapped_lab.records.forms import Rest, Within
from gapped_lab.records.forms import parse as parse_form

_BLOCK = 1 << 16
SCHEMA = 1

Name = Annotated[str, Within(0, 200)]
Count = Annotated[int, Within()]
Size = Annotated[int, Within(1)]
Scalar = bool | float | Name | None
Duration = Annotated[float, Within()]
Span = Annotated[list[Count], Within(2, 2)]


@dataclass(frozen=True, kw_only=True)
class JsonLine:
    """A line of a file of results."""

    FILE: ClassVar[str]
    """The name of the file."""
    TAGS: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """What each of these lines says beside its fields."""

    def to_json(self) -> dict[str, Any]:
        """The line as it stands in its file."""
        values = asdict(self)
        return {**values.pop("more", {}), **self.TAGS, **values}

    def encode(self) -> bytes:
        """The text of the line."""
        return json.dumps(self.to_json(), sort_keys=True, allow_nan=False).encode()


@dataclass(frozen=True, kw_only=True)
class RunLine(JsonLine):
    """A line about a run; of several lines with one `key`, the last counts."""

    id: Name

    @property
    def key(self) -> Hashable:
        return self.id


@dataclass(frozen=True, kw_only=True)
class Record(RunLine):
    """A run in a table. One whose `status` is "failed" was ended by an error and holds no result."""

    FILE = "records.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA})

    recipe: Name
    label: Name
    quick: bool = False
    task: Name = ""
    data: Name = ""
    protocol: Name = ""
    estimator: Name = ""
    options: dict[str, Scalar] = field(default_factory=dict)
    tau: float | None = None
    schedule: dict[str, Scalar] = field(default_factory=dict)
    learning_rate: float | None = None
    rate_decay: Name = "none"
    split: Name = "test"
    seed: Count = 0
    epochs: Count = 0
    status: Literal["ok", "diverged", "failed"] = "ok"
    error: str = ""
    """Why the run failed."""
    fleet: Name = ""
    """The key of the fleet that failed."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    metric: Name = ""
    """The metric that decides, where a training function of the user chose it."""
    maximize: bool = False
    """Whether a higher `metric` is better."""
    seconds: Duration = 0.0
    runs_in_fleet: Size = 1
    fleet_gpu_memory_gb: float | None = None
    environment: dict[str, Scalar] = field(default_factory=dict)
    more: Annotated[dict[str, Any], Rest()] = field(default_factory=dict)
    """What lines of other versions say beyond these."""

    @property
    def key(self) -> tuple[str, str]:
        """Recipe and id: one run may stand in several tables."""
        return self.recipe, self.id

    @property
    def failed(self) -> bool:
        """Whether an error ended the run: then the record holds no result, and the run is not finished."""
        return self.status == "failed"

    def to_json(self) -> dict[str, Any]:
        absent = {"fleet_gpu_memory_gb"} if self.failed else {"fleet", "error"}
        absent |= set() if self.metric else {"metric", "maximize"}
        return {name: value for name, value in super().to_json().items() if name not in absent}


@dataclass(frozen=True, kw_only=True)
class Curve(RunLine):
    """What a run logged, series by series, at each `epoch` of its tests."""

    FILE = "curves.jsonl"

    epoch: list[float] = field(default_factory=list)
    more: Annotated[dict[str, list[float | None] | bool | float | str | None], Rest()] = field(
        default_factory=dict
    )

    @property
    def series(self) -> dict[str, list[float | None]]:
        """One value an epoch, by name; None where the value was not finite."""
        return {name: values for name, values in self.more.items() if isinstance(values, list)}


@dataclass(frozen=True, kw_only=True)
class Images(RunLine):
    """Pictures of a run: of each kind `count`, as grey bytes in base64."""

    FILE = "images.jsonl"

    count: Size
    height: Size
    width: Size
    original: str = ""
    reconstruction: str = ""
    sample: str = ""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """An expression with its true parse and the tree that a run found, as ranges of tokens."""

    tokens: Annotated[list[Name], Within(1)]
    true: list[Span]
    found: list[Span]
    label: int
    predicted: int


@dataclass(frozen=True, kw_only=True)
class Trees(RunLine):
    """Trees of a run."""

    FILE = "trees.jsonl"

    examples: Annotated[list[Tree], Within(1)]


@dataclass(frozen=True, kw_only=True)
class Gradient(JsonLine):
    """The gradients of an estimator at one point of training, beside the exact gradient.

    `results/answered/criterion.md` describes the study that wrote these lines.
    """

    FILE = "gradients.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA})

    protocol: Name
    data: Name
    epoch: Count
    level: Literal["logits", "weights"]
    """What the gradient is taken with respect to."""
    label: Name
    tau: float | None
    samples: Count
    images: Count
    inner: float
    """The inner product of the mean gradient and the exact one."""
    square: float
    """The squared length of the mean gradient, less what its noise adds."""
    variance: float
    """The total variance of a gradient."""
    exact: float
    """The squared length of the exact gradient, likewise."""
    cosine: float
    """The mean cosine between a gradient and the exact one."""
    descent: float
    """How much steps of the mean over the root mean square, entry by entry, descend: at most 1."""
    environment: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call: median, 10% and 90% quantiles over batches."""

    median: Duration
    low: Duration
    high: Duration
    batches: Count = 0


@dataclass(frozen=True, kw_only=True)
class Bench(JsonLine):
    """Time and memory of a sampler at a shape; `status` says why where there are none."""

    FILE = "bench.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA, "kind": "bench"})

    run: Name
    shape: Name
    rows: Size
    categories: Size
    width: Size | None = None
    dtype: Literal["f64", "f32", "bf16", "f16"]
    estimator: Name
    backend: Literal["eager", "compiled", "torch", "triton"]
    form: Name
    status: str
    milliseconds: Timing | None = None
    copy: Timing | None = None
    memory: float | None = None
    device_type: Name = ""
    environment: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Work(JsonLine):
    """Time and memory of one way to do a workload; `status` says why where there are none."""

    FILE = "bench.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA, "kind": "work"})

    run: Name
    work: Name
    sizes: Annotated[list[Size], Within(1, 8)]
    dtype: Literal["f64", "f32", "bf16", "f16"]
    way: Name
    status: str
    milliseconds: Timing | None = None
    memory: Count | None = None
    """The most bytes that a call holds beyond its inputs."""
    gradients: Count = 0
    """How many of these bytes are the gradients of the inputs; 0 where the forward pass alone is measured."""
    logits: Size
    """The bytes of a tensor of all logits."""
    device_type: Name = ""
    environment: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Startup(JsonLine):
    """What an import costs."""

    FILE = "bench.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA, "kind": "startup"})

    what: Name
    milliseconds: Timing
    run: Name = ""
    device_type: Name = ""
    environment: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LinearTiming(JsonLine):
    """Time and memory from hidden states to a sampled row of a table, and back to their gradients."""

    FILE = "vocabulary.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA, "kind": "linear"})

    run: Name
    rows: Size
    width: Size
    categories: Size
    dtype: Literal["f64", "f32", "bf16", "f16"]
    way: Name
    """Who computes, or a product of hidden states and weight alone."""
    table: Literal["own", "weight", "none"]
    """What rows are selected from; none where an index is drawn without a gradient."""
    status: str = "ok"
    milliseconds: Timing | None = None
    memory: float | None = None
    """MiB beyond the inputs and their gradients."""
    device_type: Name = ""
    environment: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tuning(JsonLine):
    """A word model that was tuned by a reward: `examples/word_model.py`."""

    FILE = "tuning.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA, "kind": "tuning"})

    estimator: Name
    seed: Count
    rewards: list[float]
    """The mean reward of each step."""
    nats_lost: float
    """What the prediction of held-out text lost, in nats a word."""
    spread: float
    """The standard deviation of the first gradient over the norm of its mean."""
    milliseconds: Duration
    """Processor time of a step."""
    memory: Duration
    """MiB of a step at their peak."""
    environment: dict[str, Scalar] = field(default_factory=dict)


L = TypeVar("L", bound=JsonLine)


def read(folder: Path, kind: type[L]) -> list[L]:
    """The complete lines of one kind in a folder of results, in order; an absent file has none."""
    path = folder / kind.FILE
    return parse(path, path.read_bytes(), kind)[0] if path.exists() else []


def parse(path: Path, raw: bytes, kind: type[L]) -> tuple[list[L], int]:
    """The complete lines of `raw`, the content of `path` or an end of it, and how many bytes they take."""
    complete = _complete_length(raw)
    if complete < len(raw):
        warnings.warn(f"{path}: the last line is torn (an interrupted write) and is ignored", stacklevel=3)
    texts = enumerate(raw[:complete].split(b"\n"), start=1)
    lines = (read_line(text, kind, f"{path}, line {number}") for number, text in texts if text.strip())
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
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), open(path, "ab+") as file:
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


def read_line(text: bytes, kind: type[L], where: str) -> L | None:
    """The line of `where`, a file and the number in it; None if the line is tagged as one of another kind.

    Characters that do not print come escaped.
    """
    try:
        line = json.loads(text, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError) as problem:  # JSONDecodeError and UnicodeDecodeError among them
        raise GappedError(f"{where}: not a JSON object ({problem})") from None
    if not isinstance(line, dict):
        raise GappedError(f"{where}: not a JSON object")
    if line.get("schema", SCHEMA) != SCHEMA:
        raise GappedError(f"{where}: schema {line['schema']!r}, this version reads {SCHEMA}")
    if line.get("kind") != kind.TAGS.get("kind", line.get("kind")):
        return None
    own = {name: value for name, value in line.items() if name not in ("schema", *kind.TAGS)}
    parsed: L = parse_form(own, kind, where)
    return parsed


def _number(text: str) -> float:
    """A finite number; whatever else Python takes for one, no line can be written with."""
    if not isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _complete_length(raw: bytes) -> int:
    """How many bytes are whole lines. The last may lack its newline: no part of a JSON object is one."""
    ended = raw.rfind(b"\n") + 1
    try:
        whole = isinstance(json.loads(raw[ended:]), dict)
    except (ValueError, RecursionError):
        whole = False
    return len(raw) if whole else ended
