"""The documents say what the records hold: their blocks, verdicts and figures are what the records make."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from beyond import best_of, chosen_cell, validation_cells
from blocks import BLOCK, BLOCKS, filled, render_block
from claims import CLAIMS
from drawings import DRAWINGS
from evidence import ELBO, PLAIN, RECTIFIED, Evidence, gather, judge, lead
from field_board import contests
from svg_compare import same_drawing
from tiny_images import REAL_DATA
from update import BOARD, DOCUMENTS, FIGURES, ROOT, update
from variance import ranges
from verdicts import FAILS, HOLDS, OPEN, RELU_ONLY, Pair, decide

from gapped.errors import GappedError
from gapped_lab import data
from gapped_lab.cli.reproduce import PICTURES
from gapped_lab.recipe import find_recipe, recipe_from
from gapped_lab.recipe_files import known_recipes
from gapped_lab.records import Record
from gapped_lab.report.cells import Cell, cells, rows_of, verdict_of
from gapped_lab.report.page import render_board
from gapped_lab.report.paper import against_paper, field, paper
from gapped_lab.report.statistics import Difference
from gapped_lab.tasks import vae_protocol

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
    assert filled(evidence, read(name)) == read(name), "run: make numbers"


def test_the_board_is_what_the_records_make(evidence: Evidence) -> None:
    assert render_board(evidence.records, contests()) == read(BOARD), "run: make numbers"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_altered_number_is_detected(name: str, evidence: Evidence) -> None:
    """The wrong twin: any digit inside a block, changed by one, makes the document differ."""
    text = read(name)
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
    prose = re.sub(r"(NZ-)?GST-\d\.\d|Section \d(\.\d)+", "", prose)
    assert set(re.findall(r"\d+\.\d+", prose)) <= {"1.0", "0.5", "0.1", "0.01"}
    assert not re.search(r"\d+ (nats|seconds|minutes|times)|\d%", prose.replace("95%", ""))


def test_every_block_and_figure_is_shown(evidence: Evidence) -> None:
    text = read(PAGE)
    names = {match[1] for name in DOCUMENTS for match in BLOCK.finditer(read(name))}
    assert names >= {*BLOCKS, *PUBLISHED, "variance", "zoo"}
    assert set(re.findall(r"\bfigures/([\w.-]+)\)", "".join(map(read, DOCUMENTS)))) >= set(DRAWINGS)
    # The picture of the layers is not one of results, and examples draw their own.
    others = {"layers.svg", "discrete-vae.png", "examples"}
    assert {path.name for path in (ROOT / FIGURES).iterdir()} == {*DRAWINGS, *PICTURES} | others
    for recipe in (*PUBLISHED, "variance", "zoo", "gap-grid", "second-look", "better"):
        assert re.search(rf"^gapped reproduce (\S+ )*{recipe}( \S+)* --device cuda", text, flags=re.M), recipe
        assert f"gapped reproduce {recipe} --quick\n" in text


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


def test_the_chosen_cell_is_the_one_that_pick_best_picks(evidence: Evidence) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "pick_best.py"))
    settings, mean, count = script["best"](RESULTS)
    assert count == len(validation_cells(evidence))
    assert {key: getattr(chosen_cell(evidence).records[0], key) for key in settings} == settings
    assert all(r.split == "test" for r in chosen_cell(evidence).records)
    assert (RECIPES / "better.toml").read_text("utf-8") == script["recipe"](settings, mean, count)
    assert f"{mean:.2f} ± " in render_block(evidence, "better")


def test_each_cell_can_have_a_process_of_its_own() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "one_by_one.py"))
    whole = find_recipe("efficiency", quick=True).entries
    texts = script["single_cells"]((RECIPES / "efficiency.toml").read_text("utf-8"))
    parts = [recipe_from(tomllib.loads(text), "part.toml", quick=True).entries for text in texts]
    assert [part for (part,) in parts] == list(whole)


def test_the_plain_words_hold(evidence: Evidence) -> None:
    """What the closing section of the page says without numbers."""

    def select(protocol: str, *labels: str, tau: float | None = None) -> list[Cell]:
        group = evidence.group("zoo", protocol)
        return [c for c in group if c.label.startswith(labels) and tau in (None, c.tau)]

    def word(mine: Cell, other: Cell) -> str:
        return judge(lead(mine, other))

    def mean(cell: Cell) -> float:
        return float(cell.values(ELBO).mean())

    others = ("STGS", "GR-MC", "ReinMax", "Decoupled", "ST")
    for tau in (1.0, 0.5):
        rivals = [c for c in select(RECTIFIED, *others, tau=tau) if len(c.records) == 10]
        ours = select(RECTIFIED, "GST", tau=tau)
        assert all(word(g, c) == "better" for g in ours for c in rivals)
        assert min(map(mean, rivals)) - mean(best_of(ours)) > 5
    labels = ("STGS", "GR-MC100", "GR-MC1000", "ReinMax", "Decoupled", "GST-1.0", "GST-1.2")
    gains = {
        label: mean(best_of(select(RECTIFIED, label))) - mean(best_of(select(PLAIN, label)))
        for label in labels
    }
    assert min(gains[label] for label in labels[:5]) > max(gains[label] for label in labels[5:])
    best, rao = (evidence.cell("zoo", label, 0.5, PLAIN) for label in ("GST-1.0", "GR-MC100"))
    stgs, reinmax = (best_of(select(PLAIN, label)) for label in ("STGS", "ReinMax"))
    assert best is best_of(evidence.group("zoo", PLAIN))
    assert all(word(best, c) == "better" for c in (rao, reinmax, stgs))
    assert max(mean(rao), mean(reinmax)) - mean(best) < 2
    assert all(word(c, stgs) == "better" for c in (rao, reinmax))
    stgs_1, rao_1 = (evidence.cell("zoo", label, 1.0, PLAIN) for label in ("STGS", "GR-MC100"))
    assert all(word(g, stgs_1) == "not separated" for g in select(PLAIN, "GST", tau=1.0))
    assert all(word(rao_1, g) == "better" for g in select(PLAIN, "GST", tau=1.0))
    for protocol in (RECTIFIED, PLAIN):
        plain = [c for c in select(protocol, "ST") if c.label == "ST"]
        assert word(best_of(plain), best_of(select(protocol, "STGS"))) == "worse"
        half = (evidence.cell("zoo", label, 0.5, protocol) for label in ("Decoupled", "STGS"))
        assert word(*half) == "worse"
    mixed = [c for c in evidence.group("mixed-temperature") if c.label.startswith("GST")]
    assert max(map(mean, mixed)) < 115


def test_the_plain_words_about_digits_hold(evidence: Evidence) -> None:
    """docs/choosing.md and README.md: GST does not lead there, and the least variance ends last."""
    rows = rows_of(evidence.group("compare", "digits-8x8"), ELBO)
    variance = {row.cell.records[0].estimator: row.gradient_variance or 0.0 for row in rows}
    assert next(iter(variance)) == "reinmax"
    assert list(variance)[-1] == min(variance, key=lambda name: variance[name]) == "straight-through"
    assert variance["gst"] > variance["gumbel-softmax"]
    assert "do not separate" in verdict_of([row.cell for row in rows])


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """The documents, with nothing in their blocks."""
    for name in DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        emptied = BLOCK.sub(r"<!-- records:\1 --><!-- /records:\1 -->", read(name))
        (tmp_path / name).write_bytes(emptied.encode())
    return tmp_path


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


def altered(evidence: Evidence, change: Callable[[Record], Record]) -> Evidence:
    runs = [change(record) for record in evidence.records]
    return replace(evidence, records=runs, cells=cells(runs))


@pytest.mark.parametrize(
    ("recipe", "label", "shift", "block", "claim"),
    [
        ("better", "chosen", -3, "better", "more epochs reach further than the choice"),
        ("better", "chosen", 3, "better", "the chosen cell is below the paper's best and our own"),
        ("mixed-temperature", "GST-1.2", -3, "mixed-findings", "no mixed training is ahead"),
        ("coupled", "GST-1.2", -3, "coupled-findings", r"GST-1.2 \(τ=0.5\) is not separated from GR-MC100"),
        ("second-look", "GST-1.2", -3, "second-look", r"the fresh seeds of GST-1.2 \(τ=1\) agree"),
        ("vae", "GST-0.8", -150, "failing", "all cells marked X fail"),
        ("coupled", "STGS", 20, "coupled-findings", r"STGS \(τ=0.5\) is better than DisARM-Tree"),
        ("coupled", "RLOO", 20, "coupled-findings", "DisARM-Tree is not separated from RLOO"),
        ("zoo", "GST-1.0", -3, "conclusions", r"GR-MC100 \(τ=1\) is better than GST-1.0 \(τ=1\)"),
    ],
)
def test_a_sentence_that_the_records_do_not_carry_is_refused(
    recipe: str, label: str, shift: float, block: str, claim: str, evidence: Evidence
) -> None:
    def change(r: Record) -> Record:
        metrics = {ELBO: r.metrics.get(ELBO, 0.0) + shift}
        return replace(r, metrics=metrics) if (r.recipe, r.label) == (recipe, label) else r

    with pytest.raises(GappedError, match=f"records:{block}: the records no longer show that {claim}"):
        render_block(altered(evidence, change), block)


@pytest.mark.parametrize(
    ("recipe", "protocol", "label", "shift", "claim", "verdicts"),
    [
        ("vae", RECTIFIED, "GST-1.0", 30, "comparison", (RELU_ONLY, FAILS)),
        ("zoo", PLAIN, "GST", -30, "comparison", (RELU_ONLY, HOLDS)),
        ("zoo", PLAIN, "GST", -30, "best_setting", (RELU_ONLY, HOLDS)),
        ("ablation", RECTIFIED, "GST-0.0", -7, "ablation", (HOLDS, OPEN)),
        ("ablation", RECTIFIED, "GST-0.0", -30, "ablation", (HOLDS, FAILS)),
        ("vae", RECTIFIED, "GST-pi", -8, "expected", (HOLDS, FAILS)),
        ("mixed-temperature", RECTIFIED, "", -30, "gain", (FAILS, HOLDS)),
        ("mixed-temperature", RECTIFIED, "GR-MC100", 4, "mixed", (HOLDS, OPEN)),
        ("coupled", "paper-32x64", "GR-MC100", 5, "coupled", (OPEN, HOLDS)),
        ("coupled", "paper-32x64", "GR-MC100", -5, "coupled", (OPEN, FAILS)),
        ("listops", "paper", "GST-1.0", 0.1, "family", (FAILS, HOLDS)),
        ("listops", "paper", "GST-1.0", 0.1, "stgs", (FAILS, HOLDS)),
        ("listops", "paper", "GST-1.0", 0.1, "rao", (FAILS, HOLDS)),
        ("listops", "paper", "GST-1.0", 0.1, "par", (HOLDS, FAILS)),
        ("vae", RECTIFIED, "GST-1.2", -5, "best_gap", (OPEN, RELU_ONLY)),
        ("gap-grid", PLAIN, "GST-3.0", -50, "near_one", (HOLDS, FAILS)),
        ("entropy", RECTIFIED, "STGS", 0.1, "entropy", (HOLDS, FAILS)),
    ],
)
def test_the_records_decide_the_verdicts(
    recipe: str,
    protocol: str,
    label: str,
    shift: float,
    claim: str,
    verdicts: tuple[str, str],
    evidence: Evidence,
) -> None:
    """As they are, and with the numbers of an estimator moved."""

    def change(r: Record) -> Record:
        moved = (r.recipe, r.protocol) == (recipe, protocol) and r.label.startswith(label)
        metrics = {name: value if value is None else value + shift for name, value in r.metrics.items()}
        return replace(r, metrics=metrics) if moved else r

    assert (
        CLAIMS[claim](evidence)["verdict"],
        CLAIMS[claim](altered(evidence, change))["verdict"],
    ) == verdicts


def with_runs(
    evidence: Evidence, recipe: str, change: Callable[[Record], Record | None] = lambda r: None
) -> Evidence:
    """The evidence with other runs of a recipe: records of other recipes, altered; by default with none."""
    others = [r for r in evidence.records if r.recipe != recipe]
    runs = [replace(new, recipe=recipe) for r in others if (new := change(r)) is not None]
    return replace(evidence, records=[*others, *runs], cells=cells([*others, *runs]))


def zoo(r: Record, shift: float, *labels: str, **changes: Any) -> Record | None:
    """A record of the recipe zoo, moved; only of estimators with these labels."""
    if r.recipe != "zoo" or (labels and r.label not in labels):
        return None
    return replace(r, metrics={ELBO: r.metrics[ELBO] + shift}, **changes)


@pytest.mark.parametrize(("shift", "verdict"), [(5.0, HOLDS), (0.0, OPEN), (-5.0, FAILS)])
def test_the_verdict_on_raising_the_selected_logit(shift: float, verdict: str, evidence: Evidence) -> None:
    assert CLAIMS["raised"](with_runs(evidence, "raised"))["verdict"] == OPEN
    values = CLAIMS["raised"](
        with_runs(evidence, "raised", lambda r: zoo(r, shift, label=f"raised {r.label}"))
    )
    assert values["verdict"] == verdict
    assert values["numbers"].count(f"{shift:+.2f} (") == 8


@pytest.mark.parametrize(("end", "verdict"), [(205.0, HOLDS), (110.0, RELU_ONLY)])
def test_the_verdicts_that_need_runs_without_the_relu(end: float, verdict: str, evidence: Evidence) -> None:
    def change(r: Record) -> Record | None:
        if (r.recipe, r.protocol) not in (("vae", RECTIFIED), ("ablation", RECTIFIED)):
            return None
        return replace(r, protocol=PLAIN, metrics={ELBO: end + 0.1 * r.seed})

    absent, present = with_runs(evidence, "without-relu"), with_runs(evidence, "without-relu", change)
    assert "not run" in CLAIMS["low"](absent)["without"]
    assert [CLAIMS[name](absent)["verdict"] for name in ("low", "ablation")] == [HOLDS] * 2
    assert [CLAIMS[name](present)["verdict"] for name in ("low", "ablation")] == [verdict, HOLDS]


def test_soft_training_is_set_beside_hard_training(evidence: Evidence) -> None:
    soft = with_runs(evidence, "soft", lambda r: zoo(r, 3.0, "STGS", "GR-MC100", "GST-1.0"))
    text = render_block(soft, "soft")
    assert text.count("| +3.00 (") == 12
    assert text.count("| without |") == 6


def test_whether_tuned_estimators_tie(evidence: Evidence) -> None:
    labels = ("GR-MC100", "GST-1.0", "ReinMax")

    def change(r: Record) -> Record | None:
        moved = zoo(r, 0.0, *labels)
        return moved and replace(moved, metrics={ELBO: 106.0 + 0.1 * r.seed})

    tied = with_runs(evidence, "tuned", change)
    text = render_block(tied, "tuned")
    assert "the lead of GST-1.0 (τ=0.5) is +0.00 nats" in text
    assert "Tuned, the good estimators tie" in text
    apart = with_runs(evidence, "tuned", lambda r: zoo(r, 0.0, *labels))
    assert "they do not all tie" in render_block(apart, "tuned")


def test_more_runs_of_the_coupled_comparison(evidence: Evidence) -> None:
    def fresh(r: Record) -> Record | None:
        return replace(r, seed=r.seed + 10) if (r.recipe, r.label) == ("coupled", "GST-1.0") else None

    def own(r: Record, learns: bool = True) -> Record | None:
        if (r.recipe, r.label) != ("coupled", "RLOO"):
            return None
        start = evidence.curves[r.id].series["train_negative_elbo"][0] or 0.0
        metrics = {
            "train_negative_elbo": start - 50 * (learns and r.seed > 1),
            "test_100_sample_negative_elbo": 99.0,
        }
        return replace(r, protocol="coupled-32x64", metrics=metrics)

    def linear(r: Record) -> Record | None:
        lost = (r.recipe, r.label) == ("coupled", "GR-MC100")
        return replace(r, status="diverged", epochs=80) if lost else None

    text = render_block(with_runs(evidence, "coupled-fresh", fresh), "coupled-findings")
    assert "5 fresh seeds have 96.49 ± 0.30, +0.40 nats" in text
    assert "not run: `gapped" in render_block(with_runs(evidence, "coupled-fresh"), "coupled-findings")
    text = render_block(with_runs(evidence, "coupled-own", own), "coupled-own")
    assert "2 of the 5 runs never learn" in text
    assert "moves by at most 0.00 nats" in text
    assert "quotes 104.03 ± 0.23 for RLOO" in text
    with pytest.raises(GappedError, match="some runs learn"):
        render_block(with_runs(evidence, "coupled-own", partial(own, learns=False)), "coupled-own")
    assert "Not run yet" in render_block(with_runs(evidence, "coupled-own"), "coupled-own")
    assert "`gapped reproduce coupled-start` compares" in render_block(
        with_runs(evidence, "coupled-start"), "coupled-own"
    )

    def held(r: Record) -> Record:
        level = {"train_negative_elbo": 300.0} if r.recipe == "coupled-start" else {}
        return replace(r, metrics=r.metrics | level)

    with pytest.raises(GappedError, match="the decoder's input is what holds runs"):
        render_block(altered(evidence, held), "coupled-own")
    values = CLAIMS["divergence"](with_runs(evidence, "coupled-linear", linear))
    assert (
        values["linear"] == "5 of 5 within 80 epochs, so what diverges is the arithmetic, not the estimator"
    )


def test_what_the_board_shows_is_computed_and_refused_where_it_no_longer_holds(evidence: Evidence) -> None:
    def moved(recipe: str, label: str, shift: float, tau: float | None = None) -> Evidence:
        def change(r: Record) -> Record:
            if (r.recipe, r.label) != (recipe, label) or tau not in (None, r.tau):
                return r
            shifted = {k: None if value is None else value + shift for k, value in r.metrics.items()}
            return replace(r, metrics=shifted)

        return altered(evidence, change)

    text = render_block(evidence, "field-lessons")
    assert text.count("- **") == 8
    assert "it ends at 96.41 and 105.85 here; they have 96.39 ± 0.48 and 105.91 ± 1.47" in text
    for absent, told in (
        ("field-flows", "flows-8x64"),
        ("field-mve", "32 of the 36 cells"),
        ("field-counts", "Fini for many variables"),
        ("field-binary", "200 binary units"),
    ):
        assert told in text
        assert told not in render_block(with_runs(evidence, absent), "field-lessons")
    for recipe, label, shift, claim in (
        ("field-reinmax", "ReinMax", 1.9, "within 1% of the best"),
        ("field-codes", "ReinMax-Rao", 20.0, "ReinMax-Rao at 1 is within 1%"),
        ("field-coupled", "default", 20.0, "the default is ahead of unbiased"),
        ("field-coupled", "DoubleCV-2", 20.0, "the best of these takes slopes"),
        ("field-coupled", "RLOO", -2.0, "it is ahead of both others"),
        ("field-mve", "ST at 0.001", -1.4, "only Gumbel-Rao's cells are apart"),
        ("field-mve", "GR-MC20 at 0.001", 20.0, "they have 16 or 64 categories"),
        ("field-mve", "GR-MC20 with eps at 0.001", -1.0, "the constant is what keeps them apart"),
        ("field-binary", "default", -5.0, "STGS has the best bound"),
        ("field-binary", "RODEO-4", 9.0, "four samples and the default are not separated"),
        ("field-counts", "Fini-3", 5.0, "Fini is ahead of RLOO with many variables"),
        ("field-reinmax", "DoubleCV-2", 20.0, "DoubleCV-2 is ahead in most shapes"),
    ):
        with pytest.raises(GappedError, match=claim):
            render_block(moved(recipe, label, shift, 1.5 if label == "ReinMax" else None), "field-lessons")
    ahead = render_block(moved("field-flows", "default", -50.0), "field-default")
    assert re.search(r"`flows-8x64` \| default \| 0.85 \| 50.52 \| 50.52 \| 0.0 \| 1 of 12", ahead)


def test_counts_with_more_steps_stand_beside_what_was_published(evidence: Evidence) -> None:
    text = render_block(evidence, "counts-again")
    assert re.search(r"`poisson-1-200` \| Fini-3 \| 123.07 \| 119.63 \| 0.05 \| 118.60 \| 1.03 ≠", text)
    assert "the largest difference falls from 4.7 to 1.4 nats" in text
    alone = render_block(with_runs(evidence, "counts-longer"), "counts-again")
    assert alone == "**Not run yet**: 60 runs, `gapped reproduce counts-longer --device cuda`."

    def slow(r: Record) -> Record:
        higher = {name: 2.0 + (value or 0.0) for name, value in r.metrics.items()}
        return replace(r, metrics=higher) if r.recipe == "counts-longer" else r

    with pytest.raises(GappedError, match="most of the difference is gone with more steps"):
        render_block(altered(evidence, slow), "counts-again")


def test_cells_of_gumbel_rao_with_fresh_seeds_stand_beside_the_first_ones(evidence: Evidence) -> None:
    text = render_block(evidence, "rao-again")
    assert re.search(r"`fixed-60x4` \| STGS \| 0.5 \| 95.20 \| 95.21 \| 0.10 \| 93.70 \| 1.51 ≠", text)
    assert re.search(r"`fixed-60x4` \| STGS \| 1 \| – \| 96.18 \| 0.29 \| 93.70 \| 2.48 ≠", text)
    alone = render_block(with_runs(evidence, "rao-fresh"), "rao-again")
    assert alone == "**Not run yet**: 84 runs, `gapped reproduce rao-fresh --device cuda`."

    def warm(r: Record) -> Record:
        lower = {name: (value or 0.0) - 2.0 for name, value in r.metrics.items()}
        return replace(r, metrics=lower) if (r.recipe, r.tau) == ("rao-fresh", 1.0) else r

    with pytest.raises(GappedError, match="a higher temperature is no better"):
        render_block(altered(evidence, warm), "rao-again")


@pytest.mark.skipif(
    not any((REAL_DATA / "mnist").glob("train-images*")), reason="no MNIST in $GAPPED_DATA or ../shared/data"
)
def test_runs_that_do_not_learn_have_the_entropy_of_independent_pixels(evidence: Evidence) -> None:
    count = vae_protocol("coupled-32x64").train_images
    images = data.load("mnist", REAL_DATA, download=False)
    mean = images.train[:count].double().mean(0) / images.scale
    level = float((torch.special.entr(mean) + torch.special.entr(1 - mean)).sum())
    cells = evidence.group("coupled-own", "coupled-32x64")
    ends = [r.metrics["train_negative_elbo"] for cell in cells for r in cell.records]
    assert [end for end in ends if end > 150] == pytest.approx([level] * 3, abs=0.1)


def test_memory_is_judged_where_each_run_has_its_own(evidence: Evidence) -> None:
    def with_memory(stgs: float, rao: float) -> Evidence:
        def change(r: Record) -> Record:
            own = rao if r.label.startswith("GR") else stgs if r.label == "STGS" else 0.25
            return replace(r, metrics={**r.metrics, "gpu_memory_gb": own}) if r.recipe == "efficiency" else r

        return altered(evidence, change)

    equal, more, shared = with_memory(0.25, 0.25), with_memory(0.25, 0.5), with_memory(0.46, 0.3)
    assert CLAIMS["memory"](equal)["verdict"] == FAILS
    assert "The least that one needs is 0.250 GB" in render_block(equal, "efficiency-notes")
    assert CLAIMS["memory"](more)["verdict"] == HOLDS
    with pytest.raises(GappedError, match="Gumbel-Rao needs no more memory"):
        render_block(more, "efficiency-notes")
    with pytest.raises(GappedError, match="GST needs as much memory as STGS"):
        CLAIMS["memory"](shared)


def test_every_claim_has_its_row(evidence: Evidence) -> None:
    rows = [line for line in render_block(evidence, "claims").splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(CLAIMS)
    for row, claim in zip(rows, CLAIMS, strict=True):
        _, what, verdict, numbers, records, _ = row.split(" | ".strip())
        assert verdict.strip(" *") in (HOLDS, RELU_ONLY, FAILS, OPEN), claim
        assert what.strip()
        assert numbers.strip()
        for name in re.findall(r"`([\w-]+)`", records):
            assert name in known_recipes(), claim


@pytest.mark.parametrize(
    ("leads", "verdict"),
    [
        ([(1, 2), (3, 4)], HOLDS),
        ([(1, 2), (-1, 4)], OPEN),
        ([(-1, 4), (-2, 3)], OPEN),
        ([(1, 2), (-4, 1)], OPEN),
        ([(-1, 4), (-4, 1)], FAILS),
        ([(1, 2), (-2, -1)], FAILS),
    ],
)
def test_what_intervals_decide(leads: list[tuple[float, float]], verdict: str) -> None:
    pairs = [Pair("", Difference((low + high) / 2, low, high, 0.5)) for low, high in leads]
    assert decide(pairs) == verdict


def test_a_run_that_is_lost_disagrees_with_the_paper(evidence: Evidence) -> None:
    def change(r: Record) -> Record:
        lost = (r.recipe, r.label, r.tau) == ("listops", "STGS", 1.0) and r.seed < 3
        return replace(r, status="diverged") if lost else r

    assert "**16 of the 18 agree**" in render_block(evidence, "listops-agreement")
    text = render_block(altered(evidence, change), "listops-agreement")
    assert "**15 of the 18 agree**" in text
    assert "Beyond that: STGS at τ=1 (3 lost runs), " in text


def test_a_choice_that_is_not_the_best_is_refused(evidence: Evidence) -> None:
    def change(r: Record) -> Record:
        return replace(r, split="test") if (r.recipe, r.label) == ("gap-grid", "GST-0.8") else r

    with pytest.raises(GappedError, match="does not hold the best cell"):
        render_block(altered(evidence, change), "better")


def test_a_label_does_not_end_the_brackets(evidence: Evidence) -> None:
    fenced = altered(evidence, lambda r: replace(r, label=r.label.replace("STGS", "````")))
    lines = render_block(fenced, "latent-trees").splitlines()
    start = lines.index("`````text")
    assert "````" in "\n".join(lines[start + 1 : lines.index("`````", start)])


def test_ranges_of_epochs() -> None:
    assert ranges(range(4, 100)) == "4 to 99"
    assert ranges([3, 1, 2, 100]) == "1 to 3 and 100"
    assert ranges([]) == "none"


def test_the_recipe_for_an_estimator_of_one_s_own_is_as_short_as_promised() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", read("docs/field.md"), re.S)
    recipe = recipe_from(tomllib.loads(text), "mine.toml")
    assert len(text.splitlines()) <= 20
    assert {entry.label for entry in recipe.entries} == {"default", "mine"}
    assert len({entry.spec.protocol for entry in recipe.entries}) == 6


def test_cells_that_agree_with_published_numbers_are_counted(evidence: Evidence) -> None:
    model = next(record for record in evidence.records if record.recipe == "vae")
    made = [
        replace(
            model,
            id=entry.spec.id,
            recipe="field-mve",
            protocol=entry.spec.protocol,
            label=entry.label,
            tau=entry.spec.tau,
            seed=entry.spec.seed,
            metrics={"train_negative_elbo": (95.37 if entry.label == "MVE annealed at 0.001" else 80.0)},
        )
        for entry in find_recipe("field-mve").entries
        if entry.spec.protocol == "mve-128x4"
    ]
    compared = [name for name in field() if name.startswith("field-")]
    others = [record for record in evidence.records if record.recipe not in compared]

    def status(records: list[Record]) -> str:
        return render_block(replace(evidence, records=records, cells=cells(records)), "field-status")

    text = status([*others, *made])
    published = sum(row[0] == "mve-128x4" for row in field()["field-mve"]["rows"])
    assert int(text.split()[0]) == int(status(others).split()[0]) + 1
    assert f"Of {published} cells with a published number, 1 agree with it" in text
