"""The figures of the documentation, by the name of their file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from gapped.errors import GappedError
from gapped.lab.report.bench_figure import bench_figure
from gapped.lab.report.curves import curve, palette
from gapped.lab.report.evidence import ELBO, PLAIN, RECTIFIED, Evidence
from gapped.lab.report.figures import final_values, heat_map, learning_curves
from gapped.lab.report.paper import against_paper
from gapped.lab.report.svg import SERIES
from gapped.lab.report.tables import Row, rows_of

# A colour for each estimator, the same in all figures.
NAMES = ("GR-MC100", "STGS", "GST-1.0", "GST-1.2", "GST-pi", "GST-0.8")
COLOURS = dict(zip(NAMES, SERIES, strict=False))


class Unfilled(GappedError):
    """There are records of a figure's recipe, but none of what it shows."""


@dataclass(frozen=True)
class Drawing:
    """A figure and the recipe it is drawn from; None where the records have nothing to show in it."""

    make: Callable[[Evidence], str | None]
    recipe: str


def final(evidence: Evidence) -> str | None:
    """Where the runs of the comparison end, with the paper's numbers; cells that it marks X are left out."""
    beside = {(r.label, r.tau): r.paper_mean for r in against_paper(evidence.records, "vae", RECTIFIED)}
    rows = [r for r in rows_of(evidence.group("vae"), ELBO) if beside.get((r.label, r.tau)) is not None]
    published = {r.name: mean for r in rows if (mean := beside[r.label, r.tau]) is not None}
    dots = {r.name: COLOURS[r.label] for r in rows if r.label in COLOURS}
    return _final_values(rows, dots, "vae-final", published)


def compare(evidence: Evidence) -> str | None:
    """What `gapped compare` ends with, as it stands in its report."""
    rows = rows_of(evidence.group("compare", "digits-8x8"), ELBO)
    return _final_values(rows, palette(rows), "compare")


def learning(evidence: Evidence) -> str | None:
    """The comparison along training, at the temperature where it ends lowest."""
    every = rows_of(evidence.group("vae"), ELBO)
    rows = [r for r in every if r.tau == 0.5]
    return _curves(rows, evidence, "test negative ELBO at τ=0.5", ELBO, salt="vae-curves")


def variance(evidence: Evidence) -> str | None:
    """The variance of the encoder's gradient along training, every seed."""
    rows = rows_of(evidence.group("variance"), ELBO)
    title = "variance of the encoder's gradient: mean and each seed"
    return _curves(rows, evidence, title, "gradient_variance", log=True, salt="variance", runs=True)


def trees_along(evidence: Evidence) -> str | None:
    """Validation accuracy of the latent trees along training, at the highest temperature, every seed."""
    rows = [r for r in rows_of(evidence.group("listops", "paper"), "test_accuracy") if r.tau == 1.0]
    title = "ListOps, validation accuracy at τ=1: mean and each seed"
    return _curves(rows, evidence, title, "valid_accuracy", salt="listops-curves", runs=True)


def heat(evidence: Evidence, protocol: str, where: str) -> str | None:
    """GST over gap and temperature."""
    metric = "validation_negative_elbo"
    rows = rows_of(evidence.group("gap-grid", protocol), metric)
    grid = {(gap, r.tau): r.value.mean for r in rows if (gap := r.cell.gap) is not None and r.tau is not None}
    if not any(map(isfinite, grid.values())):
        return None
    return heat_map(grid, f"validation negative ELBO, {where}", metric, f"gap-grid-{protocol}")


def _final_values(
    rows: Sequence[Row], colours: Mapping[str, str], salt: str, published: Mapping[str, float] | None = None
) -> str | None:
    if not any(r.value.count for r in rows):
        return None
    return final_values(rows, "test negative ELBO", colours, published, salt)


def _curves(rows: Sequence[Row], evidence: Evidence, title: str, series: str, **how: Any) -> str | None:
    made = [curve(r, evidence.curves, series, r.label, r.label) for r in rows]
    found = [one for one in made if one is not None]
    return learning_curves(found, title, series, COLOURS, **how) if found else None


DRAWINGS = {
    "compare.svg": Drawing(compare, "compare"),
    "vae-final.svg": Drawing(final, "vae"),
    "vae-curves.svg": Drawing(learning, "vae"),
    "variance.svg": Drawing(variance, "variance"),
    "listops-curves.svg": Drawing(trees_along, "listops"),
    "gap-grid-relu.svg": Drawing(lambda e: heat(e, RECTIFIED, "with the ReLU on the logits"), "gap-grid"),
    "gap-grid-plain.svg": Drawing(lambda e: heat(e, PLAIN, "without the ReLU"), "gap-grid"),
}

BENCH = "bench.svg"


def known_drawings(evidence: Evidence) -> list[str]:
    """The figures that have a recipe in these records."""
    recipes = [name for name, one in DRAWINGS.items() if one.recipe in evidence.recipes()]
    return [*recipes, *([BENCH] if evidence.bench else [])]


def draw(evidence: Evidence, name: str) -> str:
    """The SVG of a figure."""
    if name not in known_drawings(evidence):
        known = ", ".join(known_drawings(evidence)) or "none"
        raise GappedError(f"{name}: no such figure, expected one that these records can draw: {known}")
    made = bench_figure(evidence.bench) if name == BENCH else DRAWINGS[name].make(evidence)
    if made is None:
        raise Unfilled(f"{name}: these records have nothing to show in it")
    return made
