"""`gapped.properties`: the truth table of the paper's properties, and estimators broken on purpose."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import KINDS, MEMBERS, normal, seeded
from statistical import LEVEL, require_law
from torch import Tensor

import gapped
from gapped import simplex
from gapped.cli.app import main
from gapped.diagnostics.surrogate_properties import Properties
from gapped.pathwise import Draw
from gapped_lab.estimator_text import make, parse

YES, NO, NONE = True, False, None

# Whether each member has each property, by the paper's section 3 and, for the ablations, its table of them.
# A member without a line has those that its class states.
TABLE: dict[str, tuple[Any, tuple[bool | None, ...]]] = {
    # The estimator whose properties they are.
    "gumbel-softmax": (gapped.GumbelSoftmax(tau=0.5), (YES, YES, YES, YES)),
    # By construction: m1 gives consistency, m2 the gap, and both are constants.
    "gst": (gapped.GST(tau=0.5), (YES, YES, YES, YES)),
    # Each of the averaged surrogates is one of Gumbel-Softmax, given the category.
    "gumbel-rao": (gapped.GumbelRao(samples=10), (YES, YES, YES, YES)),
    "gumbel-rao, cold": (gapped.GumbelRao(tau=0.1, samples=3), (YES, YES, YES, YES)),
    # The gradient's temperature moves the argmax away from the one that was drawn at temperature 1 ...
    "decoupled, backward": (gapped.DecoupledGumbelSoftmax(tau=0.5), (YES, NO, YES, YES)),
    # ... and at another forward temperature the draw has another law too, unless both are equal.
    "decoupled, forward": (gapped.DecoupledGumbelSoftmax(tau_forward=2.0), (NO, NO, YES, YES)),
    "decoupled, both": (gapped.DecoupledGumbelSoftmax(tau=2.0, tau_forward=2.0), (NO, YES, YES, YES)),
    # The ablations: no gap, and a perturbation with a gradient.
    "GST-0.0": (gapped.GST(gap=0.0), (YES, YES, YES, NO)),
    "NZ-GST-1.0": (gapped.GST(gap=1.0, detach=False), (YES, YES, NO, YES)),
    "NZ-GST-0.0": (gapped.GST(gap=0.0, detach=False), (YES, YES, NO, NO)),
    "GST-pi": (gapped.GST(gap=gapped.expected_gap), (YES, YES, YES, YES)),
}


def measured(estimator: Any, **how: Any) -> Properties:
    return gapped.properties(estimator, generator=seeded(3), level=LEVEL, **how)


def truth(report: Properties) -> tuple[bool | None, ...]:
    return tuple(finding.holds for finding in report.findings)


def stated(kind: Any) -> tuple[bool | None, ...]:
    """The statement of a member's class about its properties."""
    return (YES, kind.is_consistent, YES, YES) if kind.has_surrogate else (YES, NONE, NONE, NONE)


@pytest.mark.parametrize("name", dict.fromkeys([*MEMBERS, *TABLE]))
def test_the_truth_table(name: str) -> None:
    estimator, expected = TABLE[name] if name in TABLE else (gapped.estimator(name), stated(KINDS[name]))
    report = measured(estimator)
    assert truth(report) == expected
    if expected[0]:
        require_law(report[0].measured["p_value"])


def test_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pictures.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \| (yes|\*\*no\*\*|–) \| (.*?) \| (.*?) \| (.*?) \|$", page, flags=re.M)
    table = {spec: list(words) for first, *words in rows for spec in re.findall(r"`(.*?)`", first)}
    assert {"gst", "gumbel-softmax", "straight-through", "reinmax"} <= set(table)
    word = {YES: "yes", NO: "**no**", NONE: "–"}
    for spec, words in table.items():
        assert [word[holds] for holds in truth(measured(make(*parse(spec)), draws=1000))] == words, spec


@dataclass(frozen=True)
class Broken(gapped.GST):
    """GST with one thing wrong."""

    fault: str = ""

    def draw_category(self, logits: Tensor, generator: torch.Generator | None, surrogate: bool) -> Draw:
        # 5% of the draws are uniform.
        if self.fault == "law":
            p = 0.95 * simplex.softmax(logits) + 0.05 / logits.shape[-1]
            return Draw(simplex.inverse_cdf(p, generator))
        return super().draw_category(logits, generator, surrogate)

    def points(self, logits: Tensor, draw: Draw) -> Any:
        if self.fault == "category":
            draw = Draw(torch.where(logits.amin(-1) < -4.5, 0, draw.category))
        points = super().points(logits, draw)
        return points._replace(weights=1.001 * points.weights) if self.fault == "temperature" else points


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", (YES, YES, YES, YES)),
        ("law", (NO, YES, YES, YES)),
        ("category", (YES, NO, YES, YES)),
        ("temperature", (YES, YES, NO, YES)),
    ],
)
def test_a_small_fault_is_found(fault: str, expected: tuple[bool | None, ...]) -> None:
    assert truth(measured(Broken(fault=fault), logits=2 * normal(40, 5))) == expected


def test_samples_that_are_not_one_hot_have_no_law() -> None:
    class Soft(gapped.GumbelSoftmax):
        def sample(self, *arguments: Any, **how: Any) -> Tensor:
            return 0.99 * super().sample(*arguments, **how)

    finding = measured(Soft())[0]
    assert finding.holds is False
    assert finding.evidence == "samples of 32 rows are not one-hot"


def test_the_gap_of_gumbel_softmax_is_lemma_1() -> None:
    """Two equal categories, about 2,000 gaps each: 0.15 is six standard errors."""
    least = measured(gapped.GumbelSoftmax(), logits=torch.zeros(1, 2), draws=40_000)[3].measured["least_gap"]
    assert least == pytest.approx(gapped.expected_gap(torch.tensor(0.5)).item(), abs=0.15)
    assert measured(gapped.GST(gap=0.7))[3].measured["least_gap"] == pytest.approx(0.7)


def test_temperatures_and_gaps_may_be_tensors() -> None:
    tau, gap = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.4, 1.0, 3.0])
    report = measured(gapped.GST(tau=tau, gap=gap), logits=normal(3, 4))
    assert truth(report) == (YES, YES, YES, YES)
    assert report[3].measured["least_gap"] == pytest.approx(0.4)


def test_it_prints_in_short_lines() -> None:
    lines = str(measured(gapped.StraightThrough())).splitlines()
    assert lines[0] == "StraightThrough(tau=1.0, hard=True, draw='sample')"
    assert [line.split()[0] for line in lines[1::2]] == ["0", "1", "2", "3"]
    assert lines[3] == "  1 consistency                 does not hold, 12,800 cases"
    assert lines[4].startswith("    ")
    assert max(map(len, lines)) <= 80


def test_the_same_seed_gives_the_same_report_and_no_global_state_moves() -> None:
    """Soft samples are measured in their hard form."""
    before, hard = torch.get_rng_state(), gapped.GumbelRao(samples=2)
    assert measured(hard).findings == measured(replace(hard, hard=False)).findings
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"estimator": gapped.RLOO(2)}, "estimator: got RLOO.*, expected a pathwise"),
        ({"logits": torch.zeros(3, 1)}, "logits: .* at least two categories"),
        ({"logits": torch.tensor([0.0, -torch.inf])}, "logits: .* expected finite"),
        ({"draws": 10}, "draws: got 10"),
        ({"level": 1.0}, "level: got 1.0"),
    ],
    ids=str,
)
def test_wrong_arguments(how: dict[str, Any], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        gapped.properties(**{"estimator": gapped.GST(), **how})


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    two = ["--estimator", "gst:gap=0.0", "--estimator", "reinmax"]
    assert main(["properties", *two, "--draws", "1000"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("GST(")
    assert "3 strict gap                  does not hold" in first
    assert second.count("not applicable") == 3
    assert main(["properties", "--estimator", "gts"]) == 2
    assert "gst" in capsys.readouterr().err
