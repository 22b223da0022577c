"""Adam, clipping, plateaus, norms of gradients and layers, run by run, against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from conftest import assert_close, normal, seeded
from torch import Tensor, nn
from toy_tasks import DOUBLE, vae_task

from gapped_lab.fleet.optimizer import (
    Adam,
    Adaptation,
    GradientNorms,
    Selection,
    SelectionRule,
    clip_scales,
    scale,
)
from gapped_lab.fleet.run_layers import Linear, generators

ALL_ALIVE = torch.ones(3, dtype=torch.bool)


PLAIN = Adaptation()
# Each with torch's own.
RELATIVES: dict[str, tuple[Adaptation, Callable[..., torch.optim.Optimizer]]] = {
    "adam": (PLAIN, torch.optim.Adam),
    "radam": (Adaptation(rectified=True), torch.optim.RAdam),
    "adamw": (Adaptation(weight_decay=0.3), partial(torch.optim.AdamW, weight_decay=0.3)),
}


def adam(rates: Sequence[float] = (1e-2, 1e-2, 1e-2), rule: Adaptation = PLAIN) -> tuple[list[Tensor], Adam]:
    stacked = [normal(*shape, seed=i) for i, shape in enumerate([(3, 4, 3), (3, 1, 3)])]
    return stacked, Adam(stacked, torch.tensor(rates, dtype=DOUBLE), rule)


def gradients_at(step: int, stacked: Sequence[Tensor]) -> list[Tensor]:
    # Of very different sizes, so that the small constant in the denominator matters too.
    return [normal(*p.shape, seed=1000 + 10 * step + i) * 10.0 ** (-step % 9) for i, p in enumerate(stacked)]


@pytest.mark.parametrize("name", RELATIVES)
def test_adam_equals_torch_s_with_a_rate_per_run(name):
    rates = [1e-3, 5e-2, 0.7]
    rule, theirs = RELATIVES[name]
    stacked, mine = adam(rates, rule)
    apart = [[nn.Parameter(p[run].clone()) for p in stacked] for run in range(3)]
    plain = [theirs(own, lr=rate) for own, rate in zip(apart, rates, strict=True)]
    for step in range(50):
        gradients = gradients_at(step, stacked)
        mine.step(gradients, ALL_ALIVE)
        for run, optimiser in enumerate(plain):
            for p, g in zip(apart[run], gradients, strict=True):
                p.grad = g[run].clone()
            optimiser.step()
    for run in range(3):
        for together, own in zip(stacked, apart[run], strict=True):
            assert_close(together[run], own.detach(), 1e-12)
    # The wrong twin: two runs exchanged.
    assert (stacked[0][0] - apart[1][0].detach()).abs().max() > 1e-3


def test_frozen_runs_are_not_touched_even_by_nan():
    (stacked, mine), (twin, free) = adam(), adam()
    before = [p.clone() for p in stacked]
    for step in range(50):
        gradients = gradients_at(step, stacked)
        free.step(gradients, ALL_ALIVE)
        for g in gradients:
            g[1] = torch.nan
        mine.step(gradients, torch.tensor([True, False, True]))
    for p, q, start in zip(stacked, twin, before, strict=True):
        assert torch.equal(p[1], start[1])
        assert torch.equal(p[[0, 2]], q[[0, 2]])
        assert not torch.equal(p[0], start[0])


def test_norms_are_clipped_run_by_run_as_torch_does():
    sizes = torch.tensor([0.01, 1.0, 100.0], dtype=DOUBLE)
    gradients = [
        torch.randn(3, *shape, dtype=DOUBLE, generator=seeded(i)) * sizes.view(-1, *(1,) * len(shape))
        for i, shape in enumerate([(4, 3), (1, 3), (2,)])
    ]
    scales = clip_scales(gradients, 5.0)
    for run in range(3):
        own = [nn.Parameter(torch.zeros_like(g[run])) for g in gradients]
        for p, g in zip(own, gradients, strict=True):
            p.grad = g[run].clone()
        nn.utils.clip_grad_norm_(own, 5.0)
        for p, g in zip(own, gradients, strict=True):
            assert_close(scale(g, scales)[run], p.grad, 1e-14)


def test_a_tiny_gradient_is_not_zero() -> None:
    norms = GradientNorms({"query": torch.zeros(3, 1, 2)})
    tiny = 1.4e-45  # the least float32
    for step in ([[3.0, 4.0], [0.0, 0.0], [tiny, 0.0]], [[0.0, 0.0], [0.0, -0.0], [0.0, -tiny]]):
        norms.add("query", torch.tensor(step).unsqueeze(1))
    means = norms.means(2)
    least = float(torch.tensor(tiny))
    assert means["query_gradient_norm"].tolist() == pytest.approx([2.5, 0.0, least], rel=1e-12)
    assert means["query_gradient_zero"].tolist() == [0.5, 1.0, 0.0]
    assert math.isclose(least, tiny, rel_tol=0.1)
    norms.clear()
    assert not any(total.any() for total in norms.state())


def test_plateaus_are_torchs_run_by_run() -> None:
    runs, patience = 5, 2
    scores = torch.rand(40, runs, dtype=DOUBLE, generator=seeded(4)).cummax(0).values * 0.9
    scores += 0.05 * torch.rand(40, runs, dtype=DOUBLE, generator=seeded(5))
    weight = torch.zeros(runs, 2, dtype=DOUBLE)
    selection = Selection(SelectionRule("score", lambda _: scores[0], 1, patience), [weight])
    optimisers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(runs)]
    plateaus = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(each, mode="max", factor=0.5, patience=patience)
        for each in optimisers
    ]
    for number, row in enumerate(scores):
        weight.fill_(number)
        selection.observe(row)
        for each, score in zip(plateaus, row.tolist(), strict=True):
            each.step(score)
        assert selection.factor.tolist() == [each.param_groups[0]["lr"] for each in optimisers]
    assert len(set(selection.factor.tolist())) > 1
    # The weights of the first of the highest scores.
    assert selection.weights[0][:, 0].tolist() == scores.argmax(0).tolist()
    with selection.best_weights():
        assert weight[:, 1].tolist() == scores.argmax(0).tolist()
    assert (weight == 39).all()


def test_a_broken_run_keeps_its_best_weights() -> None:
    weight = torch.ones(2, 3)
    selection = Selection(SelectionRule("score", lambda _: weight[:, 0], 1, 4), [weight])
    selection.observe(torch.tensor([0.5, 0.5]))
    weight[0] = torch.nan
    weight[1] = 2
    selection.observe(torch.tensor([torch.nan, 0.6]))
    assert selection.weights[0][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(("steps", "often"), [(10, 2), (7, 2), (5, 1), (9, 3), (1, 1)])
def test_validations_are_evenly_spaced(steps: int, often: int) -> None:
    rule = SelectionRule("score", torch.empty, often, 0)
    due = [step + 1 for step in range(steps) if rule.due(step, steps)]
    assert due == [-(-steps * i // often) for i in range(1, often + 1)]


def plain_linear(seed: int, *shapes: tuple[int, int]) -> list[nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [nn.Linear(a, b) for a, b in shapes]


def test_layers_start_as_torch_s_do_from_each_run_s_own_seed():
    seeds, shapes = [3, 11, 4], [(20, 30), (30, 5)]
    runs = generators(seeds)
    layers = [Linear(a, b, runs) for a, b in shapes]
    for place, seed in enumerate(seeds):
        for mine, theirs in zip(layers, plain_linear(seed, *shapes), strict=True):
            # torch rounds the bound twice more on its way: one unit in the last place.
            assert_close(mine.weight[place].t(), theirs.weight, 2e-7)
            assert_close(mine.bias[place, 0], theirs.bias, 2e-7)
    other = plain_linear(5, *shapes)[0]
    assert not torch.allclose(layers[0].weight[0].t(), other.weight, atol=1e-2)


def test_initial_weights_do_not_depend_on_the_neighbours():
    alone = vae_task(seeds=[9]).model.state_dict()
    among = vae_task(seeds=[2, 9, 5, 9]).model.state_dict()
    for name, weight in alone.items():
        assert torch.equal(weight[0], among[name][1]), name
        assert torch.equal(weight[0], among[name][3]), name
        assert not torch.equal(weight[0], among[name][0]), name


def test_glorot_weights():
    layer = Linear(300, 50, generators([1]), glorot=True)
    bound = math.sqrt(6 / 350)
    assert (layer.bias == 0).all()
    assert 0.98 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
