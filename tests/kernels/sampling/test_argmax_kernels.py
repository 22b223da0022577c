"""`draw="argmax"` in the kernels: the first of the largest logits, and each estimator's gradient given it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    ESTIMATORS,
    GPU_MARKS,
    assert_equals_reference,
    example,
    key,
    make_strips_small,
)
from torch import Tensor

import gapped
from gapped.kernels import runner
from gapped.kernels.sampling import launch, long

pytestmark = [*GPU_MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LOWEST = torch.finfo(torch.float32).min
# Given a category, Gumbel-Softmax is Gumbel-Rao with one draw, which is tested instead.
GIVEN = [name for name in ESTIMATORS if name not in ("gumbel-softmax", "decoupled")]


def rows(categories: int, beside: bool) -> Tensor:
    """Rows of every kind: the last ones with ties, and with nothing but the lowest number."""
    logits = example(7, categories)
    logits[4, 1::2] = 9.0
    logits[5] = 2.0
    logits[6], logits[6, -1] = -torch.inf, LOWEST
    return logits.t().contiguous().t() if beside else logits


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("categories", [7, 37])
@pytest.mark.parametrize("name", GIVEN)
def test_the_largest_logit_and_its_gradient(
    name: str, categories: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in one block, in chunks, and side by side; only rows without categories have no argmax."""
    estimator = replace(ESTIMATORS[name], draw="argmax")
    if name != "nz-gst":
        monkeypatch.setattr(runner, "LONGEST_BLOCK", 8)
        monkeypatch.setattr(long, "CHUNK", 16)
        make_strips_small(monkeypatch)
    logits = rows(categories, beside)
    sample = assert_equals_reference(estimator, logits)
    expected = logits.max(-1).indices
    expected[1] = categories
    assert torch.equal(sample.indices.long(), expected)
    assert expected.tolist()[4:] == [1, 0, categories - 1]
    assert torch.equal(sample.value.sum(-1), (torch.arange(7, device=DEVICE) != 1).float())


@pytest.mark.parametrize("categories", [7, 5000])
def test_rows_without_a_law_have_no_argmax(categories: int) -> None:
    logits = example(4, categories)[:3]
    logits[0, 3], logits[2, 1] = torch.nan, torch.inf
    fused = replace(ESTIMATORS["gst"], draw="argmax")._fused
    for each in (logits, logits.t().contiguous().t()):
        sample = launch.forward(each, key(), fused)
        assert sample.indices.tolist() == [categories + 1, categories, categories + 1]
        assert sample.value[[0, 2]].isnan().all()


def test_gumbel_softmax_given_its_category_is_one_draw_of_gumbel_rao() -> None:
    given = gapped.GumbelSoftmax(tau=0.7, draw="argmax")._fused
    assert given == gapped.GumbelRao(tau=0.7, samples=1, draw="argmax")._fused
    assert given is not None
    assert given.argmax


def test_a_generator_is_not_used_where_nothing_is_random() -> None:
    logits = torch.randn(4, 5, device=DEVICE, requires_grad=True)
    for kind in (gapped.GST, gapped.GumbelRao, gapped.ReinMaxRao):
        estimator = kind(draw="argmax", backend="triton")
        generator = torch.Generator(DEVICE).manual_seed(1)
        before = generator.get_state()
        sample = estimator.sample(logits, generator=generator)
        assert torch.equal(sample.argmax(-1), logits.argmax(-1))
        assert torch.equal(estimator.choose(logits, generator=generator).index, logits.argmax(-1))
        assert torch.equal(generator.get_state(), before) == isinstance(estimator, gapped.GST)
