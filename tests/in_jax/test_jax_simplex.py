"""Drawing by the inverse of a distribution function, and functions of probabilities, beside torch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_close, normal, seeded
from jax_problems import _float64, _quick_compilation, jax, to_jax, to_torch  # noqa: F401

import gapped
import gapped.jax
from gapped import simplex
from gapped.jax.simplex import inverse_cdf, log_expected_odds

jnp = jax.numpy
INF = math.inf


def test_an_index_is_the_first_whose_running_sum_exceeds_the_uniform() -> None:
    """Weights and uniforms that are exact in binary: torch's rule at the boundaries, too."""
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.0, 0.25, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1 - 2.0**-53], dtype=torch.float64)
    expected = torch.searchsorted(weights.cumsum(-1), u, right=True)
    ours, _ = jax.jit(inverse_cdf)(to_jax(weights.expand(7, -1)), to_jax(u)[None])
    assert torch.equal(to_torch(ours).long(), expected)
    assert expected.tolist() == [1, 1, 3, 3, 5, 5, 5]


@pytest.mark.parametrize("categories", [17, 64, 300, 1_100])
def test_every_category_of_a_row_that_is_cut_into_blocks_is_drawn_by_its_uniforms(categories: int) -> None:
    """Just inside of both ends of each category's interval, a third of the categories being absent."""
    weights = torch.rand(categories, generator=seeded(1), dtype=torch.float64)
    weights[::3] = 0
    running = weights.cumsum(-1) / weights.sum()
    present = torch.arange(categories)[weights > 0]
    start = torch.cat([running.new_zeros(1), running[:-1]])[present]
    u = torch.stack([start + 1e-12, running[present] - 1e-12])
    rows = to_jax(weights.expand(*u.shape, -1))
    index, total = jax.jit(inverse_cdf)(rows, to_jax(u)[None])
    assert torch.equal(to_torch(index).long(), present.expand_as(u))
    assert_close(to_torch(total), weights.sum().expand_as(u))


def test_two_uniforms_draw_a_block_and_then_a_category_of_it() -> None:
    """Every pair of intervals once, for 300 categories in blocks of 32."""
    weights = torch.rand(320, generator=seeded(1), dtype=torch.float64)
    weights[300:] = 0
    blocks = weights.view(10, 32)
    first = (blocks.sum(-1).cumsum(-1) - blocks.sum(-1) / 2) / weights.sum()
    second = (blocks.cumsum(-1) - blocks / 2) / blocks.sum(-1, keepdim=True)
    u = torch.stack([first.unsqueeze(-1).expand(10, 32), second]).flatten(1)[:, :300]
    index, _ = jax.jit(inverse_cdf)(to_jax(weights[:300].expand(300, -1)), to_jax(u))
    assert torch.equal(to_torch(index).long(), torch.arange(300))


@pytest.mark.parametrize("levels", [1, 2])
def test_an_absent_category_is_never_drawn(levels: int) -> None:
    """Uniforms at every boundary of the running sum and one step beside it, in float32."""
    weights = torch.rand(400, generator=seeded(1)) * (torch.rand(400, generator=seeded(2)) < 0.3)
    edges = (weights.double().cumsum(-1) / weights.double().sum()).float()
    steps = torch.cat([edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(-1.0))])
    u = steps.clamp(0, 1 - 2.0**-24)
    noise = to_jax(u.expand(levels, -1))
    index, _ = jax.jit(inverse_cdf)(to_jax(weights.expand(len(u), -1)), noise)
    assert (weights[to_torch(index).long()] > 0).all()


def test_the_functions_of_a_probability_are_torchs() -> None:
    p = torch.cat([torch.logspace(-12, -0.001, 300, dtype=torch.float64), torch.tensor([0.0, 1.0]).double()])
    assert_close(to_torch(jax.jit(gapped.jax.expected_gap)(to_jax(p))), gapped.expected_gap(p))
    odds = jax.jit(log_expected_odds)(to_jax(p.log()))
    torch.testing.assert_close(to_torch(odds), simplex.log_expected_odds(p.log()), rtol=1e-12, atol=1e-12)


def test_unimix_is_the_mixture_and_has_its_gradient() -> None:
    logits = normal(3, 4, dtype=torch.float32) * 30
    where = torch.tensor([[True, True, False, True]] * 2 + [[False] * 4])
    ours = gapped.jax.unimix(to_jax(logits), 0.1, where=to_jax(where))
    p = torch.softmax(logits.double().masked_fill(~where, -INF)[:2], -1)
    assert_close(to_torch(ours)[:2].exp().double(), torch.where(where[:2], 0.9 * p + 0.1 / 3, 0.0), 1e-6)
    assert (to_torch(ours)[2] == -INF).all()
    free = logits[:2].double().requires_grad_()
    mixture = 0.9 * torch.softmax(free.masked_fill(~where[:2], -INF), -1) + 0.1 / 3
    mixture.log()[where[:2]].sum().backward()

    def total(x: Any) -> Any:
        mixed = gapped.jax.unimix(x, 0.1, where=to_jax(where[:2]))
        return jnp.where(to_jax(where[:2]), mixed, 0.0).sum()

    assert_close(to_torch(jax.grad(total)(to_jax(logits[:2]))), free.grad, 1e-5)
    across = gapped.jax.unimix(to_jax(logits.T), 0.1, axis=0, where=to_jax(where.T))
    np.testing.assert_array_equal(across, ours.T)
