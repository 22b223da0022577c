"""The VAE task: bound, batches, pixels, pictures and gradient variance against formulas written here."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from conftest import assert_close, normal, seeded
from scipy import stats
from statistical import require_law, require_rejected
from torch import Tensor
from torch.distributions import Bernoulli, OneHotCategorical, kl_divergence

import gapped
from gapped.errors import GappedError
from gapped.lab import data as data_sets
from gapped.lab.data import Dataset
from gapped.lab.fleet.grouping import Grouped, Part
from gapped.lab.fleet.layers import generators
from gapped.lab.spec import RunSpec
from gapped.lab.tasks.vae.model import VAE
from gapped.lab.tasks.vae.protocol import PROTOCOLS, Protocol, protocol
from gapped.lab.tasks.vae.task import VAETask
from gapped.lab.training import build

CPU, DOUBLE = torch.device("cpu"), torch.float64
LATENTS, CATEGORIES, PIXELS, SCALE = 2, 3, 12, 16
TINY = Protocol("tiny", LATENTS, CATEGORIES, (7, 5), batch=10)
BINARISED = replace(TINY, binarised=True)
RUNS = [gapped.GST(tau=0.5), gapped.GST(tau=1.0, gap=0.5), gapped.GumbelSoftmax(tau=0.7)]


def toy_data(test: int = 30) -> Dataset:
    def images(n: int, seed: int) -> Tensor:
        return torch.randint(0, SCALE + 1, (n, PIXELS), generator=seeded(seed), dtype=torch.uint8)

    labels = torch.zeros(test + 50, dtype=torch.int64)
    return Dataset("toy", images(50, 1), images(test, 2), labels[:50], labels[:test], 3, 4, SCALE)


def toy_task(rules: Protocol = TINY, test: int = 30, runs: int = 3) -> VAETask:
    return VAETask(rules, toy_data(test), range(runs), CPU, dtype=DOUBLE)


def toy_sampler(runs: int = 3) -> Grouped:
    return Grouped.of(RUNS[:runs], 2, CPU, DOUBLE)


class Fixed:
    """A sampler that returns what it was given and remembers what it was shown."""

    def __init__(self, z: Tensor) -> None:
        self.z = z
        self.logits: Tensor | None = None

    def parts(self) -> list[Part]:
        return [Part(0, len(self.z))]

    def expectation(self, f, logits, generator=None, context=None, uses=()) -> Tensor:
        self.logits = logits
        return f(self.z.unsqueeze(0), self.parts()[0]).squeeze(0)


# The model


def model_and_images(rules: Protocol = TINY) -> tuple[VAE, Tensor]:
    model = VAE(rules, PIXELS, generators([1, 2])).double()
    with torch.no_grad():  # Larger than at the start, so that posteriors are far from uniform.
        for weight in model.parameters():
            weight.mul_(4)
    return model, torch.rand(2, 6, PIXELS, generator=seeded(3), dtype=DOUBLE)


def test_divergence_equals_the_enumeration_of_all_configurations():
    model, x = model_and_images()
    logits, divergence = model.posterior(x)
    q = torch.softmax(logits, -1)
    expected = torch.zeros(2, 6, dtype=DOUBLE)
    for configuration in product(range(CATEGORIES), repeat=LATENTS):
        joint = torch.stack([q[..., place, k] for place, k in enumerate(configuration)]).prod(0)
        expected += joint * (joint.log() - LATENTS * math.log(1 / CATEGORIES))
    assert_close(divergence, expected, 1e-12)
    assert (divergence > 0.1).all(), "too close to the prior to tell formulas apart"


def test_loss_equals_torch_s_distributions():
    model, x = model_and_images()
    x = (x > 0.5).double()
    index = torch.randint(0, CATEGORIES, (2, 6, LATENTS), generator=seeded(4))
    sampler = Fixed(torch.nn.functional.one_hot(index, CATEGORIES).double())
    loss = model.loss(x, sampler)
    logits = model.encode(x)
    assert torch.equal(sampler.logits, logits)
    assert logits.shape == (2, 6, LATENTS, CATEGORIES)
    prior = OneHotCategorical(torch.full_like(logits, 1 / CATEGORIES))
    divergence = kl_divergence(OneHotCategorical(logits=logits), prior).sum(-1)
    likelihood = Bernoulli(logits=model.decode(sampler.z)).log_prob(x).sum(-1)
    assert_close(loss, divergence - likelihood, 1e-12)


def test_grey_pixels_have_their_cross_entropy():
    model, x = model_and_images()
    z = torch.softmax(normal(2, 6, LATENTS, CATEGORIES), -1)
    p = torch.sigmoid(model.decode(z))
    expected = -(x * p.log() + (1 - x) * (1 - p).log()).sum(-1)
    assert_close(model.reconstruction(z, x), expected, 1e-12)


def test_the_bound_holds_on_average_over_all_configurations():
    """E_q[loss] is at least -log p(x), by enumeration, and equals it at no image here."""
    model, x = model_and_images()
    x = (x > 0.5).double()
    q = torch.softmax(model.encode(x), -1)
    bound, evidence = torch.zeros(2, 6, dtype=DOUBLE), torch.zeros(2, 6, dtype=DOUBLE)
    for configuration in product(range(CATEGORIES), repeat=LATENTS):
        z = torch.nn.functional.one_hot(torch.tensor(configuration), CATEGORIES).double().expand_as(q)
        joint = torch.stack([q[..., place, k] for place, k in enumerate(configuration)]).prod(0)
        bound += joint * model.loss(x, Fixed(z))
        evidence += (-model.reconstruction(z, x)).exp() / CATEGORIES**LATENTS
    assert (bound > -evidence.log()).all()
    assert (bound + evidence.log() < 100).all()


def test_rectified_logits_are_not_negative():
    model, x = model_and_images(replace(TINY, rectified_logits=True))
    plain, _ = model_and_images()
    assert (plain.encode(x) < 0).any()
    assert_close(model.encode(x), plain.encode(x).relu())
    assert (model.encode(x) >= 0).all()


def test_activations_between_layers():
    for activation, slope in (("relu", 0.0), ("leaky-relu", 0.2)):
        model, x = model_and_images(replace(TINY, activation=activation))
        first, second, last = model.encoder
        for each in (first, second):
            x = x @ each.weight + each.bias
            x = torch.where(x > 0, x, slope * x)
        expected = x @ last.weight + last.bias
        _, images = model_and_images()
        assert_close(model.encode(images).flatten(-2), expected, 1e-13)


def test_protocols():
    assert set(PROTOCOLS) == {"paper-30x10", "plain-30x10", "digits-8x8", "paper-32x64", "coupled-32x64"}
    paper, plain = protocol("paper-30x10"), protocol("plain-30x10")
    assert (paper.latents, paper.categories, paper.hidden) == (30, 10, (512, 256))
    assert (paper.batch, paper.learning_rate, paper.epochs) == (100, 1e-3, 40)
    assert paper.rectified_logits
    assert replace(paper, name="plain-30x10", rectified_logits=False) == plain
    large = protocol("paper-32x64")
    assert (large.latents, large.categories, large.batch, large.train_images) == (32, 64, 200, 50_000)
    assert large.binarised
    assert large.activation == "leaky-relu"
    with pytest.raises(GappedError, match="expected one of paper-30x10, plain-30x10, digits-8x8"):
        protocol("paper-30x11")


# Pixels


def test_grey_levels():
    task = toy_task()
    assert torch.equal(task.pixels(task.train, seeded()), task.train.double() / SCALE)


def test_binarised_pixels_are_drawn_anew_at_every_access():
    task = toy_task(BINARISED)
    noise, images, times = seeded(), toy_data().train[:20], 2_000
    first, second = task.pixels(images, noise), task.pixels(images, noise)
    assert not torch.equal(first, second)
    assert ((first == 0) | (first == 1)).all()
    total = sum(task.pixels(images, noise) for _ in range(times))
    assert (total[images == 0] == 0).all()
    assert (total[images == SCALE] == times).all()
    between = (images > 0) & (images < SCALE)
    grey = images[between].double() / SCALE

    def p_value(law: Tensor) -> float:
        z = (total[between] - times * law) / (times * law * (1 - law)).sqrt()
        return float(stats.chi2.sf((z**2).sum().item(), z.numel()))

    require_law(p_value(grey))
    require_rejected(p_value(grey * SCALE / (SCALE + 1)))


def test_losses_see_the_pixels_of_their_protocol():
    for rules, binary in ((TINY, False), (BINARISED, True)):
        task = toy_task(rules)
        task.start_epoch(0)
        task.load_batch(0)
        shown: list[Tensor] = []
        inner = task.model.loss
        task.model.loss = lambda x, *rest, into=shown, inner=inner: (into.append(x), inner(x, *rest))[1]
        task.loss(toy_sampler(), seeded())
        task.loss(toy_sampler(), seeded(1))
        with torch.no_grad():
            task.evaluate(toy_sampler(), seeded())
        assert len(shown) == 3
        assert all(bool(((x == 0) | (x == 1)).all()) == binary for x in shown)
        assert torch.equal(shown[0], shown[1]) != binary


# Metrics


def test_the_test_bound_is_the_mean_over_all_images_in_ragged_chunks():
    task, sampler = toy_task(test=1203), toy_sampler()
    with torch.no_grad():
        found = task.evaluate(sampler, seeded(7))
        noise, total = seeded(7), torch.zeros(3, dtype=DOUBLE)
        for start, stop in ((0, 500), (500, 1000), (1000, 1203)):
            x = (task.test[start:stop].double() / SCALE).expand(3, -1, -1)
            total += task.model.loss(x, sampler, noise).sum(1)
    assert list(found) == ["test_negative_elbo"]
    assert_close(found["test_negative_elbo"], total / 1203, 1e-12)


@pytest.mark.parametrize("rules", [TINY, BINARISED], ids=["grey", "binarised"])
def test_gradient_variance_equals_two_passes_over_replayed_gradients(rules):
    task, sampler, samples, images = toy_task(rules), toy_sampler(), 25, 20
    found = task.gradient_variance(sampler, seeded(3), samples, images)
    noise, kept = seeded(3), []
    for _ in range(samples):
        x = task.pixels(task.test[:images].expand(3, -1, -1), noise)
        task.model.zero_grad()
        task.model.loss(x, sampler, noise).mean(1).sum().backward()
        encoder = [w.grad.reshape(3, -1) for w in task.model.encoder.parameters()]
        kept.append(torch.cat(encoder, 1).numpy())
    gradients = np.stack(kept)
    direct = ((gradients - gradients.mean(0)) ** 2).sum(0) / (samples - 1)
    assert_close(found / torch.from_numpy(direct.mean(1)), torch.ones(3), 1e-10)
    # The divisor of the biased variance is a wrong twin that the tolerance tells apart.
    assert (found / torch.from_numpy(gradients.var(0).mean(1)) - 1 > 1e-3).all()


def test_measuring_again_starts_from_the_arguments_of_that_call():
    sampler = toy_sampler()
    task = toy_task()
    task.gradient_variance(sampler, seeded(1), 5, 20)
    for noise, samples, images in ((2, 6, 20), (2, 6, 10)):
        fresh = toy_task().gradient_variance(sampler, seeded(noise), samples, images)
        again = task.gradient_variance(sampler, seeded(noise), samples, images)
        assert_close(again / fresh, torch.ones(3), 1e-10)


def test_surrogate_entropy_equals_the_formula():
    task, soft = toy_task(), toy_sampler().soft()
    task.start_epoch(0)
    task.load_batch(1)
    found = task.surrogate_entropy(soft, seeded(2))
    with torch.no_grad():
        x = task.train[task.batch].double() / SCALE
        h = soft.sample(task.model.encode(x), generator=seeded(2)).numpy()
    rows = h.reshape(3, -1, CATEGORIES)
    expected = [-np.mean([sum(p * np.log(p) for p in row) for row in run]) for run in rows]
    assert_close(found, torch.tensor(expected, dtype=DOUBLE), 1e-12)
    assert ((found > 0) & (found < math.log(CATEGORIES))).all()


def test_pictures():
    task, sampler = toy_task(), toy_sampler()
    found = task.pictures(sampler, seeded(1), 4)
    assert list(found) == ["original", "reconstruction", "sample"]
    for each in found.values():
        assert each.shape == (3, 4, PIXELS)
        assert each.dtype == torch.uint8
    original = (task.test[:4].double() / SCALE * 255).round().to(torch.uint8)
    assert all(torch.equal(run, original) for run in found["original"])
    with torch.no_grad():
        x, noise = (task.test[:4].double() / SCALE).expand(3, -1, -1), seeded(1)
        logits = task.model.encode(x)
        for name, theta in (("reconstruction", logits), ("sample", torch.zeros_like(logits))):
            drawn = task.model.decode(sampler.sample(theta, generator=noise)).sigmoid()
            assert torch.equal(found[name], (drawn * 255).round().to(torch.uint8))


def test_too_few_images_for_a_batch():
    with pytest.raises(GappedError, match="train_images: got 9, expected at least one batch of 10"):
        VAETask(TINY, toy_data().limited(9, None), [0], CPU)


# The validation split


def spec(**changes: object) -> RunSpec:
    return RunSpec("vae", "digits-8x8", "digits", "gst", split="validation", **changes)


def test_validation_images_are_the_last_sixth_of_the_training_images():
    data = data_sets.load("digits")
    task = build([spec()], CPU, None, "key").task
    assert torch.equal(task.train, data.train[:1250])
    assert torch.equal(task.test, data.train[1250:])
    few = build([spec(train_images=100, test_images=60)], CPU, None, "key").task
    assert torch.equal(few.train, data.train[:100])
    assert torch.equal(few.test, data.train[1250:1310])


def test_validation_never_touches_the_test_images(monkeypatch):
    def history(poisoned: bool) -> dict[str, list[list[float]]]:
        data = data_sets.load("digits")
        if poisoned:
            data = replace(data, test=torch.zeros(0, 64, dtype=torch.uint8))
        monkeypatch.setattr("gapped.lab.task_kinds.data_sets.load", lambda *_: data)
        trainer = build([spec(seed=1)], CPU, None, "key")
        trainer.train_epoch()
        trainer.task.gradient_variance(trainer.sampler, trainer.generator, 2, 10)
        trainer.task.pictures(trainer.sampler, trainer.generator, 2)
        return trainer.history

    load = data_sets.load
    sound = history(False)
    monkeypatch.setattr("gapped.lab.task_kinds.data_sets.load", load)
    assert history(True) == sound
    assert set(sound) == {"train_negative_elbo", "validation_negative_elbo"}, "not to be taken for a test"
    assert math.isfinite(sound["validation_negative_elbo"][0][0])
