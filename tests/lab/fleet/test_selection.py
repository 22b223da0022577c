"""Validation while training: plateaus as torch has them, best weights, evenly spaced validations."""

from __future__ import annotations

import pytest
import torch
from conftest import seeded
from torch import nn
from toy_tasks import DOUBLE

from gapped_lab.fleet.optimizer import Selection, SelectionRule


def test_plateaus_are_torchs_run_by_run() -> None:
    runs, patience = 5, 2
    scores = torch.rand(40, runs, dtype=DOUBLE, generator=seeded(4)).cummax(0).values * 0.9
    scores += 0.05 * torch.rand(40, runs, dtype=DOUBLE, generator=seeded(5))
    weight = torch.zeros(runs, 2, dtype=DOUBLE)
    selection = Selection(SelectionRule("score", lambda _: scores[0], 1, patience), [weight])
    optimisers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(runs)]
    plateaus = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(each, mode="max", factor=0.5, patience=patience)
        for each in optimisers
    ]
    for number, row in enumerate(scores):
        weight.fill_(number)
        selection.observe(row)
        for each, score in zip(plateaus, row.tolist(), strict=True):
            each.step(score)
        assert selection.factor.tolist() == [each.param_groups[0]["lr"] for each in optimisers]
    assert len(set(selection.factor.tolist())) > 1
    # The weights of the first of the highest scores.
    assert selection.weights[0][:, 0].tolist() == scores.argmax(0).tolist()
    with selection.best_weights():
        assert weight[:, 1].tolist() == scores.argmax(0).tolist()
    assert (weight == 39).all()


def test_a_broken_run_keeps_its_best_weights() -> None:
    weight = torch.ones(2, 3)
    selection = Selection(SelectionRule("score", lambda _: weight[:, 0], 1, 4), [weight])
    selection.observe(torch.tensor([0.5, 0.5]))
    weight[0] = torch.nan
    weight[1] = 2
    selection.observe(torch.tensor([torch.nan, 0.6]))
    assert selection.weights[0][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(("steps", "often"), [(10, 2), (7, 2), (5, 1), (9, 3), (1, 1)])
def test_validations_are_evenly_spaced(steps: int, often: int) -> None:
    rule = SelectionRule("score", torch.empty, often, 0)
    due = [step + 1 for step in range(steps) if rule.due(step, steps)]
    assert due == [-(-steps * i // often) for i in range(1, often + 1)]
