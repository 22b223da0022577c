"""ListOps in the report: tables, brackets, drawings and curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from report_records import record

from gapped.comparison.records import Curve, Record, write
from gapped_lab.records import Tree, Trees
from gapped_lab.report.cells import cells, rows_of
from gapped_lab.report.page import write_report
from gapped_lab.report.trees import binned_table, details, draw_tree, tree_table

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
