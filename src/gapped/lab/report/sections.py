"""A folder of records, laid out as the parts of a report: verdict, pictures, tables, images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gapped.lab.records import load
from gapped.lab.report.cells import Cell, Record, groups, metric_name, primary, read
from gapped.lab.report.curves import Line, colour_key, curve_figures, palette, series_of
from gapped.lab.report.figures import final_values, heat_map
from gapped.lab.report.images import Pixels, strip, tiles
from gapped.lab.report.markdown import command, duration, hardware, is_published
from gapped.lab.report.paper import against_paper, paper_table
from gapped.lab.report.tables import DRAWN, Row, Table, best_rows, rows_of, summary_table, verdict_of
from gapped.lab.report.trees import details, tree_pictures


@dataclass(frozen=True)
class Picture:
    """A figure under a name that is unique in its section, fit for a file name."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Gallery:
    """Strips of images, one a row, each with the name of what drew it."""

    title: str
    strips: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Section:
    """Everything about the cells of one recipe under one protocol."""

    recipe: str
    protocol: str
    verdict: str
    facts: tuple[str, ...]
    pictures: tuple[Picture, ...]
    table: Table
    against_paper: Table | None
    details: tuple[tuple[str, Table], ...]
    galleries: tuple[Gallery, ...]
    quick: bool
    records: tuple[Record, ...]


def sections(folder: Path) -> list[Section]:
    """One section for each recipe and protocol in the folder, in order of first appearance."""
    grouped = groups(read(folder))
    curves = {str(line.get("id")): line for line in load(folder / "curves.jsonl")}
    drawn = {str(line.get("id")): line for line in load(folder / "images.jsonl")}
    trees = {str(line.get("id")): line for line in load(folder / "trees.jsonl")}
    return [
        _section(recipe, protocol, cells, curves, drawn, trees)
        for (recipe, protocol), cells in grouped.items()
    ]


def _section(
    recipe: str,
    protocol: str,
    cells: list[Cell],
    curves: Mapping[str, Line],
    drawn: Mapping[str, Line],
    trees: Mapping[str, Line],
) -> Section:
    records = [r for cell in cells for r in cell.records]
    rows = rows_of(cells)
    best = rows[:DRAWN]
    beside = against_paper(records, recipe, protocol) if is_published(recipe, protocol) else []
    at = {(r.label, r.tau): r.paper_mean for r in beside if r.metric == primary(cells)}
    published = {r.name: mean for r in rows if (mean := at.get((r.label, r.tau))) is not None}
    salt = f"{recipe}-{protocol}"
    return Section(
        recipe=recipe,
        protocol=protocol,
        verdict=verdict_of(cells),
        facts=_facts(records, recipe),
        pictures=(
            *_pictures(salt, rows, curves, published),
            *(Picture(*each) for each in tree_pictures(best, trees, salt)),
        ),
        table=best_rows(summary_table(rows)),
        against_paper=paper_table(beside, recipe) if beside else None,
        details=tuple((title, best_rows(table)) for title, table in details(rows)),
        galleries=tuple(_galleries(best, drawn)),
        quick=any(r.get("quick") for r in records),
        records=tuple(records),
    )


def _facts(records: list[Record], recipe: str) -> tuple[str, ...]:
    epochs = sorted({int(r["epochs"]) for r in records if r.get("epochs")})
    counted = f"{epochs[-1]} epoch{'s' * (epochs[-1] > 1)}" if epochs else ""
    trained = [counted if len(epochs) == 1 else f"up to {counted}"] if epochs else []
    return (f"{len(records)} runs", *trained, duration(records), hardware(records), command(records, recipe))


def _pictures(
    salt: str, rows: list[Row], curves: Mapping[str, Line], published: Mapping[str, float]
) -> list[Picture]:
    metric = rows[0].metric
    what = metric_name(metric)
    colours = palette(rows)
    made = []
    if any(row.value.count for row in rows):
        best = rows[:DRAWN]
        dots = {r.name: colours[colour_key(r, rows)] for r in best} if colours else {}
        svg = final_values(best, what, dots, published, f"{salt}-final")
        which = f", the best {DRAWN} of {len(rows):,} cells" if len(rows) > DRAWN else ""
        made.append(Picture("final", f"Where the runs end, best first{which}.", svg))
    for series in series_of(rows, curves, metric):
        for name, title, svg in curve_figures(rows, curves, series, colours, salt):
            mean = "geometric mean" if "variance" in series else "mean"
            made.append(Picture(name, f"{title[0].upper()}{title[1:]}: {mean} and 95% band over seeds.", svg))
    fields = [
        ((gap, r.tau), r.value.mean) for r in rows if (gap := r.cell.gap) is not None and r.tau is not None
    ]
    grid = dict(fields)
    sides = len({gap for gap, _ in grid}), len({tau for _, tau in grid})
    square = min(sides) > 1 and max(sides) <= DRAWN
    # Cells that differ in more than gap and temperature would hide each other on the map.
    distinct = len(grid) == len(fields)
    if square and distinct and any(mean == mean for mean in grid.values()):
        svg = heat_map(grid, what, metric, f"{salt}-heat")
        made.append(Picture("heat", "GST over its gap and temperature, mean over seeds.", svg))
    return made


def _galleries(rows: list[Row], drawn: Mapping[str, Line]) -> list[Gallery]:
    ids = {r.name: [str(record.get("id")) for record in r.cell.records] for r in rows}
    lines = {
        name: drawn[first] for name, all_ in ids.items() for first in [i for i in all_ if i in drawn][:1]
    }
    shared = len({line.get("original") for line in lines.values()}) == 1
    pairs: list[tuple[str, Pixels | None]] = []
    for name, line in lines.items():
        if not shared or not pairs:
            pairs.append(("originals" if shared else f"{name}: originals", tiles(line, "original")))
        pairs.append((name, tiles(line, "reconstruction")))
    samples = [(name, tiles(line, "sample")) for name, line in lines.items()]
    both = [("Reconstructions of test images", pairs), ("Samples from the prior", samples)]
    made = [Gallery(title, _strips(entries)) for title, entries in both]
    return [gallery for gallery in made if gallery.strips]


def _strips(entries: Sequence[tuple[str, Pixels | None]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, strip(pixels)) for name, pixels in entries if pixels is not None)
