"""Fleets against plain training loops, in float64: each run equals one that is trained alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_all_close, seeded
from torch import Tensor, nn
from toy_tasks import (
    BATCH,
    CATEGORIES,
    DOUBLE,
    EPOCHS,
    LATENTS,
    PIXELS,
    STEPS,
    VAE_TINY,
    equal,
    resumed_twins,
    toy_images,
    train,
    vae_task,
    weights,
)
from toy_tasks import vae_trainer as fleet

import gapped
from gapped_lab.fleet import Run, Trainer, derived_seed
from gapped_lab.fleet.schedule import Mixed
from gapped_lab.tasks.vae import VAETask

RECTIFIED = replace(VAE_TINY, rectified_logits=True)
ESTIMATORS = {
    "gumbel-softmax": gapped.GumbelSoftmax(tau=0.5),
    "straight-through": gapped.StraightThrough(tau=0.7),
    "gst": gapped.GST(tau=0.5, gap=1.2),
    "gst-expected": gapped.GST(tau=0.5, gap=gapped.expected_gap),
    "gst-nz": gapped.GST(tau=0.5, gap=1.0, detach=False),
    "gumbel-rao": gapped.GumbelRao(tau=0.3, samples=5),
    "reinmax": gapped.ReinMax(tau=1.3),
    "decoupled": gapped.DecoupledGumbelSoftmax(tau=0.5, tau_forward=1.5),
}


# A plain twin: a VAE and its training loop as a script would have them, without code of the fleet. Only the
# estimators are the package's own, with plain numbers as options.


class PlainVAE(nn.Module):
    """One VAE."""

    def __init__(self, rectified: bool) -> None:
        super().__init__()
        self.rectified = rectified
        latent = LATENTS * CATEGORIES
        self.encoder = nn.Sequential(
            nn.Linear(PIXELS, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, latent)
        )
        self.decoder = nn.Sequential(
            nn.Linear(latent, 7), nn.ReLU(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, PIXELS)
        )

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the latents, and the divergence from the uniform prior."""
        logits = self.encoder(x)
        if self.rectified:
            logits = F.relu(logits)
        logits = logits.reshape(len(x), LATENTS, CATEGORIES)
        q = torch.softmax(logits, -1)
        return logits, (q * torch.log(q * CATEGORIES)).sum((1, 2))

    def cross_entropy(self, z: Tensor, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.decoder(z.reshape(len(x), -1)))
        return -(x * torch.log(p) + (1 - x) * torch.log(1 - p)).sum(1)

    def forward(self, x: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean negative evidence lower bound of a batch."""
        logits, divergence = self.posterior(x)
        return (self.cross_entropy(sample(logits), x) + divergence).mean()


def plain_twin(task: VAETask, run: int, kind: type[PlainVAE] = PlainVAE) -> PlainVAE:
    """A plain model with the weights that a run of the fleet has now."""
    with torch.random.fork_rng(devices=[]):
        model = kind(task.protocol.rectified_logits).double()
    with torch.no_grad():
        for mine, theirs in zip(weights(model), weights(task.model, run), strict=True):
            mine.copy_(theirs)
    return model


def plain_loop(
    model: PlainVAE,
    learning_rate: float,
    image_seed: int,
    sample: Callable[[Tensor, torch.Generator], Tensor],
    decays: bool = False,
) -> list[float]:
    """Train as a script would, and return the mean loss of each epoch."""
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    data = toy_images()
    images = data.train.double() / data.scale
    means = []
    for epoch in range(EPOCHS):
        if decays:
            optimiser.param_groups[0]["lr"] = learning_rate * math.cos(math.pi * epoch / EPOCHS / 2) ** 2
        order = torch.randperm(len(images), generator=seeded(derived_seed(image_seed, epoch)))
        noise = seeded(derived_seed(77, "train", epoch))
        losses = []
        for step in range(STEPS):
            x = images[order[step * BATCH : (step + 1) * BATCH]]
            optimiser.zero_grad()
            loss = model(x, lambda logits: sample(logits, noise))  # noqa: B023 - used at once
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        means.append(sum(losses) / STEPS)
    return means


class Slot:
    """The estimator of one run, fed with the noise that falls to its place in a fleet.

    A fleet draws group after group, each for all its runs at once. So does this class, with the run's own
    logits in every place, and returns the sample at the run's place.
    """

    def __init__(self, groups: Sequence[Sequence[Any]], run: int) -> None:
        sizes = [len(group) for group in groups]
        self.before = [(group[0], len(group)) for group in groups]
        self.group = next(g for g in range(len(groups)) if run < sum(sizes[: g + 1]))
        self.place = run - sum(sizes[: self.group])
        self.own = groups[self.group][self.place]

    def __call__(self, logits: Tensor, noise: torch.Generator) -> Tensor:
        sample = None
        for number, (estimator, size) in enumerate(self.before):
            copies = logits.expand(size, *logits.shape)
            if number == self.group:
                sample = self.own.sample(copies, generator=noise)[self.place]
            else:
                estimator.sample(copies, generator=noise)
        assert sample is not None
        return sample


def assert_same_weights(trainer: Trainer, run: int, model: nn.Module, tolerance: float = 1e-9) -> None:
    assert_all_close(weights(trainer.task.model, run), weights(model), tolerance)


def largest_difference(trainer: Trainer, model: nn.Module) -> float:
    pairs = zip(weights(trainer.task.model, 0), weights(model), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


class PlainRLOO(PlainVAE):
    """The VAE with two samples and the estimator's formula in place of a sample with a gradient."""

    def forward(self, x: Tensor, sample: Any) -> Tensor:
        logits, divergence = self.posterior(x)
        one, other = sample(logits.detach())
        costs = [self.cross_entropy(z, x) for z in (one, other)]
        gain = (costs[0] - costs[1]).detach()
        score = gain * ((one - other) * F.log_softmax(logits, -1)).sum((1, 2)) / 2
        return ((costs[0] + costs[1]) / 2 + score - score.detach() + divergence).mean()


def two_samples(logits: Tensor, noise: torch.Generator) -> Tensor:
    """Inverse transform of one uniform for each row and sample, in the order that a fleet draws them."""
    cumulative = torch.softmax(logits, -1).cumsum(-1)
    u = torch.rand(2, 1, *logits.shape[:-1], 1, generator=noise, dtype=DOUBLE).squeeze(1)
    index = (cumulative <= u * cumulative[..., -1:]).sum(-1)
    return F.one_hot(index, CATEGORIES).double()


@pytest.mark.parametrize(
    ("name", "rules"),
    [(name, rules) for name in ESTIMATORS for rules in (VAE_TINY, RECTIFIED)] + [("rloo", VAE_TINY)],
    ids=lambda each: each if isinstance(each, str) else ["plain", "rectified"][each.rectified_logits],
)
def test_a_fleet_of_one_equals_a_plain_training_loop(name, rules):
    estimator = ESTIMATORS.get(name, gapped.RLOO(2))
    trainer = fleet([Run(estimator, 3e-3)], [5], rules)
    if name == "rloo":
        model, sample = plain_twin(trainer.task, 0, PlainRLOO), two_samples
    else:
        model, sample = plain_twin(trainer.task, 0), Slot([[estimator]], 0)
    start = [w.clone() for w in weights(model)]
    losses = plain_loop(model, 3e-3, 5, sample)
    history = train(trainer)
    assert [row[0] for row in history] == pytest.approx(losses, rel=1e-9)
    assert_same_weights(trainer, 0, model, 1e-8 if name == "rloo" else 1e-9)
    for theirs, before in zip(weights(model), start, strict=True):
        assert (theirs - before).abs().max() > 1e-3, "a layer was not trained"


GROUPS = [
    [gapped.GST(tau=0.5, gap=0.8), gapped.GST(tau=1.0, gap=1.2)],
    [gapped.StraightThrough(tau=0.7), gapped.StraightThrough(tau=2.0)],
    [gapped.GumbelSoftmax(tau=0.4)],
]
RATES = [1e-3, 4e-3, 2e-3, 1e-2, 5e-3]
SEEDS = [3, 3, 8, 3, 0]


@pytest.fixture(scope="module")
def mixed_fleet() -> tuple[Trainer, list[dict[str, Tensor]], list[list[float]]]:
    """The trainer at its end, the weights that its runs started from, and its losses."""
    estimators = [e for group in GROUPS for e in group]
    trainer = fleet([Run(e, rate) for e, rate in zip(estimators, RATES, strict=True)], SEEDS)
    starts = [plain_twin(trainer.task, run).state_dict() for run in range(len(SEEDS))]
    return trainer, starts, train(trainer)


def plain_model(start: dict[str, Tensor]) -> PlainVAE:
    model = PlainVAE(False).double()
    model.load_state_dict(start)
    return model


@pytest.mark.parametrize("run", range(len(SEEDS)))
def test_each_run_of_a_fleet_equals_its_own_plain_loop(mixed_fleet, run):
    trainer, starts, history = mixed_fleet
    model = plain_model(starts[run])
    losses = plain_loop(model, RATES[run], SEEDS[run], Slot(GROUPS, run))
    assert [row[run] for row in history] == pytest.approx(losses, rel=1e-9)
    assert_same_weights(trainer, run, model)


WRONG = {
    "temperature": ([[gapped.GST(tau=1.0, gap=0.8), *GROUPS[0][1:]], *GROUPS[1:]], 1e-3, 3, 0),
    "gap": ([[gapped.GST(tau=0.5, gap=1.2), *GROUPS[0][1:]], *GROUPS[1:]], 1e-3, 3, 0),
    "rate": (GROUPS, 1.1e-3, 3, 0),
    "order of the images": (GROUPS, 1e-3, 8, 0),
    "place": ([[GROUPS[0][1], GROUPS[0][0]], *GROUPS[1:]], 1e-3, 3, 1),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_plain_loop_with_another_run_s_settings_is_told_apart(mixed_fleet, what):
    groups, rate, image_seed, place = WRONG[what]
    trainer, starts, _ = mixed_fleet
    model = plain_model(starts[0])
    plain_loop(model, rate, image_seed, Slot(groups, place))
    assert largest_difference(trainer, model) > 1e-6


def test_a_learning_rate_may_fall_along_a_half_cosine():
    estimator = gapped.GST(tau=0.5)
    trainer = fleet([Run(estimator, 3e-3, decay=decay) for decay in ("cosine", "none")], [5, 5])
    falling, wrong, steady = (plain_twin(trainer.task, run) for run in (0, 0, 1))
    for model, run, decays in ((falling, 0, True), (wrong, 0, False), (steady, 1, False)):
        plain_loop(model, 3e-3, 5, Slot([[estimator, estimator]], run), decays=decays)
    train(trainer)
    assert_same_weights(trainer, 0, falling)
    assert_same_weights(trainer, 1, steady)
    assert largest_difference(trainer, wrong) > 1e-4


def test_equal_seeds_see_equal_images_and_others_do_not():
    task = vae_task(seeds=[3, 8, 3])
    orders = []
    for epoch in range(2):
        task.start_epoch(epoch)
        batches = []
        for step in range(task.steps):
            task.load_batch(step)
            batches.append(task.batch.clone())
        order = torch.cat(batches, 1)
        assert torch.equal(order[0], order[2])
        assert not torch.equal(order[0], order[1])
        assert all(len(row.unique()) == BATCH * STEPS for row in order)
        orders.append(order)
    assert not torch.equal(*orders)
    task.start_epoch(0)
    task.load_batch(0)
    assert torch.equal(task.batch, orders[0][:, :BATCH]), "an epoch's order depends on what came before"


def test_a_fleet_may_be_tested_now_and_then():
    always, seldom = (fleet([Run(gapped.RLOO(), 3e-3)], [5], test_every=every) for every in (1, 3))
    for trainer in (always, seldom):
        train(trainer)
    assert always.tested == [1, 2, 3, 4]
    assert seldom.tested == [3, 4], "the last epoch is always tested"
    for name, rows in seldom.history.items():
        assert rows == [always.history[name][epoch - 1] for epoch in seldom.tested]


def test_an_epoch_lasts_until_the_device_is_done(monkeypatch):
    """Also one without a test, which would wait for it: steps on a GPU are queued in no time."""
    monkeypatch.setattr("gapped_lab.fleet.synchronize", lambda device: time.sleep(0.05))
    trainer = fleet([Run(gapped.GST(), 3e-3)], [5], test_every=EPOCHS)
    train(trainer)
    assert len(trainer.seconds) == EPOCHS
    assert min(trainer.seconds) >= 0.05


def test_soft_training_is_tested_with_hard_samples():
    soft, hard = (fleet([Run(gapped.GST(tau=0.5, hard=h), 3e-3)], [5]) for h in (False, True))
    before = [each.evaluate()["test_negative_elbo"] for each in (soft, hard)]
    assert torch.equal(*before), "equal weights, and the same hard samples"
    losses = [train(each) for each in (soft, hard)]
    assert losses[0] != losses[1]


# Divergence. One step of this size, and the next loss overflows even in float64.
HUGE = 1e200


@pytest.mark.parametrize("name", gapped.estimators())
def test_a_run_that_diverges_is_frozen_and_leaves_the_others_alone(name):
    def trainer(rate: float) -> Trainer:
        one, other, third = gapped.estimator(name), gapped.estimator(name), gapped.StraightThrough()
        return fleet([Run(one, 1e-3), Run(other, rate), Run(third, 1e-3)], [1, 1, 2], rules)

    rules = replace(VAE_TINY, categories=2) if name == "disarm" else VAE_TINY
    broken, sound = trainer(HUGE), trainer(1e-3)
    train(broken)
    frozen = [w.clone() for w in weights(broken.task.model, 1)]
    broken.epoch -= 1
    broken.train_epoch()
    history = train(sound)
    sound.epoch -= 1
    sound.train_epoch()
    assert broken.alive.tolist() == [True, False, True]
    assert sound.alive.all()
    for run in (0, 2):
        assert equal(weights(broken.task.model, run), weights(sound.task.model, run))
        assert [row[run] for row in broken.history["train_negative_elbo"]] == [row[run] for row in history]
    assert equal(weights(broken.task.model, 1), frozen)
    assert not any(w.isnan().any() for w in frozen)


def test_a_resumed_trainer_goes_on_as_if_nothing_had_happened():
    runs = [
        Run(gapped.GST(tau=0.5), 1e-3),
        Run(gapped.GST(tau=0.1), HUGE),
        Run(gapped.GumbelSoftmax(tau=0.1), 1e-3, Mixed(period=3)),
    ]
    whole, second = resumed_twins(lambda: fleet(runs, [1, 2, 3]), 2)
    assert second.alive.tolist() == whole.alive.tolist() == [True, False, True]
    assert str(second.history) == str(whole.history)  # as text, since NaN is not equal to itself
    assert equal(second.parameters, whole.parameters)
