"""Score-function estimators in fleets: against plain loops, beside pathwise ones, with a state."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, normal, seeded
from test_fleet import (
    BATCH,
    CATEGORIES,
    CPU,
    DOUBLE,
    EPOCHS,
    LATENTS,
    PIXELS,
    TINY,
    PlainVAE,
    fleet,
    plain_loop,
    plain_twin,
    toy_data,
    train,
    weights,
)
from torch import Tensor

import gapped
from gapped.errors import GappedError
from gapped.lab.fleet.estimator_groups import Grouped, Part
from gapped.lab.fleet.optimizer import clip_scales, scaled
from gapped.lab.fleet.run_layers import Linear, generators
from gapped.lab.fleet.score_groups import Widths
from gapped.lab.fleet.trainer import Run, Trainer
from gapped.lab.spec import RunSpec
from gapped.lab.tasks.protocols import vae_protocol
from gapped.lab.tasks.vae import VAE, VAETask

STATEFUL: dict[str, dict[str, Any]] = {
    "nvil": {},
    "nvil-network": {"network": 6},
    "rebar": {"eta": 0.5},
    "relax": {"network": 6, "tau": 0.7},
}


def stateful(name: str) -> Any:
    return gapped.estimator(name.partition("-")[0], **STATEFUL[name])


# Against a loop written out


class PlainRLOO(PlainVAE):
    """The VAE with two samples and the estimator's formula in place of a sample with a gradient."""

    def forward(self, x: Tensor, sample: Any) -> Tensor:
        logits = self.encoder(x).reshape(len(x), LATENTS, CATEGORIES)
        log_q = F.log_softmax(logits, -1)
        divergence = (log_q.exp() * (log_q + math.log(CATEGORIES))).sum((1, 2))
        one, other = sample(logits.detach())
        costs = []
        for z in (one, other):
            p = torch.sigmoid(self.decoder(z.reshape(len(x), -1)))
            costs.append(-(x * torch.log(p) + (1 - x) * torch.log(1 - p)).sum(1))
        gain = (costs[0] - costs[1]).detach()
        score = gain * ((one - other) * log_q).sum((1, 2)) / 2
        value = (costs[0] + costs[1]) / 2
        return (value + score - score.detach() + divergence).mean()


def two_samples(logits: Tensor, noise: torch.Generator) -> Tensor:
    """Inverse transform of one uniform for each row and sample, in the order that a fleet draws them."""
    cumulative = torch.softmax(logits, -1).cumsum(-1)
    u = torch.rand(2, 1, *logits.shape[:-1], 1, generator=noise, dtype=DOUBLE).squeeze(1)
    index = (cumulative <= u * cumulative[..., -1:]).sum(-1)
    return F.one_hot(index, CATEGORIES).double()


def test_a_fleet_of_one_with_rloo_equals_a_plain_training_loop():
    trainer = fleet([Run(gapped.RLOO(2), 3e-3)], [5])
    model = PlainRLOO(False).double()
    model.load_state_dict(plain_twin(trainer.task, 0).state_dict())
    start = [w.clone() for w in weights(model)]
    losses = plain_loop(model, toy_data(), 3e-3, 5, 77, two_samples)
    history = train(trainer)
    assert [row[0] for row in history] == pytest.approx(losses, rel=1e-9)
    for mine, theirs, before in zip(weights(trainer.task.model, 0), weights(model), start, strict=True):
        assert_close(mine, theirs, 1e-8)
        assert (theirs - before).abs().max() > 1e-3, "a layer was not trained"


# Beside each other


MIXED = [
    gapped.GST(tau=0.5, gap=0.8),
    gapped.GST(tau=1.0),
    gapped.ReinMax(),
    gapped.RLOO(2),
    gapped.RLOO(2),
    gapped.DisARMTree(),
    gapped.MuProp(),
]
SIZES = [2, 1, 2, 1, 1]


def test_an_expectation_is_each_group_s_own():
    """Groups draw one after the other; each is what `gapped.expectation` makes of its runs alone."""
    grouped = Grouped.of(MIXED, 2, CPU, DOUBLE)
    logits, slope = normal(7, 4, 3, 5), normal(7, 1, 15, seed=2)
    shown: list[tuple[int, int, int]] = []

    def cost(z: Tensor, part: Part) -> Tensor:
        shown.append((part.start, part.stop, len(z)))
        return ((z.flatten(-2) * slope[part.runs]).sum(-1) + 1) ** 2

    leaf = logits.clone().requires_grad_()
    value = grouped.expectation(cost, leaf, seeded(3))
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert shown == [(0, 3, 1), (3, 6, 2), (6, 7, 1), (6, 7, 1)]
    noise, start = seeded(3), 0
    for size in SIZES:
        runs = slice(start, start + size)
        own = logits[runs].clone().requires_grad_()
        single = Grouped.of(MIXED[runs], 2, CPU, DOUBLE).groups[0][2]
        alone = gapped.expectation(
            lambda z, runs=runs: cost(z, Part(runs.start, runs.stop)), own, single, generator=noise
        )
        assert_close(value[runs].detach(), alone.detach(), 1e-12)
        assert_close(gradient[runs], torch.autograd.grad(alone.sum(), own)[0], 1e-12)
        start += size


def test_without_a_gradient_every_run_has_one_sample():
    grouped = Grouped.of(MIXED, 2, CPU, DOUBLE)
    shown: list[tuple[int, ...]] = []
    with torch.no_grad():
        grouped.expectation(
            lambda z, part: (shown.append((part.start, part.stop, *z.shape)), z.sum((-2, -1)))[1],
            normal(7, 4, 3, 5),
            seeded(),
        )
    assert shown == [(0, 7, 1, 7, 4, 3, 5)]


def test_pathwise_runs_start_as_they_would_alone():
    """They come first, so that their first step sees the noise that it would see without the others."""
    both = fleet([Run(e, 3e-3) for e in MIXED], [5] * 7)
    alone = fleet([Run(e, 3e-3) for e in MIXED[:3]], [5] * 3)
    for trainer in (both, alone):
        trainer.train_steps(1)
    assert_close(both.loss_sum[:3], alone.loss_sum, 1e-13)
    for run in range(3):
        for one, other in zip(weights(both.task.model, run), weights(alone.task.model, run), strict=True):
            assert_close(one, other, 1e-12)


def test_every_family_learns():
    trainer = fleet([Run(e, 1e-2) for e in (*MIXED, *map(stateful, STATEFUL))], [5] * 11)
    history = train(trainer)
    assert all(last < first for first, last in zip(history[0], history[-1], strict=True))
    assert trainer.alive.all()


# State


@pytest.mark.parametrize("name", STATEFUL)
def test_a_run_s_state_does_not_depend_on_its_neighbours(name):
    """The neighbour's learning rate changes everything about it, and nothing about the first run."""

    def trained(rate: float) -> Trainer:
        trainer = fleet([Run(stateful(name), 3e-3), Run(stateful(name), rate)], [5, 6])
        train(trainer)
        return trainer

    one, other = trained(1e-3), trained(5e-2)
    (part, first, _), (_, second, _) = one.tuned[0], other.tuned[0]
    assert part == Part(0, 2)
    states = {k: (v, second.state_dict()[k]) for k, v in first.state_dict().items() if v.dim()}
    assert states
    for key, (mine, theirs) in states.items():
        assert torch.equal(mine[0], theirs[0]), key
    assert any(not torch.equal(mine[1], theirs[1]) for mine, theirs in states.values())
    for mine, theirs in zip(weights(one.task.model, 0), weights(other.task.model, 0), strict=True):
        assert torch.equal(mine, theirs)
    start = fleet([Run(stateful(name), 3e-3)] * 2, [5, 6]).tuned[0][1].state_dict()
    assert any(not torch.equal(start[key][0], mine[0]) for key, (mine, _) in states.items())


def test_memories_are_kept_run_by_run():
    grouped = Grouped.of([gapped.NVIL(), gapped.NVIL()], 2, CPU, DOUBLE)
    level = torch.tensor([[1.0], [100.0]], dtype=DOUBLE)
    plain = [gapped.NVIL(), gapped.NVIL()]
    logits = normal(2, 6, 3, 5).requires_grad_()
    for step in range(3):
        costs = level * (1 + step + normal(2, 6, seed=step))
        grouped.expectation(lambda z, part, costs=costs: costs + 0 * z.sum((-2, -1)), logits, seeded())
        for run, estimator in enumerate(plain):
            gapped.expectation(
                lambda z, own=costs[run : run + 1]: own + 0 * z.sum((-2, -1)),
                logits[run : run + 1],
                estimator,
            )
    joined = grouped.groups[0][2]
    for run, estimator in enumerate(plain):
        for buffer in ("mean", "variance"):
            assert getattr(joined, buffer)[run].item() == pytest.approx(
                getattr(estimator, buffer).item(), rel=1e-5
            )


@pytest.mark.parametrize("name", STATEFUL)
def test_estimators_with_a_state_resume_from_a_checkpoint(name):
    def fresh() -> Trainer:
        return fleet(
            [Run(gapped.GST(tau=0.5), 3e-3), *(Run(stateful(name), r) for r in (3e-3, 1e-2))], [5, 5, 6]
        )

    whole = fresh()
    train(whole)
    first, second = fresh(), fresh()
    for _ in range(2):
        first.train_epoch()
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(EPOCHS - 2):
        second.train_epoch()
    assert second.history == whole.history
    mine, theirs = whole.tuned[0][1].state_dict(), second.tuned[0][1].state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    # The wrong twin: the model goes on, its estimator starts over.
    forgetful = fresh()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    start = forgetful.state_dict()
    forgetful.load_state_dict({**state, "estimators": start["estimators"], "tuners": start["tuners"]})
    forgetful.train_epoch()
    assert forgetful.history["train_negative_elbo"][2] != whole.history["train_negative_elbo"][2]


def test_measuring_leaves_the_state_alone():
    trainer = fleet([Run(stateful(name), 3e-3) for name in STATEFUL], [1, 2, 3, 4])
    trainer.train_steps(2)
    before = [{k: v.clone() for k, v in each.state_dict().items()} for _, each, _ in trainer.tuned]
    trainer.task.gradient_variance(trainer.sampler, seeded(), 3, 10)
    for state, (_, each, _) in zip(before, trainer.tuned, strict=True):
        assert all(torch.equal(value, each.state_dict()[key]) for key, value in state.items())
        assert each.training
    trainer.train_steps(1)


def test_what_cannot_be_joined():
    with pytest.raises(GappedError, match="network: got a network for RELAX, expected a number of hidden"):
        Grouped.of([gapped.RELAX(torch.nn.Identity())], 2, CPU, DOUBLE, Widths(4, 4))
    with pytest.raises(GappedError, match="RELAX: this task does not say how wide"):
        Grouped.of([gapped.RELAX(5)], 2, CPU, DOUBLE)
    with pytest.raises(GappedError, match="eta: got a tensor, expected a number for each run of REBAR"):
        Grouped.of([gapped.REBAR(eta=torch.ones(3))], 2, CPU, DOUBLE)
    with pytest.raises(GappedError, match="a score-function estimator has no surrogate"):
        Grouped.of(MIXED, 2, CPU, DOUBLE).soft()


# Specs


def spec(estimator: str, **changes: Any) -> RunSpec:
    return RunSpec("vae", changes.pop("protocol", "digits-8x8"), "digits", estimator, **changes)


@pytest.mark.parametrize(
    ("estimator", "changes", "message"),
    [
        ("disarm", {}, "8 categories for DisARM, expected two"),
        ("exact", {}, "8 variables of 8 categories"),
        ("arsm", {"protocol": "paper-32x64"}, "64 categories for ARSM, expected at most 16"),
        ("rloo", {"schedule": {"kind": "mixed"}}, "schedule: got 'mixed', expected constant for rloo"),
        ("rloo", {"entropy_steps": 3}, "entropy_steps: got 3, expected 0: rloo has no surrogate"),
        ("rloo", {"test_every": 0}, "test_every: got 0, expected a positive integer"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_training(estimator, changes, message):
    with pytest.raises(GappedError, match=message):
        spec(estimator, **changes)


def test_a_run_without_a_temperature_is_one_run_at_all_of_them():
    assert spec("rloo", tau=0.5) == spec("rloo", tau=1.0)
    assert spec("rloo").tau is None
    assert spec("rebar", tau=0.3).make_estimator().tau.item() == pytest.approx(0.3)
    assert spec("relax", options={"network": 5}).options == {"network": 5}


def test_how_often_to_test_counts_only_where_it_is_used():
    assert spec("gst", test_every=1).id == spec("gst").id == replace(spec("gst"), test_every=1).id
    assert spec("gst", test_every=2).id != spec("gst").id


def test_a_fleet_may_be_tested_now_and_then():
    def trained(every: int) -> Trainer:
        task = VAETask(TINY, toy_data(), [5], CPU, dtype=DOUBLE)
        trainer = Trainer(task, [Run(gapped.RLOO(), 3e-3)], EPOCHS, 77, CPU, test_every=every)
        train(trainer)
        return trainer

    always, seldom = trained(1), trained(3)
    assert always.tested == [1, 2, 3, 4]
    assert seldom.tested == [3, 4], "the last epoch is always tested"
    for name, rows in seldom.history.items():
        assert rows == [always.history[name][epoch - 1] for epoch in seldom.tested]


# The protocol of the coupled estimators


OWN = replace(
    vae_protocol("coupled-32x64"), latents=LATENTS, categories=CATEGORIES, hidden=(9, 7), batch=BATCH
)


def own_trainer(rate: float = 1e-3) -> Trainer:
    return fleet([Run(gapped.GST(tau=0.5), rate), Run(gapped.RLOO(), rate)], [5, 6], OWN)


def test_glorot_weights():
    layer = Linear(300, 50, generators([1]), glorot=True)
    bound = math.sqrt(6 / 350)
    assert (layer.bias == 0).all()
    assert 0.98 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_the_mean_image_goes_in_and_out():
    task = own_trainer().task
    mean = toy_data().train.double().mean(0) / 16
    assert_close(task.model.decoder[-1].bias[0, 0], torch.logit(mean.clamp(1e-3, 0.999)), 1e-6)
    x = torch.rand(2, 3, PIXELS, generator=seeded(1), dtype=DOUBLE)
    shifted, plain = task.model, VAE(replace(OWN, centred=False), PIXELS, generators([5, 6]), mean).double()
    assert_close(shifted.encode(x), plain.encode(x - mean), 1e-6)
    z = F.one_hot(torch.randint(0, CATEGORIES, (2, 3, LATENTS), generator=seeded(2)), CATEGORIES).double()
    same = VAE(replace(OWN, signed=False), PIXELS, generators([5, 6]), mean).double()
    assert_close(shifted.decode(z), same.decode(2 * z - 1), 1e-6)


def test_the_sampled_divergence_is_part_of_the_cost():
    """On average over the posterior it is the divergence in closed form, by enumeration."""
    task = own_trainer().task
    with torch.no_grad():
        task.model.prior.copy_(normal(2, 1, LATENTS, CATEGORIES))
        x = torch.rand(2, 3, PIXELS, generator=seeded(1), dtype=DOUBLE)
        logits, ratio = task.model.posterior(x)
        q, p = torch.softmax(logits, -1), torch.softmax(task.model.prior, -1)
        assert_close((q * ratio).sum((-2, -1)), (q * (q / p).log()).sum((-2, -1)), 1e-12)
        z = F.one_hot(torch.randint(0, CATEGORIES, (2, 3, LATENTS), generator=seeded(2)), CATEGORIES).double()
        decoder = [(layer.weight, layer.bias) for layer in task.model.decoder]
        cost = task.model.costs(z.unsqueeze(0), x, decoder, ratio).squeeze(0)
        expected = task.model.reconstruction(z, x) + ((z * q).sum(-1).log() - (z * p).sum(-1).log()).sum(-1)
    assert_close(cost, expected, 1e-12)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_prior_is_trained_by_plain_descent(clip):
    trainer = own_trainer()
    trainer.task.clip = clip
    prior = trainer.task.model.prior
    assert all(p is not prior for p in trainer.parameters)
    trainer.task.start_epoch(0)
    trainer.task.load_batch(0)
    loss = trainer.task.loss(trainer.sampler, seeded(4))
    gradients = torch.autograd.grad(loss.sum(), [*trainer.parameters, prior])
    # The norm is that of all weights.
    gradient = scaled(gradients[-1], None if clip is None else clip_scales(gradients, clip))
    trainer.generator.manual_seed(4)
    before = prior.detach().clone()
    trainer._train_step()
    assert_close(prior.detach(), before - 1e-2 * gradient, 1e-12)
    assert (gradient != 0).any()
    assert clip is None or (clip_scales(gradients, clip) < 1).all()


def test_the_test_bound_is_importance_weighted():
    trainer = own_trainer()
    train(trainer)
    assert set(trainer.history) == {"train_negative_elbo", "test_100_sample_negative_elbo"}
    task, x = trainer.task, torch.rand(2, 3, PIXELS, generator=seeded(1), dtype=DOUBLE).round()
    with torch.no_grad():
        found = task.model.bound(x, trainer.sampler, seeded(9), 5)
        noise = seeded(9)
        costs = torch.stack([task.model.loss(x, trainer.sampler, noise) for _ in range(5)])
    assert_close(found, math.log(5) - torch.logsumexp(-costs, 0), 1e-12)
    assert (found < costs.mean(0)).all(), "tighter than the mean of as many one-sample bounds"


def test_steps_of_the_published_protocols():
    for name, steps in (("paper-32x64", 500_000), ("coupled-32x64", 1_000_000)):
        rules = vae_protocol(name)
        assert rules.epochs * (rules.train_images // rules.batch) == steps
