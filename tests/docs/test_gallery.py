"""Every example has a page with picture, command and notebook, and a card; the notebook runs."""

from __future__ import annotations

import ast
import json
import re
import runpy
import time
from pathlib import Path
from typing import Any

import pytest
from doc_pages import EXAMPLE_PAGES, ROOT, blocks_of, commands_in

import gapped
from gapped_lab.estimator_text import parse

HELPERS = {"common", "picture"}
SCRIPTS = {path.stem: path for path in (ROOT / "examples").glob("*.py") if path.stem not in HELPERS}
PAGES = {page.stem: page.read_text("utf-8") for page in EXAMPLE_PAGES}


def first_line(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").partition("\n")[0]


@pytest.fixture(scope="module")
def gallery() -> dict[str, Any]:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    return runpy.run_path(str(ROOT / "docs" / "_ext" / "gallery.py"))


def test_every_script_has_a_page() -> None:
    assert set(PAGES) == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_has_title_line_picture_and_command(name: str) -> None:
    page = PAGES[name]
    assert page.startswith("# ")
    assert page.splitlines()[2] == first_line(SCRIPTS[name]), "one line says what the example shows"
    pictures = re.findall(r"!\[(.+?)\]\((\S+)\)", page)
    assert pictures
    assert all((ROOT / "docs" / "examples" / path).is_file() for _, path in pictures)
    shell = [block for block in blocks_of(page) if block.language == "bash"]
    commands = [call for block in shell for run in ("python", "torchrun") for call in commands_in(block, run)]
    assert any(f"examples/{name}.py" in call for call in commands)


@pytest.mark.parametrize("name", SCRIPTS)
def test_outputs_begin_with_the_default_and_name_estimators_that_exist(name: str) -> None:
    """The output of a command is on the page: its rows are estimators, the recommended one first."""
    for block in blocks_of(PAGES[name]):
        if block.language == "text":
            rows = re.findall(r"^\| (?:tuned: )?([a-z]\S+) +\|", block.code, flags=re.M)[1:]
            assert rows[0] == "gapmax"
            for row in rows:
                parse(row)


def test_the_cards_are_those_of_the_pages() -> None:
    index = (ROOT / "docs" / "examples.md").read_text("utf-8")
    tool = runpy.run_path(str(ROOT / "tools" / "gallery.py"))
    assert tool["listing"](index) == index, "python tools/gallery.py --list"
    pages = [page for page in PAGES.values() if "<!-- standing -->" in page]
    assert len(pages) > 9
    assert all(tool["standing"](page) == page for page in pages), "python tools/gallery.py --list"
    assert set(re.findall(r"^examples/(\w+)$", index, flags=re.M)) == set(SCRIPTS)
    for name, script in SCRIPTS.items():
        assert f"(examples/{name}.md)**\n\n  {first_line(script)}\n" in index


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_notebook_is_valid_and_whole(gallery: dict[str, Any], name: str) -> None:
    notebook = json.loads(json.dumps(gallery["notebook"](SCRIPTS[name])))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    text, *code = notebook["cells"]
    assert text["cell_type"] == "markdown"
    assert first_line(SCRIPTS[name]) in "".join(text["source"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    trees = [ast.parse("".join(cell["source"])) for cell in code]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    # Every function and class of the script is there, and nothing comes from another file of the examples.
    defined = {node.name for tree in trees for node in tree.body if hasattr(node, "name")}
    script = ast.parse(SCRIPTS[name].read_text("utf-8"))
    assert defined >= {node.name for node in script.body if hasattr(node, "name")}
    imported = {node.module for tree in trees for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not imported & HELPERS


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_names_the_files_that_the_script_needs(gallery: dict[str, Any], name: str) -> None:
    text = gallery["downloads"](name, notebook=True)
    assert text.index(f"{name}.ipynb") < text.index(f"{name}.py")
    linked = {Path(link).stem for link in re.findall(r"\]\((\S+)\)", text)}
    missing = {name}
    for _ in range(3):  # what a script imports, what that imports, and nothing new
        trees = [ast.parse((ROOT / "examples" / f"{each}.py").read_text("utf-8")) for each in missing]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        missing |= modules & HELPERS
    assert linked == missing


def test_a_notebook_runs_from_top_to_bottom(
    gallery: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [])
    space: dict[str, Any] = {"__name__": "__main__"}
    for cell in gallery["notebook"](SCRIPTS["quickstart"])["cells"][1:]:
        code = "".join(cell["source"]).replace(
            "'quickstart.py']", "'quickstart.py', '--steps', '1', '--seeds', '1']"
        )
        exec(compile(code, cell["id"], "exec"), space)
    printed = capsys.readouterr()
    assert "| gapmax " in printed.out
    assert "\n1 steps, seed 0" in printed.out
    assert first_line(SCRIPTS["quickstart"]) in printed.err


CELLS = json.loads((ROOT / "examples" / "two_minutes.ipynb").read_text("utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_it_holds_no_output() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_it_runs_from_top_to_bottom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("matplotlib", "sklearn"):
        pytest.importorskip(package, reason="of the extra lab")
    monkeypatch.setenv("MPLBACKEND", "agg")
    space: dict[str, Any] = {}
    began = time.process_time()
    for cell in CODE:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
    assert time.process_time() - began < 120
    result, diagnosis = space["result"], space["diagnosis"]
    assert isinstance(result, gapped.Comparison)
    assert not any(record.failed for record in result.records)
    assert "<table" in result._repr_html_()
    assert diagnosis.reference.startswith("exact"), "few enough choices to enumerate"
    assert len(diagnosis.rows) == 4
    means = {row.label: row.value.mean for row in result.rows}
    assert min(means.values()) < 5, "it has learned something: it begins above 10"
    assert "tensor" in capsys.readouterr().out
