"""The blocks of a document that are made of the records of `gapped bench`."""

from __future__ import annotations

from collections.abc import Sequence

from gapped.lab.records import Line
from gapped.lab.report.bench import (
    REFERENCE,
    Bench,
    as_milliseconds,
    as_ratio,
    benches,
    table_of,
    time,
    title_of,
)
from gapped.lab.report.tables import NOTHING, Entry, Table, to_markdown, without_empty
from gapped.lab.report.targets import target_table


def render_bench(lines: Sequence[Line], name: str) -> str:
    """The text of a block."""
    if not any(line.get("kind") == "bench" for line in lines):
        return "Not measured yet."
    return BLOCKS[name](lines)


def _all_tables(lines: Sequence[Line]) -> str:
    return _by_device([bench for bench in benches(lines) if not bench.lines[0].get("width")])


def _index_tables(lines: Sequence[Line]) -> str:
    return _by_device([bench for bench in benches(lines) if bench.lines[0].get("width")])


def _by_device(found: Sequence[Bench]) -> str:
    if not found:
        return "Not measured yet."
    parts = []
    for device in dict.fromkeys(bench.device for bench in found):
        mine = [bench for bench in found if bench.device == device]
        parts.append(f"### {device}, {_made_with(mine)}\n")
        parts += [f"{title_of(bench)}\n\n{to_markdown(table_of(bench))}" for bench in mine]
    return "\n".join(parts)


def _targets(lines: Sequence[Line]) -> str:
    table = target_table(lines)
    if not table.rows:
        return "No target is stated for what these records measure."
    missed = sum(row[-1].text == "missed" for row in table.rows)
    said = f"{len(table.rows) - missed} of {len(table.rows)} targets are met, {missed} missed."
    return f"{said}\n\n{to_markdown(table)}"


def _figure(lines: Sequence[Line]) -> str:
    return "![Times as multiples of F.gumbel_softmax in eager mode, shape by shape](figures/bench.svg)"


def _headline(lines: Sequence[Line]) -> str:
    """GST beside torch's own sampler, in a few columns: who looks here has not read what is measured."""
    found = [bench for bench in benches(lines) if not bench.lines[0].get("width")]
    parts = []
    for device in dict.fromkeys(bench.device for bench in found):
        mine = [bench for bench in found if bench.device == device]
        rows = [row for bench in mine if (row := _beside(bench)) is not None]
        columns = ("rows × categories", "eager, ms", "compiled, ms", "`gapped.gst`, ms", "× eager")
        table = Table((*columns, "memory, eager", "memory, `gapped.gst`"), tuple(rows))
        said = (
            f"A hard sample and its gradient on {device}, {_made_with(mine)}; eager and compiled are torch's "
            "`F.gumbel_softmax(hard=True)`. Memory is what a call needs beyond logits and incoming gradient, "
            "in logits tensors; sample and gradient alone are 2."
        )
        if rows:
            parts.append(f"{to_markdown(without_empty(table))}\n{said}\n")
    return "\n".join(parts) or "Not measured yet.\n"


def _beside(bench: Bench) -> tuple[Entry, ...] | None:
    """A row of the above, where GST was measured: with its kernel, if there is one."""
    ours = bench.find("gst", "triton") or bench.find("gst", "torch")
    spent, eager = time(ours), bench.reference("eager")
    if ours is None or spent is None or eager is None:
        return None
    compiled = bench.reference("compiled")
    return (
        Entry(bench.title),
        as_milliseconds(eager),
        Entry(NOTHING) if compiled is None else as_milliseconds(compiled),
        as_milliseconds(spent),
        as_ratio(spent / eager),
        as_ratio((bench.find(REFERENCE, "eager") or {}).get("memory")),
        as_ratio(ours.get("memory")),
    )


BLOCKS = {
    "bench-headline": _headline,
    "bench-targets": _targets,
    "bench-figure": _figure,
    "bench": _all_tables,
    "bench-index": _index_tables,
}


def _made_with(found: Sequence[Bench]) -> str:
    places = [bench.lines[0].get("environment") or {} for bench in found]
    versions = dict.fromkeys(f"torch {p.get('torch')}, gapped at {p.get('commit')}" for p in places)
    return "; ".join(versions)
