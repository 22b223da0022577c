"""The result of a comparison: table, verdict, data frame, figure, page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import isfinite
from pathlib import Path
from textwrap import fill, wrap
from typing import TYPE_CHECKING

import numpy as np

from gapped.comparison.records import Record, plain
from gapped.comparison.statistics import LEVEL, STOP_LEVEL, Ranking, rank, seeds_to_separate, summary
from gapped.comparison.store import write_text
from gapped.comparison.table import (
    NOTHING,
    Cell,
    Entry,
    Row,
    Table,
    cells,
    failures,
    metric_name,
    named,
    own_direction,
    own_metric,
    rows_of,
    summary_table,
    to_html,
    to_rich,
    value_of,
)
from gapped.errors import GappedError, listing, require, suggestion

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# The width of a table as text.
_WIDTH = 80
# How many lines a `repr` has at most.
_LINES = 8
# How many names a sentence has at most.
_NAMED = 4


# Where no run ended with a number.
_NO_RANKING = Ranking([], {}, [], [], False, False)


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
        margin: How much worse than the best one an estimator may be to count as good as it.
        aside: How many of the runs were trained anew since `train`, or what it uses, has changed.
        level: The rate of a wrong verdict: where losers may be stopped early, less by that of a wrong stop.

    `comparison["label"]` is the row of one estimator: its mean, spread, interval and records.
    """

    records: tuple[Record, ...]
    missing: tuple[tuple[str, int], ...]
    folder: Path
    stopped: tuple[tuple[str, int, str], ...] = ()
    reused: int = 0
    margin: float | str | None = "1%"
    aside: int = 0
    level: float = LEVEL

    @property
    def rows(self) -> list[Row]:
        """A summary of each estimator, best first; where seeds are missing, by the seeds that they share."""
        return ordered(rows_of(cells(self.records)), self._verdict)

    def __getitem__(self, label: str) -> Row:
        rows = {row.name: row for row in self.rows}
        if label not in rows:
            known = f"expected {listing(rows, 8)}{suggestion(str(label), rows)}"
            raise GappedError(f"comparison[...]: got {label!r}, {known}")
        return rows[label]

    @cached_property
    def _verdict(self) -> Verdict:
        if not self.records:
            return Verdict(("No run has finished.",), is_empty=True)
        return judge(cells(self.records), margin=self.margin, level=self.level)

    @property
    def best(self) -> str | None:
        """The estimator with the best mean; None if no run ended with a number."""
        return next(iter(self._verdict.ranking.names), None)

    @property
    def worse(self) -> list[str]:
        """The estimators that `best` is better than. With `within`, wrong in at most 5% of comparisons."""
        return self._verdict.ranking.worse

    @property
    def tied(self) -> list[str]:
        """The estimators that the data do not separate from `best`."""
        return self._verdict.ranking.tied

    @property
    def within(self) -> list[str]:
        """The estimators that are shown to be within `margin` of the best one, whichever that is."""
        return self._verdict.ranking.close

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be said: no run ended with a number, or `train` ignores its estimator."""
        return self._verdict.is_empty

    @property
    def verdict(self) -> str:
        """Which one is best, which tie with it, what would separate them; then what to keep in mind."""
        return " ".join([*self._verdict.sentences, *self._reservations])

    @property
    def _reservations(self) -> list[str]:
        lost = [line.removeprefix(f"{self.records[0].recipe}: ") for line in failures(self.records)]
        texts = [f"{line.rstrip('.')}." for line in lost]
        first = dict.fromkeys(r.metric for r in self.records if not r.failed)
        if len(first) > 1:
            texts.append(f"Runs differ in their first number, {listing(first)}: {next(iter(first))} counts.")
        texts += self._stops
        if self.missing and hopeless(self.records, {label for label, _ in self.missing}):
            texts.append("Every estimator had failed then: no further run was started.")
        elif self.missing:
            runs = listing([f"{label} (seed {seed})" for label, seed in self.missing], most=8)
            texts.append(f"The budget left no time for {runs}: the same call goes on.")
        if self.aside:
            runs = f"{self.aside} earlier run{'s' * (self.aside != 1)}"
            texts.append(f"Left aside, since train or what it uses has changed: {runs} (keep takes them).")
        if self.reused:
            count = "All" if self.reused == len(self.records) else f"{self.reused} of"
            texts.append(f"{count} {len(self.records)} runs were in {self.folder} already.")
        return texts

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
        after = {label: Entry(f"after {seeds}", seeds) for label, seeds, _ in self.stopped}
        return summary_table(self.rows, {"stopped": [after.get(r.label, Entry(NOTHING)) for r in self.rows]})

    def __repr__(self) -> str:
        labels = {record.label for record in self.records} | {label for label, _ in self.missing}
        head = f"Comparison({len(self.records)} runs of {len(labels)} estimators, best: {self.best})"
        return "\n".join([head, *wrap(self.verdict, _WIDTH, max_lines=_LINES - 1, break_on_hyphens=False)])

    def __str__(self) -> str:
        return f"{self.table}\n\n{fill(self.verdict, _WIDTH, break_on_hyphens=False)}"

    def to_json(self) -> str:
        """The verdict and a line for each estimator, as JSON."""
        rows = [
            {
                "estimator": row.name,
                "mean": plain(row.value.mean),
                "std": plain(row.value.std),
                "seeds": row.value.count,
                "diverged": row.diverged,
                "failed": row.failed,
            }
            for row in self.rows
        ]
        names = ("best", "worse", "tied", "within", "margin", "verdict")
        answer = {name: getattr(self, name) for name in names}
        return json.dumps({**answer, "estimators": rows}, indent=1)

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each run: estimator, seed, status, seconds, memory, error, metrics."""
        require("Comparison.to_pandas", "pandas", extra="")
        import pandas

        return pandas.DataFrame(
            {
                "estimator": r.label,
                "seed": r.seed,
                "status": r.status,
                "seconds": r.seconds,
                "memory_gb": r.options.get("memory_gb"),
                "gpu_memory_gb": r.fleet_gpu_memory_gb,
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
            return final_figure(rows, metric_name(rows[0].metric), {})[0]

    def save_html(self, path: str | Path) -> Path:
        """Write the report as one HTML file: verdict, figures, learning curves, table."""
        require("Comparison.save_html", "matplotlib")
        from gapped.comparison.page import render_html, sections_of

        lines = [*failures(self.records), *self._stops]
        write_text(Path(path), render_html(sections_of(self.records, self.folder, self._verdict), lines))
        return Path(path)

    def _repr_html_(self) -> str:
        table = to_html(self._table) if self.records else ""
        return f"{table}<p>{escape(self.verdict)}</p>"


@dataclass(frozen=True)
class Verdict:
    """The answer of a comparison, in sentences and as names."""

    sentences: tuple[str, ...]
    ranking: Ranking = _NO_RANKING
    is_empty: bool = False
    """Whether nothing can be said: no number, or estimators that `train` does not use."""

    def __str__(self) -> str:
        return " ".join(self.sentences)


def judge(
    group: Sequence[Cell],
    metric: str = "",
    higher: bool | None = None,
    digits: int | None = None,
    margin: float | str | None = None,
    level: float = LEVEL,
) -> Verdict:
    """The verdict on cells: which one is best, which tie with it, what would separate the best two.

    Without a `metric` it is the one that the records name. Numbers have `digits` decimals, or four digits.
    An estimator with a larger share of lost runs than another one is no candidate: to diverge is a result.
    """
    metric = metric or own_metric(group)
    higher = own_direction(group) if higher is None else higher
    by_name = dict(named(group))
    finite = {name: _finite_values(cell, metric) for name, cell in by_name.items()}
    losses = {name: 1 - len(finite[name]) / len(cell.records) for name, cell in by_name.items()}
    choices = _choose(by_name, finite, losses, higher)
    least = min((losses[name] for name in by_name if finite[name]), default=None)
    lost: list[str] = []
    for name, cell in by_name.items():
        out = ", so it is not compared" * (least is not None and losses[name] > least)
        lost += filter(None, [_lost(name, cell, metric, out)])
    lost = [*lost[:_NAMED], *[f"{len(lost) - _NAMED} more estimators lost runs."] * (len(lost) > _NAMED)]
    if least is None:
        return Verdict(("No run ended with a number.", *lost), is_empty=True)
    candidates = {name: finite[name] for name in by_name if finite[name] and losses[name] == least}
    ranking = rank(candidates, higher, margin, level)
    best, *others = ranking.names
    claim = f"{'highest' if higher else 'lowest'} {metric_name(metric)}"
    number = _number(list(candidates[best].values()), ranking.means[best], digits)
    twins = [name for name in others if candidates[name] == candidates[best]]
    tied, worse, close = (listing(each, _NAMED) for each in (ranking.tied, ranking.worse, ranking.close))
    texts = []
    if others and len(twins) == len(others):
        same = f"All {len(candidates)} estimators gave the same values, seed by seed"
        return Verdict((f"{same}: does train use its estimator?", *lost), ranking, True)
    if not others:
        only = "is the only one without lost runs"
        alone = "stands alone, with nothing to compare" if len(by_name) == 1 else only
        texts.append(f"{best} {alone} ({number}).")
    elif not ranking.tied:
        rest = others[0] if len(others) == 1 else f"each of the other {len(others)}"
        texts.append(f"{best} wins: {claim} ({number}), better than {rest}.")
    else:
        texts.append(f"{best} has the {claim} ({number}).")
        texts += [f"It is better than {worse}."] * bool(ranking.worse)
        texts.append(f"The data do not separate it from {tied}.")
    if ranking.close:
        width = margin if isinstance(margin, str | None) else f"{margin:g}"
        texts.append(f"Shown to be within {width} of the best, whichever that is: {close}.")
    if ranking.worse or ranking.close:
        how = "seed by seed" if ranking.is_paired else "by their means"
        texts.append(f"All of this together is wrong in at most {LEVEL:.0%} of comparisons ({how}).")
    if ranking.tied:
        texts += _forecast(ranking, len(candidates[best]))
    texts += choices
    if len({frozenset(values) for values in candidates.values()}) > 1 and not choices:
        texts.append("Not all have run with the same seeds: pairs are compared on those that both have.")
    if twins:
        texts.append(f"{listing([best, *twins], _NAMED)} gave the same values at every seed.")
    return Verdict((*texts, *lost), ranking)


def _choose(
    by_name: dict[str, Cell],
    finite: dict[str, dict[int, float]],
    losses: Mapping[str, float],
    higher: bool,
) -> list[str]:
    """Leave of each grid the setting that is best on the first half of the seeds, with its later values.

    A sentence for each. So the choice costs seeds, and luck in it does not count.
    """
    grids: dict[str, list[str]] = {}
    for name, cell in by_name.items():
        if grid := cell.records[0].options.get("grid"):
            grids.setdefault(str(grid), []).append(name)
    texts = []
    for grid, names in grids.items():
        seeds = sorted({r.seed for name in names for r in by_name[name].records})
        first = set(seeds[: len(seeds) // 2])
        means = {
            name: float(np.mean([x for seed, x in finite[name].items() if seed in first])) * (1 - 2 * higher)
            for name in names
            if finite[name].keys() & first and finite[name].keys() - first
        }
        if not means:
            continue
        chosen = min(means, key=lambda name: (losses[name], -len(by_name[name].records), means[name], name))
        finite[chosen] = {seed: x for seed, x in finite[chosen].items() if seed not in first}
        for name in names:
            if name != chosen:
                del by_name[name], finite[name]
        counts = f"{len(first)} of {len(seeds)} seeds"
        texts.append(f"{chosen} is the choice of {counts} out of {grid}; only the others judge it.")
    return texts


def ordered(rows: Sequence[Row], verdict: Verdict) -> list[Row]:
    """The rows in the order of a verdict, those that are not compared last."""
    places = {name: place for place, name in enumerate(verdict.ranking.names)}
    return sorted(rows, key=lambda row: places.get(row.name, len(places)))


def _forecast(ranking: Ranking, seeds: int) -> list[str]:
    """What to do about a tie, for the first estimators in it."""
    if ranking.is_constant:
        return ["Each estimator gave one value at all seeds: does train use its seed?"]
    if seeds < 2:
        return ["Single seeds separate nothing: run three or more."]
    parts: list[str] = []
    small: list[str] = []
    for name in ranking.tied[:_NAMED]:
        if (total := seeds_to_separate(ranking, name)) is None:
            small.append(name)
        else:
            what = f"({total - ranking.leads[name].seeds} more)"
            what = f"{what} from" if parts else f"seeds each {what} separate {ranking.names[0]} from"
            parts.append(f"{total} {what} {name}")
    texts = [f"About {listing(parts)} in four of five cases."] if parts else []
    small_lead = f"The lead over {listing(small)} is small against its error"
    return texts + [f"{small_lead}: more seeds may find no difference."] * bool(small)


def _number(values: Sequence[float], mean: float, digits: int | None) -> str:
    """Mean, spread and number of seeds, for a pair of brackets."""
    form = ".4g" if digits is None else f".{digits}f"
    texts = [f"{x:{form}}" if abs(x) < 1e6 else f"{x:.3g}" for x in (mean, summary(values).std)]
    spread = f", std {texts[1]}" if len(values) > 1 else ""
    return f"mean {texts[0]}{spread}, {len(values)} seed{'s' * (len(values) != 1)}"


def _finite_values(cell: Cell, metric: str) -> dict[int, float]:
    """The finite values of a cell by seed."""
    values = {r.seed: value_of(r, metric) for r in cell.records if not r.failed}
    return {seed: x for seed, x in values.items() if isfinite(x)}


def _lost(name: str, cell: Cell, metric: str, out: str) -> str:
    """A sentence on the runs of a cell that ended without a number; `out` says what follows from it."""
    failed = sum(r.failed for r in cell.records)
    diverged = len(cell.records) - failed - len(_finite_values(cell, metric))
    of = f"of {len(cell.records)} run{'s' * (len(cell.records) != 1)}"
    # Errors of runs that failed are listed by themselves.
    parts = [f"{diverged} {of} diverged"] * bool(diverged) + [f"{failed} {of} failed"] * bool(out and failed)
    return f"{name}: {' and '.join(parts)}{out}." if parts else ""
