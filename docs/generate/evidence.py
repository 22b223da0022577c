"""The records that tables and figures are made of, gathered by what they are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from gapped.comparison.records import SCHEMA, Curve, JsonLine, Name, Record, Scalar, Size, read
from gapped.comparison.table import Cell
from gapped_lab.records import Bench, Startup, Timing, Tuning, Work
from gapped_lab.report.cells import cells, finished_runs

ELBO = "test_negative_elbo"
VALIDATION = "validation_negative_elbo"

# The two protocols that differ in nothing but the ReLU on the logits.
RECTIFIED = "paper-30x10"
PLAIN = "plain-30x10"


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
    """The table that rows are selected from; none where an index is drawn without a gradient."""
    status: str = "ok"
    milliseconds: Timing | None = None
    memory: float | None = None
    """MiB beyond the inputs and their gradients."""
    device_type: Name = ""
    environment: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """All records, gathered into cells, curves by the id of their run, and the lines of a bench."""

    records: Sequence[Record]
    cells: Sequence[Cell]
    curves: Mapping[str, Curve]
    bench: Sequence[Bench]
    works: Sequence[Work]
    startups: Sequence[Startup]
    linear: Sequence[LinearTiming] = ()
    tunings: Sequence[Tuning] = ()
    workloads: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    """The runs of each setting, by the name of the workload and its own."""

    def group(self, recipe: str, protocol: str = RECTIFIED) -> list[Cell]:
        """The cells of a recipe under a protocol."""
        return [c for c in self.cells if (c.recipe, c.protocol) == (recipe, protocol)]


def gather(folder: Path) -> Evidence:
    """The evidence in a folder."""
    records = finished_runs(folder)
    return Evidence(
        records,
        cells(records),
        {curve.id: curve for curve in read(folder, Curve)},
        read(folder, Bench),
        read(folder, Work),
        read(folder, Startup),
        read(folder, LinearTiming),
        read(folder, Tuning),
        {
            f"{path.parent.parent.name}: {path.parent.name.replace('-', ' ')}": read(path.parent, Record)
            for path in sorted((folder / "workloads").glob("*/*/records.jsonl"))
        },
    )
