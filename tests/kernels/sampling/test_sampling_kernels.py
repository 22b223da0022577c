"""The sampling kernels against their references: output and gradient, awkward shapes, poisoned buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import seeded
from kernel_cases import (
    DEVICE,
    ESTIMATORS,
    FUSED,
    GPU_MARKS,
    LONG,
    NATIVE,
    TOLERANCE,
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
from gapped.kernels import backend, runner
from gapped.kernels.sampling import launch, long
from gapped.kernels.sampling.fused import Fused
from gapped.kernels.sampling.surrogates import SECOND_ORDER

pytestmark = GPU_MARKS

# The interpreter warns of what a row without a law makes of itself, before that is overwritten.
lawless_rows = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LOWEST = torch.finfo(torch.float32).min
LENGTHS = (1, 2, 3, 10, 63, 64, 65, 1000, 4096, 4097, 8193, 32_000, 128_256)


def cases() -> list[Any]:
    """Every estimator with every length; the longest rows with noise take the interpreter very long."""
    pairs = [(name, length) for name in ESTIMATORS for length in LENGTHS if name in LONG or length <= 4096]
    limits = {"gumbel-rao": 5000, "decoupled": 5000, "gumbel-softmax": 32_000}
    return [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] > limits.get(pair[0], 200_000) else [])
        for pair in [*pairs, ("gst", 1_000_000)]
    ]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 8 categories are long, and read 16 at a time."""
    monkeypatch.setattr(runner, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(long, "CHUNK", 16)


@pytest.fixture
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows side by side of more than 8 categories are long, too."""
    make_strips_small(monkeypatch)


def in_columns(logits: Tensor) -> Tensor:
    """The same rows, side by side in memory."""
    return logits.t().contiguous().t()


# Every estimator with a short row, and with a long one where it has a kernel for that.
short_and_long = pytest.mark.parametrize(
    ("name", "categories"), [(name, 7) for name in ESTIMATORS] + [(name, 5000) for name in LONG]
)


@pytest.mark.slow_if(lambda name, categories: name != "gst" and categories >= 32_000)
@pytest.mark.parametrize(("name", "categories"), cases())
def test_value_and_gradient_equal_the_reference(name: str, categories: int) -> None:
    """Short rows in one block, long ones in chunks or segments."""
    rows = 37 if categories <= 1000 else 4
    logits = example(rows, categories)
    sample = assert_equals_reference(ESTIMATORS[name], logits)
    index = sample.indices.long()
    assert torch.equal(sample.value, simplex.one_hot(index, categories, torch.float32))
    assert index[1] == categories
    assert bool((index[[0, 2, 3]] < categories).all())
    if name in ("gumbel-softmax", "decoupled"):
        tau = getattr(ESTIMATORS[name], "tau_forward", 1.0)
        scores = simplex.shift(logits) / tau + noise(rows, categories)
        assert torch.equal(index, simplex.argmax_index(scores))


@short_and_long
def test_a_gradient_at_the_selected_entries_equals_a_dense_one(name: str, categories: int) -> None:
    logits, fused, one = example(5, categories), FUSED[name], incoming(5)
    sample = launch.forward(logits, key(), fused)
    index_only = launch.forward(logits, key(), fused, dense=False)
    assert index_only.value.numel() == 0
    assert torch.equal(sample.indices, index_only.indices)
    sparse = backward(logits, sample, one, fused, at_index=True)
    torch.testing.assert_close(sparse, backward(logits, sample, sample.value * one.unsqueeze(-1), fused))


@lawless_rows
@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(("categories", "lie"), [(5, Tensor.clone), (4100, Tensor.clone), (21, in_columns)])
@pytest.mark.parametrize("name", ["gst", "straight-through", "reinmax", "gapmax-tempered", "gumbel-softmax"])
def test_tensor_options_equal_a_row_by_row_loop(
    name: str, categories: int, lie: Callable[[Tensor], Tensor]
) -> None:
    logits, grad = lie(example(4, categories)), incoming(4, categories)
    taus = torch.linspace(0.3, 2.0, 4, device=DEVICE)
    gaps = torch.linspace(0.0, 3.0, 4, device=DEVICE)
    sample = launch.forward(logits, key(), Fused(name, taus))
    together = backward(logits, sample, grad, Fused(name, taus, gap=gaps))
    for row in (0, 3):
        alone = backward(logits, sample, grad, Fused(name, taus[row].item(), gap=gaps[row].item()))
        torch.testing.assert_close(together[row], alone[row])


@lawless_rows
@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(("categories", "lie"), [(10, Tensor.clone), (8200, Tensor.clone), (21, in_columns)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gst", "gumbel-softmax", "straight-through", *SECOND_ORDER, "decoupled"])
def test_half_precision_is_computed_in_float32_and_rounded_once(
    name: str, dtype: torch.dtype, categories: int, lie: Callable[[Tensor], Tensor]
) -> None:
    logits, fused = lie(example(4, categories).to(dtype)), FUSED[name]
    grad = lie(incoming(4, categories).to(dtype))
    sample = launch.forward(logits, key(), fused)
    assert sample.value.dtype == dtype
    assert set(sample.value.flatten().tolist()) <= {0.0, 1.0}
    assert torch.equal(sample.indices, launch.forward(logits.float(), key(), fused).indices)
    exact = backward(logits.float(), sample, grad.float(), fused)
    gradient = backward(logits, sample, grad, fused)
    limits = torch.finfo(dtype)
    # The interpreter truncates to bfloat16 where a GPU rounds: one unit in the last place, not half of it.
    # Long rows of halves are added up in another order, which shows in the last places of float32.
    units = 1.0 if DEVICE.type == "cpu" else 0.501
    # Below float32's smallest normal number the kernels may have 0 instead.
    least = max(units * limits.eps * limits.tiny, torch.finfo(torch.float32).tiny)
    torch.testing.assert_close(gradient.float(), exact, rtol=units * limits.eps, atol=least)


@pytest.mark.parametrize("categories", [10, 4101])
def test_strided_rows_equal_contiguous_ones(categories: int) -> None:
    wide = example(4, categories + 14)
    view, fused = wide[:, 3 : 3 + categories], Fused("gst", 0.5, gap=1.0)
    assert not view.is_contiguous()
    grad = incoming(categories, 4).t()
    sample, plain = (launch.forward(logits, key(), fused) for logits in (view, view.contiguous()))
    assert torch.equal(sample.value, plain.value)
    assert torch.equal(sample.indices, plain.indices)
    gradient = backward(view, sample, grad, fused)
    assert torch.equal(gradient, backward(view.contiguous(), sample, grad.contiguous(), fused))


@lawless_rows
@pytest.mark.usefixtures("small_strips")
@pytest.mark.parametrize(
    ("name", "categories", "lie"),
    [
        *((name, 7, Tensor.clone) for name in ESTIMATORS),
        *((name, 5000, Tensor.clone) for name in LONG),
        *((name, 37, in_columns) for name in NATIVE),
        ("gst", 7, in_columns),
    ],
)
def test_nan_rows_come_out_as_nan_and_neighbours_do_not(
    name: str, categories: int, lie: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer starts as NaN here: an element that is not written would show in the sound rows."""

    def poison(allocate: Callable[..., Tensor], *of: object, **options: object) -> Tensor:
        buffer = allocate(*of, **options)
        return buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)

    logits = lie(example(9, categories))
    logits[5, 2] = torch.nan
    logits[6, 0] = logits[7, -1] = torch.inf
    for function in ("empty", "empty_like"):
        monkeypatch.setattr(torch, function, partial(poison, getattr(torch, function)))
    sample = launch.forward(logits, key(), FUSED[name])
    soft = launch.forward(logits, key(), replace(FUSED[name], soft=ESTIMATORS[name].has_surrogate))
    gradient = backward(logits, sample, torch.ones_like(logits).cumsum(-1), FUSED[name])
    for result in (sample.value, soft.value, gradient):
        assert result[[5, 6, 7]].isnan().all()
        assert result[[0, 1, 2, 3, 4, 8]].isfinite().all()
    assert not sample.value[1].any()
    assert not gradient[1].any()
    assert sample.indices[[5, 6, 7]].tolist() == [categories + 1] * 3


def test_streams_differ_between_rows_and_keys() -> None:
    draws = torch.stack([noise(64, 16, draw) for draw in range(8)])
    for values in (noise(64, 16), draws):
        assert values.unique().numel() > 0.99 * values.numel()
    flat = torch.zeros(4096, 64, device=DEVICE)
    one, other = (launch.forward(flat, key(k), Fused("straight-through", 1.0)).indices for k in (1, 2))
    assert 0 < (one == other).float().mean() < 0.05


FILLINGS = {"gst": -torch.inf, "gumbel-softmax": -1e9, "decoupled": LOWEST}


@pytest.mark.parametrize(
    ("name", "layout"),
    # Draws from strips by noise are replayed in test_strips.py.
    [*((name, layout) for name in FILLINGS for layout in ("short", "chunks")), ("gst", "strips")],
)
def test_samples_follow_the_logits(name: str, layout: str, request: pytest.FixtureRequest) -> None:
    """Mass in different lanes, and in different chunks of one lane; a filling that leaves noise no digits."""
    if layout != "short":
        request.getfixturevalue(f"small_{layout}")
    # The interpreter takes milliseconds for every long row.
    few = {"chunks": 120, "strips": 400} if DEVICE.type == "cpu" else {}
    categories, count = 37, few.get(layout, 40_000)
    places = torch.tensor([17, 20, 23, 33, 36])
    values = torch.tensor([0.3, -1.0, 1.0, 0.5, 0.0])
    row = torch.full((categories,), FILLINGS[name]).scatter(0, places, values).to(DEVICE)
    logits = in_columns(row.expand(count, -1)) if layout == "strips" else row.expand(count, -1)
    sample = launch.forward(logits, key(), Fused(name, 1.0), dense=False)
    index = sample.indices.long().cpu()
    category = torch.searchsorted(places, index)
    assert torch.equal(places[category], index)
    counts = counts_of(category, 5)
    require_law(chi_squared(counts, values.double().softmax(-1)))
    wrong = values / 1.5 if count > 400 else -values
    require_rejected(chi_squared(counts, wrong.double().softmax(-1)))


@pytest.mark.parametrize(
    ("shape", "every"),
    [((), 30), ((2, 1, 1), 15), ((2, 3, 1), 5), ((2, 3, 5), 1), ((3, 1), 1), ((5,), 1), ((2, 1, 5), 1)],
)
def test_a_level_is_read_as_it_broadcasts(shape: tuple[int, ...], every: int) -> None:
    """A level that is constant over the last axes of the rows is not expanded over them."""
    level = torch.randn(shape, generator=seeded())
    entries, rows = backend.per_row(level, torch.zeros(2, 3, 5, 7))
    assert rows == every
    assert torch.equal(entries.reshape(-1)[torch.arange(30) // rows], level.expand(2, 3, 5).reshape(-1))


# Rows too long for a block: read in chunks, or split over programs that exchange their sums


def test_large_noise_is_fine_enough_for_long_rows() -> None:
    """Of 2^20 Gumbels those above 5.6 would be equal 230 times with 23 bits each; rounding leaves a few."""
    values = noise(1, 1 << 20)
    large = values[values > 5.6]
    assert 3500 < large.numel() < 4250
    assert large.numel() - large.unique().numel() < 20
    assert values.isfinite().all()


@lawless_rows
@pytest.mark.usefixtures("small_chunks", "small_strips")
@pytest.mark.parametrize(
    ("name", "filling", "lie"),
    [
        *((name, -1e9, Tensor.clone) for name in LONG),
        *((name, -1e9, in_columns) for name in NATIVE),
        ("gumbel-softmax", LOWEST, Tensor.clone),
        *(("decoupled", LOWEST, lie) for lie in (Tensor.clone, in_columns)),
    ],
)
def test_chunks_far_below_cost_no_digits(name: str, filling: float, lie: Callable[[Tensor], Tensor]) -> None:
    """Value and gradient where all but one of the chunks, first or last, hold a filling."""
    logits = lie(torch.full((2, 37), filling, device=DEVICE))
    logits[0, 32:], logits[1, :5] = example(2, 5)
    sample = assert_equals_reference(ESTIMATORS[name], logits)
    assert sample.indices[0] >= 32
    assert sample.indices[1] < 5


@lawless_rows
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in ESTIMATORS for layout in ("short", "strips")]
    + [(name, layout) for name in LONG for layout in ("chunks", "split")],
)
def test_what_comes_in_at_a_masked_category_does_not_count(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, grad, fused = example(6, 53), incoming(6, 53), FUSED[name]
    logits[4, ::2] = -torch.inf
    if layout == "strips":
        make_strips_small(monkeypatch)
        logits, grad = (each.T.contiguous().T for each in (logits, grad))
    elif layout != "short":
        monkeypatch.setattr(runner, "LONGEST_BLOCK", 8)
        monkeypatch.setattr(long, "SEGMENT_BYTES", 16 * 4)
        if layout == "chunks":
            monkeypatch.setattr(long, "most_segments", lambda device: 0)
    absent = logits == -torch.inf
    sample = launch.forward(logits, key(), fused, dense=False)
    expected = backward(logits, sample, grad.masked_fill(absent, 0.0), fused)
    for anything in (torch.nan, torch.inf):
        gradient = backward(logits, sample, grad.masked_fill(absent, anything), fused)
        assert torch.equal(gradient, expected)
    assert expected[4].any()
    assert not expected[absent].any()


@pytest.mark.parametrize("at_index", [False, True])
@pytest.mark.parametrize("name", [name for name in LONG if name != "gumbel-rao"])
def test_a_row_split_over_programs_equals_one_read_twice(
    name: str, at_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four programs to a row, the last one's segment not full; rows without a sample, and one with a NaN."""
    monkeypatch.setattr(runner, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(long, "SEGMENT_BYTES", 16 * 4)
    logits, fused = example(6, 53), FUSED[name]
    logits[5, 40] = torch.nan
    sample = launch.forward(logits, key(), fused, dense=False)
    grad = incoming(6) if at_index else incoming(6, 53)
    assert long.segments_of(logits, fused.mode)[0] == 4
    split = backward(logits, sample, grad, fused, at_index=at_index)
    monkeypatch.setattr(long, "most_segments", lambda device: 0)
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
    assert long.most_segments.__wrapped__(torch.device("cuda")) == most


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs run side by side on a GPU only")
@pytest.mark.parametrize("name", ["gst", *SECOND_ORDER])
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
        patch.setattr(long, "most_segments", lambda device: 0)
        torch.testing.assert_close(first, gradient())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = gradient()
    for _ in range(20):
        replayed.fill_(torch.nan)
        graph.replay()
        assert torch.equal(first, replayed)


# Choices without logits: long rows in parts, gradients in place, the law.


pytestmark = GPU_MARKS
ROWS, CATEGORIES = 6, 4100
every_long = pytest.mark.parametrize("name", LONG)


def drawn(rows: int = ROWS) -> launch.Streamed:
    stats, law = (torch.full((rows, 2), torch.nan, device=DEVICE) for _ in range(2))
    return launch.Streamed(torch.full((rows,), -1, dtype=torch.int64, device=DEVICE), stats, law)


def part_of(whole: launch.Streamed, rows: slice) -> launch.Streamed:
    assert whole.law is not None
    return launch.Streamed(whole.indices[rows], whole.stats[rows], whole.law[rows])


@every_long
def test_rows_in_parts_are_the_rows_of_one_launch(name: str) -> None:
    """Forward and backward, with the gradient in the place of the logits."""
    logits, grad, fused = example(ROWS, CATEGORIES), incoming(ROWS, CATEGORIES), FUSED[name]
    plain = launch.forward(logits, key(), fused, dense=False)
    expected = launch.backward(logits, plain.indices, plain.stats, key(), grad, fused)
    to, rows = drawn(), logits.clone()
    for part in (slice(0, 2), slice(2, 6)):
        launch.stream(logits[part], key(), fused, part_of(to, part), first=part.start)
        own = rows[part]
        indices, stats, _ = part_of(to, part)
        result = launch.backward(own, indices, stats, key(), grad[part], fused, out=own, first=part.start)
        assert result is own
    assert torch.equal(to.indices, plain.indices.long())
    assert plain.stats is not None
    assert torch.equal(to.stats, plain.stats)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gst-expected", "reinmax", "gapmax", "gumbel-softmax"])
def test_rows_that_are_read_twice_are_written_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "most_segments", lambda device: 0)
    logits, fused = example(ROWS, CATEGORIES), FUSED[name]
    grad = incoming(ROWS)
    _, index, stats = launch.forward(logits, key(), fused, dense=False)
    expected = launch.backward(logits, index, stats, key(), grad, fused, at_index=True)
    launch.backward(logits, index, stats, key(), grad, fused, at_index=True, out=logits)
    assert torch.equal(logits, expected)


def law_of(logits: Tensor, fused: Any) -> Tensor:
    warmth = fused.tau_forward
    return logits.double() / (warmth.double().unsqueeze(-1) if isinstance(warmth, Tensor) else warmth)


@pytest.mark.parametrize(("name", "per_row"), [*((name, False) for name in LONG), ("decoupled", True)])
def test_the_law_and_its_gradient(name: str, per_row: bool) -> None:
    """log p(i), the sum it is normalised by, and (e_i - p) u; a row without categories, one with a NaN."""
    logits, fused, to = example(ROWS, CATEGORIES), FUSED[name], drawn()
    if per_row:
        fused = replace(fused, tau_forward=torch.linspace(0.5, 2.0, ROWS, device=DEVICE))
    logits[5, 7] = torch.nan
    launch.stream(logits, key(), fused, to)
    assert to.law is not None
    lawful, index = [0, 2, 3, 4], to.indices
    law = law_of(logits, fused)
    log_sum, log_p = law.logsumexp(-1)[lawful], torch.log_softmax(law, -1)
    expected = log_p.gather(-1, index.clamp(max=CATEGORIES - 1).unsqueeze(-1)).squeeze(-1)[lawful]
    torch.testing.assert_close(to.law[lawful].double(), torch.stack([expected, log_sum], 1), **TOLERANCE)
    assert index[[1, 5]].tolist() == [CATEGORIES, CATEGORIES + 1]
    assert to.law[1, 0] == 0
    assert to.law[5, 0].isnan()

    u = incoming(ROWS)
    launch.pull_log_prob(logits, to, u, fused)
    slope = law_of(torch.ones_like(logits[:, :1]), fused) * u.double().unsqueeze(-1)
    score = torch.zeros_like(log_p[lawful]).scatter_(-1, index[lawful].unsqueeze(-1), 1.0)
    expected = (score - log_p[lawful].exp()) * slope[lawful]
    torch.testing.assert_close(logits[lawful].double(), expected, **TOLERANCE)
    assert not logits[1].any()
    assert logits[5].isnan().all()
