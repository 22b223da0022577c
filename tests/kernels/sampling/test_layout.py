"""Samples along any axis: logits are read as they lie in memory, and results lie as they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from kernel_cases import DEVICE, GPU_MARKS, incoming, make_strips_small
from torch import Tensor

import gapped
from gapped.kernels.sampling import layout

pytestmark = GPU_MARKS


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    make_strips_small(monkeypatch)


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
    """A mistake that the test above notices."""
    with copies() as seen:
        gapped.gumbel_rao(torch.zeros(2, 3, 4, device=DEVICE), samples=2, dim=1, backend="triton")
    assert seen


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
        assert layout.inner_axes(view) == axes, name
        rows = layout.rows_of(view, axes)
        if geometry is not None:
            assert rows[1:] == geometry, name
            assert rows.tensor is view, name
            out = layout.empty_rows(view, axes)
            assert layout.rows_of(out, axes).tensor is out, name
    crossed = x.movedim(0, 1).movedim(2, -1)
    copied = layout.rows_of(crossed, 1)
    assert copied.tensor is not crossed
    assert torch.equal(copied.tensor, crossed)
    starts = [r // copied.inner * copied.stride + r % copied.inner for r in range(copied.number)]
    flat = copied.tensor.movedim(-1, -2).reshape(-1)
    assert torch.equal(flat[starts], crossed[..., 0].reshape(-1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's allocator counts what kernels need")
@pytest.mark.parametrize("categories", [40, 100, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_sample_and_gradient(categories: int, dtype: torch.dtype) -> None:
    logits = torch.randn(8, categories, 64, 32, device="cuda", dtype=dtype, requires_grad=True)
    grad = torch.randn_like(logits)
    # A block that another test gave back may be handed out whole, up to a mebibyte larger than was asked for.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gapped.gst(logits, 0.5, True, dim=1).backward(grad)
    most = torch.cuda.max_memory_allocated() - before
    assert most <= 2.1 * logits.numel() * logits.element_size() + (1 << 16)
