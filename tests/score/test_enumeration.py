"""Enumeration: in one call or several, with little memory, at any level of the costs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from score_problems import Model, cost, every_setting, oracle, run
from torch import Tensor

import gapped


@every_setting
def test_enumeration_equals_the_oracle(theta: Tensor) -> None:
    leaf = theta.clone().requires_grad_()
    value = gapped.expectation(cost, leaf, gapped.Exact())
    expected, gradient = oracle(theta)
    assert_close(value.detach(), expected, 1e-12)
    assert_close(torch.autograd.grad(value, leaf)[0], gradient, 1e-12)


def test_a_level_of_the_costs_does_not_hide_the_exact_value() -> None:
    logits, worth = normal(3, dtype=torch.float32), normal(3, seed=2)
    value = gapped.expectation(lambda z: z.double() @ worth + 1e9, logits, gapped.Exact()) - 1e9
    assert_close(value, (torch.softmax(logits.double(), -1) * worth).sum(), 1e-6)


@pytest.mark.parametrize("graph", [False, True])
def test_enumeration_in_several_calls(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in one call, for the logits and for what the cost contains; memory is that of a few samples."""
    logits, pull = normal(3, 4, 3), normal(3, seed=3)
    mask = torch.rand(3, 4, 3, generator=seeded(4)) < 0.8
    results = []
    for call in (2**22, 20 * logits.numel()):
        monkeypatch.setattr("gapped.score.exact.CALL", call)
        leaf, model = logits.clone().requires_grad_(), Model()
        model.weight.requires_grad_(graph)
        alive: list[Any] = []

        def cost(z: Tensor, model: Model = model, alive: list[Any] = alive, call: int = call) -> Tensor:
            assert z.numel() <= call
            assert sum(other() is not None for other in alive) <= 2
            alive.append(weakref.ref(z))
            return model.cost(z) + 1e9

        value = gapped.expectation(cost, leaf, gapped.Exact(), mask=mask)
        assert len(alive) == (2 if call == 2**22 else 1 + -(-81 // 20))
        wanted = [leaf, model.weight, model.outside] if graph else [leaf]
        results.append([value.detach(), *torch.autograd.grad(value, wanted, pull)])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, 1e-6)
        assert ours.abs().max() > 1e-2


def test_enumeration_of_a_batch_needs_little_memory() -> None:
    """65,536 combinations of 8 examples: 16 KB of logits. At once their one-hot rows would take 1 GB."""
    logits, table = normal(8, 2, 256, dtype=torch.float32), normal(256, seed=2, dtype=torch.float32)
    sizes: list[int] = []

    def cost(z: Tensor) -> Tensor:
        sizes.append(z.numel())
        return (z @ table).square().sum(-1)

    value, gradient = run("exact", logits, cost)
    leaf = logits.clone().requires_grad_()
    expected = (torch.softmax(leaf, -1) @ table.square()).sum(-1)
    assert max(sizes) <= 2**22
    assert_close(value, expected.detach(), 1e-5)
    assert_close(gradient, torch.autograd.grad(expected.sum(), leaf)[0], 1e-5)


def test_one_learning_signal_for_each_row_if_costs_have_no_variables() -> None:
    """Costs per variable make every variable an example of its own."""
    logits = normal(4, 3, 5)
    _, together = run("exact", logits, lambda z: z.square().sum(-1) * z[..., 0])
    _, alone = run("exact", logits.reshape(12, 5), lambda z: z.square().sum(-1) * z[..., 0])
    assert_close(together.reshape(12, 5), alone)
