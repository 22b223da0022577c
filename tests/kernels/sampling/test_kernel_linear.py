"""A choice from a linear head with `backend="triton"`: the kernels run on the logits of each chunk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import normal
from kernel_cases import DEVICE, ESTIMATORS, GPU_MARKS, LONG
from torch import Tensor

import gapped

pytestmark = GPU_MARKS
# A choice has no path through GST's perturbation.
CHOOSING = [name for name, estimator in ESTIMATORS.items() if getattr(estimator, "detach", True)]


@pytest.mark.parametrize(
    ("name", "categories"), [*((name, 7) for name in CHOOSING), *((name, 4100) for name in LONG)]
)
def test_a_chunk_is_the_choice_of_its_logits(name: str, categories: int) -> None:
    """The key of the only chunk is the one that `choose` draws."""
    estimator = replace(ESTIMATORS[name], backend="triton")
    shapes = ((3, 4), (categories, 4), (categories,))
    results: list[list[Tensor]] = []
    for is_linear in (True, False):
        hidden, weight, bias = (
            normal(*s, seed=n, dtype=torch.float32).to(DEVICE).requires_grad_() for n, s in enumerate(shapes)
        )
        generator = torch.Generator(DEVICE).manual_seed(1)
        if is_linear:
            choice = estimator.choose_linear(hidden, weight, bias, generator=generator)
        else:
            choice = estimator.choose(hidden @ weight.T + bias, generator=generator)
        assert gapped.backend_used() == "triton"
        rows, gates = choice.select(weight), choice.gate()
        cost = rows.square().sum() + (gates * rows.detach()[:, 0]).sum()
        results.append([choice.index, rows, *torch.autograd.grad(cost, [hidden, weight, bias])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
