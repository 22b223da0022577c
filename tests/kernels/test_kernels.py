"""The fused kernels against their references: output and gradient, awkward shapes, poisoned buffers.

Without a GPU they run in Triton's interpreter. The same tests run on a GPU with `pytest -m gpu`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import USES
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import gapped
from gapped import simplex
from gapped.gradient import with_points
from gapped.kernels import blocks, launch
from gapped.kernels.launch import Fused
from gapped.pathwise import Draw, Pathwise

triton = pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    # The interpreter takes milliseconds for every program, whatever its size.
    blocks.BLOCK = blocks.RAO_BLOCK = (1 << 16, 4)
    blocks.PROGRAMS = 1
    blocks.PART_BYTES = 1 << 16
# The examples have few rows, and tests of their own for what that changes.
blocks.SPREAD_ELEMENTS = 0
SAMPLES = 6
ESTIMATORS: dict[str, Pathwise] = {
    "gst": gapped.GST(tau=0.5, gap=1.2),
    "gst-expected": gapped.GST(tau=0.7, gap=gapped.expected_gap),
    "nz-gst": gapped.GST(tau=0.8, gap=0.7, detach=False),
    "straight-through": gapped.StraightThrough(tau=0.5),
    "reinmax": gapped.ReinMax(tau=1.3),
    "gumbel-softmax": gapped.GumbelSoftmax(tau=0.5),
    "decoupled": gapped.DecoupledGumbelSoftmax(tau=0.6, tau_forward=1.5),
    "gumbel-rao": gapped.GumbelRao(tau=0.5, samples=SAMPLES),
}
# A kernel accumulates in float32 in another order than its reference.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def example(rows: int, categories: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    logits = 2 * torch.randn(rows, categories, generator=generator)
    if rows > 3:
        logits[1] = -torch.inf
        logits[2, 1:] = -torch.inf
        logits[3] *= 100
    return logits.to(DEVICE)


def key(value: int = 11) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=DEVICE)


def noise(rows: int, categories: int, kind: int = 0, draw: int = 0) -> Tensor:
    """What the kernels draw: Gumbels (0), or the exponentials of a Gumbel-Rao draw (1)."""
    from gapped.kernels.fused import noise_kernel

    out = torch.full((rows, categories), torch.nan, device=DEVICE)
    programs, held = blocks.partition(rows, categories)
    flags = {"KIND": kind, "FINE": categories > launch.LONGEST_BLOCK, "FAST": out.is_cuda, **held}
    noise_kernel[(programs,)](key(), out, rows, categories, draw, **flags)
    return out


def reference(estimator: Pathwise, logits: Tensor, index: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Soft sample and gradient of the plain implementation, for the index and the noise of the kernel."""
    rows, categories = logits.shape
    exists = (index < categories).unsqueeze(-1)
    shifted = torch.where(exists, simplex.shift(logits), 0.0)
    extra = None
    if isinstance(estimator, gapped.GumbelSoftmax):
        extra = simplex.shift(shifted + noise(rows, categories))
    elif isinstance(estimator, gapped.DecoupledGumbelSoftmax):
        extra = -noise(rows, categories)
    elif isinstance(estimator, gapped.GumbelRao):
        log_e = torch.stack([noise(rows, categories, 1, draw) for draw in range(SAMPLES)]).double().log()
        where = simplex.place(index, categories).expand(SAMPLES, rows, 1)
        winner = log_e.gather(-1, where)
        log_p = simplex.log_softmax(logits.double())
        extra = torch.logaddexp(log_e - log_p, winner).scatter(-1, where, winner).neg().float()
    points, weights = estimator.points(shifted, Draw(index.clamp(max=categories - 1), extra))
    points = torch.where(exists, points, 0.0)
    leaf = logits.clone().requires_grad_()
    with_points(torch.zeros_like(logits), estimator.carrier(leaf, index), points, weights).backward(grad)
    assert leaf.grad is not None
    return points.mean(0), leaf.grad


LENGTHS = (1, 2, 3, 10, 63, 64, 65, 1000, 4096, 4097, 8193, 32_000, 128_256)


def cases() -> list[Any]:
    """Every estimator with every length; the longest rows with noise take the interpreter very long."""
    noisy = ("gumbel-rao", "decoupled")
    pairs = [(name, length) for name in ESTIMATORS for length in LENGTHS] + [("gst", 1_000_000)]
    return [
        pytest.param(
            *pair, marks=[pytest.mark.slow] if pair[1] > (32_000 if pair[0] in noisy else 200_000) else []
        )
        for pair in pairs
    ]


@pytest.mark.parametrize(("name", "categories"), cases())
def test_value_and_gradient_equal_the_reference(name: str, categories: int) -> None:
    """Rows longer than a block are streamed: the same test for both."""
    estimator = ESTIMATORS[name]
    rows = 37 if categories <= 1000 else 4
    logits = example(rows, categories)
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    fused = estimator.fused()
    assert fused is not None
    if launch.refusal(logits, fused):
        pytest.skip("the NZ ablation has no kernel for long rows")
    value, index, stats = launch.forward(logits, key(), fused)
    assert torch.equal(value, simplex.one_hot(index.long(), categories, torch.float32))
    assert index[1] == categories
    assert bool((index[[0, 2, 3]] < categories).all())
    if name in ("gumbel-softmax", "decoupled"):
        tau = getattr(estimator, "tau_forward", 1.0)
        expected = simplex.argmax_index(simplex.shift(logits) / tau + noise(rows, categories))
        assert torch.equal(index.long(), expected)
    found = launch.backward(logits, index, stats, key(), grad, fused)
    soft_reference, reference_gradient = reference(estimator, logits, index.long(), grad)
    torch.testing.assert_close(found, reference_gradient, **TOLERANCE)
    if name == "reinmax":
        return
    soft, same, _ = launch.forward(logits, key(), replace(fused, soft=True))
    assert torch.equal(same, index)
    torch.testing.assert_close(soft, soft_reference, **TOLERANCE)


@pytest.mark.parametrize("categories", [7, 5000])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_gradient_at_the_chosen_entries_equals_a_dense_one(name: str, categories: int) -> None:
    fused = ESTIMATORS[name].fused()
    assert fused is not None
    logits = example(5, categories)
    if launch.refusal(logits, fused):
        pytest.skip("the NZ ablation has no kernel for long rows")
    value, index, stats = launch.forward(logits, key(), fused)
    empty, again, _ = launch.forward(logits, key(), fused, dense=False)
    assert empty.numel() == 0
    assert torch.equal(index, again)
    one = torch.randn(5, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    sparse = launch.backward(logits, index, stats, key(), one, fused, at_index=True)
    dense = launch.backward(logits, index, stats, key(), value * one.unsqueeze(-1), fused)
    torch.testing.assert_close(sparse, dense)


@pytest.mark.parametrize("categories", [5, 4100])
@pytest.mark.parametrize("name", ["gst", "straight-through", "reinmax", "gumbel-softmax"])
def test_tensor_options_equal_a_row_by_row_loop(name: str, categories: int) -> None:
    logits = example(4, categories)
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    taus = torch.linspace(0.3, 2.0, 4, device=DEVICE)
    gaps = torch.linspace(0.0, 3.0, 4, device=DEVICE)
    _, index, stats = launch.forward(logits, key(), Fused(name, taus))
    together = launch.backward(logits, index, stats, key(), grad, Fused(name, taus, gap=gaps))
    for row in (0, 3):
        fused = Fused(name, taus[row].item(), gap=gaps[row].item())
        alone = launch.backward(logits, index, stats, key(), grad, fused)
        torch.testing.assert_close(together[row], alone[row])


@pytest.mark.parametrize("categories", [10, 8200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gst", "gumbel-softmax", "straight-through", "reinmax", "decoupled"])
def test_half_precision_is_computed_in_float32_and_rounded_once(
    name: str, dtype: torch.dtype, categories: int
) -> None:
    logits, fused = example(4, categories).to(dtype), ESTIMATORS[name].fused()
    assert fused is not None
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    value, index, stats = launch.forward(logits, key(), fused)
    assert value.dtype == dtype
    assert set(value.flatten().tolist()) <= {0.0, 1.0}
    _, same, _ = launch.forward(logits.float(), key(), fused)
    assert torch.equal(index, same)
    exact = launch.backward(logits.float(), index, stats, key(), grad.float(), fused)
    found = launch.backward(logits, index, stats, key(), grad, fused)
    limits = torch.finfo(dtype)
    # The interpreter truncates to bfloat16 where a GPU rounds: one unit in the last place, not half of it.
    # Long rows of halves are added up in another order, which shows in the last places of float32.
    units = 1.0 if DEVICE.type == "cpu" else 0.501
    # Below float32's smallest normal number the kernels may have 0 instead.
    least = max(units * limits.eps * limits.tiny, torch.finfo(torch.float32).tiny)
    torch.testing.assert_close(found.float(), exact, rtol=units * limits.eps, atol=least)


@pytest.mark.parametrize("categories", [10, 4101])
def test_strided_rows_equal_contiguous_ones(categories: int) -> None:
    wide = example(4, categories + 14)
    view, fused = wide[:, 3 : 3 + categories], Fused("gst", 0.5, gap=1.0)
    assert not view.is_contiguous()
    grad = torch.randn(categories, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE).t()
    value, index, stats = launch.forward(view, key(), fused)
    plain_value, plain_index, _ = launch.forward(view.contiguous(), key(), fused)
    assert torch.equal(value, plain_value)
    assert torch.equal(index, plain_index)
    found = launch.backward(view, index, stats, key(), grad, fused)
    plain = launch.backward(view.contiguous(), index, stats, key(), grad.contiguous(), fused)
    assert torch.equal(found, plain)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter's, of what is overwritten later.
@pytest.mark.parametrize("categories", [5, 4100])
def test_nan_rows_come_out_as_nan_and_neighbours_do_not(
    monkeypatch: pytest.MonkeyPatch, categories: int
) -> None:
    """Every buffer starts as NaN here: an element that is not written would show in the sound rows."""

    def poisoned(make: Callable[..., Tensor], *of: object, **options: object) -> Tensor:
        made = make(*of, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(torch.iinfo(made.dtype).max)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(poisoned, getattr(torch, name)))
    logits = example(9, categories)
    logits[5, 2] = torch.nan
    logits[6, 0] = logits[7, -1] = torch.inf
    grad = torch.ones_like(logits).cumsum(-1)
    for name, estimator in ESTIMATORS.items():
        fused = estimator.fused()
        assert fused is not None
        if launch.refusal(logits, fused):
            continue
        value, index, stats = launch.forward(logits, key(), fused)
        soft, _, _ = launch.forward(logits, key(), replace(fused, soft=name != "reinmax"))
        found = launch.backward(logits, index, stats, key(), grad, fused)
        for result in (value, soft, found):
            assert result[[5, 6, 7]].isnan().all()
            assert result[[0, 1, 2, 3, 4, 8]].isfinite().all()
        assert not value[1].any()
        assert not found[1].any()


@pytest.mark.parametrize("name", ["gst", "gumbel-softmax"])
def test_samples_follow_the_logits(name: str) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, -torch.inf, 0.0], device=DEVICE)
    count = 40_000
    _, index, _ = launch.forward(logits.expand(count, 5).contiguous(), key(), Fused(name, 1.0))
    counts = counts_of(index.long().cpu(), 5)
    require_law(chi_squared(counts, logits.double().softmax(-1).cpu()))
    require_rejected(chi_squared(counts, (logits.double() / 1.5).softmax(-1).cpu()))


def test_streams_differ_between_rows_and_keys() -> None:
    first = noise(64, 16)
    assert first.unique().numel() > 0.99 * first.numel()
    uniform = Fused("straight-through", 1.0)
    flat = torch.zeros(4096, 64, device=DEVICE)
    one, other = (launch.forward(flat, key(k), uniform).chosen for k in (1, 2))
    assert 0 < (one == other).float().mean() < 0.05
    draws = torch.stack([noise(64, 16, 1, draw) for draw in range(8)])
    assert draws.unique().numel() > 0.99 * draws.numel()


LOWEST = torch.finfo(torch.float32).min


def test_large_noise_is_fine_enough_for_long_rows() -> None:
    """Of 2^20 Gumbels those above 5.6 would be equal 230 times with 23 bits each; rounding leaves a few."""
    values = noise(1, 1 << 20)
    large = values[values > 5.6]
    assert 3500 < large.numel() < 4250
    assert large.numel() - large.unique().numel() < 20
    assert values.isfinite().all()


@pytest.mark.parametrize(
    ("name", "filling"),
    [("gst", -torch.inf), ("gumbel-softmax", -1e9), ("decoupled", LOWEST)],
)
def test_samples_of_streamed_rows_follow_the_logits(
    name: str, filling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mass in different lanes and in different pieces of one lane, none in the first piece.

    What fills it is so large a number that no digit of noise is left beside it.
    """
    monkeypatch.setattr(launch, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(launch, "_STREAM", 16)
    categories, count = 37, 120 if DEVICE.type == "cpu" else 40_000
    places = torch.tensor([17, 20, 23, 33, 36])
    some = torch.tensor([0.3, -1.0, 1.0, 0.5, 0.0])
    logits = torch.full((categories,), filling).scatter(0, places, some).to(DEVICE)
    _, index, _ = launch.forward(logits.expand(count, categories), key(), Fused(name, 1.0), dense=False)
    found = torch.searchsorted(places, index.long().cpu())
    assert torch.equal(places[found], index.long().cpu())
    counts = counts_of(found, 5)
    require_law(chi_squared(counts, some.double().softmax(-1)))
    require_rejected(chi_squared(counts, (-some.double()).softmax(-1)))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # The interpreter's, where a GPU has -inf.
@pytest.mark.parametrize(
    ("name", "filling"),
    [(name, -1e9) for name in ESTIMATORS if name != "nz-gst"]
    + [("gumbel-softmax", LOWEST), ("decoupled", LOWEST)],
)
def test_streamed_pieces_far_below_cost_no_digits(
    name: str, filling: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradient where all but one of the pieces, first or last, hold a filling."""
    monkeypatch.setattr(launch, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(launch, "_STREAM", 16)
    estimator, logits = ESTIMATORS[name], torch.full((2, 37), filling, device=DEVICE)
    logits[0, 32:], logits[1, :5] = example(2, 5)
    fused = estimator.fused()
    assert fused is not None
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    soft, index, stats = launch.forward(logits, key(), replace(fused, soft=name != "reinmax"))
    assert index[0] >= 32
    assert index[1] < 5
    found = launch.backward(logits, index, stats, key(), grad, fused)
    soft_reference, reference_gradient = reference(estimator, logits, index.long(), grad)
    torch.testing.assert_close(found, reference_gradient, **TOLERANCE)
    if name != "reinmax":
        torch.testing.assert_close(soft, soft_reference, **TOLERANCE)


@pytest.mark.parametrize("samples", [1, 6, 16, 33])
@pytest.mark.parametrize("categories", [3, 40])
def test_draws_of_few_rows_are_shared_out(
    samples: int, categories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same draws, added up in another order."""
    fused = Fused("gumbel-rao", 0.5, samples=samples)
    logits = example(6, categories)
    logits[5, 1] = torch.nan
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    _, index, stats = launch.forward(logits, key(), fused, dense=False)
    alone = launch.backward(logits, index, stats, key(), grad, fused)
    monkeypatch.setattr(blocks, "SPREAD_ELEMENTS", 1 << 17)
    launch._backward.cache_clear()
    assert blocks.shares_of(*logits.shape) == 8
    shared = launch.backward(logits, index, stats, key(), grad, fused)
    launch._backward.cache_clear()
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert shared[5].isnan().all()
    assert shared[0].any()


def test_the_fewer_rows_the_more_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SPREAD_ELEMENTS", 1 << 17)
    assert [blocks.shares_of(rows, 64) for rows in (0, 256, 257, 1024, 1025, 6400)] == [8, 8, 4, 2, 1, 1]
    assert [blocks.shares_of(1, categories) for categories in (2, 100, 200, 300, 4096)] == [8, 4, 2, 1, 1]


@pytest.mark.parametrize("at_index", [False, True])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("nz-gst", "gumbel-rao")])
def test_a_row_split_over_programs_equals_one_read_twice(
    name: str, at_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four programs to a row, the last one's part not full; rows without a sample, and one with a NaN."""
    monkeypatch.setattr(launch, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(blocks, "PART_BYTES", 16 * 4)
    fused = ESTIMATORS[name].fused()
    assert fused is not None
    logits = example(6, 53)
    logits[5, 40] = torch.nan
    _, index, stats = launch.forward(logits, key(), fused, dense=False)
    shape = logits.shape[:1] if at_index else logits.shape
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert blocks.parts_of(logits, fused.mode)[0] == 4
    split = launch.backward(logits, index, stats, key(), grad, fused, at_index=at_index)
    monkeypatch.setattr(blocks, "most_parts", lambda device: 0)
    twice = launch.backward(logits, index, stats, key(), grad, fused, at_index=at_index)
    torch.testing.assert_close(split, twice, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert split[5].isnan().all()
    assert not split[1].any()
    assert split[0].any()


@pytest.mark.parametrize(("processors", "most"), [(132, 32), (14, 14)])
def test_rows_are_split_where_their_programs_fit(
    processors: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert blocks.most_parts.__wrapped__(torch.device("cuda")) == most


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs run side by side on a GPU only")
@pytest.mark.parametrize("name", ["gst", "reinmax"])
def test_programs_that_share_a_row_give_the_same_bits_every_time(name: str) -> None:
    """Whichever is first: eagerly, and at every replay of a captured graph."""
    fused = ESTIMATORS[name].fused()
    assert fused is not None
    logits = torch.randn(700, 100_000, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn_like(logits)
    _, index, stats = launch.forward(logits, key(), fused, dense=False)

    seed = key()

    def backward() -> Tensor:
        return launch.backward(logits, index, stats, seed, grad, fused)

    first = backward()
    assert all(torch.equal(first, backward()) for _ in range(20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "most_parts", lambda device: 0)
        torch.testing.assert_close(first, backward())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward()
    for _ in range(20):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(first, captured)


@pytest.mark.parametrize("hard", [True, False])
def test_an_explicit_backend_runs_or_raises(hard: bool) -> None:
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    gapped.gst(logits, hard=hard, backend="torch").square().sum().backward()
    assert gapped.backend_used() == "torch"
    z = gapped.gst(logits, hard=hard, backend="triton")
    assert gapped.backend_used() == "triton"
    z.square().sum().backward()
    gapped.gst(logits, hard=hard)
    assert gapped.backend_used() == ("triton" if DEVICE.type == "cuda" else "torch")
    gapped.gst(logits.double(), hard=hard)
    assert gapped.backend_used() == "torch"
    with pytest.raises(gapped.GappedError, match=r"backend.*float64"):
        gapped.gst(logits.double(), hard=hard, backend="triton")
    with pytest.raises(gapped.GappedError, match="no kernel"):
        gapped.gst(logits, gap=lambda p: p, hard=hard, backend="triton")
    with pytest.raises(gapped.GappedError, match="one of auto, torch, triton"):
        gapped.GST(backend="cuda")


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("gap", [1.0, torch.ones(4)])
def test_the_nz_ablation_does_not_move_a_logit_at_the_gap(gap: float | Tensor, backend: str) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0], device=DEVICE).repeat(4, 1).requires_grad_()
    z = gapped.gst(logits, gap=gap, detach=False, hard=True, backend=backend)
    (z * torch.tensor([3.0, 5.0, 11.0], device=DEVICE)).sum().backward()
    assert logits.grad is not None
    assert not logits.grad[:, 1].any()
    torch.testing.assert_close(logits.grad[:, 0], -logits.grad[:, 2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("categories", [6, 4100])
@pytest.mark.parametrize("name", ["gst", "gst-expected", "gumbel-softmax", "decoupled"])
def test_one_graph_with_the_kernel_inside(name: str, categories: int) -> None:
    """As an operator of a compiled program: same key, same sample, same gradient as the plain call."""
    from gapped.kernels import operators

    estimator = replace(ESTIMATORS[name], tau=torch.linspace(0.5, 1.5, 4, device=DEVICE))
    fused = estimator.fused()
    assert fused is not None
    logits = example(4, categories).requires_grad_()
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    program = torch.compile(
        lambda x: operators.sample(2 * x, key(), fused), backend="aot_eager", fullgraph=True
    )
    for run in (program, lambda x: operators.sample(2 * x, key(), fused)):
        value = run(logits)
        (found,) = torch.autograd.grad(value, logits, grad)
        doubled = (2 * logits).detach()
        plain, index, stats = launch.forward(doubled, key(), fused)
        assert torch.equal(value, plain)
        assert torch.equal(found, 2 * launch.backward(doubled, index, stats, key(), grad, fused))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_operators_keep_their_promises() -> None:
    """torch's own check of a custom operator: schema, shapes without data, autograd."""
    from gapped.kernels import operators

    logits = example(4, 6).requires_grad_()
    options = ("gst", None, 0.5, None, 1.0, True, None, 1.0, 1, False)
    torch.library.opcheck(operators._sample, (logits, key(), *options))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "nz-gst"])
def test_a_choice_equals_the_one_hot_sample(name: str, backend: str) -> None:
    estimator = replace(ESTIMATORS[name], backend=backend)
    generator = torch.Generator(DEVICE)
    table = torch.randn(6, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE).requires_grad_()
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    results = []
    for dense in (True, False):
        logits = example(5, 6).requires_grad_()
        generator.manual_seed(5)
        if dense:
            z = estimator.sample(logits, generator=generator)
            selected, gate = z @ table, (z * z.detach()).sum(-1)
            index = z.argmax(-1)
        else:
            choice = estimator.choose(logits, generator=generator)
            assert gapped.backend_used() == backend
            selected, gate, index = choice.select(table), choice.gate(), choice.index
            assert index[1] == 6
            index = torch.where(index == 6, 0, index)
        cost = (selected * weight).sum() + (gate * torch.arange(5, device=DEVICE)).sum()
        results.append((index, selected, gate, *torch.autograd.grad(cost, (logits, table))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_single_row_has_a_choice(backend: str) -> None:
    logits = torch.zeros(3, device=DEVICE, requires_grad=True)
    choice = gapped.gst_index(logits, backend=backend)
    assert choice.index.shape == ()
    assert choice.gate() == 1
    table = torch.eye(3, device=DEVICE)
    assert torch.equal(choice.select(table), table[choice.index])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_have_a_choice(backend: str) -> None:
    logits = torch.zeros(0, 4, device=DEVICE, requires_grad=True)
    table = torch.ones(4, 2, device=DEVICE, requires_grad=True)
    choice = gapped.gst_index(logits, backend=backend)
    (choice.select(table).sum() + choice.gate().sum()).backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 4)
    assert table.grad is not None
    assert not table.grad.any()


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("use", USES)
def test_differentiating_a_kernel_twice_is_refused(use: str, linear: bool) -> None:
    """As in `test_transforms.py`."""
    logits = example(4, 6).requires_grad_()
    used = USES[use](gapped.GST(backend="triton"), logits)
    cost = used.sum() if linear else used.square().sum()
    (gradient,) = torch.autograd.grad(cost, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        (gradient.pow(2).sum() + logits.sum()).backward()


CHANGED = pytest.mark.parametrize("changed", ["logits", "tau", "gap"])


def changeable() -> tuple[dict[str, Tensor], gapped.GST]:
    """Tensors that a kernel reads again in the backward pass, and an estimator with them."""
    leaf = torch.zeros(4, 6, device=DEVICE, requires_grad=True)
    tensors = {"logits": 1 * leaf} | {name: torch.ones(4, device=DEVICE) for name in ("tau", "gap")}
    return tensors, gapped.GST(tau=tensors["tau"], gap=tensors["gap"], backend="triton")


@CHANGED
@pytest.mark.parametrize("use", USES)
def test_what_is_changed_after_a_sample_is_noticed(use: str, changed: str) -> None:
    tensors, estimator = changeable()
    used = USES[use](estimator, tensors["logits"])
    with torch.no_grad():
        tensors[changed] += 1
    with pytest.raises(RuntimeError, match="inplace"):
        used.sum().backward()


@CHANGED
def test_what_is_changed_before_a_choice_is_used_is_noticed(changed: str) -> None:
    tensors, estimator = changeable()
    choice = estimator.choose(tensors["logits"])
    with torch.no_grad():
        tensors[changed] += 1
    with pytest.raises(RuntimeError, match="were changed after it was drawn"):
        choice.gate().sum().backward()


def test_a_choice_refuses_what_it_cannot_do() -> None:
    logits = torch.zeros(2, 3, device=DEVICE, requires_grad=True)
    with pytest.raises(gapped.GappedError, match="table"):
        gapped.gst_index(logits).select(torch.zeros(4, 2))
    with pytest.raises(gapped.GappedError, match=r"table: got a tensor of torch\.int64"):
        gapped.gst_index(logits).select(torch.arange(3))
    with pytest.raises(gapped.GappedError, match="hard"):
        gapped.GST(hard=False).choose(logits)
    with pytest.raises(gapped.GappedError, match="detach"):
        gapped.GST(detach=False).choose(logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="native code for the kernels needs a GPU")
def test_native_compiled_code_uses_the_kernel() -> None:
    seen = []

    def spy(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def program(x: Tensor) -> Tensor:
        return gapped.gst(2 * x, 0.5, True, gap=1.2)

    logits = torch.randn(64, 10, device="cuda", requires_grad=True)
    torch.compile(program, backend=spy, fullgraph=True)(logits)
    assert any("gapped.sample" in target for target in seen)
    torch._dynamo.reset()
    z = torch.compile(program, fullgraph=True)(logits)
    z.square().sum().backward()
    assert set(z.flatten().tolist()) == {0.0, 1.0}
    assert logits.grad is not None
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_captured_graph_draws_afresh_at_every_replay() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.zeros(4096, 16, device="cuda")
    out = torch.empty_like(logits)
    gapped.gst(logits, hard=True, generator=generator)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out.copy_(gapped.gst(logits, hard=True, generator=generator))
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out.argmax(-1).clone())
    assert all(0 < (a == b).float().mean() < 0.2 for a, b in pairwise(seen))


@pytest.mark.parametrize(
    ("shape", "every"),
    [((), 30), ((2, 1, 1), 15), ((2, 3, 1), 5), ((2, 3, 5), 1), ((3, 1), 1), ((5,), 1), ((2, 1, 5), 1)],
)
def test_a_level_is_read_as_it_broadcasts(shape: tuple[int, ...], every: int) -> None:
    """What is constant over the last axes of the rows is not spread over them."""
    level = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept, rows = launch._per_row(level, torch.zeros(2, 3, 5, 7))
    assert rows == every
    assert torch.equal(kept.reshape(-1)[torch.arange(30) // rows], level.expand(2, 3, 5).reshape(-1))
