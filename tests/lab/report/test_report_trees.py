"""ListOps in the report: tables, brackets, drawings, curves, and a page without any such run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from gapped.lab.report import figures
from gapped.lab.report.cells import cells, read
from gapped.lab.report.html import write_report
from gapped.lab.report.markdown import render_markdown
from gapped.lab.report.tables import rows_of
from gapped.lab.report.trees import binned_table, brackets, details, draw_tree, tree_table

TOKENS = ["[", "MAX", "2", "9", "]"]
TRUE = [[0, 2], [0, 3], [0, 4], [0, 5]]
FOUND = [[0, 2], [2, 4], [0, 4], [0, 5]]


def record(label: str, seed: int, accuracy: float, **metrics: float) -> dict[str, Any]:
    found = {
        "test_accuracy": accuracy,
        "test_tree_f1": 0.3 + 0.02 * seed,
        "left_branching_f1": 0.75,
        "test_accuracy_length_1_to_9": 0.9,
        "test_accuracy_length_10_up": accuracy - 0.1,
        "test_accuracy_depth_2": 0.5,
        "test_accuracy_depth_10_up": 0.4,
        **metrics,
    }
    return {
        "schema": 1, "id": f"{label}{seed}", "recipe": "listops", "label": label, "task": "listops",
        "protocol": "paper", "estimator": "gst", "options": {}, "tau": 1.0, "seed": seed, "epochs": 20,
        "status": "ok", "metrics": found, "seconds": 60.0, "runs_in_fleet": 4,
        "environment": {"device": "a device"},
    }  # fmt: skip


def folder(path: Path) -> Path:
    lines = [record(label, seed, 0.6 + 0.01 * seed) for label in ("STGS", "GST-1.0") for seed in (0, 1)]
    example = {"tokens": TOKENS, "label": 9, "predicted": 2, "true": TRUE, "found": FOUND}
    trees = [{"id": line["id"], "examples": [example]} for line in lines[::2]]
    curves = [
        {"id": line["id"], "epoch": [1, 2], "valid_accuracy": [0.3, 0.5], "train_cross_entropy": [2.0, 1.0]}
        for line in lines
    ]
    for name, rows in (("records", lines), ("trees", trees), ("curves", curves)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_shorter_training_than_the_paper_s_is_said(tmp_path: Path) -> None:
    records = read(folder(tmp_path))
    said = "Trained for {} epochs; the paper's runs have 20."
    for epochs, quick, expected in ((10, False, True), (20, False, False), (10, True, False)):
        block = render_markdown([{**r, "epochs": epochs, "quick": quick} for r in records], "listops")
        assert (said.format(epochs) in block) is expected


def test_runs_of_different_lengths_are_not_mixed(tmp_path: Path) -> None:
    records = read(folder(tmp_path))
    shorter = [{**r, "id": f"{r['id']}-10", "epochs": 10, "metrics": {"test_accuracy": 0.1}} for r in records]
    block = render_markdown([*shorter, *records], "listops")
    assert block == render_markdown(records, "listops")
    assert "| STGS | 1 | 0.100 ± 0.000 | 2 |" in render_markdown(shorter, "listops")


def test_bins_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    rows = rows_of(cells(read(folder(tmp_path))), "test_accuracy")
    assert binned_table(rows, "length", "tokens").columns[2:] == ("tokens 1 to 9", "tokens 10 and more")
    assert binned_table(rows, "depth", "depth").columns[2:] == ("depth 2", "depth 10 and more")
    assert next(title for title, _ in details(rows)) == "Trees"
    assert tree_table(rows).rows[0][4].text == "0.310 ± 0.014"


def test_records_without_trees_have_no_such_tables(tmp_path: Path) -> None:
    lines = [{**record("STGS", 0, 0.5), "metrics": {"test_negative_elbo": 100.0}, "recipe": "vae"}]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert details(rows_of(cells(read(tmp_path)))) == []


def test_brackets_spell_the_spans() -> None:
    assert brackets(TOKENS, TRUE) == "(((([ MAX) 2) 9) ])"
    assert brackets(["7"], []) == "7"


def test_drawings_mark_what_the_true_parse_lacks() -> None:
    example = {"tokens": TOKENS, "true": TRUE, "found": FOUND}
    right = draw_tree(example, "true", "the parse", "a")
    found = draw_tree(example, "found", "a run", "a")
    ElementTree.fromstring(found)
    assert found == draw_tree(example, "found", "a run", "a")
    assert right.count("--series-3") == 4
    assert "--series-2" not in right
    assert (found.count("--series-3"), found.count("--series-2")) == (3, 1)
    assert "((([ MAX) (2 9)) ])" in found


def test_the_page_shows_trees(tmp_path: Path) -> None:
    page = write_report(folder(tmp_path)).read_text("utf-8")
    for expected in (
        "Accuracy by depth",
        "The true parse; the value is 9.",
        "GST-1.0: greedy tree, answer 2.",
    ):
        assert expected in page
    assert "valid accuracy" in page.lower()


def test_every_run_that_is_drawn_is_in_view(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([[0.2, 0.5, 0.6, 0.65], [0.3, 0.5, 0.6, 0.72], [0.25, 0.5, 0.6, 0.66]])
    views: list[tuple[float, float]] = []

    def look(figure: Figure, *rest: object) -> str:
        views.append(figure.axes[0].get_ylim())
        return ""

    monkeypatch.setattr(figures, "to_svg", look)
    figures.learning_curves([figures.Curve("STGS", "STGS", np.arange(1.0, 5.0), values)], "it", runs=True)
    ((low, high),) = views
    assert low <= 0.2
    assert high >= 0.72
