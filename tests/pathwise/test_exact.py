"""Estimators that are deterministic given the category: every gradient by enumeration, in float64.

Many copies of one row of logits are sampled until every category was drawn. Each observed pair of category
and gradient is compared with a formula; weighted by the probabilities, the observed gradients then give the
exact expectation and variance of the estimator, which are compared with those of the formula and with the
gradient of the enumerated expected cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    assert_all_close,
    assert_close,
    assert_one_hot,
    gradient_through,
    gst_surrogate,
    jacobian_of_softmax,
    lemma_1,
    normal,
    reinmax_gradient,
    seeded,
    through_softmax,
)
from scipy import integrate
from score_problems import every_problem, joint, mean_of
from torch import Tensor

import gapped
from gapped.gradient import jacobian_product
from gapped.pathwise import Draw

DOCUMENT = Path(__file__).parents[2] / "docs" / "estimators.md"
K, COPIES, EXACT = 5, 3_000, 1e-10
THETAS = {
    "spread": torch.tensor([1.2, -0.4, 0.3, -1.5, 0.9], dtype=torch.float64),
    "near-tie": torch.tensor([0.51, 0.5, 0.1, -0.2, 0.45], dtype=torch.float64),
    "shifted": torch.tensor([101.0, 100.2, 99.1, 100.9, 98.7], dtype=torch.float64),
}
every_theta = pytest.mark.parametrize("theta", THETAS.values(), ids=THETAS)

Formula = Callable[[Tensor, int, Tensor], Tensor]
Cost = Callable[[Tensor], Tensor]

A, B = normal(K, K, seed=2), normal(K, seed=3)
COSTS: dict[str, Cost] = {
    "linear": lambda z: z @ B,
    "quadratic": lambda z: ((z @ A) * z).sum(-1) + z @ B,
    "curved": lambda z: torch.sin(2 * (z @ B)) + ((z @ A) ** 3).sum(-1),
}


# Formulas: the gradient given the selected category, written from the definition.
def straight_through(tau: float) -> Formula:
    return lambda theta, _, g: gradient_through(lambda t: torch.softmax(t / tau, -1), theta, g)


def gapped_straight_through(gap: Any, tau: float, detach: bool = True) -> Formula:
    """`gap` is a number or a function of the selected probability."""

    def formula(theta: Tensor, index: int, g: Tensor) -> Tensor:
        def surrogate(theta: Tensor) -> Tensor:
            size = gap(torch.softmax(theta, -1)[index]) if callable(gap) else gap
            return gst_surrogate(theta, index, size, tau, detach)

        return gradient_through(surrogate, theta, g)

    return formula


def odds(p: float) -> float:
    """The expected odds of a loser of that probability under Gumbel noise, by numerical integration."""
    return float(
        integrate.quad(lambda u: p * u / (p + (1 - p) * u) ** 2, 0, 1, epsabs=1e-13, epsrel=1e-13)[0]
    )


def with_odds(p: Tensor, index: int, tau: float) -> Tensor:
    """The point where each loser's weight is its expected odds to the power of 1/tau, and the winner's 1."""
    weights = [1.0 if j == index else odds(each) ** (1 / tau) for j, each in enumerate(p.tolist())]
    point = torch.tensor(weights, dtype=torch.float64)
    return point / point.sum()


def auto_gapped(tau: float) -> Formula:
    return lambda theta, index, g: through_softmax(with_odds(theta.softmax(-1), index, tau), g, tau)


def gapmax(tau: float) -> Formula:
    def formula(theta: Tensor, index: int, g: Tensor) -> Tensor:
        p = theta.softmax(-1)
        return 2 * through_softmax(with_odds(p / 2, index, tau), g, tau) - through_softmax(p, g) / 2

    return formula


def reinmax(tau: float) -> Formula:
    return lambda theta, index, g: reinmax_gradient(theta, index, g, tau)


def mve(smoothing: float, tau: float = 1.0) -> Formula:
    """By its definition, a constrained least-squares problem over all K x K matrices at once.

    Unknown are the columns v[x, j] of the matrices that map a slope to a gradient, given x. A quadratic cost
    with z_i z_j has slopes e_j at e_i and e_i at e_j, so it is exact if p_i v[i, j] + p_j v[j, i] is the
    target, 0 or for i = j the j-th column of J(p); a linear one if sum_x p_x v[x, j] is that column. The
    latter holds exactly. Minimised are the squares of v, weighted by p_x, and 1/s times half the squares of
    the violations of the former; without smoothing they hold exactly, too.
    """

    def formula(theta: Tensor, index: int, g: Tensor) -> Tensor:
        p = torch.softmax(theta / tau, -1)
        size, at = K * K, lambda x, j: x * K + j
        linear, quadratic = torch.zeros(K, size).double(), torch.zeros(size, size).double()
        for i in range(K):
            for j in range(K):
                linear[j, at(i, j)] += p[i]
                quadratic[at(i, j), at(i, j)] += p[i]
                quadratic[at(i, j), at(j, i)] += p[j]
        jacobian = jacobian_of_softmax(p)
        pairs = torch.zeros(size, K).double()
        pairs[[at(i, i) for i in range(K)]] = jacobian
        if smoothing == 0:
            root = p.repeat_interleave(K).sqrt()
            constraints, values = torch.cat([linear, quadratic]), torch.cat([jacobian, pairs])
            v = torch.linalg.pinv(constraints / root) @ values / root.unsqueeze(-1)
        else:
            metric = 2 * torch.diag(p.repeat_interleave(K)) + quadratic.T @ quadratic / smoothing
            upper = torch.cat([metric, linear.T], 1)
            lower = torch.cat([linear, torch.zeros(K, K).double()], 1)
            right = torch.cat([quadratic.T @ pairs / smoothing, jacobian])
            v = torch.linalg.solve(torch.cat([upper, lower]), right)[:size]
        return g @ v.view(K, K, K)[index]

    return formula


def twice_plus_half(p: Tensor) -> Tensor:
    return 2 * p + 0.5


CASES: dict[str, tuple[Any, Formula]] = {
    "st": (gapped.StraightThrough(), straight_through(1.0)),
    "st-cold": (gapped.StraightThrough(tau=0.3), straight_through(0.3)),
    "gst": (gapped.GST(1.0, gap=1.0), gapped_straight_through(1.0, 1.0)),
    "gst-0.8-cold": (gapped.GST(tau=0.5, gap=0.8), gapped_straight_through(0.8, 0.5)),
    "gst-integer-gap": (gapped.GST(1.0, gap=2), gapped_straight_through(2.0, 1.0)),
    "gst-no-gap": (gapped.GST(1.0, gap=0.0), gapped_straight_through(0.0, 1.0)),
    "gst-expected": (gapped.GST(tau=0.5, gap=gapped.expected_gap), gapped_straight_through(lemma_1, 0.5)),
    "gst-auto": (gapped.GST(tau=0.7, gap="auto"), auto_gapped(0.7)),
    "gst-own-gap": (gapped.GST(1.0, gap=twice_plus_half), gapped_straight_through(twice_plus_half, 1.0)),
    "nz-gst": (gapped.GST(1.0, gap=1.0, detach=False), gapped_straight_through(1.0, 1.0, detach=False)),
    "nz-gst-cold": (
        gapped.GST(tau=0.5, gap=1.2, detach=False),
        gapped_straight_through(1.2, 0.5, detach=False),
    ),
    "nz-gst-expected": (
        gapped.GST(tau=0.5, gap=gapped.expected_gap, detach=False),
        gapped_straight_through(gapped.expected_gap, 0.5, detach=False),
    ),
    "nz-gst-own": (
        gapped.GST(1.0, gap=lambda p: 0.1 + p**2, detach=False),
        gapped_straight_through(lambda p: 0.1 + p**2, 1.0, detach=False),
    ),
    "nz-gst-no-gap": (
        gapped.GST(1.0, gap=0.0, detach=False),
        gapped_straight_through(0.0, 1.0, detach=False),
    ),
    "mve": (gapped.MVE(), mve(0.0)),
    "mve-smooth": (gapped.MVE(smoothing=0.1), mve(0.1)),
    "mve-warm": (gapped.MVE(tau=1.7, smoothing=torch.tensor(2.0)), mve(2.0, 1.7)),
    "reinmax": (gapped.ReinMax(), reinmax(1.0)),
    "reinmax-warm": (gapped.ReinMax(tau=1.7), reinmax(1.7)),
    "gapmax": (gapped.GapMax(), gapmax(1.0)),
    "gapmax-warm": (gapped.GapMax(tau=1.7), gapmax(1.7)),
}
every_case = pytest.mark.parametrize("case", CASES)


def observed_gradients(estimator: Any, theta: Tensor, cost: Cost, **how: Any) -> Tensor:
    """Row i: the gradient that the estimator gave whenever it drew category i; all copies must agree."""
    logits = theta.repeat(COPIES, 1).requires_grad_()
    sample = estimator.sample(logits, generator=seeded(), **how)
    assert_one_hot(sample)
    (gradients,) = torch.autograd.grad(cost(sample).sum(), logits)
    indices = sample.argmax(-1)
    assert set(indices.tolist()) == set(range(K)), "too few copies to see every category"
    table = torch.stack([gradients[indices == i][0] for i in range(K)])
    assert_close(gradients, table[indices], 1e-13)
    return table


def formula_gradients(formula: Formula, theta: Tensor, cost: Cost) -> Tensor:
    rows = []
    for index in range(K):
        corner = torch.eye(K, dtype=torch.float64)[index].requires_grad_()
        (g,) = torch.autograd.grad(cost(corner), corner)
        rows.append(formula(theta, index, g))
    return torch.stack(rows)


def moments(table: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(theta, -1).unsqueeze(-1)
    mean = (p * table).sum(0)
    return mean, (p * (table - mean) ** 2).sum(0)


def true_gradient(theta: Tensor, cost: Cost) -> Tensor:
    """The gradient of sum_i p_i cost(e_i)."""
    leaf = theta.clone().requires_grad_()
    expected_cost = torch.softmax(leaf, -1) @ cost(torch.eye(K, dtype=torch.float64))
    return torch.autograd.grad(expected_cost, leaf)[0]


@every_theta
@every_case
def test_gradient_mean_and_variance_equal_the_formula(case: str, theta: Tensor) -> None:
    estimator, formula = CASES[case]
    observed = observed_gradients(estimator, theta, COSTS["curved"])
    expected = formula_gradients(formula, theta, COSTS["curved"])
    assert_close(observed, expected, EXACT)
    assert_all_close(moments(observed, theta), moments(expected, theta), EXACT)


def test_the_formulas_are_told_apart() -> None:
    """No two cases have the same formula at the tested logits, so passing them all means something."""
    tables = {case: formula_gradients(CASES[case][1], THETAS["spread"], COSTS["curved"]) for case in CASES}
    for case, table in tables.items():
        twins = [other for other in tables if torch.allclose(tables[other], table, atol=1e-3)]
        assert twins == [case]


@every_theta
@pytest.mark.parametrize(
    ("estimator", "gap", "tau"),
    [
        (gapped.GST(1.0, False, 1.0), 1.0, 1.0),
        (gapped.GST(tau=0.5, gap=1.2, hard=False), 1.2, 0.5),
        (gapped.GST(1.0, False, gapped.expected_gap), lemma_1, 1.0),
        (gapped.GST(1.0, False, 1.0, detach=False), 1.0, 1.0),
    ],
    ids=["gst", "cold", "expected", "nz"],
)
def test_soft_gst_is_the_softmax_of_the_gapped_logits(
    estimator: Any, gap: Any, tau: float, theta: Tensor
) -> None:
    """The perturbation's gradient differs between GST and NZ-GST; the value does not."""
    p = torch.softmax(theta, -1)
    expected = [gst_surrogate(theta, i, gap(p[i]) if callable(gap) else gap, tau) for i in range(K)]
    logits = theta.repeat(COPIES, 1)
    soft = estimator.sample(logits, generator=seeded())
    indices = gapped.straight_through(logits, hard=True, generator=seeded()).argmax(-1)
    assert_close(soft, torch.stack(expected)[indices], EXACT)


@every_theta
@pytest.mark.parametrize("tau", [0.3, 1.0, 2.0])
def test_soft_straight_through_is_the_tempered_softmax(tau: float, theta: Tensor) -> None:
    assert_close(gapped.straight_through(theta, tau, False), torch.softmax(theta / tau, -1), EXACT)


@every_theta
@pytest.mark.parametrize(
    ("estimator", "cost"),
    [
        (gapped.StraightThrough(), "linear"),
        (gapped.ReinMax(), "linear"),
        (gapped.ReinMax(), "quadratic"),
        (gapped.MVE(), "linear"),
        (gapped.MVE(), "quadratic"),
        (gapped.MVE(smoothing=0.3), "linear"),
    ],
    ids=str,
)
def test_unbiased_costs(estimator: Any, cost: str, theta: Tensor) -> None:
    """Straight-through is exact for linear costs, ReinMax and MVE for quadratic ones too."""
    mean, _ = moments(observed_gradients(estimator, theta, COSTS[cost]), theta)
    assert_close(mean, true_gradient(theta, COSTS[cost]), 1e-12)


@every_problem
@pytest.mark.parametrize("estimator", [gapped.ReinMax(), gapped.MVE()], ids=["reinmax", "mve"])
def test_quadratic_costs_of_several_variables(estimator: Any, theta: Tensor) -> None:
    """Two, three and seven categories, one to three variables that interact, masked categories."""
    a, b = normal(theta.numel(), theta.numel(), seed=31), normal(theta.numel(), seed=32)
    values, weights = joint(theta)
    z = torch.nn.functional.one_hot(values, theta.shape[-1]).double()
    slopes = (z.flatten(1) @ (a + a.T) + b).view_as(z)
    logits = (theta - theta.amax(-1, keepdim=True)).expand_as(z)
    points, numbers, product = estimator.points(logits, Draw(values))
    mean = mean_of(jacobian_product(slopes, points, numbers, slopes, product), weights)
    leaf = theta.clone().requires_grad_()
    p = torch.softmax(leaf, -1).expand_as(z).gather(-1, values.unsqueeze(-1)).prod(-2).squeeze(-1)
    expected = (p * (((z.flatten(1) @ a) * z.flatten(1)).sum(-1) + z.flatten(1) @ b)).sum()
    assert_close(mean, torch.autograd.grad(expected, leaf)[0], 1e-12)


def mean_gradient(estimator: Any, theta: Tensor, slopes: Tensor) -> Tensor:
    """The expected gradient, if the gradient at the sample e_i is row i of the slopes."""
    categories = len(theta)
    logits = (theta - theta.max()).expand(categories, categories)
    points, weights, product = estimator.points(logits, Draw(torch.arange(categories)))
    return theta.softmax(-1) @ jacobian_product(slopes, points, weights, slopes, product)


# docs/estimators.md, "What it does at equal logits".
@pytest.mark.parametrize("categories", [2, 3, 10, 64, 512])
@pytest.mark.parametrize("name", ["gapmax", "reinmax", "gst", "straight-through"])
def test_the_mean_gradient_at_equal_logits_in_closed_form(name: str, categories: int) -> None:
    """Linear costs, squares and products of entries: each mean is a multiple of the centred coefficients."""
    n, theta = categories, torch.zeros(categories, dtype=torch.float64)
    win, lose, factor, plain = {
        "gapmax": (1.0, odds(1 / (2 * n)), 2.0, 0.5),
        "reinmax": (n + 1.0, 1.0, 2.0, 0.5),
        "gst": (1.0, odds(1 / n), 1.0, 0.0),
        "straight-through": (1.0, 1.0, 1.0, 0.0),
    }[name]
    win, lose = (each / (win + (n - 1) * lose) for each in (win, lose))
    estimator = gapped.estimator(name, tau=1.0)
    coefficients, products = normal(n, seed=6), normal(n, n, seed=7)
    products = (products + products.T).fill_diagonal_(0)
    linear = factor * n * (win * (1 - win) + lose * (1 - lose) * (n - 1)) / (n - 1) - plain
    square = 2 * factor * win * (1 - win + lose) - 2 * plain / n
    cases = [
        (coefficients.expand(n, n), coefficients, linear / n),
        (coefficients.diag(), coefficients, square / (2 * n)),
        (products, products.sum(0), factor * lose**2 - plain / n**2),
    ]
    for slopes, vector, multiple in cases:
        expected = multiple * (vector - vector.mean())
        assert_close(mean_gradient(estimator, theta, slopes.contiguous()), expected, 1e-12)
    if name == "reinmax":
        assert_close(torch.tensor([linear, square, cases[2][2]]), torch.tensor([1.0, 1.0, 0.0]))


def scale_and_angle(categories: int, cost: str, problems: int = 200) -> tuple[float, float]:
    """Of the mean gradients of random problems, all entries as one vector, against the exact ones."""
    generator, products = seeded(), torch.zeros(3, dtype=torch.float64)
    for _ in range(problems):
        theta, b = torch.randn(2, categories, generator=generator, dtype=torch.float64)
        a = torch.randn(categories, categories, generator=generator, dtype=torch.float64)
        slopes = b.expand_as(a).contiguous() if cost == "linear" else (a + a.T) / 2
        mean = mean_gradient(gapped.GapMax(), 1.5 * theta, slopes)
        p, values = (1.5 * theta).softmax(-1), b if cost == "linear" else a.diag() / 2
        exact = p * (values - p @ values)
        products += torch.stack([mean @ exact, exact @ exact, mean @ mean])
    along, squares, own = products.tolist()
    return along / squares, math.acos(along / math.sqrt(squares * own))


@pytest.mark.parametrize("categories", [2, 3, 10, 64])
def test_scale_and_angle_for_random_logits(categories: int) -> None:
    """The numbers in docs/estimators.md."""
    numbers = [each for cost in ("linear", "quadratic") for each in scale_and_angle(categories, cost)]
    row = f"| {categories} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |"
    assert row in DOCUMENT.read_text(encoding="utf-8")
