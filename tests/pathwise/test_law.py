"""Distributions: drawn categories, Gumbel noise, noise given the winner, the expected gap.

Each comparison has a twin that is wrong in a way people get wrong, and must be rejected.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import TAU, every_member, lemma_1, seeded
from statistical import (
    chi_squared,
    counts_of,
    gumbel_law,
    mean_is,
    require_law,
    require_rejected,
    two_sample,
)
from torch import Tensor
from variants import make_single

import gapped
from gapped import simplex

CASES = [(k, torch.float32, 30_000 if k == 1000 else 200_000) for k in (2, 3, 10, 1000)]
CASES += [(10, dtype, 100_000) for dtype in (torch.bfloat16, torch.float16, torch.float64)]


def spread_logits(categories: int) -> Tensor:
    """Probabilities over a factor of twenty, in no order."""
    order = torch.randperm(categories, generator=seeded(5))
    return torch.linspace(-1.5, 1.5, categories)[order]


def indices(name: str, logits: Tensor, rows: int, **how: Any) -> Tensor:
    """Categories of `rows` samples; their law does not depend on how many samples a surrogate averages."""
    estimator = make_single(name, tau=TAU)
    batches = [
        estimator.sample(logits.expand(min(10_000, rows), -1), generator=seeded(seed), **how).argmax(-1)
        for seed in range(max(1, rows // 10_000))
    ]
    return torch.cat(batches)


def shifted(index: Tensor, categories: int) -> Tensor:
    """The draw of a cumulative sum that is off by one category."""
    return (index + 1).clamp(max=categories - 1)


@every_member
@pytest.mark.parametrize(("categories", "dtype", "rows"), CASES)
def test_hard_samples_follow_the_softmax_at_temperature_one(
    name: str, categories: int, dtype: torch.dtype, rows: int
) -> None:
    """The law is that of the logits as they are after rounding."""
    logits = spread_logits(categories).to(dtype)
    index, p = indices(name, logits, rows), torch.softmax(logits.double(), -1)
    counts = counts_of(index, categories)
    require_law(chi_squared(counts, p))
    require_rejected(chi_squared(counts, torch.softmax(logits.double() / TAU, -1)))
    require_rejected(chi_squared(counts_of(shifted(index, categories), categories), p))


@every_member
def test_a_mask_conditions_the_law(name: str) -> None:
    logits = spread_logits(10)
    mask = torch.tensor([True, False] * 5)
    counts = counts_of(indices(name, logits, 100_000, mask=mask), 10)
    require_law(chi_squared(counts, torch.softmax(logits.double().masked_fill(~mask, -math.inf), -1)))
    require_rejected(chi_squared(counts, torch.softmax(logits.double(), -1)))


@every_member
def test_rows_are_independent(name: str) -> None:
    """The joint law of two rows is the product; one noise shared by all rows is the twin."""
    logits, p = spread_logits(3), torch.softmax(spread_logits(3).double(), -1)
    pairs = make_single(name, tau=TAU).sample(logits.expand(100_000, 2, -1), generator=seeded()).argmax(-1)
    product = p.outer(p)
    require_law(chi_squared(counts_of(pairs[:, 0] * 3 + pairs[:, 1], 9), product))
    require_rejected(chi_squared(counts_of(pairs[:, 0] * 3 + pairs[:, 0], 9), product))


def test_the_decoupled_forward_temperature_sets_the_law() -> None:
    logits = spread_logits(10)
    index = gapped.decoupled_gumbel_softmax(
        logits.expand(100_000, -1), 0.5, True, tau_forward=3.0, generator=seeded()
    ).argmax(-1)
    counts = counts_of(index, 10)
    require_law(chi_squared(counts, torch.softmax(logits.double() / 3, -1)))
    for wrong in (0.5, 1.0):
        require_rejected(chi_squared(counts, torch.softmax(logits.double() / wrong, -1)))


def test_gumbel_noise_has_the_gumbel_law() -> None:
    for dtype in (torch.float32, torch.float64):
        noise = simplex.gumbel(torch.empty(200_000, dtype=dtype), seeded())
        require_law(gumbel_law(noise))
        require_rejected(gumbel_law(-noise))
        require_rejected(gumbel_law(torch.empty(200_000).exponential_(generator=seeded())))


WINNERS = torch.log_softmax(torch.tensor([1.0, -1.2, 0.2, -0.1], dtype=torch.float64), -1)


def by_rejection(winner: int, draws: int = 400_000) -> Tensor:
    """Plain Gumbel noise, kept where the category wins: the definition of the conditional law."""
    uniform = torch.rand(draws, 4, dtype=torch.float64, generator=seeded(100 + winner)).clamp_min(1e-300)
    perturbed = WINNERS - torch.log(-torch.log(uniform))
    return perturbed[perturbed.argmax(-1) == winner]


def top_two_gap(perturbed: Tensor) -> Tensor:
    top = perturbed.topk(2, -1).values
    return top[..., 0] - top[..., 1]


@pytest.mark.parametrize("winner", range(4))
def test_gumbel_noise_given_the_winner_equals_rejection(winner: int) -> None:
    """Every margin and, for the dependence between them, the gap to the runner-up."""
    winners = by_rejection(winner)
    index = torch.full((20_000,), winner)
    ours = simplex.conditional_gumbel(WINNERS.expand(20_000, -1), index, 1, seeded()).squeeze(0)
    free = WINNERS + simplex.gumbel(torch.empty(20_000, 4).double(), seeded())
    # Twin: the winner's own margin is right, the others are free below it, as if they did not know of it.
    twin = free.clone()
    twin[:, winner] = ours[:, winner]
    for margin in range(4):
        require_law(two_sample(ours[:, margin], winners[:, margin]))
        require_rejected(two_sample(free[:, margin], winners[:, margin]))
    require_law(two_sample(top_two_gap(ours), top_two_gap(winners)))
    require_rejected(two_sample(top_two_gap(twin), top_two_gap(winners)))


def test_conditional_samples_are_independent_of_each_other() -> None:
    """Two conditional samples of one row: the sign of their difference is fair, and they do differ."""
    noisy = simplex.conditional_gumbel(WINNERS.expand(50_000, -1), torch.zeros(50_000).long(), 2, seeded())
    median = noisy[..., 0].median()
    above = (noisy[..., 0] > median).long()
    cells = counts_of(above[0] * 2 + above[1], 4)
    require_law(chi_squared(cells, torch.full((4,), 0.25)))
    require_rejected(chi_squared(counts_of(above[0] * 2 + above[0], 4), torch.full((4,), 0.25)))


@pytest.mark.parametrize("winner", range(4))
def test_the_expected_gap_is_the_mean_gap(winner: int) -> None:
    """Lemma 1 by simulation, and the package's function is Lemma 1's."""
    gaps = top_two_gap(by_rejection(winner))
    p = WINNERS[winner].exp()
    require_law(mean_is(gaps, float(gapped.expected_gap(p))))
    require_rejected(mean_is(gaps, float(lemma_1(p)) * 1.15))


@pytest.mark.parametrize("winner", [0, 2])
def test_expected_odds_are_the_mean_odds_against_the_winner(winner: int) -> None:
    log_p = torch.log_softmax(torch.tensor([1.0, -0.5, 0.3, -2.0], dtype=torch.float64), -1)
    noise = simplex.conditional_gumbel(log_p, torch.tensor(winner), 400_000, seeded(winner))
    odds = (noise - noise[:, winner : winner + 1]).exp()
    expected = simplex.log_expected_odds(log_p).exp()
    for loser in set(range(4)) - {winner}:
        require_law(mean_is(odds[:, loser], float(expected[loser])))
        require_rejected(mean_is(odds[:, loser], float(log_p[loser].exp())))
