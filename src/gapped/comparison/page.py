"""One HTML file that holds everything: no script, font, style or picture comes from anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from gapped.comparison.figures import (
    VARIABLES,
    Finish,
    colour_key,
    curve_figure,
    final_values,
    is_dashed,
    palette,
    series_of,
    window,
)
from gapped.comparison.outcome import Verdict, judge, ordered
from gapped.comparison.records import Curve, Record, read
from gapped.comparison.table import (
    DRAWN,
    Row,
    Table,
    aligned_right,
    cells,
    metric_name,
    rows_of,
    state_once,
    summary_table,
)

# Keys of the environment that come first, in this order.
_PLACES = ("gapped", "commit", "torch", "device", "python")

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


@dataclass(frozen=True)
class Picture:
    """A figure under a name that is unique in its section, fit for a file name."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """Everything about cells that are compared with each other."""

    recipe: str
    verdict: str
    facts: tuple[str, ...]
    next_step: tuple[str, str]
    """What to do next, in words and as a command; the latter may be empty."""
    records: tuple[Record, ...]
    protocol: str = ""
    legend: tuple[tuple[str, str, bool], ...] = ()
    """Name, colour and whether dashed, of each curve in all figures."""
    pictures: tuple[Picture, ...] = ()
    table: Table = field(default_factory=lambda: Table((), ()))
    meanings: tuple[tuple[str, str], ...] = ()
    """What each column of the table means."""
    details: tuple[tuple[str, str, Table], ...] = ()
    """Further tables, each with a heading and a caption."""
    galleries: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    """Strips of images: each with a title, and for each strip the name of what drew it, and its address."""
    quick: bool = False


def sections_of(records: Sequence[Record], folder: Path, verdict: Verdict | None = None) -> list[Section]:
    """The section of the runs that a function of the user trained, if any; their curves are in `folder`."""
    if not records:
        return []
    group = cells(records)
    own = tuple(record for cell in group for record in cell.records)
    verdict = verdict or judge(group)
    rows, recipe = ordered(rows_of(group), verdict), own[0].recipe
    logs, colours, pictures = {line.id: line for line in read(folder, Curve)}, palette(rows), []
    for series in series_of(rows, logs, rows[0].metric):
        name = series.replace("_", "-")
        title, svg = curve_figure(rows, logs, series, colours, f"{recipe}-{name}")
        pictures += [Picture(name, curve_caption(title, series), svg)] if svg else []
    table = with_units(state_once(summary_table(rows)), rows[0].metric)
    next_step = "The same call with more seeds and the same folder (out, or --out) goes on from here."
    section = Section(
        recipe=recipe,
        verdict=str(verdict),
        facts=(f"{len(own)} runs", duration(own), hardware(own), "gapped.compare"),
        next_step=(next_step, ""),
        records=own,
        legend=legend_of(rows, colours) if pictures else (),
        pictures=(*final_picture(recipe, rows, colours), *pictures),
        table=table,
        meanings=meanings(table, rows[0]),
    )
    return [section]


def render_html(sections: Sequence[Section], failed: Sequence[str], back: str = "", title: str = "") -> str:
    """The page as text; `failed` are lines from `failures`, and `back` is the page that this one belongs to.

    Without a `title` it is called after its recipes. Nothing in it depends on when or where it was made, only
    on the records.
    """
    from markupsafe import Markup

    recipes = list(dict.fromkeys(section.recipe for section in sections))
    return fill(
        packaged("report.html.j2"),
        title=title or (", ".join(recipes) if len(recipes) <= 3 else f"{len(recipes)} recipes"),
        sections=sections,
        failed=failed,
        back=back,
        environment=_environment([r for section in sections for r in section.records]),
        aligned_right=aligned_right,
        safe=Markup,
        css=Markup(packaged("report.css")),
        script=Markup(packaged("report.js")),
    )


def fill(template: str, **values: Any) -> str:
    """The text of a template with its values; what is not `Markup` is escaped, and all must be given."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(**values).rstrip() + "\n"


def packaged(name: str, package: str = "gapped.comparison") -> str:
    """The text of a file that lies beside the modules of a package."""
    return files(package).joinpath(name).read_text("utf-8")


def _environment(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What the runs say about where they ran; where they differ, all of it."""
    said: dict[str, set[str]] = {key: set() for key in _PLACES}
    for key in sorted({key for record in records for key in record.environment}):
        values = (record.environment.get(key) for record in records)
        said[key] = {str(value) for value in values if value is not None}
    names = {"python": "Python"}
    return [(names.get(k, k.replace("_", " ")), ", ".join(sorted(v))) for k, v in said.items() if v]


def final_picture(
    salt: str, rows: Sequence[Row], colours: Mapping[str, str], finish: Finish | None = None
) -> list[Picture]:
    """The picture of the final values, if there is one."""
    if not any(row.value.count for row in rows):
        return []
    best = rows[:DRAWN]
    dots = {r.name: colours[colour_key(r, rows)] for r in best} if colours else {}
    what = metric_name(rows[0].metric) + unit(rows[0].metric)
    svg = final_values(best, what, dots, f"{salt}-final", finish)
    which = f", the best {DRAWN} of {len(rows):,} cells" if len(rows) > DRAWN else ""
    low, high = window(best)
    outside = any(not low <= row.value.mean <= high for row in best if row.value.count)
    arrows = " An arrow is a mean that lies outside of the frame; its number stands beside it." * outside
    return [Picture("final", f"Where the runs end, best first{which}.{arrows}", svg)]


def curve_caption(title: str, series: str) -> str:
    mean = "geometric mean" if "variance" in series else "mean"
    return f"{title[0].upper()}{title[1:]}{unit(series)}: {mean} and 95% band over seeds."


def legend_of(rows: Sequence[Row], colours: Mapping[str, str]) -> tuple[tuple[str, str, bool], ...]:
    """One for all figures, best first; none where figures have colours, and legends, of their own."""
    keys = dict.fromkeys(colour_key(row, rows) for row in rows)
    known = [(key, colours[key]) for key in keys if key in colours]
    return tuple((key, f"var(--{VARIABLES[c]}, {c})", is_dashed(c)) for key, c in known)


def hardware(records: Sequence[Record]) -> str:
    """The devices that the records name, and how they multiply where that is not plain float32."""
    places = [r.environment for r in records]
    devices = sorted({str(place.get("device") or "an unnamed device") for place in places})
    tf32 = any(place.get("precision") == "tf32" for place in places)
    return " and ".join(devices) + " (TF32 products)" * tf32


def duration(records: Sequence[Record]) -> str:
    """The wall time in words; some measurements end before there is an epoch to time.

    A fleet's seconds are shared among its runs, so that a sum over runs counts them once.
    """
    seconds = sum(r.seconds / r.runs_in_fleet for r in records)
    if not seconds:
        return "a time that was not recorded"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def unit(metric: str) -> str:
    """The unit of a metric, in parentheses; empty where it has none.

    >>> unit("test_negative_elbo"), unit("test_accuracy")
    (' (nats)', '')
    """
    return " (nats)" if metric.endswith(("elbo", "entropy")) else ""


def with_units(table: Table, metric: str) -> Table:
    """The table with the metric's unit in the head of its column."""
    name = metric_name(metric)
    return replace(table, columns=tuple(name + unit(metric) if c == name else c for c in table.columns))


def meanings(table: Table, row: Row) -> tuple[tuple[str, str], ...]:
    """Each column of a table `with_units`, and what it means."""
    better = "higher" if row.higher else "lower"
    known = MEANINGS | {metric_name(row.metric) + unit(row.metric): f"mean over seeds; {better} is better"}
    return tuple((name, known[name]) for name in table.columns if name in known)
