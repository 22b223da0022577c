"""The estimators that use Gumbel noise: the same noise drawn again, value and gradient in closed form.

The order in which noise is drawn is part of what is tested: one float64 uniform for each row in
`draw_index`; one `gumbel` for Gumbel-Softmax and for the decoupled one; `draw_index` and then the seed of
`conditional_gumbel`'s own generator for Gumbel-Rao, each for logits whose category axis is last, in float32
for half-precision logits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, pull, seeded, through_softmax
from torch import Tensor

import gapped
from gapped import simplex

K = 6
SHAPES = [(K,), (40, K), (5, 8, K)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
TAUS = [0.1, 0.5, 1.0, 2.0]
every_tau = pytest.mark.parametrize("tau", TAUS)
# The closed forms delete what is masked: the middle category is, and its logit would dominate.
MASK = torch.tensor([True, True, False, True, True, True])
every_mask = pytest.mark.parametrize("mask", [None, MASK], ids=["free", "masked"])


def problem(shape: tuple[int, ...], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the gradient at the sample, and the positions of the allowed categories."""
    logits = normal(*shape)
    if mask is None:
        return logits, normal(*shape, seed=2), torch.arange(K)
    logits[..., ~mask] = 30.0
    return logits, normal(*shape, seed=2), mask.nonzero().squeeze(-1)


def one_hot_argmax(x: Tensor) -> Tensor:
    return (x == x.max(-1, keepdim=True).values).to(x.dtype)


def conditional_noise(logits: Tensor, log_p: Any, samples: int) -> tuple[Tensor, Tensor]:
    """The draws of Gumbel-Rao, replayed: categories, and `log_p` of these with noise given that they win."""
    generator = seeded()
    index = simplex.draw_index(logits, generator)
    own = seeded(int(torch.randint(2**63 - 1, (), generator=generator)))
    return index, simplex.conditional_gumbel(log_p(index), index, samples, own)


def check(
    estimator: Any, logits: Tensor, g: Tensor, columns: Tensor, mask: Tensor | None, expected: Any
) -> None:
    """`expected` is (hard, soft, gradient) on the kept categories."""
    hard, soft, gradient = expected
    for wanted, is_hard in ((hard, True), (soft, False)):
        value, slope = pull(replace(estimator, hard=is_hard), logits, g, mask=mask)
        gone = torch.ones(K, dtype=torch.bool)
        gone[columns] = False
        assert_close(value[..., columns], wanted)
        assert_close(slope[..., columns], gradient, 1e-11)
        assert (value[..., gone] == 0).all()
        assert (slope[..., gone] == 0).all()


def test_drawing_inverts_the_cumulative_sum_at_one_uniform() -> None:
    logits = normal(2_000, K)
    uniform = torch.rand(2_000, generator=seeded(), dtype=torch.float64)
    below = torch.softmax(logits, -1).cumsum(-1) <= uniform.unsqueeze(-1)
    assert torch.equal(simplex.draw_index(logits, seeded()), below.sum(-1))


def test_drawing_reaches_every_category_of_a_flat_tail() -> None:
    """The cumulative sum rises by an eighth of a float32 step: rounded, it skips seven of eight categories.

    Seeds are chosen whose uniform falls into the tail, which has two thousandths of the mass.
    """
    categories, weight = 128_256, 2.0**-26
    logits = torch.full((categories,), math.log(weight))
    logits[0] = 0.0
    total = 1 + (categories - 1) * weight
    uniforms = {seed: torch.rand((), generator=seeded(seed), dtype=torch.float64) for seed in range(20_000)}
    tail = {seed: float(u) for seed, u in uniforms.items() if u * total > 1}
    assert len(tail) > 20
    expected = torch.tensor([1 + int((u * total - 1) / weight) for u in tail.values()])
    indices = torch.stack([simplex.draw_index(logits, seeded(seed)) for seed in tail])
    # The weights are float32's, right to 1e-6 of themselves: at the far end, a fraction of a category.
    assert ((indices - expected).abs() <= 1).all()
    rounded = logits.exp().double().cumsum(-1).float().double()
    skipped = torch.searchsorted(rounded, torch.tensor(list(tail.values())) * total, right=True)
    assert not ((skipped - expected).abs() <= 1).all(), "the test cannot see rounding"


@every_shape
@every_tau
@every_mask
def test_gumbel_softmax(shape: tuple[int, ...], tau: float, mask: Tensor | None) -> None:
    logits, g, columns = problem(shape, mask)
    perturbed = (logits + simplex.gumbel(logits, seeded()))[..., columns]
    h = torch.softmax(perturbed / tau, -1)
    expected = one_hot_argmax(perturbed), h, through_softmax(h, g[..., columns], tau)
    check(gapped.GumbelSoftmax(tau=tau), logits, g, columns, mask, expected)


@every_shape
@every_tau
@every_mask
@pytest.mark.parametrize("tau_forward", [0.5, 1.0, 3.0])
def test_decoupled(shape: tuple[int, ...], tau: float, mask: Tensor | None, tau_forward: float) -> None:
    logits, g, columns = problem(shape, mask)
    noise = simplex.gumbel(logits, seeded())[..., columns]
    h = torch.softmax(logits[..., columns] / tau + noise, -1)
    hard = one_hot_argmax(logits[..., columns] / tau_forward + noise)
    estimator = gapped.DecoupledGumbelSoftmax(tau=tau, tau_forward=tau_forward)
    check(estimator, logits, g, columns, mask, (hard, h, through_softmax(h, g[..., columns], tau)))


@every_shape
@every_tau
@every_mask
@pytest.mark.parametrize("samples", [1, 7])
def test_gumbel_rao(shape: tuple[int, ...], tau: float, mask: Tensor | None, samples: int) -> None:
    logits, g, columns = problem(shape, mask)
    allowed = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    index, noisy = conditional_noise(allowed, lambda _: torch.log_softmax(allowed, -1), samples)
    each = torch.softmax(noisy[..., columns] / tau, -1)
    hard = torch.eye(K, dtype=torch.float64)[index][..., columns]
    gradient = through_softmax(each, g[..., columns].expand_as(each), tau).mean(0)
    check(
        gapped.GumbelRao(tau=tau, samples=samples), logits, g, columns, mask, (hard, each.mean(0), gradient)
    )


@every_shape
@every_tau
@every_mask
@pytest.mark.parametrize("samples", [1, 7])
def test_reinmax_rao(shape: tuple[int, ...], tau: float, mask: Tensor | None, samples: int) -> None:
    """2 J_GR g - J(p) g / 2 with Gumbel-Rao at log((p + D) / 2)."""
    logits, g, columns = problem(shape, mask)
    allowed = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    p, corners = torch.softmax(allowed, -1), torch.eye(K, dtype=torch.float64)
    index, noisy = conditional_noise(allowed, lambda index: ((p + corners[index]) / 2).log(), samples)
    each = torch.softmax(noisy[..., columns] / tau, -1)
    own = g[..., columns]
    expected = 2 * through_softmax(each, own.expand_as(each), tau).mean(0)
    expected = expected - through_softmax(p[..., columns], own) / 2
    value, slope = pull(gapped.ReinMaxRao(tau=tau, samples=samples), logits, g, mask=mask)
    assert torch.equal(value, corners[index])
    assert_close(slope[..., columns], expected, 1e-11)


def test_reinmax_rao_knows_categories_too_unlikely_for_a_number() -> None:
    """At a high temperature they count all the same, in float32 as in float64."""
    logits = torch.tensor([0.0, -200.0])
    means = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype).expand(4000, 2).clone().requires_grad_()
        z = gapped.reinmax_rao(leaf, tau=50.0, samples=10, generator=seeded(), backend="torch")
        means.append(torch.autograd.grad(z[:, 1].sum(), leaf)[0][:, 1].mean().double())
    assert means[1] > 5e-4
    torch.testing.assert_close(means[0], means[1], rtol=1e-4, atol=0.0)
