"""One estimator for a fleet: each run is sampled, and its expectation estimated, with its own numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from torch import Tensor
from toy_tasks import CPU, DOUBLE

import gapped
from gapped.errors import GappedError
from gapped_lab.fleet.estimator_groups import Grouped, Part, group_key

LEVELS = [
    [gapped.GST(tau=0.5, gap=0.8), gapped.GST(tau=1.0, gap=1.2), gapped.GST(tau=0.1, gap=0.0)],
    [gapped.StraightThrough(tau=0.7), gapped.StraightThrough(tau=2.0)],
    [gapped.GST(tau=0.5, gap=gapped.expected_gap), gapped.GST(tau=0.2, gap=gapped.expected_gap)],
    [gapped.DecoupledGumbelSoftmax(tau=0.5, tau_forward=1.5), gapped.DecoupledGumbelSoftmax(tau=2.0)],
    [gapped.GumbelRao(tau=0.5, samples=3), gapped.GumbelRao(tau=1.5, samples=3)],
    [gapped.GumbelRao(tau=0.5, samples=4)],
    [gapped.ReinMax(tau=1.0), gapped.ReinMax(tau=2.0)],
    [gapped.GumbelSoftmax(tau=0.5), gapped.GumbelSoftmax(tau=1.0)],
]
# The groups of a fleet of both families, by what can be sampled together.
MIXED = [
    [gapped.GST(tau=0.5, gap=0.8), gapped.GST(tau=1.0, gap=1.0)],
    [gapped.ReinMax()],
    [gapped.RLOO(2), gapped.RLOO(2)],
    [gapped.DisARMTree()],
    [gapped.MuProp()],
]


def grouped(groups: list[list[Any]]) -> Grouped:
    return Grouped.of([each for group in groups for each in group], 2, CPU, DOUBLE)


def one_pull(sampler: Any, logits: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Sample and gradient of the logits side by side."""
    leaf = logits.clone().requires_grad_()
    sample = sampler.sample(leaf, generator=generator)
    (gradient,) = torch.autograd.grad(sample, leaf, weight)
    return torch.cat([sample.detach(), gradient], -1)


def test_groups_are_of_what_can_be_sampled_together():
    sampler = grouped(LEVELS)
    assert [stop - start for start, stop, _ in sampler.groups] == [len(group) for group in LEVELS]
    assert [start for start, _, _ in sampler.groups[1:]] == [stop for _, stop, _ in sampler.groups[:-1]]
    assert sampler.tau.tolist() == [each.tau for group in LEVELS for each in group]
    assert len({group_key(group[0]) for group in LEVELS}) == len(LEVELS)


@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
def test_each_run_is_sampled_with_its_own_numbers(hard):
    # ReinMax defines a gradient and no surrogate.
    able = [group for group in LEVELS if hard or not isinstance(group[0], gapped.ReinMax)]
    groups = [[replace(each, hard=hard) for each in group] for group in able]
    runs = sum(map(len, groups))
    logits, weight = normal(runs, 6, 3, 5), normal(runs, 6, 3, 5, seed=2)
    together = one_pull(grouped(groups), logits, weight, seeded(5))
    noise, start, distinguished = seeded(5), 0, 0
    for group in groups:
        rows = slice(start, start + len(group))
        state = noise.get_state()
        apart = []
        for estimator in group:
            noise.set_state(state)
            apart.append(one_pull(estimator, logits[rows], weight[rows], noise))
        for place in range(len(group)):
            assert_close(together[start + place], apart[place][place], 1e-13)
            # The wrong twin: the numbers of the neighbour.
            other = apart[place - 1][place]
            distinguished += int(not torch.allclose(together[start + place], other, rtol=1e-3, atol=1e-3))
        start += len(group)
    alone = sum(len(group) == 1 for group in groups)
    assert distinguished == runs - alone, "exchanging numbers goes unnoticed"


def test_soft_shares_the_temperature():
    sampler = Grouped.of([gapped.GST(tau=0.5), gapped.GST(tau=0.5), gapped.StraightThrough()], 1, CPU, DOUBLE)
    logits, soft = normal(3, 2, 5), sampler.soft()
    sharp = soft.sample(logits, generator=seeded())
    assert ((sharp > 0) & (sharp < 1)).all()
    sampler.tau.fill_(5.0)
    flat = soft.sample(logits, generator=seeded())
    assert (flat.amax(-1) < sharp.amax(-1)).all()
    hard = sampler.sample(logits, generator=seeded())
    assert ((hard == 0) | (hard == 1)).all()
    with pytest.raises(GappedError, match="a score-function estimator has no surrogate"):
        grouped(MIXED).soft()


def test_an_expectation_is_each_group_s_own():
    """Groups draw one after the other; each is what `gapped.expectation` makes of its runs alone."""
    logits, slope = normal(7, 4, 3, 5), normal(7, 1, 15, seed=2)
    calls: list[tuple[int, int, int]] = []

    def cost(z: Tensor, part: Part) -> Tensor:
        calls.append((part.start, part.stop, len(z)))
        return ((z.flatten(-2) * slope[part.runs]).sum(-1) + 1) ** 2

    leaf = logits.clone().requires_grad_()
    value = grouped(MIXED).expectation(cost, leaf, seeded(3))
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    assert calls == [(0, 3, 1), (3, 6, 2), (6, 7, 1), (6, 7, 1)]
    noise, start = seeded(3), 0
    for group in MIXED:
        part = Part(start, start + len(group))
        own = logits[part.runs].clone().requires_grad_()
        single = grouped([group]).groups[0][2]
        alone = gapped.expectation(lambda z, part=part: cost(z, part), own, single, generator=noise)
        assert_close(value[part.runs].detach(), alone.detach(), 1e-12)
        assert_close(gradient[part.runs], torch.autograd.grad(alone.sum(), own)[0], 1e-12)
        start = part.stop


def test_without_a_gradient_every_run_has_one_sample():
    calls: list[tuple[int, ...]] = []

    def cost(z: Tensor, part: Part) -> Tensor:
        calls.append((part.start, part.stop, *z.shape))
        return z.sum((-2, -1))

    with torch.no_grad():
        grouped(MIXED).expectation(cost, normal(7, 4, 3, 5), seeded())
    assert calls == [(0, 7, 1, 7, 4, 3, 5)]


def test_runs_with_soft_samples_have_hard_ones_too() -> None:
    """At the temperatures that the sampler has, also when these change later."""
    soft, hard = ([gapped.GST(tau=0.5, hard=h), gapped.GumbelSoftmax(hard=h)] for h in (False, True))
    sampler, expected = grouped([[each] for each in soft]), grouped([[each] for each in hard])
    logits = normal(2, 3, 4, 5)
    assert not sampler.hard
    assert sampler.discrete().hard
    assert expected.discrete() is expected
    samples = [each.sample(logits, generator=seeded()) for each in (sampler.discrete(), expected)]
    assert torch.equal(*samples)
    assert sampler.discrete().tau is sampler.tau
    mixed = grouped([[gapped.GST(hard=False)], [gapped.RLOO(2)]])
    assert mixed.discrete().hard
