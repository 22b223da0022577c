"""`Pathwise.mix` with `backend="triton"`: the kernels draw the soft sample of each block, twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import normal
from kernel_cases import DEVICE, ESTIMATORS, GPU_MARKS, LONG
from torch import Tensor

import gapped

pytestmark = GPU_MARKS
SOFT = [name for name, estimator in ESTIMATORS.items() if estimator.has_surrogate]
ROWS, STEP = (2, 5), 4


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ten rows are cut into blocks of four, four and two."""
    monkeypatch.setattr("gapped.vocabulary.mix.rows_of_a_chunk", lambda *_: STEP)


def estimators(name: str, **options: Any) -> gapped.Pathwise:
    # The interpreter takes as long for each draw as for a sample.
    options |= {"samples": 2} if name == "gumbel-rao" else {}
    return replace(ESTIMATORS[name], backend="triton", **options)


def sampled(estimator: gapped.Pathwise, logits: Tensor) -> Tensor:
    """The soft sample of all rows by the kernels, with the seed of each block, in the graph."""
    rows = logits.reshape(-1, logits.shape[-1])
    generator = torch.Generator(DEVICE).manual_seed(1)
    seeds = torch.randint(2**62, (-(-len(rows) // STEP),), device=DEVICE, generator=generator).tolist()
    soft = replace(estimator, hard=False)
    samples = [
        soft.sample(own, generator=torch.Generator(DEVICE).manual_seed(seed))
        for own, seed in zip(rows.split(STEP), seeds, strict=True)
    ]
    return torch.cat(samples).view(logits.shape)


def pulled(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    weight = normal(*value.shape, seed=5, dtype=torch.float32).to(DEVICE, value.dtype)
    return [value.detach(), *torch.autograd.grad(value, leaves, weight)]


def leaves_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [
        normal(*shape, seed=n, dtype=torch.float32).to(DEVICE, dtype).requires_grad_()
        for n, shape in enumerate(shapes, 1)
    ]


@pytest.mark.slow_if(
    lambda name, categories, is_masked: (
        categories > 7 and not (is_masked and name in ("gst", "gst-auto", "gumbel-softmax"))
    )
)
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "categories"), [*((n, 7) for n in SOFT), *((n, 4100) for n in LONG if n in SOFT)]
)
@pytest.mark.parametrize("is_masked", [False, True])
def test_value_and_gradients_are_those_of_the_product(name: str, categories: int, is_masked: bool) -> None:
    estimator = estimators(name)
    logits, table = leaves_of((*ROWS, categories), (categories, 3))
    mask = (torch.arange(categories, device=DEVICE) % 3 > 0) if is_masked else None
    generator = torch.Generator(DEVICE).manual_seed(1)
    ours = pulled(estimator.mix(logits, table, mask=mask, generator=generator), logits, table)
    assert gapped.backend_used() == "triton"
    rows = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    theirs = pulled(sampled(estimator, rows) @ table, logits, table)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-4, atol=2e-5)
