"""The result of a diagnosis, and the ways to show it: text, plain values, a data frame, a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from gapped.diagnostics.moments import Interval
from gapped.errors import listing, reject, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


# Title and attribute of each column of the table. The bias is in the data; the relative one says more.
COLUMNS = {
    "relative bias": "relative_bias",
    "variance": "variance",
    "MSE": "mse",
    "cosine": "cosine",
    "evals": "evaluations",
    "µs": "seconds",
}
VANISHING = 0.05
"""A gradient vanishes if the norm of its mean is surely below this share of the exact gradient's."""
UNDECIDED = (
    "Nothing is recommended: none of these numbers is known to rank estimators reliably by how well they "
    "train. `gapped compare` decides by training."
)


@dataclass(frozen=True)
class Row:
    """The measurements of one estimator; None where there is no reference to compare with."""

    label: str
    samples: int
    """How many gradients were drawn."""
    variance: Interval
    """The total variance, summed over all entries of the gradient."""
    evaluations: float | None
    """Evaluations of the cost per gradient, counted."""
    seconds: Interval
    """Time per gradient, where many are computed together."""
    entries: int
    """Entries of the gradient."""
    bias: Interval | None = None
    """The length of the mean error."""
    relative_bias: Interval | None = None
    """The bias over the length of the exact gradient."""
    mse: Interval | None = None
    """The mean squared error of one gradient, squared bias plus variance."""
    cosine: Interval | None = None
    """The mean cosine between one gradient and the exact one."""
    relative_norm: Interval | None = None
    """The length of the mean gradient over that of the exact one."""
    per_parameter: Mapping[str, float] = field(default_factory=dict)
    """The variance of an entry, averaged over the entries of each parameter."""
    enumerates: bool = False
    """Whether the estimator draws nothing, being the enumeration itself."""
    trainable: bool = False
    """Whether the estimator has parameters that its `variance_loss` trains."""

    @property
    def vanishes(self) -> bool:
        """Whether the mean gradient is a negligible fraction of the exact one: below `VANISHING`, interval
        included. Its relative bias is then within 1 ± `VANISHING`."""
        return self.relative_norm is not None and self.relative_norm.high < VANISHING

    @property
    def mean_variance(self) -> float:
        """The variance of an entry, averaged over all entries."""
        return self.variance.value / self.entries


def error_at(row: Row, evaluations: float) -> Interval:
    """The squared error if as many gradients are averaged as `evaluations` of the cost pay for.

    Averaging lowers the variance and leaves the bias. Without a bias measured, the variance alone.
    """
    share = 1.0 if row.evaluations is None else row.evaluations / evaluations
    if row.bias is None or row.mse is None:
        return Interval(*(share * variance for variance in row.variance))
    if share == 1:
        return row.mse
    ends = zip(row.bias, row.variance, strict=True)
    return Interval(*(bias**2 + share * variance for bias, variance in ends))


@dataclass(frozen=True)
class Diagnosis:
    """The result of `gapped.diagnose`: it prints as a table.

    Arguments:
        rows: The numbers, one row for each estimator in their order; `result["gst"]` is the row of that
            label.
        reference: The kind of the exact gradient.
        norm: The length of the exact gradient, with its interval; None without a reference.
        confidence: The level of the intervals.
    """

    rows: tuple[Row, ...]
    reference: str
    norm: Interval | None
    confidence: float

    def __repr__(self) -> str:
        return f"Diagnosis({len(self.rows)} estimators, reference: {self.reference})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The table of a notebook."""
        lines = zip(*self._columns(), strict=True)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
        prose = "".join(f"<p>{escape(each)}</p>" for each in (self._notes(), *self.findings))
        return f"<table>{body}</table>{prose}"

    def text(self, width: int = 80) -> str:
        """Table, notes and findings in lines of at most `width` characters.

        Where the columns do not fit side by side, tables with some of them follow one another.
        """
        labels, *cells = self._columns()
        tables = [_table(labels, block, width) for block in _blocks(labels, cells, width)]
        prose = [_wrap(self._notes(), width), *(_wrap(each, width, "- ") for each in self.findings)]
        return "\n\n".join([*tables, "\n".join(prose)])

    def _columns(self) -> list[list[str]]:
        """The labels, then each column that was measured, below their titles."""
        names = _measured(self.rows, COLUMNS)
        cells = [[title, *(_show(row, name) for row in self.rows)] for title, name in names.items()]
        return [["estimator", *map(_title, self.rows)], *cells]

    def _notes(self) -> str:
        counts = " and ".join(f"{count:,}" for count in sorted({row.samples for row in self.rows}))
        length = "" if self.norm is None else f", of length {_cell(self.norm)}"
        return (
            f"{counts} gradients each of {self.rows[0].entries:,} entries, {self.confidence:.0%} intervals; "
            f"reference: {self.reference}{length}."
        )

    def __getitem__(self, label: str) -> Row:
        for row in self.rows:
            if row.label == label:
                return row
        raise reject("label", label, f"one of {', '.join(row.label for row in self.rows)}")

    @property
    def findings(self) -> tuple[str, ...]:
        """The findings of the measurements, a sentence each, and their limits.

        A vanishing gradient is named as such and is least in nothing. Mean squared errors are compared with
        as many evaluations of the cost as the estimator that takes the most. `Exact` is left out.
        """
        rows = [row for row in self.rows if not row.enumerates]
        least = _least([row for row in rows if not row.vanishes])
        return (*self._bias(rows), *least, *_list_untrained(rows), UNDECIDED)

    def _bias(self, rows: Sequence[Row]) -> Iterator[str]:
        """Which gradients vanish, and which estimators are unbiased as far as can be told."""
        vanishing = [row.label for row in rows if row.vanishes]
        if vanishing:
            yield (
                f"Vanishing gradient: {listing(vanishing, most=8)}. The norm of the mean is below "
                f"{VANISHING:.0%} of the true gradient's. A small variance or error is then no merit, and is "
                "left out below."
            )
        intervals = {row.label: row.relative_bias for row in rows if row.relative_bias and not row.vanishes}
        unbiased = [f"{label} ({each.high:.2g})" for label, each in intervals.items() if each.low <= 0]
        if self.norm is None:
            yield "Bias is not measured: there is no reference."
        elif unbiased:
            yield (
                f"No bias found: the {self.confidence:.0%} interval of the relative bias reaches 0. Its "
                f"upper limit follows: {listing(unbiased)}."
            )
        elif intervals:
            yield f"Each has a bias: no {self.confidence:.0%} interval of the relative bias reaches 0."

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: numbers that are not finite become None."""
        return {
            "reference": self.reference,
            "norm": _plain(self.norm),
            "confidence": self.confidence,
            "findings": list(self.findings),
            "rows": [
                {
                    "estimator": row.label,
                    "samples": row.samples,
                    "entries": row.entries,
                    "mean_variance": row.mean_variance,
                    "relative_norm": _plain(row.relative_norm),
                    "vanishes": row.vanishes,
                    "per_parameter": dict(row.per_parameter),
                    **{name: _plain(getattr(row, name)) for name in (*COLUMNS.values(), "bias")},
                }
                for row in self.rows
            ],
        }

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each estimator; limits are columns such as `bias_low`."""
        require("Diagnosis.to_pandas", "pandas", extra="")
        import pandas

        lines = []
        for row in self.rows:
            line: dict[str, Any] = {"estimator": row.label, "samples": row.samples}
            for name in (*COLUMNS.values(), "bias"):
                number = getattr(row, name)
                if isinstance(number, Interval):
                    line |= {name: number.value, f"{name}_low": number.low, f"{name}_high": number.high}
                else:
                    line[name] = number
            line["vanishes"] = row.vanishes
            line |= {f"variance of {name}": value for name, value in row.per_parameter.items()}
            lines.append(line)
        return pandas.DataFrame(lines).set_index("estimator")

    def plot(self) -> Figure:
        """A matplotlib figure: bias, variance and mean squared error with their intervals."""
        require("Diagnosis.plot", "matplotlib")
        from matplotlib.figure import Figure

        columns = _measured(self.rows, list(COLUMNS)[:3])
        size = (2 + 2.6 * len(columns), 1.2 + 0.3 * len(self.rows))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axes, (title, name) in zip(panels, columns.items(), strict=True):
            intervals = [getattr(row, name) for row in self.rows]
            for y, interval in enumerate(intervals):
                axes.plot([interval.low, interval.high], [y, y], color="C0", linewidth=2.5, alpha=0.5)
                axes.plot([interval.value], [y], "o", color="C0", markersize=5)
            positive = [interval.value for interval in intervals if interval.value > 0]
            if name != "relative_bias" and positive and max(positive) > 20 * min(positive):
                axes.set_xscale("symlog", linthresh=max(min(positive), max(positive) * 1e-6))
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_title(title)
        panels[0].set_yticks(range(len(self.rows)), [*map(_title, self.rows)], parse_math=False)
        panels[0].invert_yaxis()
        return figure


def _measured(rows: Sequence[Row], titles: Iterable[str]) -> dict[str, str]:
    """The `COLUMNS` of these titles that were measured."""
    names = {title: COLUMNS[title] for title in titles}
    return {title: name for title, name in names.items() if any(getattr(r, name) is not None for r in rows)}


def _list_untrained(rows: Sequence[Row]) -> Iterator[str]:
    """Which estimators were measured with the parameters that they happen to have."""
    names = [row.label for row in rows if row.trainable]
    if names:
        yield (
            f"Measured with untrained parameters, which `variance_loss` trains for less variance: "
            f"{listing(names, most=8)}."
        )


def _least(rows: Sequence[Row]) -> Iterator[str]:
    """Who has the least bias, variance and mean squared error, and who cannot be told from it."""
    if len(rows) < 2:
        return
    budget = max(row.evaluations or 1.0 for row in rows)
    cost = ""
    if any(row.evaluations is not None for row in rows):
        cost = f" at equal cost, {budget:g} evaluation{'s' * (budget != 1)}"
    scores: dict[str, dict[str, Interval | None]] = {
        "relative bias": {row.label: row.relative_bias for row in rows},
        "variance of one gradient": {row.label: row.variance for row in rows},
        f"mean squared error{cost}": {row.label: row.mse and error_at(row, budget) for row in rows},
    }
    for what, intervals in scores.items():
        known = {label: interval for label, interval in intervals.items() if interval is not None}
        if len(known) < 2:
            continue
        best = min(known, key=lambda label: known[label].value)
        ties = [label for label in known if label != best and known[label].overlaps(known[best])]
        tie = f", not separated from {listing(ties, most=4)}" if ties else ""
        yield f"Least {what}: {best}, {_cell(known[best])}{tie}."


def _title(row: Row) -> str:
    return row.label + " (vanishes)" * row.vanishes


def _show(row: Row, name: str) -> str:
    """A measurement in the table; of the time, which depends on the machine's load, the mean alone."""
    return _cell(row.seconds.value * 1e6 if name == "seconds" else getattr(row, name))


def _wrap(sentence: str, width: int, mark: str = "") -> str:
    """A sentence in lines; words, names of estimators and intervals are not broken."""
    text = re.sub(r"\[[^\]]*\]", lambda match: match[0].replace(" ", "\xa0"), sentence)
    indent = " " * len(mark)
    lines = fill(text, min(width, 100), initial_indent=mark, subsequent_indent=indent, break_on_hyphens=False)
    return lines.replace("\xa0", " ")


def _blocks(labels: Sequence[str], cells: Sequence[list[str]], width: int) -> list[list[list[str]]]:
    """Columns in groups that fit beside the labels."""
    blocks: list[list[list[str]]] = []
    room = 0
    for column in cells:
        need = 2 + max(map(len, column))
        if not blocks or need > room:
            blocks.append([])
            room = width - max(map(len, labels))
        blocks[-1].append(column)
        room -= need
    return blocks


def _table(labels: Sequence[str], columns: Sequence[list[str]], width: int) -> str:
    """A table of text; labels that leave the columns no room are wrapped."""
    widths = [max(map(len, column)) for column in columns]
    longest = max(map(len, labels))
    first = max(min(longest, width - sum(widths) - 2 * len(widths)), min(longest, 16))
    lines = []
    for label, *numbers in zip(labels, *columns, strict=True):
        beginning, *rest = wrap(label, first) or [""]
        lines += ["  ".join([beginning.ljust(first), *map(str.rjust, numbers, widths)]), *rest]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def _cell(number: Interval | float | None) -> str:
    """A number with its limits, to three digits.

    >>> _cell(Interval(0.1234, 0.1, 0.15)), _cell(2.0), _cell(None)
    ('0.123 [0.1, 0.15]', '2', '-')
    """
    if number is None:
        return "-"
    if not isinstance(number, Interval):
        return f"{number:.3g}"
    limits = f" [{number.low:.3g}, {number.high:.3g}]" if math.isfinite(number.low) else ""
    return f"{number.value:.3g}{limits}"


def _plain(number: Interval | float | None) -> Any:
    if isinstance(number, Interval):
        return {end: _plain(value) for end, value in number._asdict().items()}
    return number if number is None or math.isfinite(number) else None
