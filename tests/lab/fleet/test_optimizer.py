"""Adam and clipping, run by run, against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from conftest import assert_close, normal, seeded
from torch import Tensor, nn
from toy_tasks import DOUBLE

from gapped_lab.fleet.optimizer import Adam, Adaptation, clip_scales, scale

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
