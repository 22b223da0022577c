"""Fleets against plain modules, plain optimisers and plain training loops, in float64.

The plain model, its loss, its optimiser and its loop are written here once more with `torch.nn.Linear` and
`torch.optim.Adam`, and share no code with the fleet. Only the estimators are the package's own, with plain
numbers as options: a run of a fleet must be what its estimator alone would have made of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, normal, seeded
from torch import Tensor, nn

import gapped
from gapped.lab.data import Dataset
from gapped.lab.fleet.estimator_groups import Grouped, group_key
from gapped.lab.fleet.optimizer import Adam
from gapped.lab.fleet.run_layers import Linear, generators
from gapped.lab.fleet.schedule import Mixed
from gapped.lab.fleet.trainer import Run, Trainer, derived_seed
from gapped.lab.tasks.protocols import VAEProtocol
from gapped.lab.tasks.vae import VAETask

CPU, DOUBLE = torch.device("cpu"), torch.float64
LATENTS, CATEGORIES, PIXELS, BATCH, STEPS, EPOCHS = 3, 4, 12, 8, 5, 4
TINY = VAEProtocol("tiny", LATENTS, CATEGORIES, (9, 7), batch=BATCH)
RECTIFIED = replace(TINY, rectified_logits=True)
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


def toy_data() -> Dataset:
    def images(n: int, seed: int) -> Tensor:
        return torch.randint(0, 17, (n, PIXELS), generator=seeded(seed), dtype=torch.uint8)

    labels = torch.zeros(50, dtype=torch.int64)
    # Two images more than fill the batches: the last, incomplete batch is left out.
    return Dataset("toy", images(BATCH * STEPS + 2, 1), images(30, 2), labels[:42], labels[:30], 3, 4, 16)


class PlainVAE(nn.Module):
    """One VAE, as one would write it."""

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

    def forward(self, x: Tensor, sample: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean negative evidence lower bound of a batch."""
        logits = self.encoder(x)
        if self.rectified:
            logits = F.relu(logits)
        logits = logits.reshape(len(x), LATENTS, CATEGORIES)
        q = torch.softmax(logits, -1)
        divergence = (q * torch.log(q * CATEGORIES)).sum((1, 2))
        p = torch.sigmoid(self.decoder(sample(logits).reshape(len(x), -1)))
        cross_entropy = -(x * torch.log(p) + (1 - x) * torch.log(1 - p)).sum(1)
        return (cross_entropy + divergence).mean()


def linears(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, nn.Linear | Linear)]


def weights(model: nn.Module, run: int | None = None) -> list[Tensor]:
    """Weights and biases in the layout of `torch.nn.Linear`, of one run if the model has several."""
    found = []
    for layer in linears(model):
        if run is None:
            found += [layer.weight.detach(), layer.bias.detach()]
        else:
            found += [layer.weight[run].detach().t(), layer.bias[run].detach().squeeze(0)]
    return found


def plain_twin(task: VAETask, run: int) -> PlainVAE:
    """A plain model with the weights that a run of the fleet has now."""
    with torch.random.fork_rng(devices=[]):
        model = PlainVAE(task.protocol.rectified_logits).double()
    with torch.no_grad():
        for mine, theirs in zip(weights(model), weights(task.model, run), strict=True):
            mine.copy_(theirs)
    return model


def plain_loop(
    model: PlainVAE,
    data: Dataset,
    learning_rate: float,
    image_seed: int,
    noise_seed: int,
    sample: Callable[[Tensor, torch.Generator], Tensor],
    decays: bool = False,
) -> list[float]:
    """Train as a script would, and return the mean loss of each epoch."""
    optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate)
    images = data.train.double() / data.scale
    means = []
    for epoch in range(EPOCHS):
        if decays:
            optimiser.param_groups[0]["lr"] = learning_rate * math.cos(math.pi * epoch / EPOCHS / 2) ** 2
        order = torch.randperm(len(images), generator=seeded(derived_seed(image_seed, epoch)))
        noise = seeded(derived_seed(noise_seed, "train", epoch))
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


def fleet(runs: Sequence[Run], seeds: Sequence[int], protocol: VAEProtocol = TINY, seed: int = 77) -> Trainer:
    task = VAETask(protocol, toy_data(), seeds, CPU, dtype=DOUBLE)
    return Trainer(task, runs, EPOCHS, seed, CPU)


def train(trainer: Trainer) -> list[list[float]]:
    for _ in range(EPOCHS):
        trainer.train_epoch()
    return trainer.history["train_negative_elbo"]


class Slot:
    """The estimator of one run, fed with the noise that falls to its place in a fleet.

    A fleet draws group after group, each for all its runs at once. So do we, with the run's own logits in
    every place, and keep what came out at the run's.
    """

    def __init__(self, groups: Sequence[Sequence[Any]], run: int) -> None:
        sizes = [len(group) for group in groups]
        self.before = [(group[0], len(group)) for group in groups]
        self.group = next(g for g in range(len(groups)) if run < sum(sizes[: g + 1]))
        self.place = run - sum(sizes[: self.group])
        self.own = groups[self.group][self.place]

    def __call__(self, logits: Tensor, noise: torch.Generator) -> Tensor:
        kept = None
        for number, (estimator, size) in enumerate(self.before):
            copies = logits.expand(size, *logits.shape)
            if number == self.group:
                kept = self.own.sample(copies, generator=noise)[self.place]
            else:
                estimator.sample(copies, generator=noise)
        assert kept is not None
        return kept


# Layers


def plain_linear(seed: int, *shapes: tuple[int, int]) -> list[nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [nn.Linear(a, b) for a, b in shapes]


def test_layers_start_as_torch_s_do_from_each_run_s_own_seed():
    seeds, shapes = [3, 11, 4], [(20, 30), (30, 5)]
    runs = generators(seeds)
    layers = [Linear(a, b, runs) for a, b in shapes]
    for place, seed in enumerate(seeds):
        for mine, theirs in zip(layers, plain_linear(seed, *shapes), strict=True):
            # torch rounds the bound twice more on its way: one unit in the last place.
            assert_close(mine.weight[place].t(), theirs.weight, 2e-7)
            assert_close(mine.bias[place, 0], theirs.bias, 2e-7)
    other = plain_linear(5, *shapes)[0]
    assert not torch.allclose(layers[0].weight[0].t(), other.weight, atol=1e-2)


def test_initial_weights_do_not_depend_on_the_neighbours():
    alone = VAETask(TINY, toy_data(), [9], CPU).model.state_dict()
    among = VAETask(TINY, toy_data(), [2, 9, 5, 9], CPU).model.state_dict()
    for name, weight in alone.items():
        assert torch.equal(weight[0], among[name][1]), name
        assert torch.equal(weight[0], among[name][3]), name
        assert not torch.equal(weight[0], among[name][0]), name


def test_layers_compute_each_run_s_own_map():
    layer = Linear(4, 3, generators([1, 2])).double()
    x = normal(2, 5, 4)
    for run in range(2):
        assert_close(layer(x)[run], x[run] @ layer.weight[run] + layer.bias[run], 1e-14)
    assert "runs=2, inputs=4, outputs=3" in repr(layer)


# Adam


def adam_pair(rates: Sequence[float]) -> tuple[list[Tensor], Adam, list[list[Tensor]], list[Any]]:
    shapes = [(len(rates), 4, 3), (len(rates), 1, 3)]
    stacked = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    apart = [[nn.Parameter(p[run].clone()) for p in stacked] for run in range(len(rates))]
    plain = [torch.optim.Adam(own, lr=rate) for own, rate in zip(apart, rates, strict=True)]
    return stacked, Adam(stacked, torch.tensor(rates, dtype=DOUBLE)), apart, plain


def gradients_at(step: int, stacked: Sequence[Tensor]) -> list[Tensor]:
    # Of very different sizes, so that the small constant in the denominator matters too.
    return [normal(*p.shape, seed=1000 + 10 * step + i) * 10.0 ** (-step % 9) for i, p in enumerate(stacked)]


def test_adam_equals_torch_s_with_a_rate_per_run():
    rates = [1e-3, 5e-2, 0.7]
    stacked, mine, apart, plain = adam_pair(rates)
    alive = torch.ones(3, dtype=torch.bool)
    for step in range(50):
        gradients = gradients_at(step, stacked)
        mine.step(gradients, alive)
        for run, optimiser in enumerate(plain):
            for p, g in zip(apart[run], gradients, strict=True):
                p.grad = g[run].clone()
            optimiser.step()
    for run in range(3):
        for together, own in zip(stacked, apart[run], strict=True):
            assert_close(together[run], own.detach(), 1e-12)
    # The wrong twin: two runs exchanged.
    assert (stacked[0][0] - apart[1][0].detach()).abs().max() > 1e-3


def test_adam_scales_what_it_reads():
    scales = torch.tensor([1.0, 0.5, 0.01], dtype=DOUBLE)
    stacked, mine, _, _ = adam_pair([1e-2, 1e-2, 1e-2])
    twin, plain, _, _ = adam_pair([1e-2, 1e-2, 1e-2])
    alive = torch.ones(3, dtype=torch.bool)
    for step in range(3):
        gradients = gradients_at(step, stacked)
        plain.step([g * scales.view(-1, 1, 1) for g in gradients], alive)
        mine.step(gradients, alive, scales)
    assert all(torch.equal(p, q) for p, q in zip(stacked, twin, strict=True))
    for ours, theirs in zip((*mine.first, *mine.second), (*plain.first, *plain.second), strict=True):
        assert torch.equal(ours, theirs)


def test_frozen_runs_are_not_touched_even_by_nan():
    stacked, mine, _, _ = adam_pair([1e-2, 1e-2, 1e-2])
    twin, free, _, _ = adam_pair([1e-2, 1e-2, 1e-2])
    alive = torch.tensor([True, False, True])
    before = [p.clone() for p in stacked]
    for step in range(50):
        gradients = gradients_at(step, stacked)
        free.step(gradients, torch.ones(3, dtype=torch.bool))
        for g in gradients:
            g[1] = torch.nan
        mine.step(gradients, alive)
    for p, q, start in zip(stacked, twin, before, strict=True):
        assert torch.equal(p[1], start[1])
        assert torch.equal(p[[0, 2]], q[[0, 2]])
        assert not torch.equal(p[0], start[0])


def test_adam_resumes_from_its_state():
    stacked, mine, _, _ = adam_pair([1e-2, 2e-2])
    twin, other, _, _ = adam_pair([1e-2, 2e-2])
    alive = torch.ones(2, dtype=torch.bool)
    for step in range(10):
        mine.step(gradients_at(step, stacked), alive)
    other.load_state_dict(mine.state_dict())
    for p, q in zip(stacked, twin, strict=True):
        q.copy_(p)
    for step in range(10, 20):
        mine.step(gradients_at(step, stacked), alive)
        other.step(gradients_at(step, stacked), alive)
    assert all(torch.equal(p, q) for p, q in zip(stacked, twin, strict=True))
    assert other.count == 20


# Groups


LEVELS = [
    [gapped.GST(tau=0.5, gap=0.8), gapped.GST(tau=1.0, gap=1.2), gapped.GST(tau=0.1, gap=0.0)],
    [gapped.StraightThrough(tau=0.7), gapped.StraightThrough(tau=2.0)],
    [gapped.GST(tau=0.5, gap=gapped.expected_gap), gapped.GST(tau=0.2, gap=gapped.expected_gap)],
    [gapped.DecoupledGumbelSoftmax(tau=0.5, tau_forward=1.5), gapped.DecoupledGumbelSoftmax(tau=2.0)],
    [gapped.GumbelRao(tau=0.5, samples=3), gapped.GumbelRao(tau=1.5, samples=3)],
    [gapped.GumbelRao(tau=0.5, samples=4)],
    [gapped.ReinMax(tau=1.0), gapped.ReinMax(tau=2.0)],
    [gapped.GumbelSoftmax(tau=0.5), gapped.GumbelSoftmax(tau=1.0)],
]
EVERYONE = [estimator for group in LEVELS for estimator in group]


def one_pull(sampler: Any, logits: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Sample and gradient of the logits side by side."""
    leaf = logits.clone().requires_grad_()
    sample = sampler.sample(leaf, generator=generator)
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    return torch.cat([sample.detach(), gradient], -1)


def test_groups_are_of_what_can_be_sampled_together():
    grouped = Grouped.of(EVERYONE, 2, CPU, DOUBLE)
    assert [stop - start for start, stop, _ in grouped.groups] == [len(group) for group in LEVELS]
    assert [start for start, _, _ in grouped.groups[1:]] == [stop for _, stop, _ in grouped.groups[:-1]]
    assert grouped.tau.tolist() == [e.tau for e in EVERYONE]
    keys = [group_key(group[0]) for group in LEVELS]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
def test_each_run_is_sampled_with_its_own_numbers(hard):
    # ReinMax defines a gradient and no surrogate.
    able = [group for group in LEVELS if hard or not isinstance(group[0], gapped.ReinMax)]
    groups = [[replace(e, hard=hard) for e in group] for group in able]
    everyone = [e for group in groups for e in group]
    logits, weight = normal(len(everyone), 6, 3, 5), normal(len(everyone), 6, 3, 5, seed=2)
    grouped = Grouped.of(everyone, 2, CPU, DOUBLE)
    found = one_pull(grouped, logits, weight, seeded(5))
    noise, start, distinguished = seeded(5), 0, 0
    for group in groups:
        rows = slice(start, start + len(group))
        state = noise.get_state()
        apart = []
        for estimator in group:
            noise.set_state(state)
            apart.append(one_pull(estimator, logits[rows], weight[rows], noise))
        for place in range(len(group)):
            assert_close(found[start + place], apart[place][place], 1e-13)
            # The wrong twin: the numbers of the neighbour.
            other = apart[place - 1][place]
            distinguished += int(not torch.allclose(found[start + place], other, rtol=1e-3, atol=1e-3))
        start += len(group)
    alone = sum(len(group) == 1 for group in groups)
    assert distinguished == len(everyone) - alone, "exchanging numbers goes unnoticed"


def test_soft_shares_the_temperature():
    grouped = Grouped.of([gapped.GST(tau=0.5), gapped.GST(tau=0.5), gapped.StraightThrough()], 1, CPU, DOUBLE)
    logits, soft = normal(3, 2, 5), grouped.soft()
    sharp = soft.sample(logits, generator=seeded())
    assert ((sharp > 0) & (sharp < 1)).all()
    grouped.tau.fill_(5.0)
    flat = soft.sample(logits, generator=seeded())
    assert (flat.amax(-1) < sharp.amax(-1)).all()
    hard = grouped.sample(logits, generator=seeded())
    assert ((hard == 0) | (hard == 1)).all()


# Training


@pytest.mark.parametrize("protocol", [TINY, RECTIFIED], ids=["plain", "rectified"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_fleet_of_one_equals_a_plain_training_loop(name, protocol):
    estimator = ESTIMATORS[name]
    trainer = fleet([Run(estimator, 3e-3)], [5], protocol)
    model = plain_twin(trainer.task, 0)
    start = [w.clone() for w in weights(model)]
    losses = plain_loop(
        model, toy_data(), 3e-3, 5, 77, lambda logits, noise: estimator.sample(logits, generator=noise)
    )
    history = train(trainer)
    assert [row[0] for row in history] == pytest.approx(losses, rel=1e-9)
    for mine, theirs, before in zip(weights(trainer.task.model, 0), weights(model), start, strict=True):
        assert_close(mine, theirs, 1e-9)
        assert (theirs - before).abs().max() > 1e-3, "a layer was not trained"


GROUPS = [
    [gapped.GST(tau=0.5, gap=0.8), gapped.GST(tau=1.0, gap=1.2)],
    [gapped.StraightThrough(tau=0.7), gapped.StraightThrough(tau=2.0)],
    [gapped.GumbelSoftmax(tau=0.4)],
]
RATES = [1e-3, 4e-3, 2e-3, 1e-2, 5e-3]
SEEDS = [3, 3, 8, 3, 0]


@pytest.fixture(scope="module")
def mixed_fleet() -> tuple[Trainer, list[PlainVAE], list[list[float]]]:
    estimators = [e for group in GROUPS for e in group]
    trainer = fleet([Run(e, rate) for e, rate in zip(estimators, RATES, strict=True)], SEEDS)
    twins = [plain_twin(trainer.task, run) for run in range(len(SEEDS))]
    return trainer, twins, train(trainer)


@pytest.mark.parametrize("run", range(len(SEEDS)))
def test_each_run_of_a_fleet_equals_its_own_plain_loop(mixed_fleet, run):
    trainer, twins, history = mixed_fleet
    model = twins[run]
    losses = plain_loop(model, toy_data(), RATES[run], SEEDS[run], 77, Slot(GROUPS, run))
    assert [row[run] for row in history] == pytest.approx(losses, rel=1e-9)
    for mine, theirs in zip(weights(trainer.task.model, run), weights(model), strict=True):
        assert_close(mine, theirs, 1e-9)


def test_a_learning_rate_may_fall_along_a_half_cosine():
    estimator = gapped.GST(tau=0.5)
    trainer = fleet([Run(estimator, 3e-3, decays=decays) for decays in (True, False)], [5, 5])
    groups = [[estimator, estimator]]
    falling, wrong = (plain_twin(trainer.task, 0) for _ in range(2))
    plain_loop(falling, toy_data(), 3e-3, 5, 77, Slot(groups, 0), decays=True)
    plain_loop(wrong, toy_data(), 3e-3, 5, 77, Slot(groups, 0))
    steady = plain_twin(trainer.task, 1)
    plain_loop(steady, toy_data(), 3e-3, 5, 77, Slot(groups, 1))
    train(trainer)
    for run, model in ((0, falling), (1, steady)):
        for mine, theirs in zip(weights(trainer.task.model, run), weights(model), strict=True):
            assert_close(mine, theirs, 1e-9)
    pairs = zip(weights(trainer.task.model, 0), weights(wrong), strict=True)
    assert max((mine - theirs).abs().max().item() for mine, theirs in pairs) > 1e-4


WRONG = {
    "temperature": ([[gapped.GST(tau=1.0, gap=0.8), *GROUPS[0][1:]], *GROUPS[1:]], 1e-3, 3),
    "gap": ([[gapped.GST(tau=0.5, gap=1.2), *GROUPS[0][1:]], *GROUPS[1:]], 1e-3, 3),
    "rate": (GROUPS, 1.1e-3, 3),
    "order of the images": (GROUPS, 1e-3, 8),
    "place": ([[GROUPS[0][1], GROUPS[0][0]], *GROUPS[1:]], 1e-3, 3),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_plain_loop_with_another_run_s_settings_is_told_apart(what):
    groups, rate, image_seed = WRONG[what]
    estimators = [e for group in GROUPS for e in group]
    trainer = fleet([Run(e, r) for e, r in zip(estimators, RATES, strict=True)], SEEDS)
    model = plain_twin(trainer.task, 0)
    run = 0 if what != "place" else 1
    plain_loop(model, toy_data(), rate, image_seed, 77, Slot(groups, run))
    train(trainer)
    pairs = zip(weights(trainer.task.model, 0), weights(model), strict=True)
    assert max((mine - theirs).abs().max().item() for mine, theirs in pairs) > 1e-6


def test_equal_seeds_see_equal_images_and_others_do_not():
    task = VAETask(TINY, toy_data(), [3, 8, 3], CPU)
    orders = []
    for epoch in range(2):
        task.start_epoch(epoch)
        seen = []
        for step in range(task.steps):
            task.load_batch(step)
            seen.append(task.batch.clone())
        order = torch.cat(seen, 1)
        assert torch.equal(order[0], order[2])
        assert not torch.equal(order[0], order[1])
        assert all(len(row.unique()) == BATCH * STEPS for row in order)
        orders.append(order)
    assert not torch.equal(*orders)
    task.start_epoch(0)
    task.load_batch(0)
    assert torch.equal(task.batch, orders[0][:, :BATCH]), "an epoch's order depends on what came before"


def test_derived_seeds_are_stable_and_distinct():
    digest = hashlib.sha256(b"7/train/3").digest()
    assert derived_seed(7, "train", 3) == int.from_bytes(digest[:7], "big")
    seeds = [derived_seed(a, b) for a in range(20) for b in range(20)]
    assert len(set(seeds)) == 400


# Divergence

# One step of this size, and the next loss overflows even in float64.
HUGE = 1e200


@pytest.mark.parametrize("name", gapped.estimators())
def test_a_run_that_diverges_is_frozen_and_leaves_the_others_alone(name):
    def runs(rate: float) -> list[Run]:
        one, other, third = gapped.estimator(name), gapped.estimator(name), gapped.StraightThrough()
        return [Run(one, 1e-3), Run(other, rate), Run(third, 1e-3)]

    protocol = replace(TINY, categories=2) if name == "disarm" else TINY
    broken, sound = fleet(runs(HUGE), [1, 1, 2], protocol), fleet(runs(1e-3), [1, 1, 2], protocol)
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
        pairs = zip(weights(broken.task.model, run), weights(sound.task.model, run), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
        assert [row[run] for row in broken.history["train_negative_elbo"]] == [row[run] for row in history]
    assert all(torch.equal(a, b) for a, b in zip(weights(broken.task.model, 1), frozen, strict=True))
    assert not any(w.isnan().any() for w in frozen)


def test_a_resumed_trainer_goes_on_as_if_nothing_had_happened():
    runs = [
        Run(gapped.GST(tau=0.5), 1e-3),
        Run(gapped.GST(tau=0.1), HUGE),
        Run(gapped.GumbelSoftmax(tau=0.1), 1e-3, Mixed(period=3)),
    ]
    whole, first, second = (fleet(runs, [1, 2, 3]) for _ in range(3))
    train(whole)
    for _ in range(2):
        first.train_epoch()
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        second.train_epoch()
    assert second.epoch == whole.epoch == EPOCHS
    assert second.alive.tolist() == whole.alive.tolist() == [True, False, True]
    assert str(second.history) == str(whole.history)  # as text, since NaN is not equal to itself
    for mine, theirs in zip(second.parameters, whole.parameters, strict=True):
        assert torch.equal(mine, theirs)


def test_training_leaves_torch_s_own_random_state_alone():
    before = torch.get_rng_state()
    trainer = fleet([Run(e, 1e-3) for e in EVERYONE], range(len(EVERYONE)))
    trainer.train_epoch()
    assert torch.equal(torch.get_rng_state(), before)
