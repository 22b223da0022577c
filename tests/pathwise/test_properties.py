"""Properties 1 to 3 of the paper's section 3, over the registry, and the ablations that lack one.

Property 0, that the hard sample follows p = softmax(theta), is tested in test_law.py. The others are:

1. Consistency: the largest entry of the surrogate is the selected category.
2. Zero-gradient perturbation: the surrogate is softmax((theta + m) / tau) with m constant, so that its
   gradient is J(h) g / tau.
3. Strict gap: given the category, the two largest perturbed logits differ in expectation by more than zero.

Each property is a function that returns whether it holds. A member must have all of them, unless its class
states the one it lacks (`is_consistent`), and then the test must find it lacking.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import KINDS, every_soft_member, normal, pull, seeded, through_softmax
from variants import make_single

import gapped

ROW = torch.tensor([0.9, 0.55, -0.3, 0.1], dtype=torch.float64)


def is_consistent(estimator: Any) -> bool:
    """Property 1, on rows whose most likely category is often not the selected one."""
    logits = normal(2_000, 4)
    hard = replace(estimator, hard=True).sample(logits, generator=seeded())
    soft = replace(estimator, hard=False).sample(logits, generator=seeded())
    # A tie is no failure: without a gap the selected logit equals the largest.
    return bool(((soft * hard).sum(-1) >= soft.amax(-1)).all())


def perturbation_has_no_gradient(estimator: Any) -> bool:
    """Property 2, from the surrogate's value and gradient alone."""
    logits, g = normal(500, 4), normal(500, 4, seed=2)
    soft, gradient = pull(replace(estimator, hard=False), logits, g)
    return torch.allclose(gradient, through_softmax(soft, g, estimator.tau), rtol=1e-10, atol=1e-12)


def smallest_expected_gap(estimator: Any) -> float:
    """Property 3: the least mean gap over the categories, in units of logits."""
    logits = ROW.expand(4_000, -1)
    index = replace(estimator, hard=True).sample(logits, generator=seeded()).argmax(-1)
    soft = replace(estimator, hard=False).sample(logits, generator=seeded())
    top = estimator.tau * soft.log().topk(2, -1).values
    gap = top[:, 0] - top[:, 1]
    assert len(index.unique()) == 4
    return min(float(gap[index == i].mean()) for i in range(4))


@every_soft_member
def test_property_1_consistency(name: str) -> None:
    assert is_consistent(make_single(name)) is KINDS[name].is_consistent


@pytest.mark.parametrize("options", [{"samples": 100}, {"samples": 3, "tau": 0.1}], ids=str)
def test_property_1_holds_for_averages(options: dict[str, Any]) -> None:
    """Each of the averaged softmaxes is largest at the selected category, hence so is their mean."""
    assert is_consistent(gapped.GumbelRao(**options))


@pytest.mark.parametrize(
    "ablation", [gapped.StraightThrough(), gapped.DecoupledGumbelSoftmax(tau=0.3, tau_forward=1.0)], ids=str
)
def test_property_1_fails_for_the_ablations(ablation: Any) -> None:
    assert not is_consistent(ablation)


@every_soft_member
@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_property_2_zero_gradient_perturbation(name: str, tau: float) -> None:
    assert perturbation_has_no_gradient(make_single(name, tau=tau))


@pytest.mark.parametrize("gap", [0.0, 1.0, 1.2])
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_property_2_fails_for_the_ablations(gap: float, tau: float) -> None:
    assert perturbation_has_no_gradient(gapped.GST(tau=tau, gap=gap))
    assert not perturbation_has_no_gradient(gapped.GST(tau=tau, gap=gap, detach=False))


@every_soft_member
@pytest.mark.parametrize("tau", [0.5, 1.0])
def test_property_3_strict_gap(name: str, tau: float) -> None:
    if name == "decoupled":
        # Its logits are tempered before the noise is added: in units of logits the noise is tau G.
        assert smallest_expected_gap(make_single(name, tau=tau, tau_forward=tau)) > 0.9 * tau
    elif KINDS[name].is_consistent:
        assert smallest_expected_gap(make_single(name, tau=tau)) > 0.9
    else:
        # Not a gap around the selected category, only the distance of the two most likely ones.
        assert smallest_expected_gap(make_single(name, tau=tau)) == pytest.approx(0.35)


@pytest.mark.parametrize("gap", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("detach", [True, False])
def test_property_3_the_gap_is_the_one_asked_for(gap: float, detach: bool) -> None:
    """Detached or not: the ablation NZ-GST-1.0 has the gap."""
    assert smallest_expected_gap(gapped.GST(gap=gap, detach=detach)) == pytest.approx(gap)


@pytest.mark.parametrize("detach", [True, False])
def test_property_3_fails_for_the_ablations(detach: bool) -> None:
    assert smallest_expected_gap(gapped.GST(gap=0.0, detach=detach)) == pytest.approx(0.0, abs=1e-12)
