"""Temperature schedules: their values, and that a trainer uses them step by step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import gapped
from gapped.errors import GappedError
from gapped_lab.fleet import Run, Task, Trainer
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.fleet.schedule import Annealed, Constant, Mixed, schedule

STEPS, EPOCHS = 5, 3
CPU = torch.device("cpu")


class Spy(Task):
    """A task without data that writes down the temperatures of its steps and tests."""

    row_axes, loss_name, steps = 1, "cost", STEPS

    def __init__(self, runs: int) -> None:
        self.model = torch.nn.Module()
        self.model.weight = torch.nn.Parameter(torch.zeros(runs, 2, 3, dtype=torch.float64))
        self.train_taus: list[list[float]] = []
        self.test_taus: list[list[float]] = []
        self.group_taus: list[Tensor] = []

    def loss(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        self.train_taus.append(sampler.tau.tolist())
        # What the groups hold must be what `tau` says: it is the groups that draw.
        self.group_taus.append(torch.cat([each.tau.flatten() for _, _, each in sampler.groups]))
        sample = sampler.sample(self.model.weight, generator=generator)
        return (sample * torch.arange(3)).sum((1, 2))

    def evaluate(self, sampler: Grouped, generator: torch.Generator) -> dict[str, Tensor]:
        self.test_taus.append(sampler.tau.tolist())
        return {"test_cost": torch.zeros(len(sampler.tau))}


def test_smoothing_is_annealed_where_it_is_scheduled():
    """Of MVE alone; the run's own value stands at the last step, and temperatures stay."""
    estimators = [gapped.MVE(smoothing=1e-6), gapped.MVE(smoothing=0.1), gapped.GST(tau=0.5)]
    runs = [Run(estimators[0], 0.1, Annealed(1.0, "smoothing")), *(Run(each, 0.1) for each in estimators[1:])]
    task = Spy(len(runs))
    trainer = Trainer(task, runs, EPOCHS, 0, CPU)
    seen = []
    smoothing = trainer.sampler.groups[0][2].smoothing
    while trainer.epoch < EPOCHS:
        trainer.train_epoch(lambda step: seen.append(smoothing.flatten().tolist()))
    values, still = zip(*seen, strict=True)
    assert (values[0], set(still)) == (1.0, {0.1})
    assert values[-1] == pytest.approx(1e-6, rel=1e-12)
    assert all(a > b for a, b in pairwise(values))
    assert {tuple(taus) for taus in task.train_taus} == {(1.0, 1.0, 0.5)}
    with pytest.raises(GappedError, match="level: got 'gap', expected one of tau, smoothing"):
        Annealed(1.0, "gap")


def test_values():
    """Constant; annealed from the start to a run's own temperature; every period-th batch low."""
    assert {Constant().tau(0.3, step, 10) for step in range(10)} == {0.3}
    values = [Annealed(2.0).tau(0.1, step, 11) for step in range(11)]
    assert values[0] == 2.0
    assert values[-1] == pytest.approx(0.1, rel=1e-15)
    ratios = [b / a for a, b in pairwise(values)]
    assert ratios == pytest.approx([(0.1 / 2.0) ** 0.1] * 10, rel=1e-12)
    assert math.isclose(values[5], math.sqrt(0.2))
    values = [Mixed(mid=0.5, period=4).tau(0.01, step, 12) for step in range(12)]
    assert values == [0.5, 0.5, 0.5, 0.01] * 3
    assert [Mixed(period=1).tau(0.01, step, 3) for step in range(3)] == [0.01] * 3


def test_the_trainer_follows_each_run_s_own_schedule():
    low = gapped.GST(tau=0.25)
    runs = [
        Run(low, 1e-3),
        Run(low, 1e-3, Mixed(mid=0.5, period=4)),
        Run(gapped.GST(tau=0.125), 1e-3, Annealed(1.0)),
        Run(gapped.StraightThrough(tau=0.75), 1e-3, Mixed(mid=2.0, period=2)),
    ]
    task = Spy(len(runs))
    trainer = Trainer(task, runs, EPOCHS, seed=0, device=CPU)
    for _ in range(EPOCHS):
        trainer.train_epoch()
    total = EPOCHS * STEPS
    # Steps are counted over all epochs: the period goes on across their borders.
    assert [row[0] for row in task.train_taus] == [0.25] * total
    assert [row[1] for row in task.train_taus] == [0.25 if step % 4 == 3 else 0.5 for step in range(total)]
    annealed = [row[2] for row in task.train_taus]
    assert annealed == pytest.approx([0.125 ** (step / (total - 1)) for step in range(total)], rel=1e-12)
    assert [row[3] for row in task.train_taus] == [0.75 if step % 2 else 2.0 for step in range(total)]
    assert [each.tolist() for each in task.group_taus] == task.train_taus
    # Tests are at each run's own temperature.
    assert task.test_taus == [[0.25, 0.25, 0.125, 0.75]] * EPOCHS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mxied"}, "expected one of constant, annealed, mixed"),
        ({"kind": "mixed", "perod": 3}, "expected among mid, period"),
        ({"kind": "constant", "tau": 1}, "expected among none"),
        ({"kind": "mixed", "period": 0}, "period: got 0"),
        ({"kind": "mixed", "period": 2.5}, "period: got 2.5"),
        ({"kind": "mixed", "period": True}, "period: got True"),
        ({"kind": "mixed", "mid": 0.0}, "mid: got 0.0"),
        ({"kind": "annealed", "start": -1.0}, "start: got -1.0"),
        ({"kind": "annealed", "start": math.nan}, "start: got nan"),
        ({"kind": "annealed", "start": math.inf}, "start: got inf"),
        ({"kind": "annealed", "start": "warm"}, "start: got 'warm'"),
    ],
)
def test_bad_schedules_are_rejected(options: dict[str, Any], message: str):
    with pytest.raises(GappedError, match=message):
        schedule(**options)
