"""The result of a comparison: table, verdict, data frame, figure, page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from html import escape
from math import inf, isnan
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from gapped.comparison.records import Record
from gapped.comparison.statistics import (
    MANY,
    STOP_LEVEL,
    Floats,
    is_constant,
    seeds_to_separate,
    standing,
    summary,
)
from gapped.comparison.store import write_text
from gapped.comparison.table import (
    NOTHING,
    Cell,
    Entry,
    Row,
    Table,
    cells,
    failures,
    has_temperatures,
    metric_name,
    own_direction,
    own_metric,
    rows_of,
    summary_table,
    to_html,
    to_rich,
)
from gapped.errors import GappedError, listing, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# The width of a table as text.
_WIDTH = 80
# Times whose ratio is below this are called the same.
_ALIKE = 1.1
# How many names a sentence has at most.
_NAMED = 4


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
        return cells(self.records)

    @property
    def rows(self) -> list[Row]:
        """A summary of each estimator, best first."""
        return rows_of(self._cells) if self.records else []

    @property
    def verdict(self) -> str:
        """Who is best, who ties, who is cheapest in the tie, and what would separate the two best."""
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
        stops = [f"{label} after {seeds} seeds, behind {leader}" for label, seeds, leader in self.stopped]
        rate = f"a test that stops the best one with a chance of at most {STOP_LEVEL:.0%}"
        return [f"Stopped early: {'; '.join(stops)} ({rate})."] if stops else []

    @property
    def table(self) -> str:
        """The estimators as a table, best first."""
        from rich.console import Console

        if not self.records:
            return ""
        screen = Console(width=_WIDTH, markup=False, emoji=False, highlight=False, color_system=None)
        with screen.capture() as capture:
            screen.print(to_rich(self._table, "", screen.width))
        return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())

    @property
    def _table(self) -> Table:
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
        from gapped.comparison.figures import final_figure, style

        rows = [row for row in self.rows if row.value.count]
        if not rows:
            raise GappedError("Comparison.plot: no run finished with a value")
        with style("comparison"):
            return final_figure(rows, metric_name(rows[0].metric), {}, {})[0]

    def save_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file: verdict, figures, learning curves, table."""
        require("Comparison.save_html", "matplotlib")
        from gapped.comparison.page import render_html, sections_of

        lines = [*failures(self.records), *self._stops]
        write_text(Path(path), render_html(sections_of(self.records, self.folder), lines))
        return Path(path)

    def _repr_html_(self) -> str:
        table = to_html(self._table) if self.records else ""
        return f"{table}<p>{escape(self._told)}</p>"


def verdict_of(group: Sequence[Cell]) -> str:
    """The verdict on cells whose records name the metric that decides."""
    metric, higher, named = own_metric(group), own_direction(group), has_temperatures(group)
    values = {cell.name(named): cell.values(metric) for cell in group}
    seconds = {
        cell.name(named): [r.seconds for r in cell.records if r.metric and not r.failed] for cell in group
    }
    failed = {cell.name(named): sum(r.failed for r in cell.records) for cell in group}
    sentence = verdict(values, higher, metric_name(metric), None, failed)
    return " ".join([sentence, *advice(values, higher, seconds)])


def advice(
    cells: Mapping[str, ArrayLike], higher_is_better: bool, seconds: Mapping[str, Sequence[float]]
) -> list[str]:
    """Sentences that help to decide a tie: the cheapest one in it, and how many seeds would end it.

    `seconds` has the time of each run. One is the cheapest if all of its runs took less than all of the
    dearest: on a busy machine times differ by more than estimators do.
    """
    sentences = []
    if equal := [name for name, values in cells.items() if is_constant(summary(values))]:
        sentences.append(
            f"All runs of {listing(equal, _NAMED)} gave the same value: does train use its seed?"
        )
    place = standing(cells, higher_is_better)
    if place is None or not place.rivals:
        return sentences
    tied = [place.best, *place.rivals]
    if all(seconds.get(name) for name in tied):
        typical = {name: median(seconds[name]) for name in tied}
        cheapest, dearest = (pick(tied, key=typical.__getitem__) for pick in (min, max))
        least, most = typical[cheapest], typical[dearest]
        if most <= _ALIKE * least:
            sentences.append(f"The tied cost about the same, {least:.3g} s a run.")
        elif max(seconds[cheapest]) < min(seconds[dearest]):
            how = f"{least:.3g} s a run, against up to {most:.3g} s"
            sentences.append(f"Among the tied, {cheapest} is the cheapest: {how}.")
    first, second = summary(cells[place.best]), summary(cells[place.rivals[0]])
    count, pair = seeds_to_separate(first, second), f"{place.best} from {place.rivals[0]}"
    if first.mean == second.mean:
        sentences.append(f"{place.best} and {place.rivals[0]} have equal means: more seeds do not help yet.")
    elif MANY < count < inf:
        sentences.append(f"To separate {pair} would take more than {MANY:,} seeds each: call it a tie.")
    elif count < inf:
        more = int(count) - min(first.count, second.count)
        sentences.append(
            f"About {count} seeds each ({more} more) would separate {pair}, if difference and spread hold."
        )
    return sentences


def verdict(
    cells: Mapping[str, ArrayLike],
    higher_is_better: bool = False,
    what: str = "value",
    digits: int | None = 2,
    failed: Mapping[str, int] | None = None,
) -> str:
    """One sentence on which cell is best.

    A winner is named only if Welch's tests of the best mean against every other survive Holm's correction
    at 5%, none of its own runs diverged and none `failed`; otherwise the sentence says what the data do not
    separate.
    Numbers have `digits` decimals, or four digits if it is None.
    """
    arrays = {name: np.asarray(values, dtype=np.float64).ravel() for name, values in cells.items()}
    finished = {name: summary(x) for name, x in arrays.items() if np.isfinite(x).any()}
    place = standing(arrays, higher_is_better)
    if place is None:
        return f"No run finished with a value{_casualties(arrays)}."
    best, rivals, beaten = place.best, place.rivals, place.beaten
    losses = _casualties({name: x for name, x in arrays.items() if name != best})
    lead, own = finished[best], _lost(best, arrays[best])
    if count := (failed or {}).get(best, 0):
        own = f"{count} of {arrays[best].size + count} runs of {best} failed{own and f' and {own}'}"
    form = ".4g" if digits is None else f".{digits}f"
    mean, std = (f"{x:{form}}" if abs(x) < 1e6 else f"{x:.3g}" for x in (lead.mean, lead.std))
    spread = "" if isnan(lead.std) else f", std {std}"
    number = f"mean {mean}{spread}, {lead.count} seed{'s' * (lead.count != 1)}"
    if not rivals and not beaten:
        alone = "stands alone, with nothing to compare"
        only = alone if len(arrays) == 1 else "is the only one with finished runs"
        return f"{best} {only} ({number}){own and f'; {own}'}{losses}."
    claim = f"{'highest' if higher_is_better else 'lowest'} {what}"
    lead_in = f"{best} has the {claim} ({number})"
    if own:
        return f"{lead_in}, but {own}, so it is not called the winner{losses}."
    if not rivals:
        rest = beaten[0] if len(beaten) == 1 else f"each of the other {len(beaten)}"
        return (
            f"{best} wins: {claim} ({number}), better than {rest} (Welch tests, Holm-corrected, 5%){losses}."
        )
    names = listing(rivals, _NAMED)
    if lead.count == 1 or all(finished[name].count < 2 for name in rivals):
        return f"{lead_in}, but single seeds cannot separate it from {names}: run more seeds{losses}."
    better = f"; {best} is better than {listing(beaten, _NAMED)}" if beaten else ""
    return f"{lead_in}, but at 5%, Holm-corrected, the data do not separate it from {names}{better}{losses}."


def _casualties(arrays: Mapping[str, Floats]) -> str:
    """What diverged, as the tail of a sentence."""
    texts = [text for name, x in arrays.items() if (text := _lost(name, x))]
    more = [f"{len(texts) - _NAMED} more lost runs"] if len(texts) > _NAMED else []
    return "".join(f"; {text}" for text in texts[:_NAMED] + more)


def _lost(name: str, x: Floats) -> str:
    """How many runs of a cell diverged; nothing if none did."""
    lost = int((~np.isfinite(x)).sum())
    if x.size == 0:
        return f"{name} has no finished run"
    if lost == x.size:
        return f"the run of {name} diverged" if lost == 1 else f"all {lost} runs of {name} diverged"
    return f"{lost} of {x.size} runs of {name} diverged" if lost else ""
