"""Costs, settings and estimators that the tests of the score-function family share."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_close, normal, seeded
from torch import Tensor

import gapped
from gapped import GappedError

INF = float("inf")
EXACT = 1e-10

# Estimators, and a cost that records its calls


class Sum(torch.nn.Module):
    """A free control variate that takes any shape: a weighted sum of squares over the example."""

    def __init__(self, batch_axes: int) -> None:
        super().__init__()
        self.batch_axes = batch_axes
        self.weight = torch.nn.Parameter(torch.tensor(0.3))

    def forward(self, z: Tensor) -> Tensor:
        return self.weight * z.flatten(1 + self.batch_axes).square().sum(-1)


def takes(name: str, categories: int) -> bool:
    try:
        gapped.estimator(name).check_size(1, categories)
    except GappedError:
        return False
    return True


# Every registered estimator that needs the cost and takes three categories: a new one is tested by being
# registered. It is tested with its default options, or with those given here.
SCORES = tuple(name for name in gapped.estimators("score") if takes(name, 3))
every_score = pytest.mark.parametrize("name", SCORES)
# Given the number of batch axes.
MAKERS: dict[str, Callable[[int], Any]] = {
    "reinforce": lambda axes: gapped.Reinforce(samples=2),
    "rloo": lambda axes: gapped.RLOO(3),
    "rodeo": lambda axes: gapped.RODEO(3, hidden=6),
    "relax": lambda axes: gapped.RELAX(Sum(axes)),
}
STATEFUL: dict[str, Callable[[], Any]] = {
    "double-cv": lambda: gapped.DoubleCV(alpha=0.7),
    "nvil": lambda: gapped.NVIL(torch.nn.Linear(3, 1)),
    "rodeo": lambda: gapped.RODEO(hidden=6, alpha=0.4, beta=0.3),
    "rebar": lambda: gapped.REBAR(eta=0.5, tau=0.7),
    "relax": lambda: gapped.RELAX(Sum(1)),
}


def build(name: str, batch_axes: int = 1) -> Any:
    return MAKERS[name](batch_axes) if name in MAKERS else gapped.estimator(name)


def build_trainable(name: str) -> tuple[Any, dict[str, Tensor]]:
    """The estimator with parameters to train, if it can have any, and the context that it needs."""
    context = {"context": normal(5, 3, dtype=torch.float32)} if name == "nvil" else {}
    return STATEFUL[name]() if name in STATEFUL else build(name), context


class Model:
    """A cost with a parameter inside and one behind a graph that was built before; it records its calls."""

    def __init__(self, categories: int = 3, batch_axes: int = 1) -> None:
        self.weight = normal(categories, seed=21).requires_grad_()
        self.outside = normal(categories, seed=22).requires_grad_()
        self.built = self.outside.sin()
        self.batch_axes = batch_axes
        self.seen: list[Tensor] = []

    def cost(self, z: Tensor) -> Tensor:
        products = z.to(torch.float64) * self.weight * self.built
        return (1 + products.flatten(1 + self.batch_axes).sum(-1)) ** 2

    def __call__(self, z: Tensor) -> Tensor:
        self.seen.append(z.detach().clone())
        return self.cost(z)


def estimate(
    f: Any, logits: Tensor, estimator: Any, *, seed: int = 0, pull: Tensor | None = None, **how: Any
) -> tuple[Tensor, Tensor]:
    """Values, and the gradient at the logits if `pull`, else 1 everywhere, is that at the values."""
    leaf = logits.detach().clone().requires_grad_()
    value = gapped.expectation(f, leaf, estimator, generator=seeded(seed), **how)
    (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value) if pull is None else pull)
    return value.detach(), gradient


def run(name: str, logits: Tensor, f: Any, batch_axes: int = 1, **how: Any) -> tuple[Tensor, Tensor]:
    return estimate(f, logits, build(name, batch_axes), **how)


def with_noise(estimator: Any, noise: Any) -> Any:
    """A copy of the estimator that draws `noise`."""
    other = copy.deepcopy(estimator)
    kind = type("Replayed", (type(other),), {"draw": lambda self, *_: noise})
    object.__setattr__(other, "__class__", kind)
    return other


def square(z: Tensor) -> Tensor:
    return z.square().sum((-1, -2))


def square_of_first(z: Tensor) -> Tensor:
    return (z[..., 0].sum(-1) - 1.3) ** 2


def through_argmax(z: Tensor) -> Tensor:
    return z.argmax(-1).double().sum(-1)


# Problems small enough to enumerate


def free_network(theta: Tensor) -> torch.nn.Module:
    """A network for RELAX, from relaxed samples of logits `theta` to one number each."""
    layers = [torch.nn.Linear(theta.numel(), 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
    flatten = [torch.nn.Flatten(-2)] * (theta.dim() - 1)
    return torch.nn.Sequential(*flatten, *layers, torch.nn.Flatten(-2)).double()


def rows_of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Two variables of four categories and one of eight; with a first stick above 1/2, with masked categories.
SETTINGS = {
    "2x4": normal(2, 4, seed=11),
    "2x4-steep": rows_of([2.5, -0.3, 0.4, 0.1], [1.9, -1.0, 0.2, -0.5]),
    "2x4-masked": rows_of([0.3, -INF, 1.1, -0.4], [-INF, 0.7, -INF, 0.2]),
    "1x8": normal(1, 8, seed=12),
    "1x8-steep": rows_of([2.5, 0.4, -1.0, 0.9, 0.1, -0.6, 0.3, 0.5]),
    "1x8-masked": rows_of([0.4, -INF, -1.0, -INF, -INF, 0.6, 0.3, -0.2]),
}
BINARY = {
    "1x2-steep": rows_of([2.5, -1.0]),
    "2x2": normal(2, 2, seed=18),
    "2x2-steep": rows_of([3.0, -1.0], [-2.2, 0.2]),
    "2x2-masked": rows_of([0.3, 0.9], [0.4, -INF]),
    "3x2": normal(3, 2, seed=13),
    "3x2-steep": rows_of([3.0, -1.0], [-0.2, 2.2], [0.1, 0.1]),
    "3x2-masked": rows_of([0.3, 0.9], [-INF, 0.4], [0.2, -1.0]),
}
# Further shapes, with one to three variables.
SMALL = {
    "1x2": normal(1, 2, seed=14),
    "1x3": normal(1, 3, seed=15),
    "2x3-masked": rows_of([0.3, -INF, 1.1], [0.9, 0.7, 0.2]),
    "3x3": normal(3, 3, seed=16),
    "1x7-steep": rows_of([3.0, -0.3, 0.4, 0.1, -1.0, 0.5, 1.2]),
    "2x7": normal(2, 7, seed=17),
    "2x7-masked": rows_of([0.3, -INF, 1.1, -0.4, 0.0, -INF, 0.2], [-INF, 0.7, -INF, 0.2, -INF, -INF, 1.0]),
}
PROBLEMS = {**BINARY, **SMALL}
every_setting = pytest.mark.parametrize("theta", SETTINGS.values(), ids=SETTINGS)
every_problem = pytest.mark.parametrize("theta", PROBLEMS.values(), ids=PROBLEMS)


def cost(z: Tensor) -> Tensor:
    """Curved, with variables that interact, at a level far from zero; ``(..., L, K)`` to ``(...)``."""
    flat = z.flatten(-2)
    size = flat.shape[-1]
    a, b = normal(size, size, seed=2), normal(size, seed=3)
    return 2.0 + torch.sin(2 * (flat @ b)) + ((flat @ a) * flat).sum(-1) + 0.1 * ((flat @ a) ** 3).sum(-1)


class Law(NamedTuple):
    """Everything that noise can be, ``(..., N, ...)``, and how likely it is, ``(N,)``."""

    noise: Tensor
    weights: Tensor


def joint(theta: Tensor) -> Law:
    """All joint values ``(N, L)`` of the variables and their probabilities."""
    variables, categories = theta.shape
    values = torch.tensor(list(itertools.product(range(categories), repeat=variables)))
    weights = torch.ones(len(values), dtype=torch.float64)
    for variable in range(variables):
        weights = weights * torch.softmax(theta[variable], -1)[values[:, variable]]
    return Law(values, weights)


def oracle(theta: Tensor) -> tuple[Tensor, Tensor]:
    """The expected cost and its gradient, by autograd through the product of the softmaxes."""
    leaf = theta.clone().requires_grad_()
    values, _ = joint(theta)
    p = torch.softmax(leaf, -1).unsqueeze(0).expand(len(values), -1, -1)
    weights = p.gather(-1, values.unsqueeze(-1)).squeeze(-1).prod(-1)
    expected = (weights * cost(torch.nn.functional.one_hot(values, theta.shape[-1]).double())).sum()
    return expected.detach(), torch.autograd.grad(expected, leaf)[0]


def independent(theta: Tensor, samples: int) -> Law:
    """All tuples of independent samples, ``(samples, N, L)``."""
    values, weights = joint(theta)
    picks = torch.cartesian_prod(*[torch.arange(len(values))] * samples).reshape(-1, samples)
    return Law(values[picks].movedim(1, 0), weights[picks].prod(-1))


def replay(
    estimator: Any, theta: Tensor, noise: Any, count: int, level: float = 0.0, f: Any = cost
) -> tuple[Tensor, Tensor]:
    """Values ``(N,)`` and gradients ``(N, L, K)`` of `count` examples with the given noise."""
    logits = theta.expand(count, *theta.shape)
    return estimate(lambda z: f(z) + level, logits, with_noise(estimator, noise))


def mean_of(sample: Tensor, weights: Tensor) -> Tensor:
    return (weights.view(-1, *(1 for _ in sample.shape[1:])) * sample).sum(0)


def variance_of(sample: Tensor, weights: Tensor) -> float:
    """The trace of the covariance."""
    return float(mean_of((sample - mean_of(sample, weights)) ** 2, weights).sum())


def assert_unbiased(values: Tensor, gradients: Tensor, weights: Tensor, theta: Tensor) -> None:
    value, gradient = oracle(theta)
    assert_close(weights.sum(), torch.ones((), dtype=torch.float64), EXACT)
    assert_close(mean_of(values, weights), value, EXACT)
    assert_close(mean_of(gradients, weights), gradient, EXACT)
    assert (gradients[:, theta == -INF] == 0).all()
