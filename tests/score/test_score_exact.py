"""Score-function estimators with enumerable noise: means and variances exactly, in float64.

The draw of an estimator is replaced by every value it could have, one example each, and the estimates are
weighted by their probabilities. Costs, oracle and formulas are written here, from the definitions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_close, normal
from score_problems import (
    BINARY,
    EXACT,
    INF,
    PROBLEMS,
    SETTINGS,
    Law,
    assert_unbiased,
    cost,
    estimate,
    every_problem,
    independent,
    mean_of,
    oracle,
    replay,
)
from torch import Tensor

import gapped

SAMPLERS: dict[str, tuple[Any, int]] = {
    "reinforce": (gapped.Reinforce(), 1),
    "reinforce-2": (gapped.Reinforce(samples=2), 2),
    "reinforce-leave-one-out": (gapped.Reinforce("leave-one-out", samples=2), 2),
    "rloo-2": (gapped.RLOO(), 2),
    "rloo-3": (gapped.RLOO(3), 3),
    "muprop": (gapped.MuProp(), 1),
}


# Without the triples of two variables with seven categories: there are a hundred thousand.
SAMPLED = [(name, each) for name in SAMPLERS for each in PROBLEMS if (name, each[:3]) != ("rloo-3", "2x7")]


@pytest.mark.parametrize(("name", "problem"), SAMPLED)
def test_independent_samples_are_unbiased(name: str, problem: str) -> None:
    theta, (estimator, samples) = PROBLEMS[problem], SAMPLERS[name]
    noise, weights = independent(theta, samples)
    assert_unbiased(*replay(estimator, theta, noise, len(weights)), weights, theta)


@every_problem
def test_a_remembered_mean_leaves_reinforce_unbiased(theta: Tensor) -> None:
    """The memory is used as it was before the call; with a scale the mean is only divided by it."""
    noise, weights = independent(theta, 1)
    plain = gapped.NVIL(scale=False)
    plain.mean += 1.7
    assert_unbiased(*replay(plain, theta, noise, len(weights)), weights, theta)
    scaled = gapped.NVIL().eval()
    scaled.variance += 9.0
    _, gradients = replay(scaled, theta, noise, len(weights))
    assert_close(3 * mean_of(gradients, weights), oracle(theta)[1], EXACT)


def test_a_baseline_that_contains_the_sample_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: each cost relative to the mean of all samples, itself included."""
    theta = SETTINGS["2x4"]
    noise, weights = independent(theta, 2)
    monkeypatch.setattr("gapped.score.reinforce.leave_one_out", lambda costs: costs - costs.mean(0))
    _, gradients = replay(gapped.RLOO(), theta, noise, len(weights))
    assert (mean_of(gradients, weights) - oracle(theta)[1]).abs().max() > 1e-3


def test_muprop_has_no_variance_on_linear_costs() -> None:
    theta, slope = SETTINGS["2x4"].expand(20, 2, 4), normal(8, seed=4)
    _, gradients = estimate(lambda z: z.flatten(-2) @ slope, theta, gapped.MuProp())
    assert_close(gradients, gradients[:1].expand(20, 2, 4))


def halves(p: Tensor) -> Law:
    """The three intervals of u in which a pair of bits of probability p is constant: midpoints, lengths."""
    low = torch.minimum(p, 1 - p)
    return Law(
        torch.stack([low / 2, torch.full_like(p, 0.5), 1 - low / 2]), torch.stack([low, 1 - 2 * low, low])
    )


def pieces(probabilities: Tensor) -> Law:
    """All intervals of the uniforms ``(N, L, nodes)`` of bits with the given probabilities ``(L, nodes)``."""
    middles, lengths = halves(probabilities.reshape(-1))
    picks = torch.tensor(list(itertools.product(range(3), repeat=probabilities.numel())))
    bits = torch.arange(probabilities.numel())
    weights = lengths[picks, bits].prod(-1)
    uniforms = middles[picks, bits][weights > 0]
    return Law(uniforms.reshape(-1, *probabilities.shape), weights[weights > 0])


class Node(NamedTuple):
    """A binary choice between two sets of categories."""

    left: list[int]
    right: list[int]


def tree_of(categories: int) -> list[Node]:
    """The nodes of a balanced tree, level by level."""
    nodes, level = [], [list(range(categories))]
    while len(level[0]) > 1:
        half = len(level[0]) // 2
        nodes += [Node(block[:half], block[half:]) for block in level]
        level = [part for block in level for part in (block[:half], block[half:])]
    return nodes


def chain_of(row: Tensor, order: str) -> list[Node]:
    """Each category against all that follow: taking an offer is going right."""
    categories = list(range(len(row)))
    if order != "given":
        categories.sort(key=lambda k: row[k].item(), reverse=order == "descending")
    return [Node(categories[t + 1 :], [categories[t]]) for t in range(len(categories) - 1)]


def chance_of(theta: Tensor, node: Node) -> Tensor:
    """The probability of going right; any number where the node is never reached."""
    p = torch.softmax(theta, -1)
    right, left = p[node.right].sum(), p[node.left].sum()
    return right / (right + left) if right + left > 0 else torch.tensor(0.5, dtype=torch.float64)


def slope_of(theta: Tensor, node: Node) -> Tensor:
    """The derivative of the node's logit: the softmax of the right side, minus that of the left side."""
    slope = torch.zeros_like(theta)
    for side, sign in ((node.right, 1.0), (node.left, -1.0)):
        inside = theta[side] - theta[side].max().clamp(min=-1e6)
        slope[side] = sign * torch.softmax(inside, -1).nan_to_num(0.0)
    return slope


def node_by_node(theta: Tensor, nodes: list[Node], u: Tensor) -> tuple[Tensor, Tensor]:
    """The pair ``(2, N)`` and the factor of the cost difference ``(N, K)``, for one row and u ``(N, nodes)``.

    Both paths: 1/2 (-1)^{b2} [b1 != b2] sigma(|phi|); first alone: 1/2 (b1 - sigma(phi)); second alone:
    -1/2 (b2 - sigma(phi)); times the derivative of the node's logit.
    """
    reached = torch.ones(2, len(u), len(theta), dtype=torch.bool)
    factor = torch.zeros(len(u), len(theta), dtype=torch.float64)
    for node, noise in zip(nodes, u.T, strict=True):
        chance = chance_of(theta, node)
        bits = torch.stack([noise < chance, 1 - noise < chance])
        # A node is on a path as long as the path may still reach all of its categories.
        first, second = reached[:, :, node.left + node.right].all(-1)
        both = (first & second & (bits[0] != bits[1])) * torch.maximum(chance, 1 - chance)
        b1, b2 = bits.double()
        part = torch.where(first & second, both * (-1) ** b2, first * (b1 - chance) - second * (b2 - chance))
        factor += 0.5 * part.unsqueeze(-1) * slope_of(theta, node)
        for path, on in enumerate((first, second)):
            for side, bit in ((node.left, bits[path]), (node.right, ~bits[path])):
                reached[path][:, side] &= ~(on & bit).unsqueeze(-1)
    return reached.double().argmax(-1), factor


Chain = Callable[[Tensor], list[Node]]
COUPLED: dict[str, tuple[Any, Chain]] = {
    "tree": (gapped.DisARMTree(), lambda row: tree_of(len(row))),
    "ascending": (gapped.DisARMSticks(), lambda row: chain_of(row, "ascending")),
    "descending": (gapped.DisARMSticks("descending"), lambda row: chain_of(row, "descending")),
    "given": (gapped.DisARMSticks("given"), lambda row: chain_of(row, "given")),
}
every_coupled = pytest.mark.parametrize("name", COUPLED)


def chances(theta: Tensor, nodes_of: Chain) -> Tensor:
    return torch.stack([torch.stack([chance_of(row, node) for node in nodes_of(row)]) for row in theta])


PAIRS = [(name, setting) for name in COUPLED for setting in SETTINGS]
PAIRS += [(name, setting) for name in ("disarm", "tree") for setting in (*BINARY, "1x2")]
PAIRS += [("ascending", name) for name in ("1x2", "1x3", "2x3-masked", "3x3", "1x7-steep")]


@pytest.mark.parametrize(("name", "setting"), PAIRS)
def test_coupled_pairs_are_unbiased_and_follow_the_definition(name: str, setting: str) -> None:
    """DisARM is the tree of two categories, with one uniform for each variable."""
    theta = {**SETTINGS, **PROBLEMS}[setting]
    estimator, nodes_of = COUPLED["tree" if name == "disarm" else name]
    u, weights = pieces(chances(theta, nodes_of))
    if name == "disarm":
        values, gradients = replay(gapped.DisARM(), theta, u.squeeze(-1), len(u))
    else:
        values, gradients = replay(estimator, theta, u, len(u))
    assert_unbiased(values, gradients, weights, theta)
    pairs, factors = zip(
        *[node_by_node(row, nodes_of(row), u[:, i]) for i, row in enumerate(theta)], strict=True
    )
    costs = cost(torch.nn.functional.one_hot(torch.stack(pairs, -1), theta.shape[-1]).double())
    assert_close(values, costs.mean(0), EXACT)
    delta = (costs[0] - costs[1]).view(-1, 1, 1)
    assert_close(gradients, delta * torch.stack(factors, 1), EXACT)


@every_coupled
def test_both_samples_of_a_pair_follow_the_softmax(name: str) -> None:
    estimator, nodes_of = COUPLED[name]
    theta = SETTINGS["1x8-steep"]
    u, weights = pieces(chances(theta, nodes_of))
    pair = estimator.index((theta - theta.max()).expand(len(u), 1, 8), u).squeeze(-1)
    for sample in pair:
        law = torch.zeros(8, dtype=torch.float64).index_add(0, sample, weights)
        assert_close(law, torch.softmax(theta[0], -1), EXACT)


@pytest.mark.parametrize("categories", [3, 5, 6, 7])
def test_a_padded_tree_is_unbiased(categories: int) -> None:
    theta = normal(1, categories, seed=14)
    full = 4 if categories == 3 else 8
    padded = torch.cat([theta, torch.full((1, full - categories), -INF, dtype=torch.float64)], -1)
    u, weights = pieces(chances(padded, lambda row: tree_of(full)))
    assert_unbiased(*replay(gapped.DisARMTree(), theta, u, len(u)), weights, theta)
