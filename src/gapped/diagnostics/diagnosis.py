"""The result of a diagnosis, and the ways to show it: text, plain values, a data frame, a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gapped.diagnostics.moments import Interval
from gapped.errors import listing, reject, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


Column = tuple[str, str, float]
# Title and attribute of each measured column, and its factor for display.
COLUMNS: tuple[Column, ...] = (
    ("bias", "bias", 1.0),
    ("relative bias", "relative_bias", 1.0),
    ("variance", "variance", 1.0),
    ("MSE", "mse", 1.0),
    ("cosine", "cosine", 1.0),
    ("evaluations", "evaluations", 1.0),
    ("µs", "seconds", 1e6),
)


@dataclass(frozen=True)
class Row:
    """The measurements of one estimator; None where there is no reference to compare with."""

    label: str
    samples: int
    """How many gradients were drawn."""
    bias: Interval | None
    """The length of the mean error."""
    relative_bias: Interval | None
    """The bias over the length of the exact gradient."""
    variance: Interval
    """The total variance, summed over all entries of the gradient."""
    mse: Interval | None
    """The mean squared error of one gradient, squared bias plus variance."""
    cosine: Interval | None
    """The mean cosine between one gradient and the exact one."""
    evaluations: float | None
    """Evaluations of the cost per gradient, counted."""
    seconds: Interval
    """Time per gradient, where many are computed together."""
    entries: int
    """Entries of the gradient."""
    per_parameter: Mapping[str, float] = field(default_factory=dict)
    """The variance of an entry, averaged over the entries of each parameter."""
    enumerates: bool = False
    """Whether the estimator draws nothing, being the enumeration itself."""

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
    """Bias, variance and cost of estimators on one problem: see `gapped.diagnose`.

    Prints as a table. `rows` holds the numbers, in the order of the estimators.
    """

    rows: tuple[Row, ...]
    reference: str
    """What the exact gradient is."""
    norm: Interval | None
    """The length of the exact gradient."""
    confidence: float

    def __str__(self) -> str:
        columns = _columns(self.rows)
        cells = [["estimator", *(title for title, _, _ in columns)]]
        for row in self.rows:
            cells.append([row.label, *(_cell(getattr(row, name), factor) for _, name, factor in columns)])
        first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
        lines = [
            "  ".join([label.ljust(first), *map(str.rjust, numbers, widths)]).rstrip()
            for label, *numbers in cells
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*lines, "", self._notes(), self.recommendation])

    def _notes(self) -> str:
        counts = " and ".join(f"{count:,}" for count in sorted({row.samples for row in self.rows}))
        length = "" if self.norm is None else f" of length {_cell(self.norm)}"
        return (
            f"{counts} gradients each of {self.rows[0].entries:,} entries, {self.confidence:.0%} intervals; "
            f"reference: {self.reference}{length}."
        )

    def __getitem__(self, label: str) -> Row:
        rows = {row.label: row for row in self.rows}
        if label not in rows:
            raise reject("label", label, f"one of {', '.join(rows)}")
        return rows[label]

    @property
    def recommendation(self) -> str:
        """One sentence: which estimator, and why; or that the data do not decide.

        Estimators that sample are judged by their mean squared error with as many evaluations as the one
        that takes the most. Those whose interval overlaps that of the best one are not told from it.
        """
        candidates = [row for row in self.rows if not row.enumerates]
        if len(candidates) < 2:
            return "There is nothing to choose from: give at least two estimators that sample."
        budget = max(row.evaluations or 1.0 for row in candidates)
        criterion = "mean squared error"
        if any(row.mse is None for row in candidates):
            criterion = "variance (no reference, so bias is not measured)"
        elif any(row.evaluations is not None for row in candidates):
            criterion += f" at equal cost, {budget:g} evaluation{'s' * (budget != 1)}"
        scores = {row.label: error_at(row, budget) for row in candidates}
        best, second, *_ = sorted(scores, key=lambda label: scores[label].value)
        ties = [label for label in scores if label != best and scores[label].overlaps(scores[best])]
        if ties:
            return (
                f"The data do not decide: for the lowest {criterion}, {best} ({_cell(scores[best])}) cannot "
                f"be told from {listing(ties, most=4)}; more samples may."
            )
        return (
            f"Recommended: {best}, with the lowest {criterion}: {_cell(scores[best])}, below that of every "
            f"other one (next {second}, {_cell(scores[second])})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: numbers that are not finite become None."""
        return {
            "reference": self.reference,
            "norm": _plain(self.norm),
            "confidence": self.confidence,
            "recommendation": self.recommendation,
            "rows": [
                {
                    "estimator": row.label,
                    "samples": row.samples,
                    "entries": row.entries,
                    "mean_variance": row.mean_variance,
                    "per_parameter": dict(row.per_parameter),
                    **{name: _plain(getattr(row, name)) for _, name, _ in COLUMNS},
                }
                for row in self.rows
            ],
        }

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each estimator; limits are columns such as `bias_low`."""
        import pandas

        lines = []
        for row in self.rows:
            line: dict[str, Any] = {"estimator": row.label, "samples": row.samples}
            for _, name, _ in COLUMNS:
                number = getattr(row, name)
                if isinstance(number, Interval):
                    line |= {name: number.value, f"{name}_low": number.low, f"{name}_high": number.high}
                else:
                    line[name] = number
            line |= {f"variance of {name}": value for name, value in row.per_parameter.items()}
            lines.append(line)
        return pandas.DataFrame(lines).set_index("estimator")

    def plot(self) -> Figure:
        """A matplotlib figure: bias, variance and mean squared error with their intervals."""
        require("Diagnosis.plot", "matplotlib")
        from matplotlib.figure import Figure

        columns = _columns(self.rows, COLUMNS[1:4])
        size = (2 + 2.6 * len(columns), 1.2 + 0.3 * len(self.rows))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
        for axes, (title, name, _) in zip(panels, columns, strict=True):
            intervals = [getattr(row, name) for row in self.rows]
            for y, interval in enumerate(intervals):
                axes.plot([interval.low, interval.high], [y, y], color="C0", linewidth=2.5, alpha=0.5)
                axes.plot([interval.value], [y], "o", color="C0", markersize=5)
            positive = [interval.value for interval in intervals if interval.value > 0]
            if name != "relative_bias" and positive and max(positive) > 20 * min(positive):
                axes.set_xscale("symlog", linthresh=max(min(positive), max(positive) * 1e-6))
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_title(title)
        panels[0].set_yticks(range(len(self.rows)), [row.label for row in self.rows], parse_math=False)
        panels[0].invert_yaxis()
        return figure


def _columns(rows: Sequence[Row], columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """Those of `columns` that were measured."""
    return [column for column in columns if any(getattr(row, column[1]) is not None for row in rows)]


def _cell(number: Interval | float | None, factor: float = 1.0) -> str:
    """A number with its limits, to three digits.

    >>> _cell(Interval(0.1234, 0.1, 0.15)), _cell(2.0), _cell(None)
    ('0.123 [0.1, 0.15]', '2', '-')
    """
    if number is None:
        return "-"
    if not isinstance(number, Interval):
        return f"{number * factor:.3g}"
    value = f"{number.value * factor:.3g}"
    if not math.isfinite(number.low):
        return value
    return f"{value} [{number.low * factor:.3g}, {number.high * factor:.3g}]"


def _plain(number: Interval | float | None) -> Any:
    if isinstance(number, Interval):
        return {end: _plain(value) for end, value in number._asdict().items()}
    return number if number is None or math.isfinite(number) else None
