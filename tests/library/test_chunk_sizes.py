"""How a linear choice divides its rows: memory at the shapes of language models, and what sums lose by it."""

from __future__ import annotations

import pytest
import torch
from conftest import normal, seeded
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gapped
from gapped.vocabulary import head
from gapped.vocabulary.head import (
    MEMORY,
    MOST_ROUNDINGS,
    add_rows,
    equal_rows,
    least_rows,
    rows_of_a_chunk,
    spans_of_chunks,
    spans_of_kernels,
)

# Rows, width and vocabulary, in bfloat16.
SHAPES = [
    (8192, 4096, 128_256), (32_768, 2048, 50_304), (8192, 4096, 151_936), (8192, 4096, 262_144),
    (8192, 4096, 32_000), (64, 4096, 128_256), (100_003, 4096, 128_256),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "width", "categories"), SHAPES)
def test_a_quarter_of_a_gigabyte_beyond_the_gradients(rows: int, width: int, categories: int) -> None:
    """With a table whose gradient has room to spare: the selected rows, and a part of incoming gradients."""
    row, result, spare = 2 * categories, 2 * rows * width, 2 * width * categories
    part, span = spans_of_kernels(rows, row, least_rows(rows), spare, result, is_dense=True)
    assert span * row <= max(spare, -(-rows // 32) * row)
    assert part <= span
    # A result of more than 0.25 GiB is the caller's.
    assert part * row + result <= max(MEMORY - head.MARGIN, result + MEMORY // 4)
    assert -(-rows // span) <= MOST_ROUNDINGS
    assert equal_rows(rows, MEMORY // row) * row <= MEMORY


@pytest.mark.parametrize(("rows", "width", "categories"), SHAPES)
def test_without_a_table_spans_come_out_of_the_same_memory(rows: int, width: int, categories: int) -> None:
    row, least, result = 2 * categories, least_rows(rows), 2 * rows * width
    part, span = spans_of_kernels(rows, row, least, 0, result, is_dense=True)
    assert -(-rows // span) <= MOST_ROUNDINGS
    if span > least:
        assert (part + span) * row + result <= max(MEMORY, result + MEMORY // 4)
    single = spans_of_kernels(rows, row, least, 0, result, is_dense=False)
    assert single.part == single.span >= span


def test_chunks_with_noise_of_their_own_are_kept_whole() -> None:
    assert spans_of_chunks(7, 100, least=1, spare=0) == (7, 7)
    assert spans_of_chunks(7, 100, least=1, spare=2500) == (7, 21)
    # No more than 32 roundings of 1000 rows: 128 rows, the multiple of a tile, and of a chunk.
    assert spans_of_chunks(7, 100, least_rows(1000), spare=0) == (7, 133)


@pytest.mark.parametrize("name", ["gumbel-rao", "reinmax-rao"])
@pytest.mark.parametrize(("device", "most"), [("cpu", 1 << 23), ("cuda", 1 << 25)])
def test_chunks_of_torch_are_divided_by_the_draws(name: str, device: str, most: int) -> None:
    """Its points of all draws take the memory that the logits of a chunk take in a kernel."""
    estimator = gapped.estimator(f"{name}:samples=16")
    by_kernel, by_torch = (rows_of_a_chunk(estimator, 4096, torch.device(device), k) for k in (True, False))
    assert by_kernel * 4 * 4096 == by_torch * 16 * 4 * 4096 == most
    # With fewer rows than 64 the products wait; one is the least.
    fewest = [rows_of_a_chunk(estimator, 1 << 25, torch.device(device), k) for k in (True, False)]
    assert fewest == [64, 4]
    hundred = gapped.estimator(f"{name}:samples=100")
    assert rows_of_a_chunk(hundred, 1 << 25, torch.device(device), False) == 1


def test_an_estimator_without_draws_has_chunks_of_one_size() -> None:
    for kind in (gapped.GST(), gapped.ReinMax(), gapped.GumbelSoftmax()):
        assert len({rows_of_a_chunk(kind, 512, torch.device("cuda"), k) for k in (True, False)}) == 1


@pytest.mark.parametrize(
    ("text", "categories", "dtype", "most"),
    [
        ("reinmax-rao:samples=16", 4096, torch.float32, 1 << 25),
        ("reinmax-rao:samples=16", 8192, torch.float32, 1 << 21),
        ("reinmax-rao:samples=16", 4096, torch.float64, 1 << 21),
        ("gumbel-rao:samples=16", 4096, torch.float32, 1 << 25),
        ("gumbel-rao:samples=16", 4096, torch.float64, 1 << 21),
    ],
)
def test_a_choice_on_a_gpu_divides_where_torch_computes(
    text: str, categories: int, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 4,096 categories ReinMax-Rao has no kernel, in float64 no estimator has one."""
    pytest.importorskip("triton")
    steps = []
    monkeypatch.setattr(head.Head, "draw", lambda own, *_: steps.append(own.step))
    with FakeTensorMode():
        hidden, weight = (torch.empty(n, 2, device="cuda", dtype=dtype) for n in (3, categories))
        gapped.linear_choice(hidden, weight, estimator=text)
    assert steps == [most // (4 * categories)]


def weight_gradient(rows: int, span: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """That of a weight whose gradient is added up in its own dtype, as on a GPU, in spans of `span` rows."""
    categories, width = 32, 16
    monkeypatch.setattr("gapped.vocabulary.rows_of_a_chunk", lambda *_: span)
    monkeypatch.setattr(head, "_sum_dtype", lambda weight: weight.dtype)
    monkeypatch.setattr(head, "MOST_ROUNDINGS", rows)
    monkeypatch.setattr(head, "TILE", 1)
    # Hidden states have few digits, and logits gradients of 31/32 and -1/32: only sums are rounded.
    hidden = (normal(rows, width) * 4).round().div(4).add(1).to(dtype)
    weight = torch.zeros(categories, width, dtype=dtype).requires_grad_()
    choice = gapped.linear_choice(hidden, weight, estimator="straight-through", generator=seeded())
    table = torch.zeros(categories, 1, dtype=dtype)
    table[0] = 32.0
    (gradient,) = torch.autograd.grad(choice.select(table).sum(), weight)
    return gradient


@pytest.mark.parametrize("spans", [1, 2, 16, 32])
def test_a_rounded_sum_is_within_a_few_roundings(spans: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root mean square error of n roundings of a growing sum is at most sqrt(n) that of one."""
    rows = 1024
    exact = weight_gradient(rows, rows, torch.float64, monkeypatch)
    once = float((exact.bfloat16() - exact).norm())
    found = weight_gradient(rows, rows // spans, torch.bfloat16, monkeypatch)
    error = float((found.double() - exact).norm())
    assert error <= once * (spans**0.5 + 1), error / once
    # Sums of one row each stop growing: the measure notices.
    if spans == 32:
        worst = weight_gradient(rows, 1, torch.bfloat16, monkeypatch)
        assert float((worst.double() - exact).norm()) > 2 * once * (spans**0.5 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_rows_of_one_place_are_added_up_before_they_are_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 ones among others, in blocks that end anywhere: one by one, the sum would stop at 256 or 2048."""
    monkeypatch.setattr(head, "SUM_BYTES", 4 * 3 * 1000)
    place = torch.cat([torch.full((4096,), 5), torch.arange(7), torch.zeros(300, dtype=torch.int64)])
    shuffled = place[torch.randperm(len(place), generator=seeded())]
    total = torch.zeros(8, 3, dtype=dtype)
    add_rows(
        total,
        shuffled,
        lambda numbers: torch.ones_like(shuffled[numbers], dtype=dtype).unsqueeze(1).expand(-1, 3),
    )
    expected = torch.bincount(place, minlength=8).unsqueeze(1).expand(-1, 3)
    # A sum that stands in several blocks is rounded in each.
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(total, expected.to(dtype), rtol=tolerance, atol=0)


def test_a_span_of_several_chunks_is_the_choice_of_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide table makes room for more rows; index and gradients do not notice."""
    monkeypatch.setattr("gapped.vocabulary.rows_of_a_chunk", lambda *_: 4)
    results = []
    for width in (3, 30):
        hidden, weight = (normal(n, 5, seed=n).requires_grad_() for n in (22, 9))
        table = torch.zeros(9, width, dtype=torch.float64)
        table[:, :3] = normal(9, 3, seed=3)
        table.requires_grad_()
        choice = gapped.linear_choice(hidden, weight, estimator="gumbel-rao", generator=seeded())
        upstream = torch.ones(22, width, dtype=torch.float64)
        *gradients, _ = torch.autograd.grad(choice.select(table), [hidden, weight, table], upstream)
        results.append([choice.index, *gradients])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
