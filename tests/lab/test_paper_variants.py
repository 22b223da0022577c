"""Variants of estimators that recipes compare: what they compute, and where they fail."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_close, seeded
from statistical import mean_is, require_law, require_rejected

import gapped
from gapped import simplex
from gapped.errors import GappedError
from gapped.pathwise import Draw
from gapped_lab.estimator_text import make, options_of, parse
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.paper_variants import LinearGumbelRao, RaisedGST, linear_gumbel

THETA = torch.tensor([0.8, 0.1, -0.5, -2.0], dtype=torch.float64)


@pytest.mark.parametrize("gap", [0.0, 0.3, 1.2])
@pytest.mark.parametrize("index", range(4))
def test_raising_leaves_the_others_where_they_are(gap: float, index: int) -> None:
    others = [float(THETA[j]) for j in range(4) if j != index]
    expected = THETA.clone()
    expected[index] = max(float(THETA[index]), max(others) + gap)
    point = RaisedGST(0.5, gap=gap).points(simplex.shift(THETA), Draw(torch.tensor(index))).points[0]
    assert_close(point, torch.softmax(expected / 0.5, -1), 1e-12)


def test_noise_in_linear_space_has_the_law_of_log_space() -> None:
    chosen = torch.eye(4, dtype=torch.float64)[1]
    scores = linear_gumbel(THETA, chosen, 4000, seeded(1))
    assert (scores.argmax(-1) == 1).all()
    p = torch.softmax(THETA, -1)[1]
    gaps = scores[:, 1] - scores[:, [0, 2, 3]].amax(-1)
    require_law(mean_is(gaps, float(gapped.expected_gap(p))))
    # Wrong on purpose: the gap of the likeliest category.
    require_rejected(mean_is(gaps, float(gapped.expected_gap(torch.softmax(THETA, -1)[0]))))


def test_the_gradient_in_linear_space_is_that_of_gumbel_rao_in_the_mean() -> None:
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    def gradients(estimator: gapped.GumbelRao, seed: int) -> torch.Tensor:
        rows = THETA.expand(4000, -1).clone().requires_grad_()
        sample = estimator.sample(rows, generator=seeded(seed))
        assert set(sample.detach().unique().tolist()) == {0.0, 1.0}
        (gradient,) = torch.autograd.grad(sample @ weight, rows, torch.ones(4000, dtype=torch.float64))
        return gradient

    linear, usual = (
        gradients(LinearGumbelRao(0.5, samples=20), 3),
        gradients(gapped.GumbelRao(0.5, samples=20), 4),
    )
    require_law(mean_is((linear - usual)[:, 0], 0.0))
    require_rejected(mean_is((2 * linear - usual)[:, 0], 0.0))


def test_a_fleet_lets_a_variant_sample_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits the kernel of Gumbel-Rao, which on a GPU would draw in log space instead."""
    monkeypatch.setattr(gapped.Pathwise, "kernel", lambda self, rows: self.fused())
    pieces = torch.split(torch.zeros(3, 2, 4), [1, 1, 1])
    usual = [gapped.GumbelRao(samples=2), gapped.GST(), gapped.ReinMax()]
    for estimators, together in ((usual, True), ([LinearGumbelRao(samples=2), *usual[1:]], False)):
        grouped = Grouped.of(estimators, 1, torch.device("cpu"), torch.float32)
        assert (grouped._kernels(pieces) is not None) is together


def test_variants_are_named_in_recipes_and_not_in_the_registry() -> None:
    assert isinstance(make(*parse("gst-raised:gap=1.2,tau=0.5")), RaisedGST)
    assert set(options_of("gumbel-rao-linear")) == {*options_of("gumbel-rao"), "eps"}
    assert not {"gst-raised", "gumbel-rao-linear"} & set(gapped.estimators())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gst-raised:lead=1", "gst-raised: unknown option 'lead', expected one of tau, hard, gap"),
        ("gst-raised:gap=auto", "expected a number, and detach=True"),
        ("gst-raised:detach=false", "expected a number, and detach=True"),
    ],
)
def test_what_a_variant_does_not_take(text: str, message: str) -> None:
    with pytest.raises(GappedError, match=message):
        parse(text)
