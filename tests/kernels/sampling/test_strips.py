"""Rows that lie side by side, as of a category axis that is not the last: read, and written, as they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    noise,
)
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor

import gapped
from gapped import simplex
from gapped.kernels.sampling import launch, row_layout, strip_sizes
from gapped.kernels.sampling.launch import Fused

# The interpreter warns of what a row without a law makes of itself, before that is overwritten.
pytestmark = [*GPU_MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LOWEST = torch.finfo(torch.float32).min
# Gumbel-Rao copies; the NZ ablation has a kernel for short rows only.
NATIVE = tuple(name for name in ESTIMATORS if name not in ("gumbel-rao", "nz-gst"))


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 8 categories are long, read 8 at a time, and 16 of them share a program backward."""
    monkeypatch.setattr(strip_sizes, "LONGEST_BLOCK", 8)
    for name, value in {"FORWARD_WARPS": 1, "PIECES": 2, "MOST_BYTES": 64}.items():
        monkeypatch.setattr(strip_sizes, name, value)
    for name in ("SIMPLE", "OTHERS"):
        monkeypatch.setattr(strip_sizes, name, (256, 4, 128))


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
@pytest.mark.parametrize("categories", [7, 37])
@pytest.mark.parametrize("name", [*NATIVE, "nz-gst"])
def test_every_estimator_equals_the_reference(name: str, categories: int) -> None:
    """Short rows in one block; long ones in several chunks and segments, the last of them not full."""
    if name == "nz-gst" and categories > 8:
        pytest.skip("the NZ ablation has a kernel for short rows only")
    logits = side_by_side(2, 11, categories)
    sample = assert_equals_reference(ESTIMATORS[name], logits)
    gradient = backward(logits, sample, torch.ones_like(logits), FUSED[name])
    assert sample.value.stride() == gradient.stride() == logits.stride()


@contextmanager
def copies() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of tensors that were made contiguous, or would have been."""
    seen = []
    contiguous = torch.Tensor.contiguous

    def spy(self: Tensor, *how: object, **options: object) -> Tensor:
        if not self.is_contiguous():
            seen.append(tuple(self.shape))
        return contiguous(self, *how, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", spy)
        yield seen


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("categories", [1, 5, 19])
@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 0, 3, 5), 1), ((0, 6), 0), ((3, 2, 0, 7), -2), ((4, 0, 1), 1)]
)
def test_any_axis_is_sampled_without_a_copy(shape: tuple[int, ...], dim: int, categories: int) -> None:
    """A call as users make it: sample and gradient lie as the logits do, and equal those of a copy."""
    shape = tuple(categories if n == 0 else n for n in shape)
    weight, results = incoming(*shape), []
    estimator = gapped.GST(tau=0.5, backend="triton")
    for copied in (True, False):
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
        generator = torch.Generator(DEVICE).manual_seed(3)
        rows = logits.movedim(dim, -1).contiguous() if copied else logits
        with copies() as seen:
            sample = estimator.sample(rows, dim=-1 if copied else dim, generator=generator)
            here = weight.movedim(dim, -1) if copied else weight
            (gradient,) = torch.autograd.grad(sample, logits, here)
        results.append((sample, gradient))
        if not copied:
            assert not seen
            assert sample.is_contiguous()
            assert gradient.is_contiguous()
    (_, first), (sample, gradient) = results
    assert torch.equal(sample.sum(dim), torch.ones_like(sample.sum(dim)))
    if categories <= 8:
        assert torch.equal(sample, results[0][0].movedim(-1, dim))
        torch.testing.assert_close(gradient, first)


def test_gumbel_rao_still_copies() -> None:
    """What the test above would notice."""
    with copies() as seen:
        gapped.gumbel_rao(torch.zeros(2, 3, 4, device=DEVICE), samples=2, dim=1, backend="triton")
    assert seen


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


def test_where_rows_lie() -> None:
    """The axes inside of the categories, and the geometry that kernels get; a copy only if there is none."""
    x = torch.arange(2 * 5 * 3 * 4.0).view(2, 5, 3, 4)
    padded = torch.zeros(3, 7, 5, 6)[:2, 1:6, :3, :]
    cases = {
        "last": (x, 0, None),
        "channels": (x.movedim(1, -1), 2, (24, 12, 60, 12)),
        "first": (x.movedim(0, -1), 3, (60, 60, 0, 60)),
        "before the last": (x.movedim(2, -1), 1, (40, 4, 12, 4)),
        "channels last": (x.to(memory_format=torch.channels_last).movedim(1, -1), 0, None),
        "padded": (padded.movedim(1, -1), 2, (36, 18, 210, 30)),
        "every other": (x[..., ::2].movedim(1, -1), 0, None),
        "expanded": (x[:, :1].expand(2, 5, 3, 4).movedim(1, -1), 0, None),
        "one category": (x[:, :1].movedim(1, -1), 2, (24, 12, 60, 12)),
    }
    for name, (view, axes, geometry) in cases.items():
        assert row_layout.inner_axes(view) == axes, name
        rows = row_layout.rows_of(view, axes)
        if geometry is not None:
            assert rows[1:] == geometry, name
            assert rows.tensor is view, name
            out = row_layout.empty_rows(view, axes)
            assert row_layout.rows_of(out, axes).tensor is out, name
    crossed = x.movedim(0, 1).movedim(2, -1)
    copied = row_layout.rows_of(crossed, 1)
    assert copied.tensor is not crossed
    assert torch.equal(copied.tensor, crossed)
    starts = [r // copied.inner * copied.stride + r % copied.inner for r in range(copied.number)]
    flat = copied.tensor.movedim(-1, -2).reshape(-1)
    assert torch.equal(flat[starts], crossed[..., 0].reshape(-1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("small_strips")
def test_one_graph_with_the_kernel_inside() -> None:
    def program(x: Tensor) -> Tensor:
        return gapped.gst(2 * x, 0.5, True, gap=1.2, dim=1, backend="triton")

    logits = torch.randn(2, 20, 3, 5, device=DEVICE, requires_grad=True)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    value = compiled(logits)
    assert value.is_contiguous()
    assert torch.equal(value.sum(1), torch.ones(2, 3, 5, device=DEVICE))
    (gradient,) = torch.autograd.grad(value, logits, incoming(*value.shape))
    index = value.detach().argmax(1).reshape(-1)
    rows = (2 * logits).detach().movedim(1, -1)
    stats = launch.forward(rows, key(), Fused("gst", 0.5, gap=1.2), dense=False).stats
    grad = incoming(*value.shape).movedim(1, -1)
    expected = launch.backward(rows, index.to(torch.int16), stats, key(), grad, Fused("gst", 0.5, gap=1.2))
    torch.testing.assert_close(gradient, 2 * expected.movedim(-1, 1))
    torch._dynamo.reset()


@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("name", ["gst", "gumbel-softmax"])
def test_a_choice_equals_the_one_hot_sample(name: str) -> None:
    estimator, table = replace(ESTIMATORS[name], backend="triton"), incoming(20, 3)
    logits = torch.randn(2, 20, 7, device=DEVICE, requires_grad=True)
    generators = [torch.Generator(DEVICE).manual_seed(5) for _ in range(2)]
    sample = estimator.sample(logits, dim=1, generator=generators[0])
    choice = estimator.choose(logits, dim=1, generator=generators[1])
    assert torch.equal(choice.index, sample.argmax(1))
    dense, selected = sample.movedim(1, -1) @ table, choice.select(table)
    torch.testing.assert_close(dense, selected)
    first, second = (torch.autograd.grad(each, logits, incoming(2, 7, 3))[0] for each in (dense, selected))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's allocator counts what kernels need")
@pytest.mark.parametrize("categories", [40, 100, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_sample_and_gradient(categories: int, dtype: torch.dtype) -> None:
    logits = torch.randn(8, categories, 64, 32, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn_like(logits)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gapped.gst(logits, 0.5, True, dim=1).backward(grad)
    most = torch.cuda.max_memory_allocated() - before
    assert most <= 2.1 * logits.numel() * logits.element_size() + (1 << 16)


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
        torch.testing.assert_close(first, backward(logits, sample, grad, fused), rtol=1e-4, atol=1e-6)
