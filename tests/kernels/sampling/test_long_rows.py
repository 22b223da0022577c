"""Rows too long for a block: read in chunks, or split over programs that exchange their sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernel_cases import (
    DEVICE,
    FUSED,
    GPU_MARKS,
    LONG,
    assert_equals_reference,
    backward,
    example,
    incoming,
    key,
    noise,
)
from torch import Tensor

from gapped.kernels.sampling import launch, long_rows, split_rows

pytestmark = GPU_MARKS

LOWEST = torch.finfo(torch.float32).min


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 8 categories are long, and read 16 at a time."""
    monkeypatch.setattr(launch, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(long_rows, "CHUNK", 16)


def test_large_noise_is_fine_enough_for_long_rows() -> None:
    """Of 2^20 Gumbels those above 5.6 would be equal 230 times with 23 bits each; rounding leaves a few."""
    values = noise(1, 1 << 20)
    large = values[values > 5.6]
    assert 3500 < large.numel() < 4250
    assert large.numel() - large.unique().numel() < 20
    assert values.isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # The interpreter's, where a GPU has -inf.
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("name", "filling"),
    [(name, -1e9) for name in LONG] + [("gumbel-softmax", LOWEST), ("decoupled", LOWEST)],
)
def test_chunks_far_below_cost_no_digits(name: str, filling: float) -> None:
    """Value and gradient where all but one of the chunks, first or last, hold a filling."""
    logits = torch.full((2, 37), filling, device=DEVICE)
    logits[0, 32:], logits[1, :5] = example(2, 5)
    sample = assert_equals_reference(name, logits)
    assert sample.indices[0] >= 32
    assert sample.indices[1] < 5


@pytest.mark.parametrize("at_index", [False, True])
@pytest.mark.parametrize("name", [name for name in LONG if name != "gumbel-rao"])
def test_a_row_split_over_programs_equals_one_read_twice(
    name: str, at_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four programs to a row, the last one's segment not full; rows without a sample, and one with a NaN."""
    monkeypatch.setattr(launch, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(split_rows, "SEGMENT_BYTES", 16 * 4)
    logits, fused = example(6, 53), FUSED[name]
    logits[5, 40] = torch.nan
    sample = launch.forward(logits, key(), fused, dense=False)
    grad = incoming(6) if at_index else incoming(6, 53)
    assert split_rows.segments_of(logits, fused.mode)[0] == 4
    split = backward(logits, sample, grad, fused, at_index=at_index)
    monkeypatch.setattr(split_rows, "most_segments", lambda device: 0)
    twice = backward(logits, sample, grad, fused, at_index=at_index)
    torch.testing.assert_close(split, twice, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert split[5].isnan().all()
    assert not split[1].any()
    assert split[0].any()


@pytest.mark.parametrize(("processors", "most"), [(132, 32), (14, 14)])
def test_rows_are_split_where_their_programs_fit(
    processors: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert split_rows.most_segments.__wrapped__(torch.device("cuda")) == most


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs run side by side on a GPU only")
@pytest.mark.parametrize("name", ["gst", "reinmax"])
def test_programs_that_share_a_row_give_the_same_bits_every_time(name: str) -> None:
    """Whichever is first: eagerly, and at every replay of a captured graph."""
    logits = torch.randn(700, 100_000, device="cuda", dtype=torch.bfloat16)
    grad, seed, fused = torch.randn_like(logits), key(), FUSED[name]
    _, index, stats = launch.forward(logits, seed, fused, dense=False)

    def gradient() -> Tensor:
        return launch.backward(logits, index, stats, seed, grad, fused)

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_rows, "most_segments", lambda device: 0)
        torch.testing.assert_close(first, gradient())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gradient()
    for _ in range(20):
        replayed.fill_(torch.nan)
        graph.replay()
        assert torch.equal(first, replayed)
