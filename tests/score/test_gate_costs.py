"""Gates in `gapped.expectation`: the pair of logits that every estimator sees, and the exact gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import MEMBERS, assert_close, normal, seeded
from score_problems import Sum
from torch import Tensor

import gapped
from gapped import GappedError

ODDS = normal(4, 3)


def cost(gates: Tensor) -> Tensor:
    """Not additive: all gates of an example share it."""
    return (gates @ torch.arange(1.0, 4.0).double() - 2) ** 2


def make(name: str) -> Any:
    return gapped.RELAX(Sum(1)) if name == "relax" else gapped.estimator(name)


def value_and_gradient(f: Any, odds: Tensor, estimator: Any, **how: Any) -> tuple[Tensor, Tensor]:
    leaf = odds.clone().requires_grad_()
    value = gapped.expectation(f, leaf, estimator, generator=seeded(), **how)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


@pytest.mark.parametrize("name", [*MEMBERS, *gapped.estimators("score")])
def test_a_gate_is_a_pair_to_every_estimator(name: str) -> None:
    """The same noise for the logits (logit, 0), with a cost that reads the first entries."""
    gates = value_and_gradient(cost, ODDS, make(name), gates=True)
    leaf = ODDS.clone().requires_grad_()
    pairs = torch.stack([leaf, torch.zeros_like(leaf)], -1)
    value = gapped.expectation(lambda z: cost(z[..., 0]), pairs, make(name), generator=seeded())
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert_close(gates[0], value.detach(), 1e-10)
    assert_close(gates[1], gradient, 1e-10)


def test_the_exact_gradient_is_that_of_the_enumerated_cost() -> None:
    leaf = ODDS.clone().requires_grad_()
    p, total = torch.sigmoid(leaf), torch.zeros(4, dtype=torch.float64)
    for number in range(8):
        bits = torch.tensor([number >> place & 1 for place in range(3)], dtype=torch.float64)
        total = total + torch.where(bits == 1, p, 1 - p).prod(-1) * cost(bits)
    expected = total.detach(), torch.autograd.grad(total.sum(), leaf)[0]
    ours = value_and_gradient(cost, ODDS, "exact", gates=True)
    assert_close(ours[0], expected[0], 1e-10)
    assert_close(ours[1], expected[1], 1e-10)


@pytest.mark.parametrize("estimator", ["disarm", "rloo", "exact", "gst", "arsm"])
def test_masks_certain_gates_and_shapes(estimator: str) -> None:
    """A masked gate is 0, one of infinite odds is certain, and both get a gradient of exactly 0."""
    odds = ODDS.clone()
    odds[0, 0], odds[1, 0], odds[2, 0] = torch.inf, -torch.inf, torch.nan
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[2, 0] = False
    seen = []

    def watched(gates: Tensor) -> Tensor:
        seen.append(gates.detach().clone())
        return cost(gates)

    value, gradient = value_and_gradient(watched, odds, estimator, gates=True, mask=mask)
    assert value.shape == (4,)
    for gates in seen:
        assert gates.shape[1:] == (4, 3)
        assert ((gates == 0) | (gates == 1)).all()
        assert (gates[:, 0, 0] == 1).all()
        assert (gates[:, 1:3, 0] == 0).all()
    assert (gradient[:3, 0] == 0).all()
    assert gradient.isfinite().all()
    scalar = torch.zeros((), requires_grad=True)
    gapped.expectation(lambda b: (b - 0.3) ** 2, scalar, estimator, gates=True).backward()
    assert scalar.grad.shape == ()


def test_errors_are_one_line() -> None:
    for how, message in (
        ({"gates": 1}, "gates: got 1, expected True or False"),
        ({"gates": True, "mask": torch.ones(4, 2, dtype=torch.bool)}, "mask: got a tensor of shape"),
    ):
        with pytest.raises(GappedError, match=message):
            gapped.expectation(cost, ODDS, "rloo", **how)
    with pytest.raises(GappedError, match=r"f: got costs of shape \(1, 2, 4, 3\)|f: got costs of shape"):
        gapped.expectation(lambda b: b.sum(0), ODDS, "rloo", gates=True)
    with pytest.raises(GappedError, match="got 3 categories for DisARM"):
        gapped.expectation(lambda z: z.sum((-1, -2)), ODDS.unsqueeze(0), "disarm")
