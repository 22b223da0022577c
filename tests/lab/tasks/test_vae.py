"""The VAE task: bound, batches, pixels, pictures and gradient variance against formulas written here."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, normal, seeded
from scipy import stats
from statistical import require_law, require_rejected
from torch import Tensor
from torch.distributions import Bernoulli, OneHotCategorical, kl_divergence
from toy_tasks import (
    BATCH,
    CATEGORIES,
    CPU,
    DOUBLE,
    LATENTS,
    PIXELS,
    SCALE,
    VAE_TINY,
    toy_images,
    train,
    vae_task,
    vae_trainer,
)

import gapped
from gapped.errors import GappedError
from gapped_lab import data as data_sets
from gapped_lab.fleet import Run, Trainer
from gapped_lab.fleet.estimator_groups import Grouped, Part
from gapped_lab.fleet.optimizer import clip_scales, scale
from gapped_lab.fleet.run_layers import generators
from gapped_lab.spec import RunSpec
from gapped_lab.tasks import VAEProtocol, vae_protocol
from gapped_lab.tasks.vae import VAE, VAETask
from gapped_lab.training import build

BINARISED = replace(VAE_TINY, binarised=True)


def toy_sampler() -> Grouped:
    runs = [gapped.GST(tau=0.5), gapped.GST(tau=1.0, gap=0.5), gapped.GumbelSoftmax(tau=0.7)]
    return Grouped.of(runs, 2, CPU, DOUBLE)


def one_hot(*shape: int, seed: int) -> Tensor:
    """Random one-hot samples ``(*shape, LATENTS, CATEGORIES)``."""
    index = torch.randint(0, CATEGORIES, (*shape, LATENTS), generator=seeded(seed))
    return F.one_hot(index, CATEGORIES).double()


def grey_images(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, PIXELS, generator=seeded(seed), dtype=DOUBLE)


class Fixed:
    """A sampler that always returns the same sample, and stores the logits that it was given."""

    def __init__(self, z: Tensor) -> None:
        self.z = z
        self.logits: Tensor | None = None

    def parts(self) -> list[Part]:
        return [Part(0, len(self.z))]

    def expectation(self, f, logits, generator=None, context=None) -> Tensor:
        self.logits = logits
        return f(self.z.unsqueeze(0), self.parts()[0]).squeeze(0)


def model_and_images(rules: VAEProtocol = VAE_TINY) -> tuple[VAE, Tensor]:
    model = VAE(rules, PIXELS, generators([1, 2])).double()
    with torch.no_grad():  # Larger than at the start, so that posteriors are far from uniform.
        for weight in model.parameters():
            weight.mul_(4)
    return model, grey_images(2, 6, seed=3)


def test_loss_equals_torch_s_distributions():
    model, x = model_and_images()
    x = (x > 0.5).double()
    sampler = Fixed(one_hot(2, 6, seed=4))
    loss = model.loss(x, sampler)
    logits = model.encode(x)
    assert torch.equal(sampler.logits, logits)
    assert logits.shape == (2, 6, LATENTS, CATEGORIES)
    prior = OneHotCategorical(torch.full_like(logits, 1 / CATEGORIES))
    divergence = kl_divergence(OneHotCategorical(logits=logits), prior).sum(-1)
    likelihood = Bernoulli(logits=model.decode(sampler.z)).log_prob(x).sum(-1)
    assert_close(loss, divergence - likelihood, 1e-12)


def test_pixels_may_be_binarised_once():
    """Black or white, the same at every access and in every task, with the mean of the grey levels."""
    task, twin = (vae_task(replace(VAE_TINY, binarised="once"), test=2_000) for _ in range(2))
    assert set(task.test.unique().tolist()) == {0, SCALE}
    assert torch.equal(task.train, twin.train)
    assert torch.equal(task.pixels(task.test, seeded(1)), task.test.double() / SCALE)
    grey = toy_images(2_000).test.double()
    spread = 0.5 * SCALE / math.sqrt(task.test.numel())
    assert abs(float(task.test.double().mean() - grey.mean())) < 6 * spread


def test_binarised_pixels_are_drawn_anew_at_every_access():
    task = vae_task(BINARISED)
    noise, images, times = seeded(), toy_images().train[:20], 2_000
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
    for rules, binary in ((VAE_TINY, False), (BINARISED, True)):
        task = vae_task(rules)
        task.start_epoch(0)
        task.load_batch(0)
        inputs: list[Tensor] = []
        inner = task.model.loss
        task.model.loss = lambda x, *rest, into=inputs, inner=inner: (into.append(x), inner(x, *rest))[1]
        task.loss(toy_sampler(), seeded())
        task.loss(toy_sampler(), seeded(1))
        with torch.no_grad():
            task.evaluate(toy_sampler(), seeded())
        assert len(inputs) == 3
        assert all(bool(((x == 0) | (x == 1)).all()) == binary for x in inputs)
        assert torch.equal(inputs[0], inputs[1]) != binary


def test_the_test_bound_is_the_mean_over_all_images_in_ragged_chunks():
    task, sampler = vae_task(test=1203), toy_sampler()
    with torch.no_grad():
        metrics = task.evaluate(sampler, seeded(7))
        noise, total = seeded(7), torch.zeros(3, dtype=DOUBLE)
        for start, stop in ((0, 500), (500, 1000), (1000, 1203)):
            x = (task.test[start:stop].double() / SCALE).expand(3, -1, -1)
            total += task.model.loss(x, sampler, noise).sum(1)
    assert list(metrics) == ["test_negative_elbo"]
    assert_close(metrics["test_negative_elbo"], total / 1203, 1e-12)


@pytest.mark.parametrize("rules", [VAE_TINY, BINARISED], ids=["grey", "binarised"])
def test_gradient_variance_equals_two_passes_over_replayed_gradients(rules):
    task, sampler, samples, images = vae_task(rules), toy_sampler(), 25, 20
    variance = task.gradient_variance(sampler, seeded(3), samples, images)
    noise, rows = seeded(3), []
    for _ in range(samples):
        x = task.pixels(task.test[:images].expand(3, -1, -1), noise)
        task.model.zero_grad()
        task.model.loss(x, sampler, noise).mean(1).sum().backward()
        encoder = [w.grad.reshape(3, -1) for w in task.model.encoder.parameters()]
        rows.append(torch.cat(encoder, 1).numpy())
    gradients = np.stack(rows)
    direct = ((gradients - gradients.mean(0)) ** 2).sum(0) / (samples - 1)
    assert_close(variance / torch.from_numpy(direct.mean(1)), torch.ones(3), 1e-10)
    # The divisor of the biased variance is a wrong twin that the tolerance tells apart.
    assert (variance / torch.from_numpy(gradients.var(0).mean(1)) - 1 > 1e-3).all()


def test_surrogate_entropy_equals_the_formula():
    task, soft = vae_task(), toy_sampler().soft()
    task.start_epoch(0)
    task.load_batch(1)
    entropy = task.surrogate_entropy(soft, seeded(2))
    with torch.no_grad():
        x = task.train[task.batch].double() / SCALE
        h = soft.sample(task.model.encode(x), generator=seeded(2)).numpy()
    rows = h.reshape(3, -1, CATEGORIES)
    expected = [-np.mean([sum(p * np.log(p) for p in row) for row in run]) for run in rows]
    assert_close(entropy, torch.tensor(expected, dtype=DOUBLE), 1e-12)
    assert ((entropy > 0) & (entropy < math.log(CATEGORIES))).all()


def test_pictures():
    task, sampler = vae_task(), toy_sampler()
    pictures = task.pictures(sampler, seeded(1), 4)
    assert list(pictures) == ["original", "reconstruction", "sample"]
    for each in pictures.values():
        assert each.shape == (3, 4, PIXELS)
        assert each.dtype == torch.uint8
    original = (task.test[:4].double() / SCALE * 255).round().to(torch.uint8)
    assert all(torch.equal(run, original) for run in pictures["original"])
    with torch.no_grad():
        x, noise = (task.test[:4].double() / SCALE).expand(3, -1, -1), seeded(1)
        logits = task.model.encode(x)
        for name, theta in (("reconstruction", logits), ("sample", torch.zeros_like(logits))):
            pixels = task.model.decode(sampler.sample(theta, generator=noise)).sigmoid()
            assert torch.equal(pictures[name], (pixels * 255).round().to(torch.uint8))


def test_too_few_images_for_a_batch():
    with pytest.raises(GappedError, match=f"train_images: got 7, expected at least one batch of {BATCH}"):
        VAETask(VAE_TINY, toy_images().limit(7, None), [0], CPU)


# The protocol of the coupled estimators


COUPLED = replace(
    vae_protocol("coupled-32x64"), latents=LATENTS, categories=CATEGORIES, hidden=(9, 7), batch=BATCH
)


def coupled_trainer() -> Trainer:
    return vae_trainer([Run(gapped.GST(tau=0.5), 1e-3), Run(gapped.RLOO(), 1e-3)], [5, 6], COUPLED)


def test_the_mean_image_goes_in_and_out():
    task = coupled_trainer().task
    mean = toy_images().train.double().mean(0) / 16
    assert_close(task.model.decoder[-1].bias[0, 0], torch.logit(mean.clamp(1e-3, 0.999)), 1e-6)
    x = grey_images(2, 3, seed=1)
    shifted = task.model
    plain = VAE(replace(COUPLED, centred=False), PIXELS, generators([5, 6]), mean).double()
    assert_close(shifted.encode(x), plain.encode(x - mean), 1e-6)
    z = one_hot(2, 3, seed=2)
    same = VAE(replace(COUPLED, signed=False), PIXELS, generators([5, 6]), mean).double()
    assert_close(shifted.decode(z), same.decode(2 * z - 1), 1e-6)


def test_the_sampled_divergence_is_part_of_the_cost():
    """On average over the posterior it is the divergence in closed form, by enumeration."""
    task = coupled_trainer().task
    with torch.no_grad():
        task.model.prior.copy_(normal(2, 1, LATENTS, CATEGORIES))
        x = grey_images(2, 3, seed=1)
        logits, ratio = task.model.posterior(x)
        q, p = torch.softmax(logits, -1), torch.softmax(task.model.prior, -1)
        assert_close((q * ratio).sum((-2, -1)), (q * (q / p).log()).sum((-2, -1)), 1e-12)
        z = one_hot(2, 3, seed=2)
        decoder = [(layer.weight, layer.bias) for layer in task.model.decoder]
        cost = task.model.costs(z.unsqueeze(0), x, decoder, ratio).squeeze(0)
        expected = task.model.reconstruction(z, x) + ((z * q).sum(-1).log() - (z * p).sum(-1).log()).sum(-1)
    assert_close(cost, expected, 1e-12)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_prior_is_trained_by_plain_descent(clip):
    trainer = coupled_trainer()
    trainer.task.clip = clip
    prior = trainer.task.model.prior
    assert all(p is not prior for p in trainer.parameters)
    trainer.task.start_epoch(0)
    trainer.task.load_batch(0)
    loss = trainer.task.loss(trainer.sampler, seeded(4))
    gradients = torch.autograd.grad(loss.sum(), [*trainer.parameters, prior])
    # The norm is that of all weights.
    gradient = scale(gradients[-1], None if clip is None else clip_scales(gradients, clip))
    trainer.generator.manual_seed(4)
    before = prior.detach().clone()
    trainer._train_step()
    assert_close(prior.detach(), before - 1e-2 * gradient, 1e-12)
    assert (gradient != 0).any()
    assert clip is None or (clip_scales(gradients, clip) < 1).all()


def test_the_test_bound_is_importance_weighted():
    trainer = coupled_trainer()
    train(trainer)
    assert set(trainer.history) == {"train_negative_elbo", "test_100_sample_negative_elbo"}
    task, x = trainer.task, grey_images(2, 3, seed=1).round()
    with torch.no_grad():
        bound = task.model.bound(x, trainer.sampler, seeded(9), 5)
        noise = seeded(9)
        costs = torch.stack([task.model.loss(x, trainer.sampler, noise) for _ in range(5)])
    assert_close(bound, math.log(5) - torch.logsumexp(-costs, 0), 1e-12)
    assert (bound < costs.mean(0)).all(), "tighter than the mean of as many one-sample bounds"


def spec(**changes: object) -> RunSpec:
    return RunSpec("vae", "digits-8x8", "digits", "gst", split="validation", **changes)


def test_validation_never_touches_the_test_images(monkeypatch):
    def history(poisoned: bool) -> dict[str, list[list[float]]]:
        data = data_sets.load("digits")
        if poisoned:
            data = replace(data, test=torch.zeros(0, 64, dtype=torch.uint8))
        monkeypatch.setattr("gapped_lab.task_kinds.data_sets.load", lambda *_: data)
        trainer = build([spec(seed=1)], CPU, None, "key")
        trainer.train_epoch()
        trainer.task.gradient_variance(trainer.sampler, trainer.generator, 2, 10)
        trainer.task.pictures(trainer.sampler, trainer.generator, 2)
        return trainer.history

    load = data_sets.load
    sound = history(False)
    monkeypatch.setattr("gapped_lab.task_kinds.data_sets.load", load)
    assert history(True) == sound
    assert set(sound) == {"train_negative_elbo", "validation_negative_elbo"}, "not to be taken for a test"
    assert math.isfinite(sound["validation_negative_elbo"][0][0])
