"""What a report says beside its numbers: what each column means, in which unit, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gapped_lab.report.cells import Row, metric_name
from gapped_lab.report.tabular import Table

MEANINGS = {
    "estimator": "what estimates the gradient; options follow the colon",
    "τ": "its temperature",
    "std": "standard deviation over seeds",
    "95% interval": "t-interval of the mean",
    "seeds": "runs that ended well and differ in nothing but their seed",
    "diverged": "runs whose loss stopped being a number; they enter no mean",
    "failed": "runs that an error ended",
    "stopped": "after so many seeds it was clearly worse",
    "seconds / run": "wall time, the median over runs",
    "gradient variance": "variance of a weight's gradient over samples, averaged over weights",
    "ms / epoch": "wall time of runs that had the device to themselves",
}


def unit(metric: str) -> str:
    """The unit of a metric, in parentheses; empty where it has none.

    >>> unit("test_negative_elbo"), unit("test_accuracy")
    (' (nats)', '')
    """
    return " (nats)" if metric.endswith(("elbo", "entropy")) else ""


def with_units(table: Table, metric: str) -> Table:
    """The table with the metric's unit in the head of its column."""
    name = metric_name(metric)
    columns = tuple(column + unit(metric) * (column == name) for column in table.columns)
    return replace(table, columns=columns)


def meanings(table: Table, row: Row) -> list[tuple[str, str]]:
    """Each column of a table `with_units`, and what it means."""
    better = "higher" if row.higher else "lower"
    own = {metric_name(row.metric) + unit(row.metric): f"mean over seeds; {better} is better"}
    return [(name, text) for name in table.columns if (text := {**MEANINGS, **own}.get(name))]


def next_step(rows: Sequence[Row], recipe: str) -> tuple[str, str]:
    """What to do next, in words and as a command; the latter may be empty."""
    runs = rows[0].cell.records
    if rows[0].own:
        return "The same call with more seeds and the same folder (out, or --out) goes on from here.", ""
    if any(run.quick for run in runs):
        return "For numbers to quote, run it in full:", f"gapped reproduce {recipe}"
    if recipe != "compare":
        words = "More seeds make the intervals narrower; finished runs are kept:"
        return words, f"gapped reproduce {recipe} --seeds {2 * len(runs)}"
    best = " ".join(f"--estimator {row.label}" for row in rows[:3])
    words = "More seeds (--seeds) and longer training (--epochs) decide ties. Then ask a model of your own:"
    return words, f"gapped compare --train module:function {best}"
