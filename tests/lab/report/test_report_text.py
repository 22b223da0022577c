"""The report as text: Markdown, the terminal, and which modules it may import."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_records import write_compare, write_vae

import gapped_lab.report
from gapped.cli.command import console
from gapped.errors import GappedError
from gapped_lab.cli.report import report
from gapped_lab.report.cells import finished_runs
from gapped_lab.report.rendering import render_markdown, show


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
