"""Which runs belong together, how cells are ranked, what is said of lost runs; the report as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from report_records import ELBO, many, record, write_compare, write_vae

import gapped_lab.report
from gapped.cli.app import main
from gapped.cli.command import console
from gapped.comparison.records import Record, write
from gapped.comparison.statistics import summary
from gapped.errors import GappedError
from gapped_lab.cli.report import report
from gapped_lab.report.cells import cells, finished_runs, groups, pace, rows_of, summary_table
from gapped_lab.report.paper import against_paper
from gapped_lab.report.rendering import render_markdown, show, to_markdown


def test_rows_are_best_first_and_count_what_was_lost() -> None:
    runs = many("B", [5.0, 6.0, 7.0]) + many("A", [1.0, 2.0, None]) + many("lost", [None])
    rows = rows_of(cells(runs))
    assert [r.label for r in rows] == ["A", "B", "lost"]
    assert rows[0].value == summary([1.0, 2.0])
    assert [r.diverged for r in rows] == [1, 0, 1]
    assert isnan(pace(rows[0].cell)), "the time of a fleet is not its runs' own"
    assert not any(name.startswith("ms") for name in summary_table(rows).columns)


def test_runs_that_trained_alone_have_a_time() -> None:
    # 30 s for 20 epochs.
    runs = many("A", [1.0, 2.0], runs_in_fleet=1)
    rows = rows_of(cells(runs))
    assert pace(rows[0].cell) == pytest.approx(1.5)
    assert summary_table(rows).columns[-1] == "ms / epoch"
    measured = [replace(run, metrics={**run.metrics, "seconds_per_epoch": 0.05}) for run in runs]
    assert pace(cells(measured)[0]) == pytest.approx(0.05), "without what compiling took"


def test_a_label_of_two_estimators_is_two_cells() -> None:
    def runs(text: str) -> list[Record]:
        mine = many("mine", [1.0, 2.0], metric=ELBO, estimator=text)
        return [replace(r, id=f"{r.id} {text}") for r in mine]

    both = [*runs("gst:tau=1"), *runs("gst:tau=2")]
    assert [(c.label, len(c.records)) for c in cells(both)] == [
        ("mine (gst:tau=1)", 2),
        ("mine (gst:tau=2)", 2),
    ]
    assert [c.label for c in cells(both[:2])] == ["mine"]


def test_accuracy_sorts_downward_and_shows_three_digits() -> None:
    runs = [
        record(label, seed, None, status="ok", metrics={"test_accuracy": seed / 10 + lead})
        for label, lead in (("B", 0.0), ("A", 0.5))
        for seed in range(3)
    ]
    rows = rows_of(cells(runs))
    assert [r.label for r in rows] == ["A", "B"]
    assert "| A | 0.5 | 0.600 |" in to_markdown(summary_table(rows))


def test_data_sets_are_not_mixed() -> None:
    settings = {"recipe": "listops", "protocol": "paper", "tau": 1.0, "metrics": {"test_accuracy": 0.66}}
    runs = many("STGS", [1.0, 1.0], data="listops", **settings)
    others = [
        replace(r, id=f"{r.id} too", data="listops (generated)", metrics={"test_accuracy": 0.9}) for r in runs
    ]
    assert {key: len(group[0].records) for key, group in groups([*runs, *others]).items()} == {
        ("listops", "paper"): 2,
        ("listops", "paper on listops (generated)"): 2,
    }
    (beside,) = (row for row in against_paper([*runs, *others], "listops") if row.ours)
    assert beside.ours == summary([0.66, 0.66])
    assert not any(row.ours for row in against_paper(others, "listops"))


def test_nothing_to_report_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(GappedError, match=r"no records.jsonl in it"):
        finished_runs(tmp_path)
    (tmp_path / "records.jsonl").touch()
    with pytest.raises(GappedError, match="no finished run yet"):
        finished_runs(tmp_path)


def test_failed_runs_are_named_wherever_a_report_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But not those that a later attempt has finished, and not only beside others."""
    lost = [replace(r, status="failed", error="RuntimeError: <b>") for r in many("GST", [1.0, 2.0, 3.0])]
    write(tmp_path, lost)
    with pytest.raises(GappedError, match="no finished run yet, compare: 3 runs of GST failed: RuntimeError"):
        finished_runs(tmp_path)
    write(tmp_path, [*many("ST", [4.0, 5.0]), *many("GST", [1.0])])
    assert main(["report", str(tmp_path)]) == 0
    sentence = "compare: 2 runs of GST failed: RuntimeError: "
    assert f"{sentence}<b>" in capsys.readouterr().out
    assert f"{sentence}\\<b\\>" in (tmp_path / "tables.md").read_text()
    assert f"{sentence}&lt;b&gt;" in (tmp_path / "report.html").read_text()


def test_markdown_states_where_it_comes_from(tmp_path: Path) -> None:
    records = finished_runs(write_vae(tmp_path))
    text = render_markdown(records, "vae")
    assert "`gapped reproduce vae` on NVIDIA H200: 190 runs in 2.2 minutes." in text
    assert "| GST-1.2 | 0.5 |" in text
    with pytest.raises(GappedError, match=r"recipe: got 'nope'.*vae"):
        render_markdown(records, "nope")


def test_the_command_prints_table_verdict_and_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_compare(tmp_path)
    report(folder, None)
    shown = capsys.readouterr().out
    assert "GST-1.0" in shown
    assert "ST: 1 of 3 runs diverged" in " ".join(shown.split())
    assert str(folder / "report.html") in shown.replace("\n", "")
    assert "gapped compare" in (folder / "tables.md").read_text("utf-8")


@pytest.mark.parametrize("fill", [write_compare, write_vae])
def test_tables_fit_an_ordinary_terminal(
    tmp_path: Path, fill: Callable[[Path], Path], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = finished_runs(fill(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    show(records, console())
    narrow = capsys.readouterr().out
    monkeypatch.delenv("COLUMNS")
    show(records, console())
    wide = capsys.readouterr().out
    numbers = r"[-+]?\d+\.\d+(?:e-\d+)?|≠"
    assert re.findall(numbers, narrow) == re.findall(numbers, wide)
    assert max(len(line.rstrip()) for line in narrow.splitlines() if " has the " not in line) <= 80


def test_the_report_needs_no_other_layer() -> None:
    allowed = ("gapped.errors", "gapped.comparison", "gapped.cli.command", "gapped_lab.re")
    for path in Path(gapped_lab.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert module.split(".")[0] != "torch", path
                assert not module.startswith("gapped") or module.startswith(allowed), (path, module)
