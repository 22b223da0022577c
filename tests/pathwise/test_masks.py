"""Masks of every registered estimator: masking equals deleting; rows without a category; NaN and infinity."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import (
    INVERSE_CDF,
    assert_all_close,
    assert_close,
    assert_equal,
    normal,
    pull,
    seeded,
)
from torch import Tensor
from variants import K, every_kind_of_sample, every_variant, make

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
