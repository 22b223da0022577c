"""What a diagnosis says, and the ways to look at it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gapped.diagnostics.intervals import Interval
from gapped.errors import listing, reject, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


# Title and attribute of each measured column, and its factor for display.
COLUMNS = (
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
    """What was measured of one estimator; None where there was nothing to measure it against."""

    label: str
    samples: int
    """How many gradients were drawn."""
    bias: Interval | None
    """The length of the mean error."""
    relative_bias: Interval | None
    """The same over the length of the exact gradient."""
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
    """Whether nothing is drawn: the estimator is the enumeration itself."""

    @property
    def mean_variance(self) -> float:
        """The variance of an entry, averaged over all entries."""
        return self.variance.value / self.entries

    def error_at(self, evaluations: float) -> Interval:
        """The squared error if as many gradients are averaged as `evaluations` of the cost pay for.

        Averaging lowers the variance and leaves the bias. Without a bias measured, the variance alone.
        """
        share = 1.0 if self.evaluations is None else self.evaluations / evaluations
        if self.bias is None or self.mse is None:
            return Interval(*(share * getattr(self.variance, end) for end in ("value", "low", "high")))
        if share == 1:
            return self.mse
        return Interval(
            *(
                getattr(self.bias, end) ** 2 + share * getattr(self.variance, end)
                for end in ("value", "low", "high")
            )
        )


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
        shown = [column for column in COLUMNS if any(getattr(r, column[1]) is not None for r in self.rows)]
        cells = [["estimator", *(title for title, _, _ in shown)]]
        for row in self.rows:
            cells.append(
                [row.label, *(_cell(getattr(row, name), factor) for _, name, factor in shown)],
            )
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.ljust(w) if i == 0 else text.rjust(w)
                for i, (text, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join([*lines, "", self._notes(), self.recommendation])

    def _notes(self) -> str:
        counts = sorted({row.samples for row in self.rows})
        many = " and ".join(f"{count:,}" for count in counts)
        length = "" if self.norm is None else f" of length {_cell(self.norm)}"
        return (
            f"{many} gradients each of {self.rows[0].entries:,} entries, {self.confidence:.0%} intervals; "
            f"reference: {self.reference}{length}."
        )

    def __getitem__(self, label: str) -> Row:
        found = {row.label: row for row in self.rows}
        if label not in found:
            raise reject("label", label, f"one of {', '.join(found)}")
        return found[label]

    @property
    def recommendation(self) -> str:
        """One sentence: which estimator, and why; or that the data do not decide."""
        candidates = [row for row in self.rows if not row.enumerates]
        if len(candidates) < 2:
            return "There is nothing to choose from: give at least two estimators that sample."
        budget = max(row.evaluations or 1.0 for row in candidates)
        errors = {row.label: row.error_at(budget) for row in candidates}
        best = min(errors, key=lambda label: errors[label].value)
        what = (
            "variance (no reference, so bias is not measured)"
            if candidates[0].mse is None
            else f"mean squared error at equal cost, {budget:g} evaluation{'s' * (budget != 1)}"
            if candidates[0].evaluations is not None
            else "mean squared error"
        )
        close = [label for label in errors if label != best and errors[best].overlaps(errors[label])]
        if close:
            return (
                f"The data do not decide: for the lowest {what}, {best} ({_cell(errors[best])}) cannot be "
                f"told from {listing(close, most=4)}; more samples may."
            )
        second = min((label for label in errors if label != best), key=lambda label: errors[label].value)
        return (
            f"Recommended: {best}, with the lowest {what}: {_cell(errors[best])}, below that of every other "
            f"one (next {second}, {_cell(errors[second])})."
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

        flat = []
        for row in self.rows:
            line: dict[str, Any] = {"estimator": row.label, "samples": row.samples}
            for _, name, _ in COLUMNS:
                measured = getattr(row, name)
                line[name] = measured.value if isinstance(measured, Interval) else measured
                if isinstance(measured, Interval):
                    line |= {f"{name}_low": measured.low, f"{name}_high": measured.high}
            line |= {f"variance of {name}": value for name, value in row.per_parameter.items()}
            flat.append(line)
        return pandas.DataFrame(flat).set_index("estimator")

    def plot(self) -> Figure:
        """A matplotlib figure: bias, variance and mean squared error with their intervals."""
        require("Diagnosis.plot", "matplotlib")
        from matplotlib.figure import Figure

        shown = [c for c in COLUMNS[1:4] if self.rows and getattr(self.rows[0], c[1]) is not None]
        size = (2 + 2.6 * len(shown), 1.2 + 0.3 * len(self.rows))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for place, (title, name, _) in zip(axes, shown, strict=True):
            for y, row in enumerate(self.rows):
                measured = getattr(row, name)
                place.plot([measured.low, measured.high], [y, y], color="C0", linewidth=2.5, alpha=0.5)
                place.plot([measured.value], [y], "o", color="C0", markersize=5)
            positive = [getattr(row, name).value for row in self.rows if getattr(row, name).value > 0]
            if name != "relative_bias" and positive and max(positive) > 20 * min(positive):
                place.set_xscale("symlog", linthresh=max(min(positive), max(positive) * 1e-6))
                place.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            place.set_title(title)
        axes[0].set_yticks(range(len(self.rows)), [row.label for row in self.rows], parse_math=False)
        axes[0].invert_yaxis()
        return figure


def _cell(measured: Interval | float | None, factor: float = 1.0) -> str:
    """A number with its limits, to three digits.

    >>> _cell(Interval(0.1234, 0.1, 0.15)), _cell(2.0), _cell(None)
    ('0.123 [0.1, 0.15]', '2', '-')
    """
    if measured is None:
        return "-"
    if not isinstance(measured, Interval):
        return f"{measured * factor:.3g}"
    value = f"{measured.value * factor:.3g}"
    if not math.isfinite(measured.low):
        return value
    return f"{value} [{measured.low * factor:.3g}, {measured.high * factor:.3g}]"


def _plain(measured: Interval | float | None) -> Any:
    if isinstance(measured, Interval):
        return {end: _plain(getattr(measured, end)) for end in ("value", "low", "high")}
    return measured if measured is None or math.isfinite(measured) else None
