"""Blocks about the parser of ListOps, before and after their recipes are run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blocks import render_block
from evidence import Evidence, gather
from parser_start import measured
from tree_blocks import SHAPES
from update import ROOT

from gapped.errors import GappedError
from gapped_lab.recipe import find_recipe
from gapped_lab.records import Curve, Record
from gapped_lab.report.cells import cells


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    return gather(ROOT / "results")


def run(recipe: str, evidence: Evidence, **metrics: float) -> Evidence:
    """The evidence with a recipe's runs as if trained, with these metrics; accuracy differs by seed."""
    model = next(r for r in evidence.records if r.recipe == "listops")
    lines: list[Record] = []
    for entry in find_recipe(recipe).entries:
        values = {"test_accuracy": 0.6, "test_tree_f1": 0.2, **metrics}
        values["test_accuracy"] += 0.001 * entry.spec.seed
        spec = entry.spec
        lines.append(
            replace(
                model,
                id=spec.id,
                recipe=recipe,
                protocol=spec.protocol,
                label=entry.label,
                estimator=spec.estimator,
                options=spec.options,
                tau=spec.tau,
                seed=spec.seed,
                epochs=spec.epochs,
                metrics=values,
            )
        )
    records = [r for r in evidence.records if r.recipe != recipe] + lines
    series = {"query_gradient_norm": [3e-5, 2e-7], "query_gradient_zero": [0.25, 1.0]}
    curves = {line.id: Curve(id=line.id, epoch=[1, 2], more=dict(series)) for line in lines}
    return replace(evidence, records=records, cells=cells(records), curves={**evidence.curves, **curves})


def without(recipe: str, evidence: Evidence) -> Evidence:
    records = [r for r in evidence.records if r.recipe != recipe]
    return replace(evidence, records=records, cells=cells(records))


BLOCKS = {
    "parser-training": "listops-parser",
    "tree-controls": "listops-controls",
    "tree-authors": "listops-authors",
    "tree-short": "listops-short",
}


@pytest.mark.parametrize(("block", "recipe"), BLOCKS.items())
def test_what_is_not_run_says_so(block: str, recipe: str, evidence: Evidence) -> None:
    assert f"`gapped reproduce {recipe} --device cuda`" in render_block(without(recipe, evidence), block)


def test_the_gradient_along_training(evidence: Evidence) -> None:
    text = render_block(run("listops-parser", evidence), "parser-training")
    assert text.count("| 0.605 ± 0.001 | 3e-05 | 2e-07 | 25% | 100% |") == 18
    epochs = find_recipe("listops-parser").entries[0].spec.epochs
    assert f"zero steps, epoch {epochs}" in text


def test_the_controls_stand_beside_the_estimators(evidence: Evidence) -> None:
    text = render_block(evidence, "tree-controls")
    assert all(f"| {shape} | – | 0." in text for shape in SHAPES)
    assert "Of 18 cells of the table, 0 are separated from it in their favour and 18 against them" in text
    for accuracy in (0.5, 0.68):
        with pytest.raises(GappedError, match="every cell is behind right-branching trees"):
            render_block(run("listops-controls", evidence, test_accuracy=accuracy), "tree-controls")


def test_the_reading_of_the_authors(evidence: Evidence) -> None:
    text = render_block(evidence, "tree-authors")
    assert "Of the three runs of STGS at 0.01, 0, 1 and 3 of the 5 epochs ended at chance" in text
    for accuracy, reason in ((0.5, "some runs stay at chance for a while"), (0.1, "no others do")):
        curves = {
            entry.spec.id: replace(
                evidence.curves[entry.spec.id],
                more={"valid_accuracy": [accuracy] * 5},
            )
            for entry in find_recipe("listops-authors").entries
        }
        with pytest.raises(GappedError, match=reason):
            render_block(replace(evidence, curves={**evidence.curves, **curves}), "tree-authors")


def test_the_small_protocol(evidence: Evidence) -> None:
    still = {"query_gradient_norm": 0.0, "query_gradient_zero": 1.0}
    text = render_block(run("listops-short", evidence, **still), "tree-short")
    assert "and zero at 100% of the steps or more" in text
    assert "over random trees +0.000 (" in text
    moving = {"query_gradient_norm": 1e-3, "query_gradient_zero": 0.0}
    with pytest.raises(GappedError, match=r"no longer show that the parser of GST at 0\.01 stays as it was"):
        render_block(run("listops-short", evidence, **moving), "tree-short")


def test_the_parser_of_gst_has_no_gradient_at_the_start(evidence: Evidence) -> None:
    norms = {(start.label, start.tau): max(start.norms) for start in measured()}
    assert len(norms) == 18
    for label in ("GST-1.0", "GST-1.2", "GST-pi"):
        assert norms[label, 0.01] == 0
        assert norms[label, 1.0] > 1e-7
    assert norms["STGS", 0.01] > 1e-7
    better = [
        replace(r, metrics={**r.metrics, "test_accuracy": 0.9}) if r.label == "STGS" else r
        for r in evidence.records
    ]
    with pytest.raises(GappedError, match="no longer show that the best cell has such a parser"):
        render_block(replace(evidence, records=better, cells=cells(better)), "parser-start")
