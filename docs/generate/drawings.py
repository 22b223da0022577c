"""The figures of the documentation, by the name of their file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import vocabulary_drawings
from evidence import ELBO, PLAIN, RECTIFIED, VALIDATION, Evidence
from study import TASKS, Study

from gapped.comparison.figures import (
    SERIES,
    Tip,
    cell_curve,
    final_values,
    heat_map,
    learning_curves,
    legend,
    name_places,
    new_figure,
    style,
    to_svg,
)
from gapped.comparison.table import Row
from gapped_lab.report.cells import gap_of, rows_of
from gapped_lab.report.paper import against_paper
from gapped_lab.report.plots import mark_published, palette
from gapped_lab.report.timings import bench_figure

# A colour for each estimator, the same in all figures, and in reports where those give it one.
NAMES = ("GST-auto", "GR-MC100", "STGS", "GST-1.0", "GST-0.8", "GST-pi", "GST-1.2")
COLOURS = dict(zip(NAMES, SERIES, strict=False))


def final(evidence: Evidence) -> str:
    """Where the runs of the comparison end, with the paper's numbers; cells that it marks X are left out."""
    beside = {(r.label, r.tau): r.paper_mean for r in against_paper(evidence.records, "vae", RECTIFIED)}
    rows = [r for r in rows_of(evidence.group("vae"), ELBO) if beside.get((r.label, r.tau)) is not None]
    published = {r.name: mean for r in rows if (mean := beside[r.label, r.tau]) is not None}
    dots = {r.name: COLOURS[r.label] for r in rows if r.label in COLOURS}
    return final_values(rows, "test negative ELBO", dots, "vae-final", mark_published(rows, published))


def compare(evidence: Evidence) -> str:
    """The last figure of `gapped compare`, as it stands in its report."""
    rows = rows_of(evidence.group("compare", "digits-8x8"), ELBO)
    return final_values(rows, "test negative ELBO", palette(rows), "compare")


def learning(evidence: Evidence) -> str:
    """The comparison along training, at the temperature where it ends lowest."""
    rows = [r for r in rows_of(evidence.group("vae"), ELBO) if r.tau == 0.5]
    return _curves(rows, evidence, "test negative ELBO at τ=0.5", ELBO, salt="vae-curves")


def variance(evidence: Evidence) -> str:
    """The variance of the encoder's gradient along training, every seed."""
    rows = rows_of(evidence.group("variance"), ELBO)
    title = "variance of the encoder's gradient: mean and each seed"
    return _curves(rows, evidence, title, "gradient_variance", log=True, salt="variance", runs=True)


def listops(evidence: Evidence) -> str:
    """Validation accuracy of the latent trees along training, at the highest temperature, every seed."""
    rows = [r for r in rows_of(evidence.group("listops", "paper"), "test_accuracy") if r.tau == 1.0]
    title = "ListOps, validation accuracy at τ=1: mean and each seed"
    return _curves(rows, evidence, title, "valid_accuracy", salt="listops-curves", runs=True)


def heat(evidence: Evidence, protocol: str, where: str) -> str:
    """GST over gap and temperature."""
    rows = rows_of(evidence.group("gap-grid", protocol), VALIDATION)
    grid = {(gap_of(r.cell), r.tau): r.value.mean for r in rows}
    return heat_map(grid, f"validation negative ELBO, {where}", VALIDATION, f"gap-grid-{protocol}")


def default(evidence: Evidence) -> str:
    """The loss of each widely used estimator at one temperature for all tasks."""
    study = Study.of(evidence)
    chosen = study.recommend()
    names = {
        "GapMax": "gapmax, the default",
        "GST-auto": "gst",
        "GR-MC10": "gumbel-rao",
        "STGS": "F.gumbel_softmax(hard=True)",
    }
    with style("default"):
        figure, axes = new_figure(90 + 26 * len(study.tasks))
        tips = []
        for place, (label, name) in enumerate(names.items()):
            cell = chosen[label]
            values = [study.shortfall(task, cell) for task in study.tasks]
            heights = [row + 0.14 * (place - 1.5) for row in range(len(values))]
            axes.plot(values, heights, "o", markersize=6, color=SERIES[place], label=f"{name}, τ={cell[1]:g}")
            for task, x, y in zip(study.tasks, values, heights, strict=True):
                tips.append(Tip(axes, x, y, f"{name} (τ={cell[1]:g}) on {TASKS[task]}: {x:.1f}%"))
        name_places(axes, [re.sub("^K=", "codes, K=", TASKS[task]) for task in study.tasks])
        axes.set_xlim(left=-0.2)
        title = "test loss above that of the best of all cells, per cent of it"
        axes.set_title(title)
        legend(figure, [f"{name}, τ=0.85" for name in names.values()])
        means = "; ".join(f"{name} {study.mean(chosen[label]):.1f}%" for label, name in names.items())
        return to_svg(figure, f"{title}; means without the ReLU: {means}", tips)


def bench(evidence: Evidence) -> str:
    """Times as multiples of torch's."""
    return bench_figure(evidence.bench)


def _curves(rows: Sequence[Row], evidence: Evidence, title: str, series: str, **how: Any) -> str:
    curves = [cell_curve(r, evidence.curves, series, r.label, r.label) for r in rows]
    return learning_curves([c for c in curves if c is not None], title, series, COLOURS, **how)


DRAWINGS: dict[str, Callable[[Evidence], str]] = {
    "compare.svg": compare,
    "default.svg": default,
    "vae-final.svg": final,
    "vae-curves.svg": learning,
    "variance.svg": variance,
    "listops-curves.svg": listops,
    "gap-grid-relu.svg": partial(heat, protocol=RECTIFIED, where="with the ReLU on the logits"),
    "gap-grid-plain.svg": partial(heat, protocol=PLAIN, where="without the ReLU"),
    "bench.svg": bench,
    "vocabulary.svg": vocabulary_drawings.growth,
    "word-model.svg": vocabulary_drawings.rewards,
}
