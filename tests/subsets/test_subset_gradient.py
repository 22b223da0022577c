"""Gradients of subsets: SIMPLE, GST with k winners and its properties, and the unbiased estimate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_close, gradient_through, normal, seeded
from subset_enumeration import covariances, enumerate_law, gapped_logits, marginals, plackett_luce
from torch import Tensor

import gapped
from gapped.subsets import conditional_bernoulli, subset_sampling

SIZES = [(4, 2), (6, 2), (6, 5), (9, 4), (10, 7)]
every_size = pytest.mark.parametrize(("n", "k"), SIZES)


def pulled(logits: Tensor, weight: Tensor, k: int, *how: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """A sample, and the gradient that reaches the logits when `weight` is the gradient at the sample."""
    leaf = logits.detach().requires_grad_()
    sample = gapped.subset(leaf, k, *how, generator=seeded(), **more)
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    return sample.detach(), gradient


@every_size
@pytest.mark.parametrize("tau", [1.0, 0.4, 2.5])
def test_simple_has_the_jacobian_of_the_marginals(n: int, k: int, tau: float) -> None:
    theta, g = 2 * normal(n, seed=n), normal(n, seed=2)
    expected = gradient_through(lambda t: marginals(t / tau, k), theta, g)
    for hard in (True, False):
        sample, gradient = pulled(theta, g, k, tau, hard)
        assert_close(gradient, expected, 1e-10)
        assert_close(sample.sum(), torch.tensor(float(k)), 1e-12)
    assert_close(sample, marginals(theta / tau, k), 1e-10)


@every_size
def test_simple_is_exact_for_linear_costs(n: int, k: int) -> None:
    """At the temperature 1, whatever is drawn; at another one it is not."""
    theta, g = normal(n, seed=n), normal(n, seed=2)
    law = enumerate_law(theta.requires_grad_(), k)
    (exact,) = torch.autograd.grad((law.p * (law.subsets @ g)).sum(), theta)
    assert_close(pulled(theta, g, k)[1], exact, 1e-10)
    assert (pulled(theta, g, k, 0.5)[1] - exact).abs().max() > 1e-3


@every_size
@pytest.mark.parametrize("gap", [0.0, 1.0, 2.5])
def test_gst_has_the_marginals_of_gapped_logits(n: int, k: int, gap: float) -> None:
    theta, g, tau = 2 * normal(4, n, seed=n), normal(4, n, seed=2), 0.7
    estimator = f"gst:gap={gap}"
    sample, gradient = pulled(theta, g, k, tau, estimator=estimator)
    soft, soft_gradient = pulled(theta, g, k, tau, False, estimator=estimator)
    assert_close(soft_gradient, gradient, 1e-12)
    for row in range(4):
        t = gapped_logits(theta[row], sample[row], k, gap)
        assert_close(soft[row], marginals(t / tau, k), 1e-10)
        # The perturbation is a constant of the backward pass.
        assert_close(gradient[row], covariances(t / tau, k) @ g[row] / tau, 1e-10)


@every_size
@pytest.mark.parametrize("gap", [0.3, 2.0])
def test_gst_is_consistent_and_has_a_strict_gap(n: int, k: int, gap: float) -> None:
    """For every subset, however improbable: the k largest entries of the surrogate are the selected ones."""
    theta, tau = 3 * normal(n, seed=n), 0.7
    chosen = enumerate_law(theta, k).subsets > 0
    t = subset_sampling.perturbed(theta.expand_as(chosen), chosen, k, gap)
    least, most = t.masked_fill(~chosen, torch.inf).amin(-1), t.masked_fill(chosen, -torch.inf).amax(-1)
    assert (least - most >= gap - 1e-12).all()
    h = gapped.subsets.marginals(t / tau, k)
    assert (h.masked_fill(~chosen, 2.0).amin(-1) > h.masked_fill(chosen, -1.0).amax(-1)).all()
    # A subset that is already ahead by the gap is not perturbed.
    ahead = torch.zeros(n, dtype=torch.bool).index_fill(0, theta.topk(k).indices, True)
    apart = torch.where(ahead, theta + gap, theta)
    assert torch.equal(subset_sampling.perturbed(apart, ahead, k, gap), apart)


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("gap", [1.0, 0.2])
def test_one_winner_is_gst(gap: float, hard: bool) -> None:
    """Through the call itself, and through the general path for the category that gst drew."""
    theta, g, tau = 2 * normal(6, 7), normal(6, 7, seed=2), 0.6
    one, gradient = pulled(theta, g, 1, tau, hard, estimator=gapped.GST(gap=gap))
    leaf = theta.clone().requires_grad_()
    other = gapped.gst(leaf, tau, hard, gap=gap, generator=seeded())
    assert torch.equal(one, other)
    assert torch.equal(gradient, torch.autograd.grad(other, leaf, g)[0])
    index = gapped.gst(theta, tau, True, generator=seeded()) > 0
    t = subset_sampling.perturbed(theta, index, 1, gap) / tau
    assert_close(conditional_bernoulli.covariance_product(g, t, 1) / tau, gradient, 1e-12)
    if not hard:
        assert_close(conditional_bernoulli.marginals(t, 1), one, 1e-12)


def test_one_of_n_by_simple_is_straight_through() -> None:
    theta, g = normal(6, 7), normal(6, 7, seed=2)
    one, gradient = pulled(theta, g, 1, 0.6)
    leaf = theta.clone().requires_grad_()
    other = gapped.straight_through(leaf, 0.6, True, generator=seeded())
    assert torch.equal(one, other)
    assert torch.equal(gradient, torch.autograd.grad(other, leaf, g)[0])


def exact_gradient(theta: Tensor, k: int, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The probabilities of all subsets, and the exact gradient of the expected cost."""
    leaf = theta.clone().requires_grad_()
    law = enumerate_law(leaf, k)
    (exact,) = torch.autograd.grad((law.p * f(law.subsets)).sum(), leaf)
    return law.p.detach(), exact


@pytest.mark.parametrize(("n", "k"), [(n, k) for n in range(2, 7) for k in range(1, n)])
def test_the_expectation_is_unbiased(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all pairs of subsets is the exact gradient; with pairs of another law it is percents off.

    The other law is that of the largest logits with Gumbel noise, whose score is not this one.
    """
    theta, weight = 1.5 * normal(n, seed=n), normal(n, seed=2)

    def cost(z: Tensor) -> Tensor:
        return ((z @ weight) - 0.3).square() + 2 * z[..., 0] * z[..., -1]

    p, exact = exact_gradient(theta, k, cost)
    subsets = enumerate_law(theta, k).subsets
    i, j = torch.cartesian_prod(torch.arange(len(p)), torch.arange(len(p))).unbind(-1)
    monkeypatch.setattr(conditional_bernoulli, "draw", lambda *_: torch.stack([subsets[i], subsets[j]]) > 0)
    logits = theta.expand(len(i), n).clone().requires_grad_()
    value = gapped.subsets.expectation(cost, logits, k)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert_close((p[i] * p[j]) @ gradient, exact, 1e-10)
    assert_close((p[i] * p[j]) @ value.detach(), p @ cost(subsets), 1e-10)
    if 1 < k < n - 1:
        wrong = plackett_luce(theta, k)
        error = (wrong[i] * wrong[j]) @ gradient - exact
        assert error.norm() / exact.norm() > 0.02


def test_the_expectation_of_a_batch_with_several_variables() -> None:
    """Each example's cost is that of all its rows, and the cost's own parameters have ordinary gradients."""
    logits = normal(3, 2, 5).requires_grad_()
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def cost(z: Tensor) -> Tensor:
        assert z.shape == (4, 3, 2, 5)
        assert (z.sum(-1) == 2).all()
        return scale * (z @ normal(5, seed=2)).sum(-1)

    value = gapped.subsets.expectation(cost, logits, 2, samples=4, generator=seeded())
    value.sum().backward()
    assert value.shape == (3,)
    assert_close(scale.grad, value.sum().detach() / 2, 1e-12)
    assert logits.grad.abs().sum() > 0
    assert_close(logits.grad.sum(-1), torch.zeros(3, 2), 1e-12)
    constant = gapped.subsets.expectation(lambda z: z.sum((-1, -2)), logits, 2)
    assert not torch.autograd.grad(constant.sum(), logits)[0].any()
