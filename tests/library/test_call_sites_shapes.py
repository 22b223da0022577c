"""The call sites of test_call_sites.py that are not one of K: gates, the argmax, N:M masks, mixtures."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from conftest import assert_all_close, assert_close, normal, seeded
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor
from torch.nn import functional as F

import gapped
from gapped import simplex

TAU, N, K, D = 0.7, 6, 5, 3


def pulled(use: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """A value, and the gradients of a cost for all inputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    value = use(*leaves)
    return (value.detach(), *torch.autograd.grad(value, leaves, normal(*value.shape, seed=9)))


def through(hard: Tensor, soft: Tensor) -> Tensor:
    """The straight-through form: one value, the other's gradient."""
    return hard - soft.detach() + soft


def hot(scores: Tensor, dim: int = -1) -> Tensor:
    return torch.zeros_like(scores).scatter_(dim, scores.argmax(dim, keepdim=True), 1.0)


# The argmax


@pytest.mark.parametrize("dim", [-1, -2])
def test_rows_6_and_7_the_argmax_with_the_gradient_of_the_softmax(dim: int) -> None:
    """GroupViT's `hard_softmax` in eval mode, on axis -2; Ovis2's `st_argmax`, times a table."""
    x, table = normal(2, K, K), normal(K, D, seed=2)
    estimator = gapped.StraightThrough(draw="argmax")
    ours = pulled(lambda x, t: estimator.sample(x, dim=dim) @ t, x, table)
    theirs = pulled(lambda x, t: through(hot(x, dim), x.softmax(dim)) @ t, x, table)
    assert_all_close(ours, theirs)
    if dim == -1:
        looked_up = pulled(lambda x, t: estimator.choose(x).select(t), x, table)
        assert_all_close(looked_up, theirs)


# Gates


def logistic(shape: tuple[int, ...]) -> Tensor:
    """The noise of gates: the difference of a pair of Gumbel variables."""
    noise = simplex.gumbel(normal(*shape, 2), seeded())
    return noise[..., 0] - noise[..., 1]


def test_row_9_relaxed_bernoulli() -> None:
    """torch's class takes logistic noise as log u - log(1 - u)."""
    x, u = normal(N, K), torch.sigmoid(logistic((N, K)))
    theirs = pulled(lambda x: ((u.log() - (-u).log1p() + x) / TAU).sigmoid(), x)
    ours = pulled(lambda x: gapped.GumbelSoftmax(TAU, hard=False).gate(x, generator=seeded()), x)
    assert_all_close(ours, theirs, 1e-9)


def test_row_12_gumbel_sigmoid_gates() -> None:
    x, noise = normal(N, K), logistic((N, K))

    def theirs(x: Tensor) -> Tensor:
        soft = torch.sigmoid((x + noise) / TAU)
        return through((soft > 0.5).to(x), soft)

    ours = pulled(lambda x: gapped.GumbelSoftmax(TAU).gate(x, generator=seeded()), x)
    assert_all_close(ours, pulled(theirs, x), 1e-9)


def test_row_25_a_token_is_kept() -> None:
    """The first of two categories is a gate, whose log-odds are the difference of the logits."""
    x, noise = normal(2, N, 2), simplex.gumbel(normal(2, N, 2), seeded())

    def theirs(x: Tensor) -> Tensor:
        soft = (x + noise).softmax(-1)
        return through(hot(soft), soft)[:, :, 0:1]

    def ours(x: Tensor) -> Tensor:
        odds = x[:, :, 0:1] - x[:, :, 1:2]
        return gapped.gate(odds, estimator="gumbel-softmax:tau=1", generator=seeded())

    assert_all_close(pulled(ours, x), pulled(theirs, x), 1e-9)


# N:M masks


OPTIONS = torch.tensor(
    [[float(i in kept) for i in range(4)] for kept in itertools.combinations(range(4), 2)],
    dtype=torch.float64,
)


def test_rows_21_and_22_two_of_four() -> None:
    """Six options whose logits are the sums of their entries': one law, and straight-through's gradient."""
    x = normal(N, 4)
    p = (x @ OPTIONS.T).softmax(-1)
    mask, slope = pulled(lambda x: gapped.nm_mask(x, 2, 4, generator=seeded()), x)
    assert (mask.sum(-1) == 2).all()
    chosen = (mask @ OPTIONS.T).argmax(-1)
    theirs = pulled(
        lambda x: through(F.one_hot(chosen, 6).double(), (x @ OPTIONS.T).softmax(-1)) @ OPTIONS, x
    )
    assert_all_close((mask, slope), theirs, 1e-9)
    masks = gapped.nm_mask(x[0].expand(20_000, 4), 2, 4, generator=seeded())
    counts = counts_of((masks @ OPTIONS.T).argmax(-1), 6)
    require_law(chi_squared(counts, p[0]))
    require_rejected(chi_squared(counts, p[1]))


# Mixtures


def test_row_31_a_mixture_with_the_uniform_law() -> None:
    """World models give each category one percent of the uniform law, and go straight through."""
    x = normal(N, K) * 10
    mixed = 0.99 * x.softmax(-1) + 0.01 / K
    drawn = F.one_hot(simplex.draw_index(mixed.log(), seeded()), K).double()

    def theirs(x: Tensor) -> Tensor:
        return through(drawn, 0.99 * x.softmax(-1) + 0.01 / K)

    def ours(x: Tensor) -> Tensor:
        return gapped.straight_through(gapped.unimix(x, 0.01), hard=True, generator=seeded())

    assert_all_close(pulled(ours, x), pulled(theirs, x), 1e-9)
    assert_close(gapped.unimix(x, 0.01).exp(), mixed)
