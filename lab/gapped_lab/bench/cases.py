"""What `gapped bench` measures: shapes, cases, and the defaults of each device.

A *shape* is rows x categories in a dtype; with a width, the sample selects from an embedding of that width.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from gapped.errors import GappedError, reject
from gapped.registry import estimators, spell
from gapped_lab.bench.timing import free_memory
from gapped_lab.estimator_text import parse

BACKENDS = ("torch", "triton")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
REFERENCE = "F.gumbel_softmax"

COMMON = ("gapmax", "gst", "gumbel-softmax", "straight-through", "reinmax")
RAO = ("gumbel-rao:samples=100", "gumbel-rao:samples=1000")
DEFAULT: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "32x10:f32": COMMON,
        "3000x10:f32": COMMON,
        "1048576x64:f32": COMMON,
        "262144x256:f32": COMMON,
        "8192x32000:f32": COMMON,
        "8192x128256:bf16": COMMON,
        "6400x64:f32": RAO,
        "8192x128256x1024:bf16": ("gapmax",),
    },
    "cpu": {
        "1x2:f32": COMMON,
        "32x10:f32": COMMON,
        "256x64:f32": COMMON,
        "3000x10:f32": (*COMMON, "gumbel-rao:samples=10"),
        "65536x64:f32": (*COMMON, "gumbel-rao:samples=10"),
        "256x4096x64:f32": ("gapmax",),
    },
}


@dataclass(frozen=True)
class Shape:
    """What is sampled: `rows` x `categories`, and the `width` of the embedding to select from, if any."""

    rows: int
    categories: int
    dtype: str = "f32"
    width: int | None = None

    def __str__(self) -> str:
        sizes = (self.rows, self.categories, *([self.width] if self.width else []))
        return "x".join(map(str, sizes)) + f":{self.dtype}"

    @property
    def elements(self) -> int:
        return self.rows * self.categories

    @property
    def bytes(self) -> int:
        """The size of one logits tensor."""
        return self.elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Case:
    """One thing to measure at a shape: who samples, how, and in which form the sample is used."""

    estimator: str
    backend: str
    form: str = "sample"
    """`sample` alone; at a shape with a width `dense`, one-hot times table, or `index`, look-up."""

    def __str__(self) -> str:
        return f"{self.estimator}, {self.backend}, {self.form}"


@dataclass(frozen=True)
class Job:
    """Everything that is measured at one shape."""

    shape: Shape
    cases: tuple[Case, ...]


def parse_shape(text: str) -> Shape:
    """A shape from its text.

    >>> parse_shape("3000x10"), str(parse_shape("8192x128256x1024:bf16"))
    (Shape(rows=3000, categories=10, dtype='f32', width=None), '8192x128256x1024:bf16')
    """
    match = re.fullmatch(r"([\d_]+)x([\d_]+)(?:x([\d_]+))?(?::(\w+))?", text.strip())
    sizes = [int(size) for size in match.groups()[:3] if size is not None] if match else []
    dtype = (match[4] if match else None) or "f32"
    if not sizes or min(sizes) < 1 or dtype not in DTYPES:
        accepted = f"ROWSxCATEGORIES[xWIDTH][:{'|'.join(DTYPES)}], such as 65536x64 or 8192x32000:bf16"
        raise reject("--shape", text, accepted)
    return Shape(sizes[0], sizes[1], dtype, *sizes[2:])


def plan(
    device: torch.device,
    shapes: Sequence[str] = (),
    specs: Sequence[str] = (),
    backends: Sequence[str] = (),
    compiled: bool = True,
) -> list[Job]:
    """What to measure, all of it checked; what is not named is the default of the device."""
    default = DEFAULT[device.type]
    texts = [spell(*_without_backend(spec)) for spec in specs]
    backends = _check_backends(backends, device)
    jobs = []
    for text in shapes or default:
        shape = parse_shape(text)
        _check_size(shape, device)
        usual = default.get(str(shape), ("gapmax",) if shape.width else COMMON)
        jobs.append(Job(shape, tuple(_cases(shape, texts or usual, backends, compiled))))
    return jobs


def _cases(shape: Shape, specs: Sequence[str], backends: Sequence[str], compiled: bool) -> Iterator[Case]:
    forms = ("dense", "index") if shape.width else ("sample",)
    yield Case(REFERENCE, "eager", forms[0])
    if compiled:
        yield Case(REFERENCE, "compiled", forms[0])
    for spec, form, backend in itertools.product(specs, forms, backends):
        yield Case(spec, backend, form)


def _without_backend(text: str) -> tuple[str, dict[str, Any]]:
    name, options = parse(text)
    if not hasattr(estimators()[name], "sample"):
        raise reject("--estimator", text, "one whose sample carries the gradient")
    if "backend" in options:
        raise reject("--estimator", text, "an estimator without a backend, which is for --backend to choose")
    return name, options


def _check_backends(backends: Sequence[str], device: torch.device) -> Sequence[str]:
    for backend in backends:
        if backend not in BACKENDS:
            raise reject("--backend", backend, f"one of {', '.join(BACKENDS)}")
        if backend == "triton" and device.type != "cuda":
            raise reject("--backend", backend, f"torch on a {device.type}: the kernels need a CUDA device")
        if backend == "triton" and find_spec("triton") is None:
            raise GappedError("--backend: got 'triton', which is not installed: pip install triton")
    if backends:
        return list(dict.fromkeys(backends))
    return BACKENDS if device.type == "cuda" and find_spec("triton") else ("torch",)


def _check_size(shape: Shape, device: torch.device) -> None:
    free = free_memory(device)
    # Logits, gradient, and the two that every sampler adds.
    if 4 * shape.bytes > free:
        needs = f"{4 * shape.bytes / 2**30:.1f} GiB of the {free / 2**30:.1f} GiB that are free"
        raise reject("--shape", str(shape), f"a shape that fits; this one needs {needs}")
