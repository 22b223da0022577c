"""Parts of a fleet side by side on a GPU: the same numbers as one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_fleet import EPOCHS, TINY, toy_data
from torch import Tensor

import gapped
from gapped.fleet.lanes import Lanes
from gapped.fleet.trainer import Run, Trainer
from gapped.tasks.vae.task import VAETask

# A trained prior makes the cost look at a tensor of the encoder's.
OWN_PRIOR = replace(TINY, sampled_divergence=True, prior_rate=1e-2)
ESTIMATORS = (
    gapped.GST(tau=0.5),
    gapped.GumbelRao(tau=0.5, samples=10),
    gapped.RLOO(2),
    gapped.DisARMTree(),
    gapped.NVIL(network=6),
    gapped.MuProp(),
)


def test_elsewhere_than_on_a_gpu_there_is_one_lane():
    x = torch.ones(3)
    lanes = Lanes(x.device, [x])
    with lanes.lane(0), lanes.lane(1):
        y = x + 1
    lanes.join([y])
    assert (y == 2).all()


@contextmanager
def same_lane(lanes: Lanes, number: int) -> Iterator[None]:
    yield


def trained(protocol: str) -> list[Tensor]:
    device = torch.device("cuda")
    task = VAETask({"tiny": TINY, "own": OWN_PRIOR}[protocol], toy_data(), [3] * len(ESTIMATORS), device)
    trainer = Trainer(task, [Run(each, 1e-2) for each in ESTIMATORS], EPOCHS, 77, device)
    for _ in range(EPOCHS):
        trainer.train_epoch()
    assert trainer.alive.all()
    return [parameter.detach().clone() for parameter in task.model.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
@pytest.mark.parametrize("protocol", ["tiny", "own"])
@pytest.mark.filterwarnings("ignore:.*AccumulateGrad.*")
def test_lanes_change_no_bit(protocol: str, monkeypatch: pytest.MonkeyPatch):
    side_by_side = trained(protocol)
    monkeypatch.setattr(Lanes, "lane", same_lane)
    assert all(torch.equal(a, b) for a, b in zip(side_by_side, trained(protocol), strict=True))
