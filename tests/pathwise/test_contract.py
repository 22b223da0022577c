"""One contract for every registered estimator: values, gradients, shapes, axes, randomness, options.

Samples are compared under equal generator seeds, so that almost everything here is exact.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import (
    KINDS,
    TAU,
    USES,
    assert_close,
    assert_equal,
    assert_one_hot,
    normal,
    pull,
    seeded,
)
from torch import Tensor
from variants import VARIANTS, K, every_dtype, every_soft_variant, every_variant, make

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
