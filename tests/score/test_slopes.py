"""Unbiased estimators that use the slopes of the cost at their samples, by enumeration in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_close, normal, seeded
from score_problems import (
    EXACT,
    PROBLEMS,
    SETTINGS,
    assert_unbiased,
    cost,
    estimate,
    independent,
    replay,
)
from torch import Tensor

import gapped
from gapped.score.trainable import Trainable

Numbers = dict[str, float]
FACTORS: list[tuple[str, Numbers]] = [
    *(("double-cv", {"alpha": alpha}) for alpha in (-0.5, 0.7, 1.0)),
    *(
        ("rodeo", {"hidden": 7, "alpha": alpha, "beta": beta})
        for alpha, beta in ((0.0, 0.0), (0.7, 0.0), (0.0, -0.6), (1.3, 0.4))
    ),
]


@pytest.mark.parametrize(("kind", "options"), FACTORS, ids=str)
@pytest.mark.parametrize("problem", [*PROBLEMS, "1x3, three", "3x2, three", "2x3-masked, three"])
def test_two_or_three_samples_are_unbiased(kind: str, options: Numbers, problem: str) -> None:
    """In training mode: a call uses the factors that it finds, and only its loss changes these."""
    name, _, more = problem.partition(", ")
    theta, samples = PROBLEMS[name], 3 if more else 2
    noise, weights = independent(theta, samples)
    estimator = gapped.estimator(kind, samples=samples, **options).double()
    assert_unbiased(*replay(estimator, theta, noise, len(weights)), weights, theta)


class Drawn(NamedTuple):
    """One tuple of samples ``(n, L)``, with costs and slopes."""

    p: Tensor
    samples: list[Tensor]
    costs: list[Tensor]
    slopes: list[Tensor]


def drawn(theta: Tensor, picks: Tensor) -> Drawn:
    samples = [torch.nn.functional.one_hot(pick, theta.shape[-1]).double().requires_grad_() for pick in picks]
    costs = [cost(sample) for sample in samples]
    slopes = [torch.autograd.grad(f, sample)[0] for f, sample in zip(costs, samples, strict=True)]
    costs, samples = ([each.detach() for each in some] for some in (costs, samples))
    return Drawn(torch.softmax(theta, -1), samples, costs, slopes)


def rodeo_by_hand(theta: Tensor, picks: Tensor, estimator: Any) -> Tensor:
    """The definition, neighbour by neighbour."""
    n, (variables, categories) = len(picks), theta.shape
    p, samples, costs, slopes = drawn(theta, picks)
    parameters = dict(estimator.site.named_parameters())

    def heights(i: int, y: Tensor) -> Tensor:
        outputs = []
        for j in set(range(n)) - {i}:
            linear = (slopes[j] * (y - samples[j])).sum()
            inner = parameters["linear"] * linear + parameters["level"] * costs[j] + parameters["bias"]
            inner = torch.where(inner > 0, inner, 0.3 * inner)
            outputs.append(inner @ parameters["outer"] + parameters["shift"])
        return torch.stack(outputs).mean(0).detach()

    def stein(i: int, h: Any) -> Tensor:
        x, total = samples[i], torch.zeros(())
        for variable in range(variables):
            for category in range(categories):
                y = x.clone()
                y[variable] = torch.eye(categories, dtype=torch.float64)[category]
                total = total + p[variable, category] * (h(y) - h(x)) / variables
        return total

    alpha, beta = estimator.alpha.detach(), estimator.beta.detach()
    first = [costs[i] + alpha * stein(i, lambda y, i=i: heights(i, y)[0]) for i in range(n)]
    gradient = torch.zeros_like(theta)
    for i in range(n):
        baseline = sum(first[j] for j in range(n) if j != i) / (n - 1)
        vector = stein(i, lambda y, i=i: heights(i, y)[1] * (y - p))
        gradient = gradient + ((costs[i] - baseline) * (samples[i] - p) + beta * vector) / n
    return gradient


def double_by_hand(theta: Tensor, picks: Tensor, estimator: Any) -> Tensor:
    """The definition, sample by sample."""
    n, alpha = len(picks), estimator.alpha.item()
    p, samples, costs, slopes = drawn(theta, picks)
    heights = [sum(slopes[j] for j in range(n) if j != i) / (n - 1) for i in range(n)]
    signals = [costs[i] - alpha * (heights[i] * (samples[i] - p)).sum() for i in range(n)]
    gradient = torch.zeros_like(theta)
    for i in range(n):
        baseline = sum(signals[j] for j in range(n) if j != i) / (n - 1)
        straight = torch.stack([row * (h - row @ h) for row, h in zip(p, heights[i], strict=True)])
        gradient = gradient + ((signals[i] - baseline) * (samples[i] - p) + alpha * straight) / n
    return gradient


DEFINITIONS: dict[str, tuple[Any, Any, int]] = {
    "rodeo": (gapped.RODEO(3, hidden=5, alpha=0.7, beta=0.4).double(), rodeo_by_hand, 20),
    "double-cv": (gapped.DoubleCV(3, alpha=0.75), double_by_hand, 40),
}


@pytest.mark.parametrize("problem", ["2x3-masked", "3x2", "3x3"])
@pytest.mark.parametrize("kind", DEFINITIONS)
def test_gradients_follow_their_definition(kind: str, problem: str) -> None:
    theta, (estimator, by_hand, count) = PROBLEMS[problem], DEFINITIONS[kind]
    noise, weights = independent(theta, 3)
    noise = noise[:, weights > 0]
    noise = noise[:, :: noise.shape[1] // count]
    _, gradients = replay(estimator, theta, noise, noise.shape[1])
    expected = torch.stack([by_hand(theta, noise[:, i], estimator) for i in range(noise.shape[1])])
    assert_close(gradients, expected, EXACT)


def test_linear_costs_have_no_variance() -> None:
    theta, slope = SETTINGS["2x4"].expand(20, 2, 4), normal(8, seed=4)
    _, gradients = estimate(lambda z: z.flatten(-2) @ slope, theta, gapped.DoubleCV(alpha=1.0))
    assert_close(gradients, gradients[:1].expand(20, 2, 4))


@pytest.mark.parametrize("name", ["double-cv", "rodeo", "muprop", "rebar", "relax"])
def test_a_slope_at_a_category_that_does_not_exist_counts_for_nothing(name: str) -> None:
    """The square root has an infinite one there; without the category all gradients are the same."""
    logits, mask = normal(4, 3).requires_grad_(), torch.tensor([True, True, False])
    estimator = gapped.estimator(name)

    def slopes(cost: Any) -> list[Tensor]:
        value = gapped.expectation(cost, logits, estimator, mask=mask, generator=seeded())
        loss = value.sum()
        trained = []
        if isinstance(estimator, Trainable):
            loss, trained = loss + estimator.variance_loss(), list(estimator.parameters())
        return list(torch.autograd.grad(loss, [logits, *trained], materialize_grads=True))

    # Networks learn their width at the first call.
    slopes(lambda z: z[..., 0])
    found = slopes(lambda z: (2 * z[..., 0] - z[..., 1]).square() + z[..., 2].sqrt())
    expected = slopes(lambda z: (2 * z[..., 0] - z[..., 1]).square())
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
        assert mine.isfinite().all()
