"""One contract for every registered estimator: values, gradients, axes, options, masks, rows without a law.

Samples are compared under equal generator seeds, so that almost everything here is exact.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import (
    INVERSE_CDF,
    KINDS,
    TAU,
    USES,
    assert_all_close,
    assert_close,
    assert_equal,
    assert_one_hot,
    normal,
    pull,
    seeded,
)
from torch import Tensor
from variants import VARIANTS, K, every_dtype, every_kind_of_sample, every_soft_variant, every_variant, make

# Values and gradients


@every_variant
@every_dtype
def test_many_hard_samples_with_a_gradient_are_exactly_one_hot(name: str, dtype: torch.dtype) -> None:
    """D - h + h rounds to something else about once in a hundred rows."""
    logits = normal(3_000, 11, dtype=dtype)
    sample, _ = pull(make(name), logits, torch.ones_like(logits))
    assert_one_hot(sample)


@every_soft_variant
@pytest.mark.parametrize("tau", [0.3, 1.0, TAU])
def test_hard_samples_carry_the_gradient_of_the_surrogate(name: str, tau: float) -> None:
    """D - sg(h) + h: for the same noise and the same gradient at the sample, hard and soft agree."""
    logits, weight = normal(30, K), normal(30, K, seed=2)
    _, hard = pull(make(name, tau=tau), logits, weight)
    _, soft = pull(make(name, tau=tau, hard=False), logits, weight)
    assert_close(hard, soft)


@every_soft_variant
@pytest.mark.parametrize("tau", [1e-4, 1e4])
def test_extreme_temperatures_stay_on_the_simplex(name: str, tau: float) -> None:
    logits, weight = 30 * normal(50, K, dtype=torch.float32), normal(50, K, seed=2, dtype=torch.float32)
    soft, gradient = pull(make(name, tau=tau, hard=False), logits, weight)
    assert_close(soft.sum(-1), torch.ones(50), 1e-5)
    assert torch.isfinite(gradient).all()


class Stop(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@every_variant
def test_a_gradient_that_is_cut_off_is_none(name: str) -> None:
    logits = normal(2, K).requires_grad_()
    Stop.apply(make(name).sample(logits)).sum().backward()
    assert logits.grad is None or (logits.grad == 0).all()


@every_variant
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("masked", [False, True])
def test_any_dim_equals_transposing(name: str, dim: int, masked: bool) -> None:
    """A temperature for each row broadcasts against the axes that are left."""
    logits, weight = normal(3, 4, 6), normal(3, 4, 6, seed=2)
    mask = torch.rand(3, 4, 6, generator=seeded(3)) < 0.7 if masked else None
    last = None if mask is None else mask.movedim(dim, -1).contiguous()
    taus = 1 + torch.rand(logits.movedim(dim, -1).shape[:-1], generator=seeded(3), dtype=torch.float64)
    transposed = (each.movedim(dim, -1).contiguous() for each in (logits, weight))
    expected = pull(make(name, tau=taus), *transposed, mask=last)
    sample, gradient = pull(make(name, tau=taus), logits, weight, dim=dim, mask=mask)
    assert torch.equal(sample, expected[0].movedim(-1, dim))
    assert_close(gradient, expected[1].movedim(-1, dim))


# Options that are tensors or whole numbers


LEVELS = [(name, level) for name, kind in KINDS.items() for level in kind.levels]
LEVELS += [(name, "tau") for name in VARIANTS] + [("nz-gst", "gap")]
every_level = pytest.mark.parametrize(("name", "level"), LEVELS)


@every_level
@pytest.mark.parametrize("hard", [True, False])
def test_a_level_per_row_equals_a_loop(name: str, level: str, hard: bool) -> None:
    kind = type(make(name))
    logits, weight = normal(4, 30, K), normal(4, 30, K, seed=2)
    levels = torch.tensor([1.0, 1.5, 2.0, 4.0], dtype=torch.float64)
    options = {"hard": hard or not kind.has_surrogate}
    sample, gradient = pull(make(name, **{level: levels[:, None]}, **options), logits, weight)
    for row, number in enumerate(levels.tolist()):
        alone, gradient_alone = pull(make(name, **{level: number}, **options), logits, weight)
        assert_close(sample[row], alone[row], 1e-12 if not hard else 0.0)
        assert_close(gradient[row], gradient_alone[row])


@every_variant
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (20,), (3, 1), (3, 20)], ids=str)
def test_a_tensor_of_equal_temperatures_is_a_number(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    logits, weight = normal(3, 20, K, dtype=dtype), normal(3, 20, K, seed=2, dtype=dtype)
    sample, gradient = pull(make(name, tau=torch.full(shape, TAU)), logits, weight)
    expected = pull(make(name), logits, weight)
    assert sample.dtype == gradient.dtype == dtype
    assert torch.equal(sample, expected[0])
    assert_close(gradient, expected[1], max(1e-12, 2 * torch.finfo(dtype).eps))


@every_level
@every_dtype
def test_a_whole_number_is_that_number(name: str, level: str, dtype: torch.dtype) -> None:
    """An integer gap once selected the expected gap instead."""
    logits, weight = normal(50, K, dtype=dtype), normal(50, K, seed=2, dtype=dtype)
    assert_equal(*(pull(make(name, **{level: number}), logits, weight) for number in (2, 2.0)))


@every_level
@pytest.mark.parametrize("use", USES)
def test_a_level_changed_after_the_draw_does_not_change_the_gradient(name: str, level: str, use: str) -> None:
    """Annealing in place between forward and backward: the gradient is that of the draw."""
    if name.startswith("nz-gst") and use != "sample":
        pytest.skip("a choice has no path through its perturbation")
    gradients = []
    for factor in (1.0, 0.25):
        levels = torch.linspace(1.0, 2.0, 20, dtype=torch.float64)
        logits = normal(20, K).requires_grad_()
        result = USES[use](make(name, **{level: levels}), logits, generator=seeded())
        levels *= factor
        gradients.append(torch.autograd.grad(result.square().sum(), logits)[0])
    assert torch.equal(*gradients)


INF = math.inf


def masked_problem(batch: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    logits, weight = normal(batch, K), normal(batch, K, seed=2)
    mask = torch.rand(batch, K, generator=seeded(3)) < 0.6
    mask[torch.arange(batch), torch.arange(batch) % K] = True
    return logits, weight, mask


@every_kind_of_sample
@pytest.mark.parametrize("filling", [math.nan, INF, -INF])
def test_an_incoming_gradient_behind_a_mask_may_be_anything(name: str, hard: bool, filling: float) -> None:
    """A row without categories too. One that is not finite at a category that exists is not hidden."""
    logits, weight, mask = masked_problem()
    logits = logits.masked_fill(~mask, -INF)
    logits[3], mask[3] = -INF, False
    expected = pull(make(name, hard=hard), logits, weight)
    actual = pull(make(name, hard=hard), logits, weight.masked_fill(~mask, filling))
    assert_equal(actual, expected)
    assert actual[1].isfinite().all()
    rows = torch.arange(len(logits))
    # These categories exist, but for row 3. The NZ ablation has no gradient at all in some rows.
    weight[rows, rows % K] = filling
    _, gradient = pull(make(name, hard=hard), logits, weight)
    moves = expected[1].any(-1)
    assert moves.sum() > 3
    assert not gradient[moves].isfinite().all(-1).any()
    assert not gradient[3].any()


@every_variant
def test_a_gradient_that_is_not_finite_at_an_unlikely_category_is_not_hidden(name: str) -> None:
    """Its probability is 0 in floating point, but the category exists."""
    if name == "mve":
        pytest.skip("MVE takes probabilities without a finite reciprocal for zero")
    logits, weight = torch.tensor([[0.0, 1.0, -1e4, -INF]]), torch.tensor([[1.0, 2.0, math.nan, math.nan]])
    _, gradient = pull(make(name), logits, weight)
    assert gradient.isnan().any()


@every_variant
def test_a_table_may_hold_anything_in_the_rows_of_masked_categories(name: str) -> None:
    """The padding of a vocabulary: a choice never reads it, and neither does the gradient of its logits."""
    estimator = make(name)
    if name.startswith("nz-gst"):
        pytest.skip("choose has no gradient with detach=False")
    mask = torch.tensor([True, True, False, True, False])
    table, weight = normal(K, 3), normal(40, 3, seed=2)
    results = []
    for padding in (0.0, math.nan, INF):
        logits, own = normal(40, K, seed=3).requires_grad_(), table.clone()
        own[~mask] = padding
        own.requires_grad_()
        value = estimator.choose(logits, mask=mask, generator=seeded()).select(own)
        results.append((value.detach(), *torch.autograd.grad(value, (logits, own), weight)))
    assert all(each.isfinite().all() for each in results[0])
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


@pytest.mark.parametrize("name", [*INVERSE_CDF, "nz-gst", "gst-expected", "gumbel-rao", "gumbel-rao-1"])
def test_masking_equals_deleting(name: str) -> None:
    """Same uniforms, same draws; and the same gradients where no further noise is used."""
    logits, weight = normal(500, K), normal(500, K, seed=2)
    columns = torch.tensor([0, 1, 4])
    mask = torch.zeros(K, dtype=torch.bool)
    mask[columns] = True
    logits[:, ~mask] += 20
    sample, gradient = pull(make(name), logits, weight, mask=mask)
    narrow, narrow_gradient = pull(make(name), logits[:, columns], weight[:, columns])
    assert torch.equal(sample[:, columns], narrow)
    if not name.startswith("gumbel-rao"):
        assert_close(gradient[:, columns], narrow_gradient)


@every_variant
def test_masks_broadcast(name: str) -> None:
    logits, weight = normal(3, 4, K), normal(3, 4, K, seed=2)
    for shape in [(K,), (1, K), (4, K), (3, 1, K), (1, 1, K)]:
        mask = torch.rand(shape, generator=seeded(4)) < 0.5
        mask[..., 1] = True
        spread = mask.expand_as(logits).clone()
        results = [pull(make(name), logits, weight, mask=each) for each in (mask, spread)]
        assert_equal(*results)
    everything = torch.ones(K, dtype=torch.bool)
    assert_all_close(pull(make(name), logits, weight, mask=everything), pull(make(name), logits, weight))
