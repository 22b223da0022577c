"""Options of every registered estimator that are tensors or whole numbers."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    DTYPES,
    KINDS,
    TAU,
    USES,
    assert_close,
    assert_equal,
    normal,
    pull,
    seeded,
)
from variants import VARIANTS, K, every_variant, make

import gapped

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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_number_is_that_number(name: str, level: str, dtype: torch.dtype) -> None:
    """An integer gap once selected the expected gap instead."""
    logits, weight = normal(50, K, dtype=dtype), normal(50, K, seed=2, dtype=dtype)
    assert_equal(*(pull(make(name, **{level: number}), logits, weight) for number in (2, 2.0)))


def test_an_expected_gap_is_not_a_gap_of_one() -> None:
    logits, weight = normal(50, K), normal(50, K, seed=2)
    gaps = (1, gapped.expected_gap)
    one, expected = (pull(gapped.GST(gap=gap), logits, weight)[1] for gap in gaps)
    assert not torch.equal(one, expected)


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
