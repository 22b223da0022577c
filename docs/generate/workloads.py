"""The tables and verdicts of the four workloads, setting by setting."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from evidence import Evidence
from template import fill

from gapped.comparison.outcome import judge, ordered
from gapped.comparison.table import Cell, Entry, Row, Table, number, rows_of, without_empty
from gapped_lab.report.cells import cells

TIME, MEMORY = "ms_a_step", "mib"
"""Runs trained side by side: their time says nothing about the cost of a way. A CPU's memory is not read."""
LEAST = 3
"""So many seeds are enough to be judged."""


def workloads(evidence: Evidence) -> str:
    """A heading, a table and a verdict for each setting that is on record."""
    parts = []
    for name, records in evidence.workloads.items():
        every = cells(records)
        group = at_their_best(every)
        most = max(len(cell.records) for cell in group)
        judged = [cell for cell in group if len(cell.records) >= min(most, LEAST)]
        verdict = judge(judged, margin="1%")
        rows = [*ordered(rows_of(judged), verdict), *rows_of([cell for cell in group if cell not in judged])]
        values = {
            "name": name,
            "table": without_empty(_table(rows)),
            "verdict": str(verdict),
            "runs": len(records),
            "fewer": " Those with fewer seeds than most, at the end, are not judged."
            * (len(judged) < len(group)),
            "tried": " Each way is shown at its best learning rate." * (len(group) < len(every)),
            "device": records[0].environment["device"],
        }
        parts.append(fill("workload", values))
    return "\n\n".join(parts)


def at_their_best(group: Sequence[Cell]) -> list[Cell]:
    """Of cells that differ in their learning rate, the best one."""
    best: dict[str, Cell] = {}
    for row in rows_of(group):
        best.setdefault(row.label.partition(", rate ")[0], row.cell)
    return list(best.values())


def _table(rows: Sequence[Row]) -> Table:
    metric = rows[0].metric
    names = dict.fromkeys(name for row in rows for name in row.cell.records[0].metrics)
    unused = {metric, TIME} | ({MEMORY} if not any(_mean(row, MEMORY) for row in rows) else set())
    others = [name for name in names if name not in unused]
    body = (
        (
            Entry(row.label, code=True),
            Entry(f"{number(row.value.mean, metric, 4).text} ± {number(row.value.std, metric, 2).text}"),
            Entry(str(row.value.count), row.value.count),
            *(number(_mean(row, name)) for name in others),
        )
        for row in rows
    )
    return Table(("way", metric, "seeds", *others), tuple(body))


def _mean(row: Row, name: str) -> float | None:
    values = [value for record in row.cell.records if (value := record.metrics.get(name)) is not None]
    return fmean(values) if values else None
