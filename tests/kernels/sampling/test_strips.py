"""The kernels of rows that lie side by side against their references."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    ESTIMATORS,
    FUSED,
    GPU_MARKS,
    NATIVE,
    assert_equals_reference,
    backward,
    incoming,
    key,
    make_strips_small,
    noise,
    side_by_side,
    tl,
    triton,
)
from torch import Tensor

from gapped import simplex
from gapped.kernels.sampling import launch, strips
from gapped.kernels.sampling.strips import task_of
from gapped.kernels.sampling.surrogates import SECOND_ORDER
from gapped.pathwise import Draw

# The interpreter warns of what a row without a law makes of itself, before that is overwritten.
pytestmark = [*GPU_MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    make_strips_small(monkeypatch)


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
        fine = categories > strips.LONGEST_HELD
        scores = simplex.shift(logits).reshape(-1, categories) + noise(len(index), categories, fine=fine)
        assert torch.equal(index, simplex.argmax_index(scores))
    elif categories <= strips.LONGEST_HELD:
        assert torch.equal(index, launch.forward(logits.contiguous(), key(), FUSED[name]).indices.long())


@pytest.mark.slow_if(lambda name, categories: name in ("decoupled", "gst-expected", "straight-through"))
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


def assert_equal_but_for_order(
    first: Tensor, second: Tensor, logits: Tensor, grad: Tensor, index: Tensor, name: str
) -> None:
    """Two gradients of logits whose sums were added up in different orders.

    With u = 2^-24, G the largest |g| of a row and d = 48 the most additions of a term: weights have the same
    bits in both, their sum a relative error of d u, its reciprocal one of (d + 4) u, and the mean <q, g> an
    error of (2 d + 6) u G. Each q (g - <q, g>) / tau, at most 2 G q / tau, adds 7 u for its operations: in
    all 4 (d + 7) u G q / tau, and twice that between two results. ReinMax and GapMax have two such terms.
    """
    if name in SECOND_ORDER:
        category = index.long().clamp(max=logits.shape[-1] - 1).view(logits.shape[:-1])
        (one, other), *_ = ESTIMATORS[name].points(simplex.shift(logits), Draw(category))
        coefficient = 2 * one + other / 2
    else:
        fused = replace(FUSED[name], soft=True)
        coefficient = launch.forward(logits, key(), fused).value / fused.tau
    largest = grad.abs().amax(-1, keepdim=True) if grad.dim() == logits.dim() else grad.abs().unsqueeze(-1)
    unit = torch.finfo(torch.float32).eps / 2
    # Numbers below the smallest normal one may be flushed to zero.
    bound = 8 * (48 + 7) * unit * largest * coefficient + torch.finfo(torch.float32).tiny
    # Rows without categories have no law, and a gradient of exactly zero.
    assert ((first - second).abs() <= bound.nan_to_num(nan=0.0)).all()


@pytest.mark.parametrize("at_index", [False, True])
@pytest.mark.parametrize("name", ["gst", *SECOND_ORDER, "gumbel-softmax"])
def test_rows_side_by_side_equal_a_copy_of_them(name: str, at_index: bool) -> None:
    logits, fused = side_by_side(5, 4500), FUSED[name]
    sample = launch.forward(logits, key(), fused, dense=False)
    grad = incoming(5) if at_index else incoming(5, 4500)
    tiled = backward(logits, sample, grad, fused, at_index=at_index)
    copied = backward(logits.contiguous(), sample, grad, fused, at_index=at_index)
    assert tiled.stride() == logits.stride() != copied.stride()
    assert_equal_but_for_order(tiled, copied, logits, grad, sample.indices, name)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter runs programs in any order that it is told")
@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize("name", ["gst", *SECOND_ORDER])
def test_bits_do_not_depend_on_which_program_is_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are summed in a random order, then written in another one."""
    from triton.runtime.interpreter import interpreter_builder as builder

    logits, fused = side_by_side(9, 147), FUSED[name]
    sample = launch.forward(logits, key(), fused, dense=False)
    grad, place = incoming(9, 147), builder.set_grid_idx
    monkeypatch.setattr(strips, "AHEAD", 1 << 30)
    expected = backward(logits, sample, grad, fused)

    def shuffled(x: int, y: int, z: int) -> None:
        tiles = builder.grid_dim[0] // 2
        order = torch.randperm(tiles, generator=torch.Generator().manual_seed(x // tiles))
        place(x // tiles * tiles + int(order[x % tiles]), y, z)
        seen.append(builder.grid_idx[0])

    seen: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", shuffled)
        assert torch.equal(backward(logits, sample, grad, fused), expected)
    assert seen != sorted(seen)
    assert sorted(seen) == list(range(len(seen)))


@pytest.mark.parametrize("mode", ["gst", *SECOND_ORDER, "gumbel-softmax"])
@pytest.mark.parametrize("size", [2, 4])
def test_sizes_of_strips(size: int, mode: str) -> None:
    """Wide enough for memory, every category in a segment, and a lag of a strip or more.

    Of the constants as they are, which other tests change: they are read once more.
    """
    spec = importlib.util.spec_from_file_location("constants", strips.__file__)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    for count in (1, 7, 1000, 65_536):
        for categories in (65, 129, 200, 257, 513, 8192, 200_000):
            _, forward = own.forward_sizes(count, categories, size)
            assert forward["CHUNKS"] * forward["BLOCK"] >= categories
            assert own.LEAST_BYTES <= forward["STRIP"] * size <= own.MOST_BYTES
            programs, lag, sizes = own.backward_sizes(count, categories, size, mode)
            number = -(-count // sizes["STRIP"])
            length = sizes["TURNS"] * sizes["PIECES"] * sizes["BLOCK"]
            assert own.LEAST_BYTES <= sizes["STRIP"] * size <= own.TILE_BYTES
            assert (sizes["SEGMENTS"] - 1) * length < categories <= sizes["SEGMENTS"] * length
            assert sizes["SEGMENTS"] <= min(sizes["SLOTS"], own.MOST_SEGMENTS)
            if sizes["SEGMENTS"] == 1:
                assert (programs, lag, sizes["TURNS"]) == (number, 0, 1)
            else:
                assert programs == 2 * number * sizes["SEGMENTS"]
                assert sizes["SEGMENTS"] <= lag <= programs // 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs run side by side on a GPU only")
@pytest.mark.parametrize("name", ["gst", *SECOND_ORDER, "gumbel-softmax"])
def test_tiles_have_the_same_bits_every_time(name: str) -> None:
    """Many strips, so that some programs wait while others run; then with so short a lag that many wait."""
    logits = torch.randn(16, 8192, 1024, device="cuda").movedim(1, -1)
    grad, fused = torch.empty_like(logits).normal_(), FUSED[name]
    sample = launch.forward(logits, key(), fused, dense=False)
    first = backward(logits, sample, grad, fused)
    assert all(torch.equal(first, backward(logits, sample, grad, fused)) for _ in range(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strips, "AHEAD", 0)
        assert all(torch.equal(first, backward(logits, sample, grad, fused)) for _ in range(10))
    copied = backward(logits.contiguous(), sample, grad.contiguous(), fused)
    assert_equal_but_for_order(first, copied, logits, grad, sample.indices, name)


# The order of the programs that share strips, by enumeration.


@triton.jit
def _order_kernel(p_out, s_strips, s_lag, SEGMENTS: tl.constexpr):
    s_program = tl.program_id(0)
    s_tile, s_writes = task_of(s_program, s_strips * SEGMENTS, s_lag)
    tl.store(p_out + 3 * s_program, s_writes.to(tl.int32))
    tl.store(p_out + 3 * s_program + 1, s_tile // SEGMENTS)
    tl.store(p_out + 3 * s_program + 2, s_tile % SEGMENTS)


@pytest.mark.parametrize(
    ("count", "segments", "ahead"), [(1, 2, 0), (5, 3, 0), (5, 3, 1), (6, 4, 3), (7, 2, 100), (3, 5, 2)]
)
def test_a_program_waits_for_lower_numbers_only(count: int, segments: int, ahead: int) -> None:
    """Every tile is summed once and written once, after all tiles of its strip were summed."""
    tiles = count * segments
    lag = min(segments + ahead, tiles)
    out = torch.empty(2 * tiles, 3, dtype=torch.int32, device=DEVICE)
    _order_kernel[(2 * tiles,)](out, count, lag, SEGMENTS=segments)
    tasks = [tuple(task) for task in out.tolist()]
    wanted = [
        (writes, strip, segment) for writes in (0, 1) for strip in range(count) for segment in range(segments)
    ]
    assert sorted(tasks) == wanted
    number = {task: program for program, task in enumerate(tasks)}
    for (writes, strip, segment), program in number.items():
        if writes:
            assert all(number[0, strip, other] < program for other in range(segments))
            # Not much later than it was summed: the cache would have lost it.
            assert program - number[0, strip, segment] <= 2 * lag + 1
