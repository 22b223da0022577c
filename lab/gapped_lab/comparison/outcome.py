"""The result of a comparison: table, verdict, data frame, figure, page."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from gapped.errors import GappedError, listing, require
from gapped_lab.records import Record
from gapped_lab.records.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from gapped_lab.report.cells import Cell, Row
    from gapped_lab.report.tabular import Table

# The width of a table as text.
_WIDTH = 80


def hopeless(ended: Sequence[Record], labels: Set[str]) -> bool:
    """Whether all of these estimators have failed, two runs or more, and no run has finished."""
    return len(ended) > 1 and all(r.failed for r in ended) and labels <= {r.label for r in ended}


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `gapped.compare`: it prints as a table and a verdict.

    Arguments:
        records: One record for each run, seed by seed.
        missing: Label and seed of the runs that the budget left no time for, or that were not started since
            every estimator had failed.
        folder: Where the records are. One that `gapped.compare` made itself is removed with this object.
        stopped: The estimators that were stopped early: label, after how many seeds, and the one that led
            then.
        reused: How many of the runs were in the folder already, from an earlier call.
    """

    records: tuple[Record, ...]
    """One for each run, seed by seed."""
    missing: tuple[tuple[str, int], ...]
    """Label and seed of the runs that the budget left no time for, or that were not started since every
    estimator had failed."""
    folder: Path
    """Where the records are. One that `gapped.compare` made itself goes with this object."""
    stopped: tuple[tuple[str, int, str], ...] = ()
    """The estimators that were stopped early: label, after how many seeds, and the one that led then."""
    reused: int = 0
    """How many of the runs were in the folder already, from an earlier call."""

    @property
    def _cells(self) -> list[Cell]:
        from gapped_lab.report.cells import cells

        return cells(self.records)

    @property
    def rows(self) -> list[Row]:
        """A summary of each estimator, best first."""
        from gapped_lab.report.cells import rows_of

        return rows_of(self._cells) if self.records else []

    @property
    def verdict(self) -> str:
        """Who is best, who ties, who is cheapest in the tie, and what would separate the two best."""
        from gapped_lab.report.cells import failures, verdict_of

        texts = [verdict_of(self._cells) if self.records else "No run has finished."]
        lost = [line.removeprefix(f"{self.records[0].recipe}: ") for line in failures(self.records)]
        texts += [f"{line.rstrip('.')}." for line in lost]
        first = dict.fromkeys(r.metric for r in self.records if not r.failed)
        if len(first) > 1:
            texts.append(f"Runs differ in their first number, {listing(first)}: {next(iter(first))} counts.")
        texts += self._stops
        if self.missing and hopeless(self.records, {label for label, _ in self.missing}):
            texts.append("Every estimator had failed then: no further run was started.")
        elif self.missing:
            runs = listing([f"{label} (seed {seed})" for label, seed in self.missing], most=8)
            texts.append(f"The budget left no time for {runs}: the same call goes on.")
        return " ".join(texts)

    @property
    def _told(self) -> str:
        """The verdict, and which runs were not trained by this call."""
        if not self.reused:
            return self.verdict
        count = "All" if self.reused == len(self.records) else f"{self.reused} of"
        return (
            f"{self.verdict} {count} {len(self.records)} runs were in {self.folder} already and not trained "
            "again: after a change of your function, take another folder."
        )

    @property
    def _stops(self) -> list[str]:
        """A sentence on what was stopped early, and how often that is wrong."""
        from gapped_lab.report.statistics import STOP_LEVEL

        stops = [f"{label} after {seeds} seeds, behind {leader}" for label, seeds, leader in self.stopped]
        rate = f"a test that stops the best one with a chance of at most {STOP_LEVEL:.0%}"
        return [f"Stopped early: {'; '.join(stops)} ({rate})."] if stops else []

    @property
    def table(self) -> str:
        """The estimators as a table, best first."""
        from rich.console import Console

        from gapped_lab.report.tabular import to_rich

        if not self.records:
            return ""
        screen = Console(width=_WIDTH, markup=False, emoji=False, highlight=False, color_system=None)
        with screen.capture() as capture:
            screen.print(to_rich(self._table, "", screen.width))
        return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())

    @property
    def _table(self) -> Table:
        from gapped_lab.report.tabular import NOTHING, Entry, summary_table

        table = summary_table(self.rows)
        if not self.stopped:
            return table
        after = {label: Entry(f"after {seeds}", seeds) for label, seeds, _ in self.stopped}
        body = [
            (*entries, after.get(row.label, Entry(NOTHING)))
            for row, entries in zip(self.rows, table.rows, strict=True)
        ]
        return replace(table, columns=(*table.columns, "stopped"), rows=tuple(body))

    def __repr__(self) -> str:
        labels = {record.label for record in self.records} | {label for label, _ in self.missing}
        best = next((row.name for row in self.rows if row.value.count), "none")
        return f"Comparison({len(self.records)} runs of {len(labels)} estimators, best: {best})"

    def __str__(self) -> str:
        return f"{self.table}\n\n{fill(self._told, _WIDTH, break_on_hyphens=False)}"

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each run: estimator, seed, status, seconds, error and the metrics."""
        import pandas

        return pandas.DataFrame(
            {
                "estimator": r.label,
                "seed": r.seed,
                "status": r.status,
                "seconds": r.seconds,
                "error": r.error,
                **r.metrics,
            }
            for r in self.records
        )

    def plot(self) -> Figure:
        """A matplotlib figure: the mean of each estimator with its 95% interval, best on top."""
        require("Comparison.plot", "matplotlib")
        from gapped_lab.report.cells import metric_name
        from gapped_lab.report.plots import final_figure
        from gapped_lab.report.svg import style

        rows = [row for row in self.rows if row.value.count]
        if not rows:
            raise GappedError("Comparison.plot: no run finished with a value")
        with style("comparison"):
            return final_figure(rows, metric_name(rows[0].metric), {}, {})[0]

    def save_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file: verdict, figures, learning curves, table."""
        require("Comparison.save_html", "matplotlib")
        from gapped_lab.report.cells import failures
        from gapped_lab.report.page import render_html, sections_of

        lines = [*failures(self.records), *self._stops]
        write_text(Path(path), render_html(sections_of(self.records, self.folder), lines))
        return Path(path)

    def _repr_html_(self) -> str:
        from gapped_lab.report.tabular import to_html

        table = to_html(self._table) if self.records else ""
        return f"{table}<p>{escape(self._told)}</p>"
