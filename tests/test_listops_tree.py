"""The linear-time latent tree against the quadratic reference: values, trees, every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gapped
from gapped.errors import GappedError
from gapped.registry import Pathwise
from gapped.tasks.listops.cell import compose, compose_vjp
from gapped.tasks.listops.reference import reference_tree
from gapped.tasks.listops.sampler import Greedy
from gapped.tasks.listops.tree import latent_tree

ESTIMATORS: list[Pathwise] = [
    gapped.GumbelSoftmax(tau=0.5),
    gapped.StraightThrough(),
    gapped.GST(tau=0.7, gap=1.2),
    gapped.GST(tau=0.1, gap=gapped.expected_gap),
    gapped.GumbelRao(samples=5),
    gapped.ReinMax(),
    gapped.DecoupledGumbelSoftmax(),
]


def problem(runs: int, batch: int, count: int, width: int, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Leaves, weight, bias, query in float64, large enough that scores differ; lengths from 1 to `count`."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, dtype=torch.float64, generator=g)).requires_grad_()

    inputs = [
        draw(runs, batch, count, 2 * width),
        draw(runs, 2 * width, 5 * width, scale=width**-0.5),
        draw(runs, 1, 5 * width, scale=0.3),
        draw(runs, 1, width, scale=3.0),
    ]
    lengths = torch.randint(1, count + 1, (runs, batch), generator=g)
    lengths[0, 0] = count
    return inputs, lengths


def gradients(root: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    direction = torch.randn(root.shape, dtype=root.dtype, generator=torch.Generator().manual_seed(5))
    return torch.autograd.grad((root * direction).sum(), inputs)


def assert_equal_trees(inputs: list[Tensor], lengths: Tensor, estimator: Pathwise) -> None:
    noise = [torch.Generator().manual_seed(3) for _ in range(2)]
    root, _ = latent_tree(*inputs, lengths, estimator, noise[0])
    expected = reference_tree(*inputs, lengths, estimator, noise[1])
    torch.testing.assert_close(root, expected, rtol=0, atol=1e-12)
    for mine, theirs in zip(gradients(root, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        assert theirs.abs().max() > 1e-3


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_every_estimator_has_the_reference_gradient(estimator: Pathwise, count: int) -> None:
    inputs, lengths = problem(2, 4, count, 5)
    if count == 2:  # one pair, nothing to choose: the query has no gradient
        root, _ = latent_tree(*inputs, lengths, estimator)
        torch.testing.assert_close(root, reference_tree(*inputs, lengths, estimator))
        return
    assert_equal_trees(inputs, lengths, estimator)


@pytest.mark.parametrize("count", [30, 100])
def test_long_expressions(count: int) -> None:
    assert_equal_trees(*problem(2, 3, count, 3, seed=count), gapped.GST(tau=0.5))
