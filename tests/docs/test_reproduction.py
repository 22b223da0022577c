"""The tables and figures of the documents are what the records make."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from blocks import BLOCK, BLOCKS, fill_blocks
from board import render_board
from doc_pages import same_drawing
from drawings import DRAWINGS
from evidence import PLAIN, RECTIFIED, Evidence, gather
from field_board import contests
from update import BOARD, DOCUMENTS, FIGURES, ROOT, update

from gapped.errors import GappedError
from gapped_lab.cli.reproduce import PICTURES
from gapped_lab.recipe import find_recipe, recipe_from
from gapped_lab.recipe_files import ANSWERED
from gapped_lab.report.cells import cells
from gapped_lab.report.paper import against_paper, paper

RESULTS = ROOT / "results"
PAGE = "docs/reproduction.md"
RECIPES = ROOT / "lab" / "gapped_lab" / "recipes"

# The recipes of the paper's MNIST part, and how many of its numbers each must meet.
PUBLISHED = {"ablation": 10, "vae": 16, "mixed-temperature": 12, "entropy": 3, "efficiency": 8}


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return gather(RESULTS)


def read(name: str) -> str:
    return (ROOT / name).read_bytes().decode("utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_what_the_records_make(name: str, evidence: Evidence) -> None:
    assert fill_blocks(evidence, read(name)) == read(name), "run: make numbers"


def test_the_board_is_what_the_records_make(evidence: Evidence) -> None:
    assert render_board(evidence.records, contests()) == read(BOARD), "run: make numbers"


@pytest.mark.slow_if(lambda name: name in ("docs/field.md", "docs/defaults.md"))
@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_altered_number_is_detected(name: str, evidence: Evidence) -> None:
    """The wrong twin: any digit inside a block, changed by one, makes the document differ."""
    text = read(name)
    spots = [
        i for m in BLOCK.finditer(text) for i in range(m.start() + 30, m.end() - 30) if text[i].isdigit()
    ]
    assert len(spots) > 60
    for spot in spots[:: len(spots) // 5]:
        wrong = text[:spot] + str((int(text[spot]) + 1) % 10) + text[spot + 1 :]
        assert fill_blocks(evidence, wrong) == text != wrong


def test_a_record_that_changes_changes_the_table(evidence: Evidence) -> None:
    records = [replace(r, status="diverged") if r.recipe == "ablation" else r for r in evidence.records]
    changed = replace(evidence, records=records, cells=cells(records))
    assert fill_blocks(changed, read(PAGE)) != read(PAGE)


def test_every_block_and_figure_is_shown() -> None:
    text = read(PAGE)
    names = {match[1] for name in DOCUMENTS for match in BLOCK.finditer(read(name))}
    assert names >= {*BLOCKS, *PUBLISHED, "variance", "coupled", "listops"}
    assert set(re.findall(r"\bfigures/([\w.-]+)\)", "".join(map(read, DOCUMENTS)))) >= set(DRAWINGS)
    # The picture of the layers is not one of results, and examples draw their own.
    others = {"layers.svg", "discrete-vae.png", "examples"}
    assert {path.name for path in (ROOT / FIGURES).iterdir()} == {*DRAWINGS, *PICTURES} | others
    for recipe in (*PUBLISHED, "variance"):
        assert re.search(rf"^gapped reproduce (\S+ )*{recipe}( \S+)* --device cuda", text, flags=re.M), recipe
        assert f"gapped reproduce {recipe} --quick\n" in text


def test_text_that_no_command_writes_says_when_it_was_written() -> None:
    """A section with decimals outside of its tables has the date and the commit of its records."""
    note = re.compile(r"^\*Written on \d+ \w+ \d{4}, from the records at commit [0-9a-f]{7,}\.\*$", re.M)
    sections = re.split(r"^(?=#)", BLOCK.sub("", read(PAGE)), flags=re.M)
    dated = [section for section in sections if note.search(section)]
    assert len(dated) > 15
    for section in sections:
        if re.search(r"^\|.*\d\.\d\d", section, re.M):
            assert section in dated, section.partition("\n")[0]


@pytest.mark.parametrize("name", DRAWINGS)
def test_figures_are_what_the_command_draws(name: str, evidence: Evidence) -> None:
    assert same_drawing(read(f"{FIGURES}/{name}"), DRAWINGS[name](evidence))


def test_an_altered_drawing_is_detected() -> None:
    svg = read(f"{FIGURES}/variance.svg")
    curve = max(re.findall(r' d="([^"]*)"', svg), key=len)
    numbers = re.findall(r"\d+\.\d+", curve)
    bent = svg.replace(curve, curve.replace(numbers[41], f"{float(numbers[41]) + 5:.6f}", 1))
    assert bent != svg
    assert same_drawing(svg, svg)
    assert not same_drawing(svg, bent)
    assert not same_drawing(svg, svg.replace("epoch 100: ", "epoch 100: 1", 1))


@pytest.mark.parametrize(("recipe", "numbers"), PUBLISHED.items())
def test_every_published_cell_has_its_seeds(recipe: str, numbers: int, evidence: Evidence) -> None:
    rows = [r for r in against_paper(evidence.records, recipe) if r.paper_mean is not None]
    assert len(rows) == numbers
    seeds = tomllib.loads((RECIPES / f"{recipe}.toml").read_text("utf-8"))["seeds"]
    assert seeds == paper()[recipe].get("seeds", seeds)
    assert [r.ours.count if r.ours else 0 for r in rows] == [seeds] * numbers
    for cell in (c for c in evidence.cells if c.recipe == recipe):
        assert [r.seed for r in cell.records] == list(range(len(cell.records)))
        assert not any(r.quick or r.status != "ok" for r in cell.records)


def test_the_other_recipes_are_complete(evidence: Evidence) -> None:
    variance = {c.label: len(c.records) for c in evidence.group("variance")}
    assert variance == {"STGS": 3, "GR-MC100": 3, "GST-1.0": 3}
    assert all(len(evidence.group("zoo", protocol)) == 16 for protocol in (RECTIFIED, PLAIN))
    assert all(len(evidence.group("gap-grid", protocol)) == 30 for protocol in (RECTIFIED, PLAIN))
    assert [r.seed for c in evidence.group("second-look") for r in c.records] == [*range(10, 20)] * 2
    marked = [r for r in against_paper(evidence.records, "vae") if r.note.startswith("paper: X")]
    assert len(marked) == 8


def test_answered_recipes_stand_beside_the_records() -> None:
    folder = RESULTS / "answered"
    index = (folder / "README.md").read_text("utf-8")
    assert sorted(ANSWERED) == sorted(path.stem for path in folder.glob("*.toml"))
    for name in ANSWERED:
        assert f"({name}.toml)" in index
        with pytest.raises(GappedError, match=rf"^recipe: '{name}' has been answered.*/{name}\.toml$"):
            find_recipe(name)


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """The documents, with nothing in their blocks."""
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        emptied = BLOCK.sub(r"<!-- records:\1 --><!-- /records:\1 -->", read(name))
        (tmp_path / name).write_bytes(emptied.encode())
    return tmp_path


@pytest.mark.slow
def test_emptied_documents_come_back_as_they_are(copies: Path) -> None:
    """A second time nothing is written."""
    figures = [f"{FIGURES}/{name}" for name in DRAWINGS]
    assert update(copies) == [copies / name for name in (*DOCUMENTS, *figures, BOARD)]
    for name in DOCUMENTS:
        assert (copies / name).read_bytes() == (ROOT / name).read_bytes()
    assert update(copies) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- records:nope --><!-- /records:nope -->", "records:nope: recipe: got 'nope', expected .*vae"),
        ("nothing to fill", "expected pairs of"),
        ("<!-- records:vae --> no end", "expected pairs of"),
        ("<!-- records:vae --><!-- records:zoo --><!-- /records:vae -->", "expected pairs of"),
    ],
)
def test_a_document_with_a_fault_is_named_and_nothing_is_written(
    text: str, message: str, copies: Path
) -> None:
    (copies / PAGE).write_text(text, encoding="utf-8")
    before = (copies / "README.md").read_bytes()
    with pytest.raises(GappedError, match=f"{PAGE}: {message}"):
        update(copies)
    assert (copies / "README.md").read_bytes() == before
    assert not (copies / FIGURES).exists()


def test_the_recipe_for_an_estimator_of_one_s_own_is_as_short_as_promised() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", read("docs/field.md"), re.S)
    recipe = recipe_from(tomllib.loads(text), "mine.toml")
    assert len(text.splitlines()) <= 20
    assert {entry.label for entry in recipe.entries} == {"default", "mine"}
    assert len({entry.spec.protocol for entry in recipe.entries}) == 6
