"""One HTML file that holds everything: no script, font, style or picture comes from anywhere else.

A folder of records becomes sections, one for each recipe and protocol: verdict, figures, tables, images.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gapped.errors import GappedError, listing, reject
from gapped_lab.records import Curve, Images, Record, Trees, read
from gapped_lab.records.files import write_text
from gapped_lab.report.board import Contest, board
from gapped_lab.report.cells import (
    Cell,
    Row,
    failures,
    finished_runs,
    groups,
    metric_name,
    rows_of,
    verdict_of,
)
from gapped_lab.report.explanations import meanings, next_step, unit, with_units
from gapped_lab.report.paper import against_paper, paper, paper_table
from gapped_lab.report.plots import (
    colour_key,
    curve_figures,
    final_values,
    heat_map,
    is_dashed,
    palette,
    series_of,
)
from gapped_lab.report.rendering import command, duration, hardware
from gapped_lab.report.svg import VARIABLES
from gapped_lab.report.tabular import DRAWN, Table, aligned_right, best_rows, summary_table, without_empty
from gapped_lab.report.trees import details, tree_pictures
from gapped_lab.report.triangle import CATEGORIES, COLOURS

Pixels = NDArray[np.uint8]

# A key of the environment, and what a reader calls it; unknown keys show under their own name.
NAMES = {"gapped": "gapped", "commit": "commit", "torch": "torch", "device": "device", "python": "Python"}

# What the board is called, and the command that fills it.
FIELD = "field"

# Pixels between two images.
GAP = 1


@dataclass(frozen=True)
class Picture:
    """A figure under a name that is unique in its section, fit for a file name."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Gallery:
    """Strips of images, each under the name of what drew it."""

    title: str
    strips: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Section:
    """Everything about the cells of one recipe under one protocol."""

    recipe: str
    protocol: str
    verdict: str
    facts: tuple[str, ...]
    next_step: tuple[str, str]
    legend: tuple[tuple[str, str, bool], ...]
    """Name, colour and whether dashed, of each curve in all figures."""
    pictures: tuple[Picture, ...]
    table: Table
    meanings: tuple[tuple[str, str], ...]
    """What each column of the table means."""
    against_paper: Table | None
    details: tuple[tuple[str, Table], ...]
    galleries: tuple[Gallery, ...]
    quick: bool
    records: tuple[Record, ...]


@dataclass(frozen=True)
class _Logs:
    """What the runs of a folder left beside their records, by the id of the run."""

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


def render_board(records: Sequence[Record], contests: Sequence[Contest]) -> str:
    """The board of the field as a page of its own, to filter and to sort."""
    own = [record for record in records if record.recipe in {contest.name for contest in contests}]
    asked = sum(len(contest.runs) for contest in contests)
    lacking = " ".join(contest.name for contest in contests if contest.missing(own))
    command = f"gapped reproduce {lacking} --device cuda --minutes 9"
    following = ("Runs that are missing, in pieces:", command) if lacking else ("Nothing is missing.", "")
    diverged = sum(record.status == "diverged" for record in own)
    verdict = f"{asked - sum(contest.missing(own) for contest in contests)} of {asked} runs are finished"
    verdict += f"; {diverged} of them diverged." if diverged else "."
    # No sum of times: fleets that shared a device have none that counts.
    facts = (*([hardware(own)] if own else ()), listing(contest.name for contest in contests))
    section = Section(
        FIELD,
        "",
        verdict,
        facts,
        next_step=following,
        legend=(),
        pictures=(),
        table=Table((), ()),
        meanings=(),
        against_paper=None,
        details=(("Every estimator under every protocol", without_empty(board(own, contests))),),
        galleries=(),
        quick=any(record.quick for record in own),
        records=tuple(own),
    )
    return render_html([section], [], back="../field.html", title="The board")


def render_html(sections: Sequence[Section], failed: Sequence[str], back: str = "", title: str = "") -> str:
    """The page as text; `failed` are lines from `failures`, and `back` is the page that this one belongs to.

    Without a `title` it is called after its recipes. Nothing in it depends on when or where it was made, only
    on the records.
    """
    from markupsafe import Markup

    recipes = list(dict.fromkeys(section.recipe for section in sections))
    return _fill(
        "report.html.j2",
        title=title or (", ".join(recipes) if len(recipes) <= 3 else f"{len(recipes)} recipes"),
        sections=sections,
        failed=failed,
        back=back,
        environment=_environment([r for section in sections for r in section.records]),
        citation=paper()["citation"],
        aligned_right=aligned_right,
        safe=Markup,
        css=Markup(_packaged("report.css")),
        script=Markup(_packaged("report.js")),
    )


def render_playground(logits: Sequence[float], tau: float, gap: float, samples: int) -> str:
    """The page on which one moves the logits and sees the estimators follow, as text.

    The arguments are where its sliders stand at first. Its arithmetic is a second copy, in JavaScript, of
    what the estimators do; `tests/lab/report/test_playground.py` compares the two, number by number.
    """
    from markupsafe import Markup

    return _fill(
        "simplex.html.j2",
        categories=list(zip(CATEGORIES, logits, COLOURS, strict=True)),
        tau=tau,
        gap=gap,
        samples=samples,
        citation=paper()["citation"],
        css=Markup(_packaged("report.css") + _packaged("simplex.css")),
        script=Markup(_packaged("simplex.js")),
    )


def _fill(template: str, **values: Any) -> str:
    """A template of this package with its values; what is not `Markup` is escaped, and all must be given."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_packaged(template)).render(**values).rstrip() + "\n"


def _packaged(name: str) -> str:
    """The text of a file that lies beside this one."""
    return files("gapped_lab.report").joinpath(name).read_text("utf-8")


def _environment(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What the runs say about where they ran; where they differ, all of it."""
    places: dict[str, set[str]] = {}
    for record in records:
        for key, value in record.environment.items():
            if value is not None:
                places.setdefault(key, set()).add(str(value))
    order = list(NAMES)
    keys = sorted(places, key=lambda k: (order.index(k) if k in order else len(order), k))
    return [(NAMES.get(key, key.replace("_", " ")), ", ".join(sorted(places[key]))) for key in keys]


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
    return [_section(*key, cells, logs) for key, cells in groups(records).items()]


def _section(recipe: str, protocol: str, cells: Sequence[Cell], logs: _Logs) -> Section:
    records = [r for cell in cells for r in cell.records]
    rows = rows_of(cells)
    best = rows[:DRAWN]
    beside = against_paper(records, recipe, protocol)
    at = {(r.label, r.tau): r.paper_mean for r in beside if r.metric == rows[0].metric}
    published = {r.name: mean for r in rows if (mean := at.get((r.label, r.tau))) is not None}
    salt = f"{recipe}-{protocol}"
    curves = _curves(salt, rows, logs.curves)
    pictures = [*_final(salt, rows, published), *curves, *_heat(salt, rows)]
    table = with_units(best_rows(summary_table(rows)), rows[0].metric)
    return Section(
        recipe=recipe,
        protocol=protocol,
        verdict=verdict_of(cells),
        facts=_facts(records, recipe),
        next_step=next_step(rows, recipe),
        legend=_legend(rows) if curves else (),
        pictures=(*pictures, *(Picture(*each) for each in tree_pictures(best, logs.trees, salt))),
        table=table,
        meanings=tuple(meanings(table, rows[0])),
        against_paper=paper_table(beside, recipe) if beside else None,
        details=tuple((title, best_rows(table)) for title, table in details(rows)),
        galleries=tuple(_galleries(best, logs.images)),
        quick=any(r.quick for r in records),
        records=tuple(records),
    )


def _facts(records: Sequence[Record], recipe: str) -> tuple[str, ...]:
    epochs = sorted({r.epochs for r in records if r.epochs})
    count = f"{epochs[-1]} epoch{'s' * (epochs[-1] > 1)}" if epochs else ""
    training = [count if len(epochs) == 1 else f"up to {count}"] if epochs else []
    return (f"{len(records)} runs", *training, duration(records), hardware(records), command(records, recipe))


def _final(salt: str, rows: Sequence[Row], published: Mapping[str, float]) -> list[Picture]:
    """Where the runs end, if any has."""
    if not any(row.value.count for row in rows):
        return []
    best, colours = rows[:DRAWN], palette(rows)
    dots = {r.name: colours[colour_key(r, rows)] for r in best} if colours else {}
    what = metric_name(rows[0].metric) + unit(rows[0].metric)
    svg = final_values(best, what, dots, published, f"{salt}-final")
    which = f", the best {DRAWN} of {len(rows):,} cells" if len(rows) > DRAWN else ""
    return [Picture("final", f"Where the runs end, best first{which}.", svg)]


def _legend(rows: Sequence[Row]) -> tuple[tuple[str, str, bool], ...]:
    """One for all figures, best first; none where figures have colours, and legends, of their own."""
    colours = palette(rows)
    keys = dict.fromkeys(colour_key(row, rows) for row in rows)
    return tuple(
        (key, f"var(--{VARIABLES[c]}, {c})", is_dashed(c)) for key in keys if (c := colours.get(key))
    )


def _curves(salt: str, rows: Sequence[Row], curves: Mapping[str, Curve]) -> list[Picture]:
    """Everything that the runs logged along training."""
    pictures = []
    for series in series_of(rows, curves, rows[0].metric):
        for name, title, svg in curve_figures(rows, curves, series, palette(rows), salt):
            mean = "geometric mean" if "variance" in series else "mean"
            caption = f"{title[0].upper()}{title[1:]}{unit(series)}: {mean} and 95% band over seeds."
            pictures.append(Picture(name, caption, svg))
    return pictures


def _heat(salt: str, rows: Sequence[Row]) -> list[Picture]:
    """GST over gap and temperature, where both vary and no two cells share them: one would hide the other."""
    cells = [((r.cell.gap, r.tau), r.value.mean) for r in rows if None not in (r.cell.gap, r.tau)]
    grid = dict(cells)
    sides = len({gap for gap, _ in grid}), len({tau for _, tau in grid})
    square = min(sides) > 1 and max(sides) <= DRAWN
    if not square or len(grid) < len(cells) or all(np.isnan(mean) for mean in grid.values()):
        return []
    svg = heat_map(grid, metric_name(rows[0].metric), rows[0].metric, f"{salt}-heat")
    return [Picture("heat", "GST over its gap and temperature, mean over seeds.", svg)]


def _galleries(rows: Sequence[Row], images: Mapping[str, Images]) -> list[Gallery]:
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
    both = (("Reconstructions of test images", pairs), ("Samples from the prior", samples))
    galleries = [
        Gallery(title, tuple((name, strip(pixels)) for name, pixels in entries if pixels is not None))
        for title, entries in both
    ]
    return [gallery for gallery in galleries if gallery.strips]


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
    return "data:image/png;base64," + base64.b64encode(_png(canvas)).decode("ascii")


def _png(canvas: Pixels) -> bytes:
    """8-bit grey with alpha (colour type 4), every row unfiltered."""
    height, width, _ = canvas.shape
    raw = b"".join(b"\0" + row.tobytes() for row in canvas)
    header = struct.pack(">IIBBBBB", width, height, 8, 4, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
