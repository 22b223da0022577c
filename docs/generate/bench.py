"""The tables of `gapped bench`: samples, look-ups and workloads, device by device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from evidence import Evidence
from template import fill

from gapped.comparison.table import NOTHING, Entry, Table, without_empty
from gapped.errors import listing
from gapped_lab.bench.workloads import tasks
from gapped_lab.records import Bench
from gapped_lab.report.rendering import to_markdown
from gapped_lab.report.timings import (
    REFERENCE,
    Timings,
    WorkTimings,
    as_milliseconds,
    as_ratio,
    device_of,
    last_startups,
    table_of,
    time,
    timings,
    title_of,
    work_timings,
)

T = TypeVar("T", Timings, WorkTimings)

_OURS = {"gapmax": "`gapped.sample`", "gst": "`gapped.gst`"}
"""Which estimator a headline is about, the first that was timed, and how readers call it."""


def sample_tables(evidence: Evidence) -> str:
    """Every shape whose samples are wanted themselves, device by device, and the cost of importing."""
    imports = [
        f"- `{each.what}` after torch, {device_of(each)}: {as_milliseconds(each.milliseconds.median).text} ms"
        for each in last_startups(evidence.startups)
    ]
    tables = _by_device([bench for bench in timings(evidence.bench) if not bench.width], _shape)
    return "\n".join([tables, *imports])


def index_tables(evidence: Evidence) -> str:
    """Every shape whose samples select from an embedding, device by device."""
    return _by_device([bench for bench in timings(evidence.bench) if bench.width], _shape)


def work_tables(evidence: Evidence) -> dict[str, Any]:
    """Every workload that was measured, device by device, and which were not, at their size for a GPU."""
    lines = [line for line in evidence.works if line.device_type == "cuda" and line.milliseconds]
    measured = {(line.work, *line.sizes, line.dtype) for line in lines}
    wanted = tasks(["all"], torch.device("cuda"))
    missing = [task.work for task in wanted if (task.work, *task.sizes, task.dtype) not in measured]
    return {
        "missing": listing(dict.fromkeys(missing)),
        "tables": _by_device(work_timings(evidence.works), _workload),
    }


def headline(evidence: Evidence) -> str:
    """The default beside torch's own sampler, in a few columns: a reader has not read what is measured.

    Devices whose records are older than GapMax have GST instead.
    """
    texts = []
    for device, group in _devices([b for b in timings(evidence.bench) if not b.width]):
        name = next(name for name in _OURS if any(_ours(bench, name) for bench in group))
        times = ("rows × categories", "eager, ms", "compiled, ms", f"{_OURS[name]}, ms", "× eager")
        columns = (*times, "memory, eager", f"memory, {_OURS[name]}")
        timed = [bench for bench in group if _ours(bench, name)]
        table = without_empty(Table(columns, tuple(_row(bench, name) for bench in timed)))
        values = {"table": table, "device": device, "versions": _versions(timed)}
        texts.append(fill(f"bench-headline-{name}", values))
    return "\n\n".join(texts)


def _by_device(group: Sequence[T], text: Callable[[T], str]) -> str:
    parts = []
    for device, mine in _devices(group):
        parts.append(f"### {device}, {_versions(mine)}\n")
        parts += [text(each) for each in mine]
    return "\n".join(parts)


def _shape(bench: Timings) -> str:
    return f"{title_of(bench)}\n\n{to_markdown(table_of(bench))}"


def _workload(work: WorkTimings) -> str:
    return f"{work.heading()}\n\n{to_markdown(work.table())}"


def _devices(group: Sequence[T]) -> list[tuple[str, list[T]]]:
    devices = dict.fromkeys(bench.device for bench in group)
    return [(device, [bench for bench in group if bench.device == device]) for device in devices]


def _ours(bench: Timings, name: str) -> Bench | None:
    """An estimator at a shape, with its kernel if there is one."""
    return bench.find(name, "triton") or bench.find(name, "torch")


def _row(bench: Timings, name: str) -> tuple[Entry, ...]:
    """A row of the headline: an estimator beside torch's sampler."""
    ours, torch = _ours(bench, name), bench.find(REFERENCE, "eager")
    spent, eager, compiled = time(ours), time(torch), bench.reference("compiled")
    assert ours is not None
    assert torch is not None
    assert spent is not None
    assert eager is not None
    return (
        Entry(bench.title),
        as_milliseconds(eager),
        Entry(NOTHING) if compiled is None else as_milliseconds(compiled),
        as_milliseconds(spent),
        as_ratio(spent / eager),
        as_ratio(torch.memory),
        as_ratio(ours.memory),
    )


def _versions(group: Sequence[Timings | WorkTimings]) -> str:
    places = [bench.lines[0].environment for bench in group]
    return "; ".join(dict.fromkeys(f"torch {p['torch']}, gapped at {p['commit']}" for p in places))
