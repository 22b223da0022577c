"""Estimators with a memory or parameters of their own: what they remember, and how they are trained."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from conftest import assert_all_close, assert_close, assert_equal, normal, seeded
from score_problems import (
    SETTINGS,
    STATEFUL,
    Model,
    build_trainable,
    cost,
    estimate,
    free_network,
    square,
    with_noise,
)
from torch import Tensor

import gapped
from gapped import GappedError


def test_the_memory_of_nvil() -> None:
    """Used before it is updated, a plain mean at first, then decaying; still in eval mode."""
    logits, estimator = torch.zeros(4, 3, requires_grad=True), gapped.NVIL(decay=0.5, scale=False)
    levels = []
    for level in (1.0, 2.0, 6.0, 0.0):
        levels.append(estimator.mean.item())
        gapped.expectation(lambda z, level=level: z.sum(-1) * level, logits, estimator)
    assert levels == [0.0, 1.0, 1.5, 3.75]
    assert estimator.mean.item() == 1.875
    estimator.eval()
    value = gapped.expectation(lambda z: z.sum(-1) * 1.875, logits, estimator)
    assert estimator.mean.item() == 1.875
    assert torch.autograd.grad(value.sum(), logits)[0].abs().max() == 0
    other = gapped.NVIL()
    other.load_state_dict(estimator.state_dict())
    assert other.mean.item() == 1.875
    assert other.steps == 4


def test_nvil_scales_by_the_running_deviation() -> None:
    logits, estimator = torch.zeros(4, 3, requires_grad=True), gapped.NVIL()
    f = lambda z: z[..., 0] + torch.tensor([0.0, 0.0, 8.0, 8.0])  # noqa: E731
    gapped.expectation(f, logits, estimator, generator=seeded(1))
    assert 3.0 < estimator.variance.sqrt() < 5.0
    plain = gapped.NVIL(scale=False)
    plain.load_state_dict(estimator.state_dict())
    gradients = [estimate(f, logits, e.eval(), seed=2)[1] for e in (estimator, plain)]
    assert_close(gradients[0] * estimator.variance.sqrt(), gradients[1], 1e-6)


@pytest.mark.parametrize("name", STATEFUL)
def test_the_variance_loss_trains_the_estimator_alone(name: str) -> None:
    torch.manual_seed(0)
    estimator, how = build_trainable(name)
    for context in how.values():
        context.requires_grad_()
    logits, model = normal(5, 2, 3).requires_grad_(), Model()
    cost = gapped.expectation(model, logits, estimator, **how)
    estimator.variance_loss().backward()
    leaves = [logits, model.weight, model.outside, *how.values()]
    assert all(leaf.grad is None for leaf in leaves)
    slopes = [parameter.grad for parameter in estimator.parameters()]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in slopes)
    with pytest.raises(GappedError, match="nothing to train on"):
        estimator.variance_loss()
    cost.sum().backward()
    assert all(leaf.grad is not None for leaf in leaves[:3])
    for parameter, grad in zip(estimator.parameters(), slopes, strict=True):
        assert torch.equal(parameter.grad, grad), "the cost itself must not reach the estimator's parameters"


@pytest.mark.parametrize("name", STATEFUL)
def test_layers_that_share_an_estimator_lose_no_loss(name: str) -> None:
    totals = []
    for at_once in (False, True):
        torch.manual_seed(0)
        (estimator, context), losses = build_trainable(name), []
        for layer in (0, 1):
            logits = normal(5, 2, 3, seed=layer).requires_grad_()
            gapped.expectation(square, logits, estimator, generator=seeded(layer), **context)
            if layer == 1 or not at_once:
                losses.append(estimator.variance_loss())
        total = torch.stack(losses).sum()
        totals.append([total.detach(), *torch.autograd.grad(total, list(estimator.parameters()))])
    assert_all_close(*totals)


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_estimators_are_modules(name: str) -> None:
    """Saved, loaded and copied, in the middle of the work too."""
    (estimator, how), logits = build_trainable(name), normal(5, 2, 3).requires_grad_()
    gapped.expectation(square, logits, estimator, **how)
    file = io.BytesIO()
    torch.save(estimator.state_dict(), file)
    file.seek(0)
    fresh = STATEFUL[name]()
    fresh.load_state_dict(torch.load(file))
    clones = [estimator, copy.deepcopy(estimator), fresh]
    first, *others = (estimate(square, logits, clone.eval(), **how) for clone in clones)
    for other in others:
        assert_equal(other, first)


def test_frozen_parameters_are_not_trained() -> None:
    estimator = gapped.REBAR().requires_grad_(False)
    gapped.expectation(square, normal(5, 2, 3).requires_grad_(), estimator)
    with pytest.raises(GappedError, match="nothing to train on"):
        estimator.variance_loss()


def test_rebar_takes_parameters_per_run() -> None:
    """A fleet: eta and tau for each run of the leading axis, equal to runs by themselves."""
    logits, model = normal(3, 4, 2, 3), Model(batch_axes=2)
    fleet = gapped.REBAR(
        torch.tensor([[0.2], [0.5], [1.0]]), torch.tensor([0.3, 0.5, 1.0]).view(3, 1, 1)
    ).double()
    noise = fleet.draw(logits, seeded())
    _, together = estimate(model.cost, logits, with_noise(fleet, noise))
    for run in range(3):
        alone = gapped.REBAR(fleet.eta[run].item(), fleet.tau[run].item()).double()
        own = type(noise)(*(each[run] for each in noise))
        _, gradient = estimate(Model().cost, logits[run], with_noise(alone, own))
        assert_close(together[run], gradient, 1e-6)


def test_a_baseline_of_whole_numbers_is_not_rounded() -> None:
    """Tokens as a context: the perceptron's answer is no token."""
    results = []
    for dtype in (torch.int64, torch.float32):
        estimator = gapped.NVIL(8)
        context = torch.arange(12).view(4, 3).to(dtype)
        torch.manual_seed(0)
        estimator.network(context, torch.Size([4]))
        torch.nn.init.constant_(estimator.network.outer.bias, 0.7)
        results.append(estimate(Model(), normal(4, 2, 3), estimator, context=context))
    assert_equal(*results)


def test_a_network_may_write_into_its_input() -> None:
    logits, results = normal(5, 2, 3), []
    for inplace in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.Hardtanh(0.1, 0.5, inplace), torch.nn.Flatten(-2), torch.nn.Linear(6, 1)]
        network = torch.nn.Sequential(*layers, torch.nn.Flatten(-2)).double()
        results.append(estimate(square, logits, gapped.RELAX(network)))
    assert_equal(*results)


@pytest.mark.parametrize("name", ["nvil", "relax"])
def test_a_number_stands_for_a_network_of_that_width(name: str) -> None:
    """It learns its width at the first call, and starts at zero: the estimator as it is without it."""
    estimator = gapped.estimator(name, network=7)
    logits, x = normal(4, 2, 3).requires_grad_(), normal(4, 6)
    context = {"context": x} if name == "nvil" else {}
    value = gapped.expectation(
        lambda z: z.square().sum((-2, -1)), logits, estimator, generator=seeded(), **context
    )
    (value.mean() + estimator.variance_loss()).backward()
    assert estimator.network.inner.weight.shape == (7, 6)
    assert (estimator.network.outer.weight == 0).all()
    assert (estimator.network.outer.weight.grad != 0).any()


def test_a_learned_baseline_lowers_the_variance() -> None:
    """Costs whose level depends on the input: only NVIL's network can know it."""
    x = normal(4_000, 3, seed=9)
    theta = normal(4, seed=8)

    def leveled(z: Tensor) -> Tensor:
        return z @ normal(4, seed=6) + 5 * (x @ normal(3, seed=10))

    def variance(estimator: Any, **how: Any) -> float:
        _, gradient = estimate(leveled, theta.expand(len(x), 4), estimator, seed=5, **how)
        return float(gradient.var(0).sum())

    torch.manual_seed(0)
    estimator = gapped.NVIL(torch.nn.Linear(3, 1).double(), scale=False).double()
    before = variance(estimator, context=x)
    optimiser = torch.optim.Adam(estimator.parameters(), lr=0.1)
    for _ in range(150):
        variance(estimator, context=x)
        optimiser.zero_grad()
        estimator.variance_loss().backward()
        optimiser.step()
    assert variance(estimator, context=x) < 0.1 * before
    assert variance(gapped.NVIL(scale=False)) > 0.5 * before


@pytest.mark.parametrize("kind", ["rebar", "relax", "double-cv", "rodeo"])
def test_the_variance_loss_has_the_slope_of_the_squared_gradient(kind: str) -> None:
    """By finite differences with the same noise, for every number among the parameters."""
    theta = SETTINGS["2x4-masked"]
    kinds = {
        "rebar": gapped.REBAR(eta=0.7, tau=0.6),
        "relax": gapped.RELAX(free_network(theta), tau=0.6),
        "double-cv": gapped.DoubleCV(3, alpha=0.7),
        "rodeo": gapped.RODEO(3, hidden=5, alpha=0.7, beta=0.4),
    }
    estimator = kinds[kind].double()

    def squared() -> Tensor:
        _, gradient = estimate(cost, theta.expand(50, *theta.shape), estimator, seed=4)
        return gradient.flatten(1).square().sum(-1).mean()

    expected = squared()
    loss = estimator.variance_loss()
    assert_close(loss.detach(), expected)
    loss.backward()
    for parameter in estimator.parameters():
        for place in range(min(parameter.numel(), 5)):
            entry, step = parameter.data.view(-1)[place : place + 1], 1e-5
            entry += step
            above = squared()
            entry -= 2 * step
            below = squared()
            entry += step
            assert_close(parameter.grad.view(-1)[place], (above - below) / (2 * step), 1e-5)
