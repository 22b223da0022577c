"""Append-only files of JSON lines: the form in which results outlive the process that made them.

A finished run is one line of ``records.jsonl``. Lines are only ever appended, in one write followed by
an fsync, so the worst that a kill or a full disk can leave behind is a torn last line; `read` passes over
it with a warning and `write` cuts it off before it writes. A last line that lacks but its newline is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from math import inf, isfinite
from pathlib import Path
from sys import float_info
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gapped.errors import GappedError, printable

_BLOCK = 1 << 16
SCHEMA = 1


@dataclass(frozen=True)
class Within:
    """In `Annotated`: limits of a number, or of the length of a text or a list."""

    least: float = 0
    most: float = inf


Name = Annotated[str, Within(0, 200)]
Count = Annotated[int, Within()]
Size = Annotated[int, Within(1)]
Scalar = bool | float | Name | None
Duration = Annotated[float, Within()]


def derived_hash(*keys: object) -> str:
    """Sixteen hexadecimal digits that are a function of the `keys`."""
    return hashlib.sha256("/".join(map(str, keys)).encode()).hexdigest()[:16]


def plain(value: float | None) -> float | None:
    """A number as JSON has it: None where it is not finite."""
    return value if value is not None and isfinite(value) else None


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
    more: dict[str, Any] = field(default_factory=dict)
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
    more: dict[str, list[float | None] | bool | float | str | None] = field(default_factory=dict)

    @property
    def series(self) -> dict[str, list[float | None]]:
        """One value an epoch, by name; None where the value was not finite."""
        return {name: values for name, values in self.more.items() if isinstance(values, list)}


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


def write(folder: Path, lines: Iterable[JsonLine], sync: bool = True) -> None:
    """Append `lines`, all of one file, in one write; none of them if `read` would refuse one.

    Without `sync` a loss of power, not one of the process, may still take them.
    """
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
        if sync:
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
    parsed: L = from_json(own, kind, where)
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


_ABSENT = object()
_LEAVES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    Any: ("anything", lambda value: True),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: type(value) is int and -(2**63) <= value < 2**63),
    # NaN is within no limits.
    float: ("a number", lambda value: type(value) in (int, float) and abs(value) <= float_info.max),
    NoneType: ("nothing", lambda value: value is None),
}
_NUMBERS = {int, float, NoneType}
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 60
_BRIEF.maxlevel = 2


def from_json(value: object, form: Any, where: str) -> Any:
    """The value with its objects as the dataclasses that `form` names; what does not print is escaped.

    A form is a type of `_LEAVES`, a `Literal`, a union, a `list`, a `dict` with text keys, a dataclass, or
    one of these in `Annotated` with limits. A value of another form is refused; `where` is the file, and the
    line, that it came from.

    >>> from_json({"seconds": [0.5, "1"]}, dict[str, list[float]], "a.json")
    Traceback (most recent call last):
    gapped.errors.GappedError: a.json: seconds[1]: got '1', expected a number
    """
    try:
        return _convert(value, form, where, "")
    except RecursionError:
        raise GappedError(f"{where}: nested too deeply") from None


def _convert(value: Any, form: Any, where: str, place: str) -> Any:
    """`from_json` of what stands at a `place` in the object."""
    accepted, accepts = _rule(form)
    if not accepts(value):
        got = "nothing" if value is _ABSENT else _BRIEF.repr(value)
        place = f"{place.lstrip('.')}: " if place else ""
        raise GappedError(f"{where}: {place}got {got}, expected {accepted}")
    origin, members = get_origin(form), get_args(form)
    if form is Any and isinstance(value, list | dict):
        origin, members = type(value), (Any, Any)
    if origin is Annotated:
        return _convert(value, members[0], where, place)
    if origin in (Union, UnionType):
        return _convert(value, next(each for each in members if _rule(each)[1](value)), where, place)
    if origin is list:
        # Curves are long: numbers are checked, and stay as they are.
        if _NUMBERS.issuperset(map(type, value)) and all(map(_rule(members[0])[1], value)):
            return value
        return [_convert(each, members[0], where, f"{place}[{i}]") for i, each in enumerate(value)]
    if origin is dict:
        pairs = value.items()
        return {printable(key): _convert(each, members[1], where, f"{place}.{key}") for key, each in pairs}
    if is_dataclass(form):
        return _make(form, value, where, place)
    return printable(value) if isinstance(value, str) else value


def _make(form: Any, value: dict[str, Any], where: str, place: str) -> Any:
    """A dataclass; fields without a default are required, and `more` has the keys that no field names."""
    hints = {name: hint for name, hint in _hints(form).items() if name != "more"}
    rest = get_args(_hints(form).get("more", dict[str, Any]))[1]
    required = [each.name for each in fields(form) if each.default is each.default_factory is MISSING]
    entries = {
        printable(key): _convert(each, hints.get(key, rest), where, f"{place}.{key}")
        for key, each in (dict.fromkeys([n for n in required if n not in value], _ABSENT) | value).items()
    }
    more = {name: entries.pop(name) for name in [*entries] if name not in hints}
    return form(**entries, **({"more": more} if "more" in _hints(form) else {}))


@cache
def _hints(form: Any) -> dict[str, Any]:
    hints = get_type_hints(form, include_extras=True)
    return {each.name: hints[each.name] for each in fields(form)}


@cache
def _rule(form: Any) -> tuple[str, Callable[[Any], bool]]:
    """What a form accepts, in words, and a test of a value that does not look into it."""
    if form in _LEAVES:
        return _LEAVES[form]
    origin, members = get_origin(form), get_args(form)
    if origin is Literal:
        return " or ".join(map(repr, members)), lambda value: any(value == each for each in members)
    if origin in (Union, UnionType):
        rules = [_rule(member) for member in members]
        return " or ".join(words for words, _ in rules), lambda value: any(test(value) for _, test in rules)
    if origin is list:
        return "a list", lambda value: isinstance(value, list)
    if origin is not Annotated:
        return "an object", lambda value: isinstance(value, dict)
    (words, accepts), limit = _rule(members[0]), members[1]
    most = f" to {limit.most:g}" if limit.most < inf else ""
    unit = {str: "characters", list: "entries"}.get(get_origin(members[0]) or members[0])
    if unit is None:
        words = f"{words} from {limit.least:g}{most}"
        return words, lambda value: accepts(value) and limit.least <= value <= limit.most
    words = f"{words} of {limit.least:g}{most} {unit}"
    return words, lambda value: accepts(value) and limit.least <= len(value) <= limit.most
