"""Torch and JAX, given the same noise: the same samples, and gradients that agree to rounding."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from conftest import assert_close, normal, seeded
from conftest import pull as torch_pull
from jax_problems import (
    DTYPES,
    EVERY,
    PATHWISE,
    SOFT,
    _float64,  # noqa: F401
    _quick_compilation,  # noqa: F401
    jax,
    make,
    noise_of,
    options_in_jax,
    pull,
    replayed,
    to_jax,
    to_torch,
    translated,
)
from pathwise.test_exact import CASES, COSTS, THETAS, K, formula_gradients, moments, true_gradient
from torch import Tensor
from variants import make as make_torch

import gapped
import gapped.jax
from gapped import simplex
from gapped.jax import categories, draws, samplers

# One size for all axes: JAX compiles every operation once for each shape.
SHAPE = (5, 5, 5)


MASK = torch.rand(SHAPE, generator=seeded(3)) < 0.6
MASK[torch.arange(5), torch.arange(5)] = True
EMPTIED = MASK & (torch.arange(5) != 2).view(5, 1)
# Whether the sample is hard, its mask, its axis. One mask leaves rows without a category.
PLACES: list[tuple[bool, Tensor | None, int]] = [
    (True, MASK, 0),
    (True, EMPTIED, 1),
    (True, None, -1),
    (False, MASK, -1),
]
FREE = 2


@lru_cache
def program(name: str) -> Any:
    """Samples and gradients of all kinds and places at once, compiled once for each dtype."""

    def run(logits: Any, weight: Any, noises: Any) -> list[tuple[Any, Any]]:
        results = []
        for (hard, mask, dim), noise in zip(places(name), noises, strict=True):
            estimator = replayed(make(name, hard=hard), noise=noise)
            where = None if mask is None else to_jax(mask)
            draw = partial(estimator.sample, jax.random.key(0), axis=dim, where=where)
            sample, back = jax.vjp(draw, logits)
            results.append((sample, back(weight)[0]))
        return results

    return jax.jit(run)


def places(name: str) -> list[tuple[bool, Tensor | None, int]]:
    return [place for place in PLACES if place[0] or name in SOFT]


def compared(name: str, logits: Tensor, weight: Tensor, tolerance: float) -> list[tuple[Tensor, Tensor]]:
    """Samples and gradients of JAX, for the noise that torch drew, after comparing them with torch's."""
    theirs, noises = [], []
    for hard, mask, dim in places(name):
        estimator = make_torch(name, hard=hard)
        theirs.append(torch_pull(estimator, logits, weight, dim=dim, mask=mask))
        noises.append(noise_of(estimator, logits.movedim(dim, -1).contiguous()))
    ours = program(name)(to_jax(logits), to_jax(weight), noises)
    for (hard, *_), result, expected in zip(places(name), ours, theirs, strict=True):
        for array, tensor in zip(result, expected, strict=True):
            assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
            exactly = hard and array is result[0]
            torch.testing.assert_close(
                to_torch(array),
                tensor,
                rtol=0 if exactly else tolerance,
                atol=0 if exactly else tolerance,
                equal_nan=True,
                check_dtype=False,
            )
    return [(to_torch(sample), to_torch(gradient)) for sample, gradient in ours]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in EVERY]
    + [(name, dtype) for name in PATHWISE for dtype in (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_the_same_noise_gives_the_same_sample_and_gradient(name: str, dtype: torch.dtype) -> None:
    """Hard and soft, with masks and without, on every axis."""
    logits, weight = normal(*SHAPE, dtype=dtype), normal(*SHAPE, seed=2, dtype=dtype)
    for _, gradient in compared(name, logits, weight, DTYPES[dtype]):
        assert gradient.abs().sum() > 1
    if dtype == torch.float64:
        logits = wild_logits()
        sample, gradient = compared(name, logits, weight, 1e-12)[FREE]
        for result in (sample, gradient):
            rows = result.view(25, 5)
            assert rows[[1, 2, 5]].isnan().all()
            assert (rows[3] == 0).all()
            assert rows[6:].isfinite().all()


def wild_logits() -> Tensor:
    """Rows with a NaN, with infinities, with nothing allowed, and logits whose exponentials overflow."""
    logits = normal(25, 5)
    logits[1, 0], logits[2, 1], logits[3], logits[4, 1:] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[5, 1:], logits[5, 0] = -torch.inf, torch.nan
    logits[6:15] *= 1e4
    return logits.view(SHAPE)


@pytest.mark.parametrize("name", [*PATHWISE, "gst-auto"])
def test_rows_of_several_blocks_agree_and_long_ones_have_the_same_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70 categories, drawn from blocks of 16; then with the backward pass of rows too long for one kernel."""
    logits, weight = normal(6, 70), normal(6, 70, seed=2)
    estimator = make_torch(name)
    expected = torch_pull(estimator, logits, weight)
    ours = replayed(make(name), noise=noise_of(estimator, logits))
    for longest in (70, 69):
        monkeypatch.setattr(samplers, "_LONGEST_BLOCK", longest)
        for array, tensor in zip(pull(ours, to_jax(logits), to_jax(weight)), expected, strict=True):
            assert_close(to_torch(array), tensor)


@pytest.mark.parametrize("name", EVERY)
def test_the_backward_pass_keeps_the_logits_and_a_few_numbers_per_row(name: str) -> None:
    logits = jax.ShapeDtypeStruct((4, 100), "bfloat16")
    back = jax.eval_shape(lambda x: jax.vjp(partial(make(name).sample, jax.random.key(0)), x)[1], logits)
    kept = [leaf for leaf in jax.tree.leaves(back) if leaf.size >= logits.size]
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(logits.shape, logits.dtype)]


@pytest.mark.parametrize("name", ["gst", "gumbel-softmax", "reinmax"])
def test_levels_with_a_value_per_row(name: str) -> None:
    """Without the category axis, or with it as one."""
    logits, weight = normal(*SHAPE), normal(*SHAPE, seed=2)
    tau = torch.rand(5, 5, generator=seeded(5), dtype=torch.float64) + 1
    estimator = make_torch(name, tau=tau)
    _, expected = torch_pull(estimator, logits, weight, dim=1)
    noise = noise_of(estimator, logits.movedim(1, -1).contiguous())
    for level in (tau, tau.unsqueeze(1)):
        ours = replayed(make(name, tau=level), noise=noise)
        assert_close(to_torch(pull(ours, to_jax(logits), to_jax(weight), axis=1)[1]), expected)


def test_gaps_with_a_value_per_row() -> None:
    logits, weight = normal(*SHAPE), normal(*SHAPE, seed=2)
    gap = torch.linspace(0, 3, 25, dtype=torch.float64).view(5, 5)
    _, expected = torch_pull(gapped.GST(gap=gap), logits, weight)
    ours = replayed(gapped.jax.GST(gap=to_jax(gap)), noise=noise_of(gapped.GST(), logits))
    assert_close(to_torch(pull(ours, to_jax(logits), to_jax(weight))[1]), expected)


@pytest.mark.parametrize("hard", [True, False])
def test_a_learned_temperature_of_gumbel_softmax(hard: bool) -> None:
    logits, weight, tau = normal(*SHAPE), normal(*SHAPE, seed=2), torch.tensor([0.7], dtype=torch.float64)
    mask = torch.tensor([True, True, False, True, True])
    learned = tau.clone().requires_grad_()
    gapped.GumbelSoftmax(learned, hard).sample(logits, mask=mask, generator=seeded()).backward(weight)
    noise = noise_of(gapped.GumbelSoftmax(), logits)

    def cost(tau: Any) -> Any:
        estimator = replayed(gapped.jax.GumbelSoftmax(tau, hard), noise=noise)
        sample = estimator.sample(jax.random.key(0), to_jax(logits), where=to_jax(mask))
        return (sample * to_jax(weight)).sum()

    assert learned.grad is not None
    assert_close(to_torch(jax.jit(jax.grad(cost))(to_jax(tau))), learned.grad)


@pytest.mark.parametrize("name", ["gst-auto", "reinmax", "gumbel-rao-1"])
def test_looking_up_a_table_agrees(name: str) -> None:
    """Rows, and gradients of logits and table; one row has no categories."""
    logits, table, weight = normal(*SHAPE), normal(5, 3, seed=4), normal(5, 5, 3, seed=2)
    logits[0, 3] = -torch.inf
    estimator = make_torch(name)
    leaves = logits.clone().requires_grad_(), table.clone().requires_grad_()
    choice = estimator.choose(leaves[0], generator=seeded())
    rows, gate = choice.select(leaves[1]), choice.gate()
    expected = torch.autograd.grad([rows, gate], leaves, [weight, weight[..., 0]])
    ours = replayed(make(name), noise=noise_of(estimator, logits))

    @jax.jit
    def use(logits: Any, table: Any, weight: Any) -> tuple[Any, ...]:
        def values(logits: Any, table: Any) -> tuple[tuple[Any, Any], Any]:
            choice = ours.choose(jax.random.key(0), logits)
            return (choice.select(table), choice.gate()), choice.index

        used, back, index = jax.vjp(values, logits, table, has_aux=True)
        return index, *used, *back((weight, weight[..., 0]))

    index, *results = use(to_jax(logits), to_jax(table), to_jax(weight))
    assert torch.equal(to_torch(index), choice.index)
    for array, tensor in zip(results, (rows, gate, *expected), strict=True):
        assert_close(to_torch(array), tensor.detach())


# The table of closed forms that torch's estimators are tested with


@pytest.mark.parametrize(
    "case", [case for case, (estimator, _) in CASES.items() if options_in_jax(estimator) is not None]
)
def test_gradients_equal_the_formulas(case: str) -> None:
    """Rows of each theta for each category, which is drawn by a uniform in the middle of its interval."""
    estimator, formula = CASES[case]
    theta = torch.stack(list(THETAS.values()))
    corners = torch.eye(K, dtype=torch.float64, requires_grad=True)
    p = torch.softmax(theta, -1)
    ours = replayed(translated(estimator), noise=to_jax(p.cumsum(-1) - p / 2)[None])
    for name in ("curved", "quadratic"):
        cost = COSTS[name]
        (slopes,) = torch.autograd.grad(cost(corners).sum(), corners)
        sample, table = pull(
            ours, to_jax(theta.unsqueeze(1).expand(-1, K, -1)), to_jax(slopes.expand(len(theta), K, K))
        )
        assert torch.equal(to_torch(sample), corners.detach().expand(len(theta), K, K))
        for row, gradients in zip(theta, to_torch(table), strict=True):
            assert_close(gradients, formula_gradients(formula, row, cost), 1e-10)
            if (case, name) == ("reinmax", "quadratic"):
                assert_close(moments(gradients, row)[0], true_gradient(row, cost), 1e-10)


# Drawing


def test_an_index_is_the_first_whose_running_sum_exceeds_the_uniform() -> None:
    """Weights and uniforms that are exact in binary: torch's rule at the boundaries, too."""
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.0, 0.25, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1 - 2.0**-53], dtype=torch.float64)
    expected = torch.searchsorted(weights.cumsum(-1), u, right=True)
    ours, _ = jax.jit(draws.inverse_cdf)(to_jax(weights.expand(7, -1)), to_jax(u)[None])
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
    index, total = jax.jit(draws.inverse_cdf)(rows, to_jax(u)[None])
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
    index, _ = jax.jit(draws.inverse_cdf)(to_jax(weights[:300].expand(300, -1)), to_jax(u))
    assert torch.equal(to_torch(index).long(), torch.arange(300))


@pytest.mark.parametrize("levels", [1, 2])
def test_an_absent_category_is_never_drawn(levels: int) -> None:
    """Uniforms at every boundary of the running sum and one step beside it, in float32."""
    weights = torch.rand(400, generator=seeded(1)) * (torch.rand(400, generator=seeded(2)) < 0.3)
    edges = (weights.double().cumsum(-1) / weights.double().sum()).float()
    steps = torch.cat([edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(-1.0))])
    u = steps.clamp(0, 1 - 2.0**-24)
    noise = to_jax(u.expand(levels, -1))
    index, _ = jax.jit(draws.inverse_cdf)(to_jax(weights.expand(len(u), -1)), noise)
    assert (weights[to_torch(index).long()] > 0).all()


def test_the_functions_of_a_probability_are_torchs() -> None:
    p = torch.cat([torch.logspace(-12, -0.001, 300, dtype=torch.float64), torch.tensor([0.0, 1.0]).double()])
    assert_close(to_torch(jax.jit(gapped.jax.expected_gap)(to_jax(p))), gapped.expected_gap(p))
    odds = jax.jit(categories.log_expected_odds)(to_jax(p.log()))
    torch.testing.assert_close(to_torch(odds), simplex.log_expected_odds(p.log()), rtol=1e-12, atol=1e-12)


def test_gates_of_infinite_odds_are_certain() -> None:
    jnp = jax.numpy
    odds = jnp.asarray([jnp.inf, -jnp.inf])
    for hard in (True, False):
        value, slope = jax.value_and_grad(
            lambda x, hard=hard: (
                gapped.jax.gate(jax.random.key(0), x, hard=hard) * jnp.asarray([1.0, 2.0])
            ).sum()
        )(odds)
        assert float(value) == 1
        assert slope.tolist() == [0, 0]
