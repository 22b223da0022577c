"""The documents say what the records hold: not one number in them is typed by hand."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gapped.errors import GappedError
from gapped.lab import records
from gapped.lab.cli.app import main
from gapped.lab.cli.figures import PICTURES
from gapped.lab.report.better import chosen_cell, validation_cells
from gapped.lab.report.beyond import best_of
from gapped.lab.report.blocks import DERIVED, known_blocks, render_block
from gapped.lab.report.cells import Cell
from gapped.lab.report.documents import filled, names_in, update_documents
from gapped.lab.report.drawings import draw, known_drawings
from gapped.lab.report.evidence import ELBO, PLAIN, RECTIFIED, Evidence, gather, judge
from gapped.lab.report.noise import ranges
from gapped.lab.report.paper import against_paper, paper
from gapped.lab.report.tables import rows_of, verdict_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "reproduction.md"
DOCUMENTS = [PAGE, ROOT / "docs" / "choosing.md", ROOT / "README.md"]
FIGURES = ROOT / "docs" / "figures"
# The figures that the published records can draw; that of the bench belongs to another page: test_bench.py.
DRAWN = [name for name in known_drawings(gather(RESULTS)) if name != "bench.svg"]

# The recipes of the paper's MNIST part, and how many of its numbers each must meet.
PUBLISHED = {"ablation": 10, "vae": 16, "mixed-temperature": 12, "entropy": 3, "efficiency": 8}

# Blocks of the README and of the page on choosing.
ELSEWHERE = {"best-temperatures", "demo", "headline"}

BLOCK = re.compile(r"<!-- records:[\w.-]+ -->.*?<!-- /records:[\w.-]+ -->", flags=re.S)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return gather(RESULTS)


def read(path: Path) -> str:
    return path.read_bytes().decode("utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_what_the_records_make(path: Path, evidence: Evidence) -> None:
    text = read(path)
    assert filled(evidence, text) == text, "run: gapped report results --update " + str(
        path.relative_to(ROOT)
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_an_altered_number_is_detected(path: Path, evidence: Evidence) -> None:
    """The wrong twin: any digit inside a block, changed by one, makes the document differ."""
    text = read(path)
    spots = [
        i for m in BLOCK.finditer(text) for i in range(m.start() + 30, m.end() - 30) if text[i].isdigit()
    ]
    assert len(spots) > 100
    for spot in spots[:: len(spots) // 5]:
        wrong = text[:spot] + str((int(text[spot]) + 1) % 10) + text[spot + 1 :]
        assert filled(evidence, wrong) == text != wrong


def test_prose_holds_no_results() -> None:
    """Outside of blocks, code and links, the only fractions are settings: temperatures, sections, names."""
    prose = re.sub(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", BLOCK.sub("", read(PAGE)), flags=re.M | re.S)
    prose = re.sub(r"(NZ-)?GST-\d\.\d|Section 5\.1\.2", "", prose)
    assert set(re.findall(r"\d+\.\d+", prose)) <= {"1.0", "0.5", "0.1", "0.01"}
    assert not re.search(r"\d+ (nats|seconds|minutes|times)|\d%", prose.replace("95%", ""))


def test_the_page_has_every_block_and_figure() -> None:
    text = read(PAGE)
    assert set(names_in(text)) >= {*PUBLISHED, "variance", "zoo", *DERIVED} - ELSEWHERE
    assert set(re.findall(r"\(figures/([\w.-]+)\)", text)) == set(DRAWN) - {"compare.svg"}
    # The picture of the layers is not one of results; that of the bench belongs to another page.
    assert {path.name for path in FIGURES.iterdir()} - {"bench.svg"} == {*DRAWN, *PICTURES, "layers.svg"}
    for recipe in (*PUBLISHED, "variance", "zoo", "gap-grid", "second-look", "better"):
        assert re.search(rf"^gapped reproduce (\S+ )*{recipe}( \S+)* --device cuda", text, flags=re.M), recipe
        assert f"gapped reproduce {recipe} --quick\n" in text


@pytest.mark.parametrize("name", DRAWN)
def test_figures_are_what_the_command_draws(name: str, evidence: Evidence) -> None:
    assert same_drawing(read(FIGURES / name), draw(evidence, name))


def same_drawing(one: str, other: str) -> bool:
    """All words and numbers alike, shapes to a fraction of a unit: layout differs a little by version."""

    def words(svg: str) -> list[str]:
        return re.findall(r'>([^<>]*\S[^<>]*)</(?:text|title|tspan)>|aria-label="([^"]*)"', svg)

    def shapes(svg: str) -> list[np.ndarray]:
        return [
            np.array(re.findall(r"-?\d+\.?\d*", d), dtype=float) for d in re.findall(r' d="([^"]*)"', svg)
        ]

    first, second = shapes(one), shapes(other)
    alike = len(first) == len(second) and all(
        a.shape == b.shape and np.allclose(a, b, atol=1.0) for a, b in zip(first, second, strict=True)
    )
    return alike and words(one) == words(other)


def test_an_altered_drawing_is_detected() -> None:
    svg = read(FIGURES / "variance.svg")
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
    wanted = tomllib.loads(read(ROOT / "src/gapped/lab/recipes" / f"{recipe}.toml"))["seeds"]
    assert wanted == paper()[recipe].get("seeds", wanted)
    assert [r.ours.count if r.ours else 0 for r in rows] == [wanted] * numbers
    for cell in (c for c in evidence.cells if c.recipe == recipe):
        assert [r["seed"] for r in cell.records] == list(range(len(cell.records)))
        assert not any(r["quick"] or r["status"] != "ok" for r in cell.records)


def test_the_other_recipes_are_complete(evidence: Evidence) -> None:
    assert {(c.label, len(c.records)) for c in evidence.group("variance")} == {
        ("STGS", 3),
        ("GR-MC100", 3),
        ("GST-1.0", 3),
    }
    assert all(len(evidence.group("zoo", protocol)) == 16 for protocol in (RECTIFIED, PLAIN))
    assert all(len(evidence.group("gap-grid", protocol)) == 30 for protocol in (RECTIFIED, PLAIN))
    fresh = [r["seed"] for c in evidence.group("second-look") for r in c.records]
    assert fresh == [*range(10, 20)] * 2
    marked = [r for r in against_paper(evidence.records, "vae") if r.note.startswith("paper: X")]
    assert len(marked) == 8
    assert all(r.note.endswith("fails too") for r in marked)


def test_the_chosen_cell_is_the_one_that_pick_best_picks(evidence: Evidence) -> None:
    spec = importlib.util.spec_from_file_location("pick_best", ROOT / "benchmarks" / "pick_best.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    chosen, mean, count = module.best(RESULTS)
    assert count == len(validation_cells(evidence))
    assert {key: chosen_cell(evidence).records[0].get(key) for key in chosen} == chosen
    assert all(r["split"] == "test" for r in chosen_cell(evidence).records)
    assert read(ROOT / "src/gapped/lab/recipes" / "better.toml") == module.recipe(chosen, mean, count)
    assert f"{mean:.2f} ± " in render_block(evidence, "better")


def test_the_plain_words_hold(evidence: Evidence) -> None:
    """What the closing section says without numbers."""

    def cells(protocol: str, *labels: str, tau: float | None = None) -> list[Cell]:
        group = evidence.group("zoo", protocol)
        return [c for c in group if c.label.startswith(labels) and tau in (None, c.tau)]

    def word(mine: Cell, other: Cell) -> str:
        return judge(mine.values(ELBO), other.values(ELBO))[1]

    def mean(cell: Cell) -> float:
        return float(cell.values(ELBO).mean())

    others = ("STGS", "GR-MC", "ReinMax", "Decoupled", "ST")
    for tau in (1.0, 0.5):
        rivals = [c for c in cells(RECTIFIED, *others) if len(c.records) == 10]
        assert all(
            word(g, c) == "better" for g in cells(RECTIFIED, "GST", tau=tau) for c in rivals if c.tau == tau
        )
        assert (
            min(mean(c) for c in rivals if c.tau == tau) - mean(best_of(cells(RECTIFIED, "GST", tau=tau))) > 5
        )
    gains = {
        label: mean(best_of(cells(RECTIFIED, label))) - mean(best_of(cells(PLAIN, label)))
        for label in ("STGS", "GR-MC100", "GR-MC1000", "ReinMax", "Decoupled", "GST-1.0", "GST-1.2")
    }
    assert min(gain for name, gain in gains.items() if "GST-" not in name) > max(
        gains["GST-1.0"], gains["GST-1.2"]
    )
    (best,), (gr,), stgs = (
        cells(PLAIN, "GST-1.0", tau=0.5),
        cells(PLAIN, "GR-MC100", tau=0.5)[:1],
        best_of(cells(PLAIN, "STGS")),
    )
    reinmax = best_of(cells(PLAIN, "ReinMax"))
    assert best is best_of(evidence.group("zoo", PLAIN))
    assert all(word(best, c) == "better" for c in (gr, reinmax, stgs))
    assert max(mean(gr), mean(reinmax)) - mean(best) < 2
    assert all(word(c, stgs) == "better" for c in (gr, reinmax))
    (stgs_1,), rao_1 = cells(PLAIN, "STGS", tau=1.0), evidence.cell("zoo", "GR-MC100", 1.0, PLAIN)
    assert all(word(g, stgs_1) == "not separated" for g in cells(PLAIN, "GST", tau=1.0))
    assert all(word(rao_1, g) == "better" for g in cells(PLAIN, "GST", tau=1.0))
    for protocol in (RECTIFIED, PLAIN):
        st = [c for c in cells(protocol, "ST") if c.label == "ST"]
        assert word(best_of(st), best_of(cells(protocol, "STGS"))) == "worse"
        half = [cells(protocol, label, tau=0.5)[0] for label in ("Decoupled", "STGS")]
        assert word(*half) == "worse"
    mixed = [c for c in evidence.group("mixed-temperature") if c.label.startswith("GST")]
    assert max(mean(c) for c in mixed) < 115


def test_the_plain_words_about_digits_hold(evidence: Evidence) -> None:
    """docs/choosing.md and README.md: GST does not lead there, and the least variance ends last."""
    rows = rows_of(evidence.group("compare", "digits-8x8"), ELBO)
    assert [rows[0].cell.records[0]["estimator"], rows[-1].cell.records[0]["estimator"]] == [
        "reinmax",
        "straight-through",
    ]
    assert rows[-1] is min(rows, key=lambda row: row.gradient_variance or 0.0)
    noise = {row.cell.records[0]["estimator"]: row.gradient_variance or 0.0 for row in rows}
    assert noise["gst"] > noise["gumbel-softmax"]
    assert "do not separate" in verdict_of([row.cell for row in rows])


def test_the_command_updates_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Emptied documents come back as they are; a second time nothing is written."""
    (tmp_path / "docs").mkdir()
    page, readme, figures = (
        tmp_path / "docs" / PAGE.name,
        tmp_path / "README.md",
        tmp_path / "docs" / "figures",
    )
    for path, source in ((page, PAGE), (readme, ROOT / "README.md")):
        path.write_bytes(
            re.sub(r"(<!-- records:[\w.-]+ -->).*?(<!-- /)", r"\1\2", read(source), flags=re.S).encode()
        )
    call = ["report", str(RESULTS), "--update", str(page), "--update", str(readme), "--figures", str(figures)]
    assert main(call) == 0
    assert capsys.readouterr().out.count("updated: ") == 2 + len(DRAWN)
    assert (read(page), read(readme)) == (read(PAGE), read(ROOT / "README.md"))
    assert {path.name for path in figures.iterdir()} == set(DRAWN)
    before = {path: path.stat().st_mtime_ns for path in (page, readme)}
    assert main(call[:-2]) == 0
    assert capsys.readouterr().out.count("unchanged: ") == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert read(figures / "gap-grid-plain.svg") == draw(gather(RESULTS), "gap-grid-plain.svg")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "<!-- records:nope --><!-- /records:nope -->",
            r"page.md: records:nope: no such block.*vae.*advantage",
        ),
        ("nothing to fill", r"page.md: no block to fill"),
        ("<!-- records:vae --> no end", r"page.md: records: markers do not pair up"),
        ("<!-- records:vae --><!-- records:zoo --><!-- /records:vae -->", r"markers do not pair up"),
        (
            "<!-- records:vae --><!-- /records:vae -->![x](nope.svg)",
            r"nope.svg: no such figure.*vae-final.svg",
        ),
    ],
)
def test_a_document_with_a_fault_is_one_line_and_stays(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    assert main(["report", str(RESULTS), "--update", str(page), "--figures", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1
    assert read(page) == text
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


def test_documents_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(GappedError, match=r"absent.md: cannot be read \(No such file"):
        update_documents(RESULTS, [tmp_path / "absent.md"])
    (tmp_path / "bytes.md").write_bytes(b"\xff\xfe")
    with pytest.raises(GappedError, match=r"bytes.md: cannot be read \(not UTF-8"):
        update_documents(RESULTS, [tmp_path / "bytes.md"])
    page = tmp_path / "page.md"
    page.write_text("<!-- records:vae --><!-- /records:vae -->![x](bytes.md/gap-grid-plain.svg)", "utf-8")
    with pytest.raises(GappedError, match="cannot be written"):
        update_documents(RESULTS, [page], tmp_path / "bytes.md")


def subset(folder: Path, keep: Callable[[records.Line], bool]) -> Evidence:
    lines = [line for line in records.load(RESULTS / "records.jsonl") if keep(line)]
    records.append(folder / "records.jsonl", lines)
    return gather(folder)


def test_only_blocks_that_the_records_fill_are_known(tmp_path: Path) -> None:
    """Someone's own folder has fewer recipes: what needs the others is not offered."""
    few = subset(tmp_path, lambda line: line["recipe"] in ("vae", "better"))
    assert known_blocks(few) == ["vae", "better", "headline", "speed", "listops", "latent-trees"]
    assert "chosen" in render_block(few, "better")
    assert known_drawings(few) == ["vae-final.svg", "vae-curves.svg"]
    with pytest.raises(GappedError, match="records:conclusions: no such block"):
        render_block(few, "conclusions")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("recipe", "protocol", "metrics", "figures"),
    [
        ("compare", "paper-30x10", None, ["compare.svg"]),
        ("compare", None, {ELBO: None}, ["compare.svg"]),
        ("listops", "short", None, ["listops-curves.svg"]),
        ("gap-grid", "digits-8x8", None, ["gap-grid-relu.svg", "gap-grid-plain.svg"]),
        ("vae", None, {ELBO: None}, ["vae-final.svg", "vae-curves.svg"]),
    ],
)
def test_figures_that_the_records_cannot_fill_are_left_out(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    protocol: str | None,
    metrics: dict[str, None] | None,
    figures: list[str],
) -> None:
    def other(line: records.Line) -> bool:
        line["protocol"] = protocol or line["protocol"]
        line["metrics"] = metrics or line["metrics"]
        return bool(line["recipe"] == recipe)

    evidence = subset(tmp_path, other)
    assert main(["report", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"left out, with nothing in the records to show: {tmp_path / 'figures' / name}" for name in figures
    ]
    assert not (tmp_path / "figures").exists()
    # A document that shows one is not left with a gap.
    with pytest.raises(GappedError, match=f"{figures[0]}: these records have nothing to show in it"):
        draw(evidence, figures[0])


def test_words_follow_the_numbers(tmp_path: Path) -> None:
    """Twins of the records with other results get other sentences."""

    def shifted(line: records.Line) -> bool:
        line["metrics"] = {k: v - 3 if k == ELBO else v for k, v in line["metrics"].items()}
        return True

    lower = subset(
        tmp_path, lambda line: shifted(line) if line["recipe"] in ("better", "second-look") else True
    )
    curves = {line["id"]: line for line in records.load(RESULTS / "curves.jsonl")}
    lower = Evidence(lower.records, lower.cells, curves)
    assert "**The goal of 104.0 nats was met, by 0.91 nats.**" in render_block(lower, "better")
    assert "meets the goal" in render_block(lower, "conclusions")
    assert "The fresh seeds disagree with the paper as well" in render_block(lower, "second-look")


def test_a_choice_that_is_not_the_best_is_refused(tmp_path: Path) -> None:
    wrong = subset(tmp_path, lambda line: not (line["recipe"] == "gap-grid" and line["label"] == "GST-0.8"))
    with pytest.raises(GappedError, match="does not hold the best cell"):
        render_block(wrong, "better")


def test_ranges_of_epochs() -> None:
    assert ranges(range(4, 100)) == "4 to 99"
    assert ranges([3, 1, 2, 100]) == "1 to 3 and 100"
    assert ranges([]) == "none"
