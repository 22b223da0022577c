"""The VAE with counts: divergence and gradients against sums over the support, and what may train it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from torch import Tensor
from torch.distributions import Binomial, Distribution, NegativeBinomial, Poisson
from toy_tasks import BATCH, CPU, DOUBLE, PIXELS

import gapped
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.fleet.run_layers import generators
from gapped_lab.tasks import CountProtocol, count_protocol
from gapped_lab.tasks.count_vae import CountVAE, Fini, law

LAWS = ("poisson-0.1-2", "poisson-1-200", "binomial-8-16", "negative-binomial-8-2")
every_law = pytest.mark.parametrize("name", LAWS)


def tiny(name: str) -> CountProtocol:
    return replace(count_protocol(name), latents=3, hidden=(9, 7), batch=BATCH)


def torch_law(rules: CountProtocol, eta: Tensor) -> Distribution:
    if rules.law == "poisson":
        return Poisson(eta.exp())
    kind = Binomial if rules.law == "binomial" else NegativeBinomial
    return kind(rules.total, logits=eta)


def support(rules: CountProtocol) -> Tensor:
    """All counts, or so many that the rest has no weight in float64."""
    return torch.arange(rules.total + 1.0 if rules.law == "binomial" else 400.0, dtype=DOUBLE)


def model_and_images(name: str) -> tuple[CountVAE, Tensor]:
    mean = torch.linspace(0.1, 0.9, PIXELS)
    model = CountVAE(tiny(name), PIXELS, generators([1, 2, 3]), mean).double()
    x = (torch.rand(3, 6, PIXELS, generator=seeded(3)) > 0.5).double()
    return model, x


@every_law
def test_the_divergence_is_the_sum_over_the_support(name: str) -> None:
    model, x = model_and_images(name)
    eta, divergence = model.posterior(x)
    assert eta.shape == (3, 6, 3, 1)
    z = support(model.protocol)
    log_q = torch_law(model.protocol, eta).log_prob(z)
    log_p = torch_law(model.protocol, torch.tensor(model.protocol.prior, dtype=DOUBLE)).log_prob(z)
    assert_close(log_q.exp().sum(-1), torch.ones(3, 6, 3, dtype=DOUBLE), 1e-12)
    assert_close(divergence, (log_q.exp() * (log_q - log_p)).sum((-2, -1)), 1e-10)
    assert (divergence > 0).all()


@every_law
def test_a_posterior_starts_at_the_prior(name: str) -> None:
    model, x = model_and_images(name)
    with torch.no_grad():
        for weight in model.encoder.parameters():
            weight.zero_()
    eta, divergence = model.posterior(x)
    assert_close(divergence, torch.zeros_like(divergence), 1e-12)
    prior = torch_law(model.protocol, eta[0, 0, 0, 0])
    assert_close(law(model.protocol, eta[0, 0, 0, 0]).mean, prior.mean, 1e-12)


@every_law
def test_the_gradient_of_rloo_is_exact_in_the_mean(name: str) -> None:
    """All pairs of counts, each with its probability; the cost has no structure."""
    model, _ = model_and_images(name)
    rules = model.protocol
    eta = (torch.tensor(rules.prior, dtype=DOUBLE) + 0.3).requires_grad_()
    z = support(rules)[:120]
    q = torch_law(rules, eta).log_prob(z).exp()
    cost = normal(len(z))
    (exact,) = torch.autograd.grad((q * cost).sum(), eta)
    pairs, weight = torch.cartesian_prod(z, z).t(), torch.cartesian_prod(q, q).prod(-1).detach()
    gradient = model._score(
        pairs.view(2, 1, -1, 1, 1),
        cost[pairs.long()].view(2, 1, -1),
        eta.detach().expand(1, len(weight), 1, 1),
    )
    assert_close((weight * gradient.flatten()).sum(), exact, 1e-9)


@every_law
def test_every_estimator_reaches_the_encoder_and_no_other_run(name: str) -> None:
    model, x = model_and_images(name)
    with torch.no_grad():
        # A run whose counts are all zero has no gradient at the decoder's first layer.
        model.encoder[-1].bias += 2
    sampler = Grouped.of([Fini(order=2), Fini(order=3), gapped.RLOO(2)], 2, CPU, DOUBLE)
    assert len(sampler.groups) == 3
    for run in range(3):
        loss = model.loss(x, sampler, seeded(5))
        assert loss.shape == (3, 6)
        for gradient in torch.autograd.grad(loss[run].sum(), list(model.parameters())):
            others = [place for place in range(3) if place != run]
            assert gradient[run].abs().sum() > 0
            assert not gradient[others].any()
            assert gradient.isfinite().all()
        # Only the estimators carry this part: without it the encoder would see the divergence alone.
        (alone,) = torch.autograd.grad(model.posterior(x)[1][run].sum(), [model.encoder[0].weight])
        (whole,) = torch.autograd.grad(
            model.loss(x, sampler, seeded(5))[run].sum(), [model.encoder[0].weight]
        )
        assert not torch.allclose(alone, whole)


def test_runs_of_rloo_have_their_own_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of Fini are decoded together."""
    seen: list[tuple[int, ...]] = []
    model, x = model_and_images("poisson-1-200")
    costs = model.costs

    def spy(z: Tensor, *rest: Any) -> Tensor:
        seen.append(tuple(z.shape[:2]))
        return costs(z, *rest)

    monkeypatch.setattr(model, "_training", (model.posterior, spy))
    model.loss(x, Grouped.of([Fini(order=2), gapped.RLOO(2), gapped.RLOO(5)], 2, CPU, DOUBLE), seeded())
    model.loss(x, Grouped.of([Fini(order=2), Fini(order=3), gapped.RLOO(5)], 2, CPU, DOUBLE), seeded())
    assert seen == [(1, 1), (2, 1), (5, 1), (1, 2), (5, 1)]
