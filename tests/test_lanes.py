"""Parts of a fleet side by side on a GPU: the same numbers as one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from test_fleet import EPOCHS, TINY, toy_data
from test_listops_task import TINY as TREES
from test_listops_task import toy_data as toy_trees
from torch import Tensor

import gapped
from gapped.kernels import lanes as kernel_lanes
from gapped.kernels.lanes import Lanes
from gapped.lab.fleet import grouping
from gapped.lab.fleet.capture import Captured
from gapped.lab.fleet.trainer import Run, Trainer
from gapped.lab.tasks.listops.task import ListOpsTask
from gapped.lab.tasks.vae.task import VAETask

# A trained prior makes the cost look at a tensor of the encoder's.
OWN_PRIOR = replace(TINY, sampled_divergence=True, prior_rate=1e-2)
ESTIMATORS = (
    gapped.GST(tau=0.5),
    gapped.GumbelRao(tau=0.5, samples=10),
    gapped.RLOO(2),
    gapped.DisARMTree(),
    gapped.NVIL(network=6),
    gapped.MuProp(),
    gapped.REBAR(),
)


def test_elsewhere_than_on_a_gpu_there_is_one_lane():
    x = torch.ones(3)
    lanes = Lanes("test", x.device, [x])
    with lanes.lane(0), lanes.lane(1):
        y = x + 1
    lanes.join([y])
    assert (y == 2).all()


class Stream:
    """One that keeps what it is told."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def record_event(self) -> str:
        return "start"

    def wait_event(self, event: str) -> None:
        self.told.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.told.append("joined")


class Kept:
    """Memory that knows who uses it."""

    def __init__(self) -> None:
        self.users: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream)


def test_memory_is_kept_for_all_lanes_that_use_it(monkeypatch: pytest.MonkeyPatch):
    main, side = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(kernel_lanes, "_stream", lambda device, beside, purpose, number: side)
    before, made = Kept(), Kept()
    lanes = Lanes("test", torch.device("cuda"), [before])
    with lanes.lane(0):
        assert not before.users
    with lanes.lane(1):
        assert before.users == [side]
        assert side.told == ["start"]
    lanes.join([made])
    assert made.users == [main]
    assert main.told == ["joined"]


def test_all_that_a_cost_looks_at_is_shared(monkeypatch: pytest.MonkeyPatch):
    shared: list[Tensor] = []

    def spy(purpose: str, device: torch.device, tensors: list[Tensor]) -> Lanes:
        shared.extend(tensors)
        return Lanes(purpose, device, tensors)

    monkeypatch.setattr(grouping, "Lanes", spy)
    task = VAETask(OWN_PRIOR, toy_data(), [3] * len(ESTIMATORS), torch.device("cpu"))
    trainer = Trainer(task, [Run(each, 1e-2) for each in ESTIMATORS], EPOCHS, 77, torch.device("cpu"))
    task.start_epoch(0)
    task.load_batch(0)
    task.loss(trainer.sampler, torch.Generator().manual_seed(0))
    rows = (len(ESTIMATORS), TINY.batch)
    latent = (*rows, TINY.latents, TINY.categories)
    # Logits, what log q - log p is of every category, and the images.
    assert [tuple(each.shape) for each in shared] == [latent, latent, (*rows, task.train.shape[1])]


@contextmanager
def same_lane(lanes: Lanes, number: int) -> Iterator[None]:
    yield


def trained(name: str, device: torch.device) -> list[Tensor]:
    """The weights of a small fleet of the VAE, under either of two protocols, or of ListOps."""
    estimators = [each for each in ESTIMATORS if name != "listops" or isinstance(each, gapped.Pathwise)]
    seeds = [3] * len(estimators)
    task: VAETask | ListOpsTask
    if name == "listops":
        task = ListOpsTask(TREES, toy_trees(), seeds, device, compiled=device.type == "cuda")
    else:
        task = VAETask({"tiny": TINY, "own": OWN_PRIOR}[name], toy_data(), seeds, device)
    trainer = Trainer(task, [Run(each, 1e-2) for each in estimators], EPOCHS, 77, device)
    for _ in range(EPOCHS):
        trainer.train_epoch()
    assert trainer.alive.all()
    return [parameter.detach().clone() for parameter in task.model.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", ["tiny", "own", "listops"])
def test_lanes_change_no_bit(name: str, captured: bool, monkeypatch: pytest.MonkeyPatch):
    if not captured:
        # A graph does not use memory again that some lane has seen, plain calls do.
        monkeypatch.setattr(Captured, "__call__", lambda self, program=None: self._function())
    cuda = torch.device("cuda")
    side_by_side = trained(name, cuda)
    monkeypatch.setattr(Lanes, "lane", same_lane)
    assert all(torch.equal(a, b) for a, b in zip(side_by_side, trained(name, cuda), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_recording_again_keeps_no_more_memory():
    cuda = torch.device("cuda")
    x, out = torch.randn(2, 64, 64, device=cuda)

    def product() -> None:
        torch.mm(x, x, out=out)

    def kept() -> int:
        """What is still allocated after a graph with a product was recorded, used and dropped."""
        Captured(product, torch.Generator(cuda), lambda: (out,))()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(cuda)

    assert kept() == kept()
