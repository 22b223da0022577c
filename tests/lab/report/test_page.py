"""The HTML report from synthetic records: what it holds and loads, how its figures cope, ListOps in it."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from report_records import ELBO, ENVIRONMENT, many, record, write_compare, write_vae

from gapped.comparison.records import Curve, Record, write
from gapped.errors import GappedError
from gapped_lab.records import Images, Tree, Trees
from gapped_lab.report.cells import cells, rows_of
from gapped_lab.report.page import sections, strip, tiles, write_report
from gapped_lab.report.trees import binned_table, details, draw_tree, tree_table


@pytest.fixture
def compare(tmp_path: Path) -> Path:
    return write_compare(tmp_path)


def addresses(page: str) -> list[str]:
    """Every address in the page that a browser would fetch."""
    matches = re.findall(r"""(?:src|href|srcset|data|action)\s*=\s*["']([^"']+)["']""", page)
    matches += re.findall(r"""url\(\s*["']?([^"')]+)|@import\s+["']?([^"';]+)""", page)
    return ["".join(match) for match in matches]


def write_curves(folder: Path, runs: list[Record], *values: float) -> None:
    epochs = list(range(1, len(values) + 1))
    write(folder, [Curve(id=r.id, epoch=epochs, more={ELBO: list(values)}) for r in runs])


def test_the_page_loads_nothing_and_is_reproducible(compare: Path) -> None:
    first = write_report(compare).read_bytes()
    assert first == write_report(compare, compare / "again.html").read_bytes()
    page = first.decode()
    assert addresses(page)
    assert [each for each in addresses(page) if not each.startswith(("#", "data:"))] == []
    # Names of XML vocabularies look like addresses; nothing fetches them.
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) <= names
    assert str(compare) not in page
    assert not list(compare.glob(".*part"))


def test_the_page_begins_with_the_verdict(compare: Path) -> None:
    page = write_report(compare).read_text("utf-8")
    order = [
        page.index(f'class="{name}"') for name in ("quick", "verdict", "pictures", "sortable", "gallery")
    ]
    assert order == sorted(order)
    assert "ST: 1 of 3 runs diverged" in page
    for value in ENVIRONMENT.values():
        assert value in page
    assert page.count("<img ") == 11


@pytest.mark.parametrize("twins", [False, True])
def test_cells_that_would_hide_each_other_get_no_map(tmp_path: Path, twins: bool) -> None:
    """With the perturbation differentiated, gap and temperature are the same, and the method is another."""
    runs = [
        record(f"{'NZ-' * nz}{gap}", 0, 100 + gap + tau + 100 * nz, tau=tau, options={"gap": gap} | extra)
        for gap in (0.5, 1.0)
        for tau in (0.5, 1.0)
        for nz, extra in [(False, {}), (True, {"detach": False})][: 1 + twins]
    ]
    write(tmp_path, runs)
    (section,) = sections(tmp_path)
    assert ("heat" in [picture.name for picture in section.pictures]) is not twins


def test_figures_stand_alone_and_speak(tmp_path: Path) -> None:
    (section,) = sections(write_vae(tmp_path))
    names = [p.name for p in section.pictures]
    assert names[:2] == ["final", "test-negative-elbo-tau-0.5"]
    assert names[-1] == "heat"
    for picture in section.pictures:
        root = ET.fromstring(picture.svg)
        assert root.get("aria-label")
        assert root.get("role") == "img"
        titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
        assert len(titles) > 5
    assert "the paper 107.33" in section.pictures[0].svg


def test_strips_are_pngs_with_gaps() -> None:
    from PIL import Image

    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    raw = base64.b64decode(strip(pixels).removeprefix("data:image/png;base64,"))
    shown = np.asarray(Image.open(BytesIO(raw)))
    assert shown.shape == (3, 9, 2)
    assert (shown[:, :4, 0] == pixels[0]).all()
    assert (shown[:, 5:, 0] == pixels[1]).all()
    assert shown[0, :, 1].tolist() == [255] * 4 + [0] + [255] * 4


@pytest.mark.parametrize("broken", ["!!", base64.b64encode(b"abc").decode()])
def test_broken_images_are_named(broken: str) -> None:
    with pytest.raises(GappedError, match=r"images.jsonl, x: sample"):
        tiles(Images(id="x", height=2, width=2, count=1, sample=broken), "sample")


def test_a_report_of_very_many_cells_shows_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many pictures, rows and marks as anybody looks at; tables.md has every cell."""
    from gapped_lab.cli.report import report

    runs = [
        record(f"GST-{gap}", 0, 20 + gap + tau, tau=float(tau), options={"gap": float(gap)})
        for gap in range(20)
        for tau in range(1, 14)
    ]
    write(tmp_path, runs)
    write_curves(tmp_path, runs, 3.0, 2.0)
    pixel = dict.fromkeys(("original", "reconstruction", "sample"), base64.b64encode(b"x").decode())
    write(tmp_path, [Images(id=r.id, height=1, width=1, count=1, **pixel) for r in runs])
    report(tmp_path, None)
    out, page = capsys.readouterr().out, (tmp_path / "report.html").read_text("utf-8")
    for text in (out, page):
        assert "The best 200 of 260 cells; gapped report writes all of them to tables.md." in text
    assert "the best 40 of 260 cells" in page
    assert len(page) < 5e5
    assert len(out) < 3e4
    assert page.count("<svg") == 1 + 8 + 1
    assert page.count("<img") == 81
    assert (tmp_path / "tables.md").read_text("utf-8").count("\n| GST-") == 260


LONG = ("gumbel-rao:samples=10, learning_rate=0.001, rate_decay=cosine", 200 * "x", "a " * 90 + "b")


def test_a_page_explains_its_columns_and_says_what_to_do_next(compare: Path, tmp_path: Path) -> None:
    (section,) = sections(compare)
    assert [name for name, _ in section.meanings] == list(section.table.columns)
    assert ("test negative ELBO (nats)", "mean over seeds; lower is better") in section.meanings
    assert section.next_step == ("For numbers to quote, run it in full:", "gapped reproduce compare")
    names = [picture.name for picture in section.pictures]
    assert names.index("test-negative-elbo") < names.index("train-negative-elbo")
    full = tmp_path / "full"
    write(full, [*many("gst:gap=auto", [1.0, 1.1]), *many("reinmax", [2.0, 2.1]), *many("rloo", [3.0, 3.1])])
    best = "--estimator gst:gap=auto --estimator reinmax --estimator rloo"
    assert sections(full)[0].next_step[1] == f"gapped compare --train module:function {best}"
    assert sections(write_vae(tmp_path / "vae"))[0].next_step[1].startswith("gapped reproduce vae")


def test_curves_share_one_legend(compare: Path) -> None:
    (section,) = sections(compare)
    labels = [name for name, _, _ in section.legend]
    assert labels
    page = write_report(compare).read_text("utf-8")
    assert page.count('<ul class="legend">') == 1
    curves = [picture.svg for picture in section.pictures if "curves" in picture.svg[:200].lower()]
    assert len(curves) > 1
    assert all(f">{label}</text>" not in svg for label in labels for svg in curves)
    for _, colour, _ in section.legend:
        assert any(colour in svg for svg in curves)


def test_an_estimator_has_one_colour_in_every_report(tmp_path: Path) -> None:
    def legend(name: str, *texts: str) -> dict[str, str]:
        runs = []
        for text in texts:
            kind, _, gap = text.partition(":gap=")
            options = {"gap": float(gap) if gap[:1].isdigit() else gap} if gap else {}
            runs += many(text, [1.0, 1.1], estimator=kind, options=options)
        write(tmp_path / name, runs)
        write_curves(tmp_path / name, runs, 2.0, 1.0)
        return {label: colour for label, colour, _ in sections(tmp_path / name)[0].legend}

    all_of_them = legend(
        "a", "gst:gap=auto", "gst:gap=1.0", "gst:gap=1.2", "reinmax", "gumbel-softmax", "rloo"
    )
    assert len(set(all_of_them.values())) == 6
    some = legend("b", "gumbel-softmax", "gst:gap=auto")
    assert some == {label: all_of_them[label] for label in some}


TREE = Tree(
    tokens=["[", "MAX", "2", "9", "]"],
    true=[[0, 2], [0, 3], [0, 4], [0, 5]],
    found=[[0, 2], [2, 4], [0, 4], [0, 5]],
    label=9,
    predicted=2,
)


def run(label: str, seed: int) -> Record:
    accuracy = 0.6 + 0.01 * seed
    metrics = {
        "test_accuracy": accuracy,
        "test_tree_f1": 0.3 + 0.02 * seed,
        "left_branching_f1": 0.75,
        "test_accuracy_length_1_to_9": 0.9,
        "test_accuracy_length_10_up": accuracy - 0.1,
        "test_accuracy_depth_2": 0.5,
        "test_accuracy_depth_10_up": 0.4,
    }
    settings = {"recipe": "listops", "protocol": "paper", "tau": 1.0, "status": "ok"}
    return record(label, seed, None, metrics=metrics, **settings)


RUNS = [run(label, seed) for label in ("STGS", "GST-1.0") for seed in (0, 1)]


def test_bins_come_in_the_order_of_their_numbers() -> None:
    rows = rows_of(cells(RUNS), "test_accuracy")
    assert binned_table(rows, "length", "tokens").columns[2:] == ("tokens 1 to 9", "tokens 10 and more")
    assert binned_table(rows, "depth", "depth").columns[2:] == ("depth 2", "depth 10 and more")
    assert next(title for title, _ in details(rows)) == "Trees"
    table = tree_table(rows)
    assert table.rows[0][4].text == "0.310 ± 0.014"
    sentence = "always branch to the left have F1 0.750; none of the 2 means above is higher"
    assert any(sentence in note for note in table.notes)


def test_the_gradient_of_the_parser_stands_beside_its_trees() -> None:
    norms = {"query_gradient_norm": 2e-6, "query_gradient_zero": 0.25}
    watched = [replace(r, metrics={**r.metrics, **norms}) if r.label == "STGS" else r for r in RUNS]
    table = tree_table(rows_of(cells(watched), "test_accuracy"))
    assert table.columns[5:] == ("query gradient", "zero steps", "seeds")
    entries = {row[0].text: [entry.text for entry in row[5:]] for row in table.rows}
    assert entries == {"STGS": ["2e-06", "25%", "2"], "GST-1.0": ["–", "–", "2"]}
    assert any(note.startswith("Query gradient: ") for note in table.notes)


def test_drawings_mark_what_the_true_parse_lacks() -> None:
    right = draw_tree(TREE, TREE.true, "the parse", "a")
    other = draw_tree(TREE, TREE.found, "a run", "a")
    ElementTree.fromstring(other)
    assert other == draw_tree(TREE, TREE.found, "a run", "a")
    assert (right.count("--series-3"), right.count("--series-2")) == (4, 0)
    assert (other.count("--series-3"), other.count("--series-2")) == (3, 1)
    assert "((([ MAX) (2 9)) ])" in other


def test_the_page_shows_trees(tmp_path: Path) -> None:
    write(tmp_path, RUNS)
    write(tmp_path, [Trees(id=r.id, examples=[TREE]) for r in RUNS[::2]])
    logged = {"valid_accuracy": [0.3, 0.5], "train_cross_entropy": [2.0, 1.0]}
    write(tmp_path, [Curve(id=r.id, epoch=[1, 2], more=logged) for r in RUNS])
    page = write_report(tmp_path).read_text("utf-8")
    for text in ("Accuracy by depth", "The true parse; the value is 9.", "GST-1.0: greedy tree, answer 2."):
        assert text in page
    assert "0.605 ± 0.007" in page
    assert "valid accuracy" in page.lower()
