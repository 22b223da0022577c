"""The kernel of MVE's gradient against MVE in torch, for the category that the kernel draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import seeded
from kernel_cases import DEVICE, GPU_MARKS, incoming, key
from subprocesses import python
from torch import Tensor

import gapped
from gapped.errors import GappedError
from gapped.kernels.sampling import flow_sizes, launch
from gapped.pathwise import Draw

pytestmark = GPU_MARKS


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter takes milliseconds for every program, whatever its size."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(flow_sizes, "LOGITS", 1 << 11)
        monkeypatch.setattr(flow_sizes, "WEIGHTS", 1 << 15)
    # Launches are kept, with the sizes that were set when they were made.
    launch._backward.cache_clear()
    yield
    launch._backward.cache_clear()


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
    fused = estimator.fused()
    index = launch.forward(logits, key(), fused, dense=False).indices
    gradient = launch.backward(logits, index, None, key(), grad, fused)
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


def test_categories_too_rare_for_their_reciprocals() -> None:
    logits, grad = example(20, 6)
    logits[:, 5] = -torch.linspace(80, 110, 20, device=DEVICE)
    for smoothing in (0.0, 0.01):
        assert error(gapped.MVE(smoothing=smoothing), logits, grad) < 2e-5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_drawn_category_has_its_share_however_low_the_temperature(smoothing: float) -> None:
    """At temperature 0.1 the drawn category of every row has a probability of 1e-39 in the formula."""
    logits, grad = torch.randn(20, 6, generator=seeded(1)).to(DEVICE), incoming(20, 6)
    logits[:, 5] = logits.amax(-1) - 9.0
    index = torch.full((20,), 5, dtype=torch.int64, device=DEVICE)
    estimator = gapped.MVE(0.1, smoothing=smoothing)
    gradient = launch.backward(logits, index, None, key(), grad, estimator.fused())
    torch.testing.assert_close(
        gradient.double(), reference(estimator, logits, index, grad), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("gap", [5.0, 20.0, 40.0, 60.0, 70.0])
def test_next_to_certainty_the_small_gradients_keep_their_digits(gap: float) -> None:
    """The likely category was drawn; the others' gradients are as small as their probabilities."""
    rare = torch.randn(20, 6, generator=seeded(1))
    rare[:, 5] = gap
    logits, grad = rare.to(DEVICE), incoming(20, 6)
    index = torch.full((20,), 5, dtype=torch.int64, device=DEVICE)
    gradient = launch.backward(logits, index, None, key(), grad, gapped.MVE().fused()).double()
    expected = reference(gapped.MVE(), logits, index, grad)
    scale = expected.abs().amax(-1, keepdim=True)
    assert ((gradient - expected).abs() / scale).max() < 1e-4


@pytest.mark.parametrize("size", [1e-34, 1e-20, 1e20, 1e36])
def test_gradients_of_any_size(size: float) -> None:
    logits, grad = example(20, 10)
    fused = gapped.MVE().fused()
    index = launch.forward(logits, key(), fused, dense=False).indices
    plain, scaled = (launch.backward(logits, index, None, key(), each, fused) for each in (grad, size * grad))
    torch.testing.assert_close(scaled / size, plain, rtol=1e-5, atol=1e-6)


STRESS = """
import sys, time, torch, gapped
from gapped.kernels.sampling import launch

noise = torch.Generator("cuda").manual_seed(0)
fused, rows = gapped.MVE().fused(), 240_000
for _ in range(int(sys.argv[1])):
    scale = 10 ** (1.5 * torch.rand(rows, 1, device="cuda", generator=noise) - 0.5)
    logits, grad = (torch.randn(rows, 10, device="cuda", generator=noise) for _ in range(2))
    key = launch.draw_key(scale * logits, noise)
    index = launch.forward(scale * logits, key, fused, dense=False).indices
    for shift in range(4):
        launch.backward(scale * logits, index, None, key, grad.roll(shift, 0), fused)
    torch.cuda.synchronize()
print("done")
"""


@pytest.mark.skipif(DEVICE.type == "cpu", reason="threads that wait for each other are a GPU's")
def test_threads_leave_the_loop_of_steps_together() -> None:
    """Three billion rows. Where threads compare a sum that differs between them, a warp waits for ever: on an
    H200, such a kernel did so after 0.6 billion of them."""
    assert python("-c", STRESS, "3000", timeout=120).strip() == "done"


def test_levels_by_rows_and_strides() -> None:
    logits, grad = example(12, 10)
    levels = {"tau": torch.tensor([0.7, 1.0, 1.9]), "smoothing": torch.tensor([0.0, 0.1, 2.0])}
    estimator = gapped.MVE(**{k: v.to(DEVICE).view(3, 1) for k, v in levels.items()})
    assert error(estimator, logits.view(3, 4, 10), grad.view(3, 4, 10)) < 2e-5
    wide = torch.zeros(12, 16, device=DEVICE)
    wide[:, :10] = logits
    assert error(gapped.MVE(tau=1.3), wide[:, :10], grad.t().contiguous().t()) < 2e-5


def test_too_few_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_sizes, "STEPS", 3)
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


def test_the_gradient_at_the_index_alone() -> None:
    """As a choice that gates its branches has it."""
    logits, _ = example(20, 12)
    fused, one = gapped.MVE().fused(), torch.arange(20.0, device=DEVICE)
    index = launch.forward(logits, key(), fused, dense=False).indices
    dense = torch.zeros_like(logits).scatter(-1, index.long().unsqueeze(-1), one.unsqueeze(-1))
    expected = launch.backward(logits, index, None, key(), dense, fused)
    gradient = launch.backward(logits, index, None, key(), one, fused, at_index=True)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("draw", ["sample", "argmax"])
def test_rows_side_by_side(draw: str) -> None:
    """They are copied, also where other estimators would read so many categories as long rows."""
    logits, grad = example(6, 100)
    estimator = gapped.MVE(draw=draw, backend="triton")
    samples, gradients = [], []
    for stored, dim in ((logits, 1), (logits.t().contiguous(), 0)):
        leaf = stored.clone().requires_grad_()
        samples.append(estimator.sample(leaf, dim=dim, generator=noise(4)).movedim(dim, -1))
        samples[-1].backward(grad.nan_to_num())
        gradients.append(leaf.grad.movedim(dim, -1))
    assert torch.equal(*samples)
    assert torch.equal(*gradients)
    if draw == "argmax":
        assert torch.equal(samples[0].argmax(-1), logits.argmax(-1))


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
        ({"categories": 129}, "2 to 128 categories, not 129"),
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
    leaf = torch.zeros(0, 4, device=DEVICE, requires_grad=True)
    gapped.mve(leaf, backend="triton").sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == (0, 4)
