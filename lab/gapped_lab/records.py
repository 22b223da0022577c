"""Lines of results beside runs and curves: pictures, trees, timings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from gapped.comparison.records import SCHEMA, Count, Duration, JsonLine, Name, RunLine, Scalar, Size, Within

Span = Annotated[list[Count], Within(2, 2)]


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
    """The time of an import."""

    FILE = "bench.jsonl"
    TAGS = MappingProxyType({"schema": SCHEMA, "kind": "startup"})

    what: Name
    milliseconds: Timing
    run: Name = ""
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
    """The loss of predicting held-out text, in nats a word."""
    spread: float
    """The standard deviation of the first gradient over the norm of its mean."""
    milliseconds: Duration
    """Processor time of a step."""
    memory: Duration
    """MiB of a step at their peak."""
    environment: dict[str, Scalar] = field(default_factory=dict)


def file_name(text: str) -> str:
    """A name for a file or folder, on any system, that stays where it is put.

    >>> file_name("gst:gap=1.2"), file_name("../../x"), file_name(".."), file_name("vae-30x10")
    ('gst_gap=1.2', '_.._x', '_', 'vae-30x10')
    """
    return re.sub(r"[^\w.,=+() -]", "_", text)[:100].strip(". ") or "_"
