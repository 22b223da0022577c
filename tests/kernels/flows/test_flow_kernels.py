"""The kernel of flows against MVE in torch, for the category that the kernel draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import seeded
from kernel_cases import DEVICE, GPU_MARKS, key
from torch import Tensor

import gapped
from gapped.errors import GappedError
from gapped.kernels.flows import flow_launch
from gapped.pathwise import Draw

pytestmark = GPU_MARKS


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for every program, whatever its size."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(flow_launch, "BLOCK", 1 << 15)


def noise(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def example(rows: int, categories: int, scale: float = 1.5) -> tuple[Tensor, Tensor]:
    """Logits and gradients; a third of the categories of the last row do not exist."""
    logits, grad = (torch.randn(rows, categories, generator=seeded(seed)) for seed in (1, 2))
    logits = scale * logits
    logits[-1, : categories // 3] = -torch.inf
    grad[-1, : categories // 3] = torch.nan
    return logits.to(DEVICE), grad.to(DEVICE)


def reference(estimator: gapped.MVE, logits: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """The gradient in float64, by the estimator in torch."""
    rows = logits.double() - logits.double().amax(-1, keepdim=True)
    points, weights, product = estimator.points(rows, Draw(index.long().view(logits.shape[:-1])))
    assert product is not None
    return product(grad.double(), points, weights)


def error(estimator: gapped.MVE, logits: Tensor, grad: Tensor) -> float:
    """The largest error, relative to the largest entry of its row, or to a tenth."""
    index = flow_launch.draw(logits, noise(3), dense=False).indices
    gradient = flow_launch.backward(logits, index, grad, estimator.tau, estimator.smoothing)
    expected = reference(estimator, logits, index, grad)
    assert gradient.dtype == logits.dtype
    return float(
        ((gradient.double() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=0.1)).max()
    )


@pytest.mark.parametrize("smoothing", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize(("rows", "categories"), [(7, 2), (33, 3), (20, 7), (5, 33), (9, 64), (3, 128)])
def test_the_gradient_is_the_reference_s(rows: int, categories: int, smoothing: float) -> None:
    for scale in (0.3, 3.0):
        assert error(gapped.MVE(smoothing=smoothing), *example(rows, categories, scale)) < 2e-5


def test_levels_by_rows_and_strides() -> None:
    logits, grad = example(12, 10)
    levels = {"tau": torch.tensor([0.7, 1.0, 1.9]), "smoothing": torch.tensor([0.0, 0.1, 2.0])}
    estimator = gapped.MVE(**{k: v.to(DEVICE).view(3, 1) for k, v in levels.items()})
    assert error(estimator, logits.view(3, 4, 10), grad.view(3, 4, 10)) < 2e-5
    wide = torch.zeros(12, 16, device=DEVICE)
    wide[:, :10] = logits
    assert error(gapped.MVE(tau=1.3), wide[:, :10], grad.t().contiguous().t()) < 2e-5


def test_too_few_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_launch, "STEPS", 3)
    assert error(gapped.MVE(), *example(20, 32, 3.0)) > 1e-4


def test_half_precision_is_rounded_once() -> None:
    logits, grad = (each.to(torch.bfloat16) for each in example(20, 12))
    # The interpreter does not round to the nearest, it cuts.
    assert error(gapped.MVE(), logits, grad) < (2**-8 if DEVICE.type == "cuda" else 2**-7)


def test_the_sample_is_a_hard_one_with_the_kernel_s_gradient() -> None:
    logits, grad = example(20, 12)
    grad = grad.nan_to_num()
    estimator = gapped.MVE(smoothing=0.1, backend="triton")
    leaf = logits.clone().requires_grad_()
    z = estimator.sample(leaf, generator=noise(4))
    assert gapped.backend_used() == "triton"
    assert torch.equal(z.sort(-1).values[:, -2:], torch.tensor([0.0, 1.0], device=DEVICE).expand(20, 2))
    z.backward(grad)
    expected = reference(estimator, logits, z.argmax(-1), grad)
    torch.testing.assert_close(leaf.grad.double(), expected, rtol=0, atol=2e-5)
    choice = estimator.choose(leaf, generator=noise(4))
    assert torch.equal(choice.index, z.argmax(-1))


def test_rows_without_a_law() -> None:
    logits, grad = example(4, 5)
    logits[0], logits[1, 2] = -torch.inf, torch.nan
    leaf = logits.clone().requires_grad_()
    z = gapped.mve(leaf, backend="triton", generator=noise(4))
    z.backward(grad.nan_to_num())
    assert leaf.grad is not None
    assert (leaf.grad[0] == 0).all()
    assert leaf.grad[1].isnan().all()
    assert leaf.grad[2:].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"categories": 129}, "129 categories, the kernel takes 2 to 128"),
        ({"draw": "argmax"}, "only samples have a kernel"),
        ({"dtype": torch.float64}, "the logits are torch.float64"),
    ],
)
def test_what_has_no_kernel_is_said(change: dict[str, Any], message: str) -> None:
    logits = torch.zeros(
        2, change.pop("categories", 3), dtype=change.pop("dtype", torch.float32), device=DEVICE
    )
    with pytest.raises(GappedError, match=message):
        gapped.mve(logits, backend="triton", **change)


def test_no_rows() -> None:
    empty = torch.zeros(0, 4, device=DEVICE)
    assert flow_launch.backward(empty, key(1)[:0].short(), empty, 1.0, 0.0).shape == (0, 4)
