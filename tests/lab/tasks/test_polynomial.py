"""Polynomial programming: the expected cost, and that estimators descend it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy_tasks import CPU

import gapped
from gapped_lab.fleet import Run, Trainer
from gapped_lab.tasks import polynomial_protocol
from gapped_lab.tasks.polynomial import PolynomialTask


@pytest.mark.parametrize(
    ("name", "optimum"), [("power-1.5", 0.30187), ("power-2", 0.2025), ("power-3", 0.091125)]
)
def test_the_result_is_the_exact_expectation(name: str, optimum: float) -> None:
    task = PolynomialTask(polynomial_protocol(name), [0, 1], CPU)
    rules = task.protocol
    with torch.no_grad():
        task.model.logits[0] = torch.tensor([-60.0, 60.0])
        task.model.logits[1] = 0.0
    (costs,) = (each.detach() for each in task.evaluate(None, None).values())  # type: ignore[arg-type]
    assert costs[0] == pytest.approx(optimum, abs=1e-5)
    assert costs[1] == pytest.approx((0.45**rules.power + 0.55**rules.power) / 2)


def test_runs_start_near_even_and_descend() -> None:
    """A fleet of a pathwise estimator and a score: the cost falls from its mean towards the optimum."""
    task = PolynomialTask(replace(polynomial_protocol("power-2"), latents=16), [0, 0], CPU)
    assert torch.equal(task.model.logits[0], task.model.logits[1])
    assert 0 < task.model.logits.abs().max() <= 0.01
    runs = [Run(gapped.ReinMax(), 0.05), Run(gapped.DoubleCV(2), 0.05)]
    trainer = Trainer(task, runs, 1, 0, CPU)
    trainer.train_epoch()
    for cost in trainer.history["test_expected_cost"][-1]:
        assert 0.2025 < cost < 0.22 < (0.45**2 + 0.55**2) / 2
