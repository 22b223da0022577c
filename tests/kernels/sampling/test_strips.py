"""The kernels of rows that lie side by side against their references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases import (
    DEVICE,
    ESTIMATORS,
    FUSED,
    GPU_MARKS,
    assert_equals_reference,
    backward,
    example,
    incoming,
    key,
    make_strips_small,
    noise,
)
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor

from gapped import simplex
from gapped.kernels.sampling import launch, strip_sizes
from gapped.kernels.sampling.launch import Fused

# The interpreter warns of what a row without a law makes of itself, before that is overwritten.
pytestmark = [*GPU_MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LOWEST = torch.finfo(torch.float32).min
# Gumbel-Rao copies; the NZ ablation has a kernel for short rows only.
NATIVE = tuple(name for name in ESTIMATORS if name not in ("gumbel-rao", "nz-gst"))


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    make_strips_small(monkeypatch)


def side_by_side(*shape: int) -> Tensor:
    """Logits ``(*outer, S, K)`` that lie as ``(*outer, K, S)``, with rows of every kind."""
    *outer, inner, categories = shape
    rows = example(inner * torch.Size(outer).numel(), categories)
    return rows.view(shape).transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize(
    ("categories", "inner"),
    [(2, 2), (3, 33), (63, 3), (64, 32), (65, 2), (65, 33), (1000, 3), (1000, 32), (4097, 3)],
)
@pytest.mark.parametrize("name", ["gst", "gumbel-softmax"])
def test_awkward_sizes_equal_the_reference(name: str, categories: int, inner: int) -> None:
    logits = side_by_side(2, inner, categories)
    assert launch.axes_of(logits, FUSED[name]) == 1
    sample = assert_equals_reference(ESTIMATORS[name], logits)
    index = sample.indices.long()
    one_hot = simplex.one_hot(index, categories, torch.float32).view(logits.shape)
    assert torch.equal(sample.value, one_hot)
    assert sample.value.stride() == logits.stride()
    if name == "gumbel-softmax":
        fine = categories > strip_sizes.LONGEST_BLOCK
        scores = simplex.shift(logits).reshape(-1, categories) + noise(len(index), categories, fine=fine)
        assert torch.equal(index, simplex.argmax_index(scores))
    elif categories <= strip_sizes.LONGEST_BLOCK:
        assert torch.equal(index, launch.forward(logits.contiguous(), key(), FUSED[name]).indices.long())


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(
    ("name", "categories"), [*((name, n) for name in NATIVE for n in (7, 37)), ("nz-gst", 7)]
)
def test_every_estimator_equals_the_reference(name: str, categories: int) -> None:
    """Short rows in one block; long ones in several chunks and segments, the last of them not full."""
    logits = side_by_side(2, 11, categories)
    sample = assert_equals_reference(ESTIMATORS[name], logits)
    gradient = backward(logits, sample, torch.ones_like(logits), FUSED[name])
    assert sample.value.stride() == gradient.stride() == logits.stride()


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(("name", "categories"), [*((name, 37) for name in NATIVE), ("gst", 7)])
def test_rows_without_a_law_leave_their_neighbours_alone(
    name: str, categories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer starts as NaN here: an element that is not written would show in the sound rows."""

    def poison(allocate: Callable[..., Tensor], *of: object, **options: object) -> Tensor:
        buffer = allocate(*of, **options)
        return buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)

    logits = side_by_side(9, categories)
    logits[5, 2] = torch.nan
    logits[6, 0] = logits[7, -1] = torch.inf
    logits[8, :2] = torch.inf
    grad = torch.ones_like(logits).cumsum(-1)
    for function in ("empty", "empty_like"):
        monkeypatch.setattr(torch, function, partial(poison, getattr(torch, function)))
    sample = launch.forward(logits, key(), FUSED[name])
    soft = launch.forward(logits, key(), replace(FUSED[name], soft=name != "reinmax"))
    gradient = backward(logits, sample, grad, FUSED[name])
    for result in (sample.value, soft.value, gradient):
        assert result[[5, 6, 7, 8]].isnan().all()
        assert result[[0, 1, 2, 3, 4]].isfinite().all()
    assert not sample.value[1].any()
    assert not gradient[1].any()
    assert sample.indices.tolist()[5:] == [categories + 1] * 4


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(
    ("name", "dtype"), [("gst", torch.float16), *((name, torch.bfloat16) for name in ("gst", "reinmax"))]
)
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    logits, fused = side_by_side(2, 9, 21).to(dtype), FUSED[name]
    grad = torch.empty_like(logits).copy_(incoming(2, 9, 21))
    sample = launch.forward(logits, key(), fused)
    assert set(sample.value.flatten().tolist()) <= {0.0, 1.0}
    exact = backward(logits.float(), sample, grad.float(), fused)
    limits = torch.finfo(dtype)
    torch.testing.assert_close(
        backward(logits, sample, grad, fused).float(), exact, rtol=limits.eps, atol=limits.eps * 1e-3
    )


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("categories", [5, 21])
@pytest.mark.parametrize("name", ["gst", "gumbel-softmax"])
def test_options_with_a_value_per_row_equal_a_loop(name: str, categories: int) -> None:
    logits, grad = side_by_side(2, 3, categories), incoming(2, 3, categories)
    taus, gaps = (torch.linspace(0.3, 2.0, 6, device=DEVICE).view(2, 3) * scale for scale in (1, 2))
    sample = launch.forward(logits, key(), Fused(name, taus))
    together = backward(logits, sample, grad, Fused(name, taus, gap=gaps))
    for row in ((0, 0), (1, 1)):
        alone = backward(logits, sample, grad, Fused(name, taus[row].item(), gap=gaps[row].item()))
        torch.testing.assert_close(together[row], alone[row])


@pytest.mark.usefixtures("small_strips")
def test_samples_follow_the_logits() -> None:
    """Mass in different lanes, and in different chunks of one lane. Draws by noise are replayed above."""
    categories, count = 37, 400 if DEVICE.type == "cpu" else 40_000
    places = torch.tensor([17, 20, 25, 33, 36])
    values = torch.tensor([0.3, -1.0, 1.0, 0.5, 0.0])
    row = torch.full((categories, 1), -torch.inf).scatter(0, places.unsqueeze(-1), values.unsqueeze(-1))
    logits = row.expand(categories, count).contiguous().t().to(DEVICE)
    index = launch.forward(logits, key(), Fused("gst", 1.0), dense=False).indices.long().cpu()
    category = torch.searchsorted(places, index)
    assert torch.equal(places[category], index)
    counts = counts_of(category, 5)
    require_law(chi_squared(counts, values.double().softmax(-1)))
    require_rejected(chi_squared(counts, (-values).double().softmax(-1)))


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(("name", "filling"), [*((name, -1e9) for name in NATIVE), ("decoupled", LOWEST)])
def test_chunks_far_below_cost_no_digits(name: str, filling: float) -> None:
    logits = torch.full((37, 2), filling, device=DEVICE).t()
    logits[0, 32:], logits[1, :5] = example(2, 5)
    sample = assert_equals_reference(ESTIMATORS[name], logits)
    assert sample.indices[0] >= 32
    assert sample.indices[1] < 5


@pytest.mark.parametrize("at_index", [False, True])
@pytest.mark.parametrize("name", ["gst", "reinmax", "gumbel-softmax"])
def test_rows_too_long_to_be_shared_equal_those_that_are(
    name: str, at_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, fused = side_by_side(5, 4500), FUSED[name]
    sample = launch.forward(logits, key(), fused, dense=False)
    grad = incoming(5) if at_index else incoming(5, 4500)
    shared = backward(logits, sample, grad, fused, at_index=at_index)
    monkeypatch.setattr(strip_sizes, "most_segments", lambda device: 0)
    copied = backward(logits, sample, grad, fused, at_index=at_index)
    assert shared.stride() == copied.stride() == logits.stride()
    torch.testing.assert_close(shared, copied, rtol=1e-5, atol=1e-6)


def test_sizes_of_strips() -> None:
    """Wide enough for memory, narrow enough for many programs; segments that one GPU can run together."""
    strips, sizes = strip_sizes.backward_sizes(65_536, 200_000, 4, "gst")
    assert strips * sizes["STRIP"] >= 65_536
    assert sizes["STRIP"] * 4 == strip_sizes.LEAST_BYTES
    for count, categories in ((65_536, 8192), (7, 8192), (65_536, 65)):
        for size in (2, 4):
            _, forward = strip_sizes.forward_sizes(count, categories, size)
            assert forward["CHUNKS"] * forward["BLOCK"] >= categories
            assert strip_sizes.LEAST_BYTES <= forward["STRIP"] * size <= strip_sizes.MOST_BYTES
            _, sizes = strip_sizes.backward_sizes(count, categories, size, "reinmax")
            assert sizes["SEGMENTS"] * sizes["BLOCK"] >= categories
            assert sizes["SEGMENTS"] <= min(sizes["SLOTS"], strip_sizes.MOST_SEGMENTS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs run side by side on a GPU only")
@pytest.mark.parametrize("name", ["gst", "reinmax", "gumbel-softmax"])
def test_programs_that_share_a_strip_give_the_same_bits_every_time(name: str) -> None:
    """Whichever is first; many strips, so that some wait while others run."""
    logits = torch.randn(16, 8192, 1024, device="cuda").movedim(1, -1)
    grad, seed, fused = torch.randn_like(logits), key(), FUSED[name]
    sample = launch.forward(logits, seed, fused, dense=False)
    first = backward(logits, sample, grad, fused)
    assert all(torch.equal(first, backward(logits, sample, grad, fused)) for _ in range(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strip_sizes, "most_segments", lambda device: 0)
        # q (g - <q, g>) / tau: the sums come in another order, and differ by a few units in their last place.
        unit = torch.finfo(torch.float32).eps * float(grad.abs().max()) / float(fused.tau)
        torch.testing.assert_close(first, backward(logits, sample, grad, fused), rtol=1e-4, atol=4 * unit)
