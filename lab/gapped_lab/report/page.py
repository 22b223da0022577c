"""A folder of records as one HTML file: a section for each recipe and protocol, with figures and tables."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gapped.comparison import page
from gapped.comparison.figures import heat_map, series_of
from gapped.comparison.page import (
    Picture,
    Section,
    curve_caption,
    duration,
    final_picture,
    hardware,
    legend_of,
    meanings,
    render_html,
    with_units,
)
from gapped.comparison.records import Curve, Record, read
from gapped.comparison.store import write_text
from gapped.comparison.table import (
    DRAWN,
    Cell,
    Row,
    failures,
    metric_name,
    own_metric,
    state_once,
)
from gapped.errors import GappedError, reject
from gapped_lab.records import Images, Trees
from gapped_lab.report.cells import (
    finished_runs,
    gap_of,
    groups,
    higher_is_better,
    rows_of,
    summary_table,
    verdict_of,
)
from gapped_lab.report.paper import against_paper, paper_table
from gapped_lab.report.plots import curve_figures, mark_published, palette
from gapped_lab.report.rendering import best_rows, command
from gapped_lab.report.trees import details, tree_pictures

Pixels = NDArray[np.uint8]

OURS_AND_PAPERS = "Our numbers and the paper's"

# Pixels between two images.
GAP = 1


@dataclass(frozen=True)
class _Logs:
    """The files that the runs of a folder left beside their records, by the id of the run."""

    curves: Mapping[str, Curve]
    images: Mapping[str, Images]
    trees: Mapping[str, Trees]


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write `report.html` from the records in `folder`, to `out` (a file or an existing folder) if given."""
    path = folder / "report.html" if out is None else out / "report.html" if out.is_dir() else out
    if path.suffix == ".jsonl":
        raise reject("out", str(path), "a page to write, not a file of records")
    write_text(path, render_html(sections(folder), failures(read(folder, Record))))
    return path


def sections(folder: Path) -> list[Section]:
    """One section for each recipe and protocol in the folder, in order of first appearance."""
    return sections_of(finished_runs(folder), folder)


def sections_of(records: Sequence[Record], folder: Path) -> list[Section]:
    """One section for each recipe and protocol of `records`; their curves and pictures are in `folder`."""
    logs = _Logs(
        {line.id: line for line in read(folder, Curve)},
        {line.id: line for line in read(folder, Images)},
        {line.id: line for line in read(folder, Trees)},
    )
    found: list[Section] = []
    for key, cells in groups(records).items():
        own = [r for cell in cells for r in cell.records]
        found += page.sections_of(own, folder) if own_metric(cells) else [_section(*key, cells, logs)]
    return found


def _section(recipe: str, protocol: str, cells: Sequence[Cell], logs: _Logs) -> Section:
    records = [r for cell in cells for r in cell.records]
    rows = rows_of(cells)
    best = rows[:DRAWN]
    beside = against_paper(records, recipe, protocol)
    at = {(r.label, r.tau): r.paper_mean for r in beside if r.metric == rows[0].metric}
    published = {r.name: mean for r in rows if (mean := at.get((r.label, r.tau))) is not None}
    salt = f"{recipe}-{protocol}"
    curves = _curves(salt, rows, logs.curves)
    marks = mark_published(best, published)
    pictures = [*final_picture(salt, rows, palette(rows), marks), *curves, *_heat(salt, rows)]
    table = with_units(state_once(best_rows(summary_table(rows))), rows[0].metric)
    return Section(
        recipe=recipe,
        protocol=protocol,
        verdict=verdict_of(cells),
        facts=_facts(records, recipe),
        next_step=_next_step(rows, recipe),
        legend=legend_of(rows, palette(rows)) if curves else (),
        pictures=(*pictures, *(Picture(*each) for each in tree_pictures(best, logs.trees, salt))),
        table=table,
        meanings=meanings(table, rows[0]),
        details=(
            *([("Beside the paper", OURS_AND_PAPERS, paper_table(beside, recipe))] if beside else ()),
            *((title, title, best_rows(table)) for title, table in details(rows)),
        ),
        galleries=tuple(_galleries(best, logs.images)),
        quick=any(r.quick for r in records),
        records=tuple(records),
    )


def _next_step(rows: Sequence[Row], recipe: str) -> tuple[str, str]:
    """The next step, in words and as a command; the latter may be empty."""
    runs = rows[0].cell.records
    if any(run.quick for run in runs):
        return "For numbers to quote, run it in full:", f"gapped reproduce {recipe}"
    if recipe != "compare":
        words = "More seeds make the intervals narrower; finished runs are kept:"
        return words, f"gapped reproduce {recipe} --seeds {2 * len(runs)}"
    best = " ".join(f"--estimator {row.label}" for row in rows[:3])
    words = "More seeds (--seeds) and longer training (--epochs) decide ties. Then ask a model of your own:"
    return words, f"gapped compare --train module:function {best}"


def _facts(records: Sequence[Record], recipe: str) -> tuple[str, ...]:
    epochs = sorted({r.epochs for r in records if r.epochs})
    count = f"{epochs[-1]} epoch{'s' * (epochs[-1] > 1)}" if epochs else ""
    training = [count if len(epochs) == 1 else f"up to {count}"] if epochs else []
    return (f"{len(records)} runs", *training, duration(records), hardware(records), command(records, recipe))


def _curves(salt: str, rows: Sequence[Row], curves: Mapping[str, Curve]) -> list[Picture]:
    """Everything that the runs logged along training."""
    return [
        Picture(name, curve_caption(title, series), svg)
        for series in series_of(rows, curves, rows[0].metric)
        for name, title, svg in curve_figures(rows, curves, series, palette(rows), salt)
    ]


def _heat(salt: str, rows: Sequence[Row]) -> list[Picture]:
    """GST over gap and temperature, where both vary and no two cells share them: one would hide the other."""
    cells = [((gap_of(r.cell), r.tau), r.value.mean) for r in rows if None not in (gap_of(r.cell), r.tau)]
    grid = dict(cells)
    sides = len({gap for gap, _ in grid}), len({tau for _, tau in grid})
    square = min(sides) > 1 and max(sides) <= DRAWN
    if not square or len(grid) < len(cells) or all(np.isnan(mean) for mean in grid.values()):
        return []
    metric = rows[0].metric
    svg = heat_map(grid, metric_name(metric), metric, f"{salt}-heat", higher=higher_is_better(metric))
    return [Picture("heat", "GST over its gap and temperature, mean over seeds.", svg)]


def _galleries(
    rows: Sequence[Row], images: Mapping[str, Images]
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Title, and the name and address of each strip of images."""
    lines: dict[str, Images] = {}
    for row in rows:
        for record in row.cell.records:
            if record.id in images:
                lines.setdefault(row.name, images[record.id])
    shared = len({line.original for line in lines.values()}) == 1
    pairs: list[tuple[str, Pixels | None]] = []
    for name, line in lines.items():
        if not shared or not pairs:
            pairs.append(("originals" if shared else f"{name}: originals", tiles(line, "original")))
        pairs.append((name, tiles(line, "reconstruction")))
    samples = [(name, tiles(line, "sample")) for name, line in lines.items()]
    for title, entries in (("Reconstructions of test images", pairs), ("Samples from the prior", samples)):
        strips = tuple((name, strip(pixels)) for name, pixels in entries if pixels is not None)
        if strips:
            yield title, strips


def tiles(line: Images, kind: Literal["original", "reconstruction", "sample"]) -> Pixels | None:
    """The (count, height, width) images of one kind; none where the line has no such kind."""
    text: str = getattr(line, kind)
    if not text:
        return None
    shape = (line.count, line.height, line.width)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise GappedError(f"images.jsonl, {line.id}: {kind} is not base64") from None
    if len(raw) != prod(shape):
        raise GappedError(f"images.jsonl, {line.id}: {kind} has {len(raw)} bytes, expected {shape}")
    return np.frombuffer(raw, dtype=np.uint8).reshape(shape)


def strip(images: Pixels) -> str:
    """The images side by side, a transparent pixel between them, as the address of an `<img>`."""
    count, height, width = images.shape
    canvas = np.zeros((height, count * (width + GAP) - GAP, 2), dtype=np.uint8)
    for i, image in enumerate(images):
        left = i * (width + GAP)
        canvas[:, left : left + width] = np.stack([image, np.full_like(image, 255)], axis=-1)
    picture = BytesIO()
    # Grey with alpha; Pillow comes with matplotlib.
    Image.fromarray(canvas).save(picture, "PNG")
    return "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode("ascii")
