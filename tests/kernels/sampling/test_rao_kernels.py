"""The kernels of Gumbel-Rao: noise, weights at every temperature, short rows against long ones, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    DEVICE,
    GPU_MARKS,
    assert_equals_reference,
    backward,
    example,
    incoming,
    key,
    tl,
    triton,
)
from live_bytes import peak_of
from scipy import integrate
from statistical import mean_is, require_law, require_rejected

import gapped
from gapped.kernels import runner
from gapped.kernels.sampling import launch, rao
from gapped.kernels.sampling.fused import Fused
from gapped.kernels.sampling.rao import ROUNDS, log2_uniform, rao_bits

pytestmark = GPU_MARKS

# 1/2 and 1 have kernels without a logarithm.
TAUS = (0.1, 0.5, 0.7, 1.0, 2.0)
LENGTHS = (1, 2, 3, 63, 65, 1000)


def gumbel_rao(tau: Any, samples: int = 6) -> Fused:
    return Fused("gumbel-rao", tau, samples=samples)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 8 categories are long, and read in chunks, four draws at a time."""
    monkeypatch.setattr(runner, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(rao, "VECTOR", 1)
    monkeypatch.setattr(rao, "WARPS", 1)
    monkeypatch.setattr(rao, "DRAWS", 4)


@triton.jit
def _philox_kernel(p_seed, p_row, p_own, p_triton, COUNT: tl.constexpr, FAST: tl.constexpr):
    b_column = tl.arange(0, COUNT)
    s_seed, s_row, s_block = tl.load(p_seed), tl.load(p_row), 5
    b_own = rao_bits(s_seed, s_row, b_column, b_column * 0 + s_block, FAST)
    b_zero = b_column.to(tl.uint32) * 0
    b_low = b_zero + s_row.to(tl.uint32)
    b_last = b_zero + (2 * (s_row >> 32) + 1).to(tl.uint32)
    b_triton = tl.philox(s_seed, b_zero + b_column.to(tl.uint32), b_low, b_zero + s_block, b_last, ROUNDS)
    for i in tl.static_range(4):
        tl.store(p_own + i * COUNT + b_column, b_own[i].to(tl.int64))
        tl.store(p_triton + i * COUNT + b_column, b_triton[i].to(tl.int64))


@pytest.mark.parametrize("row", [0, 3, 2**31 + 1, 2**33 + 7])
def test_bits_are_those_of_philox(row: int) -> None:
    own, theirs = (torch.zeros(4, 64, dtype=torch.int64, device=DEVICE) for _ in range(2))
    rows = torch.tensor([row], device=DEVICE)
    _philox_kernel[(1,)](key(2**61 + 12345), rows, own, theirs, COUNT=64, FAST=DEVICE.type == "cuda")
    assert torch.equal(own, theirs)
    assert own.unique().numel() == 256


@triton.jit
def _noise_of_bits_kernel(p_bits, p_out, COUNT: tl.constexpr, FAST: tl.constexpr):
    b_at = tl.arange(0, COUNT)
    tl.store(p_out + b_at, log2_uniform(tl.load(p_bits + b_at).to(tl.uint32), FAST))


def test_the_smallest_noise_keeps_its_digits() -> None:
    """Noise of the middle of each piece of (0, 1) next to 1, and of every 127th of the others."""
    pieces = torch.cat([torch.arange(1 << 16), torch.arange((1 << 23) - 1, 1 << 16, -127)[: 1 << 16]])
    out = torch.full(pieces.shape, torch.nan, device=DEVICE)
    bits = (pieces << 9).to(DEVICE)
    _noise_of_bits_kernel[(1,)](bits, out, COUNT=len(pieces), FAST=DEVICE.type == "cuda")
    exact = torch.log1p(-(pieces + 0.5).double() / (1 << 23)) / np.log(2)
    noise = out.cpu().double()
    assert bool((noise < 0).all())
    assert bool(noise.isfinite().all())
    torch.testing.assert_close(noise[: 1 << 16], exact[: 1 << 16], rtol=1e-4, atol=0.0)
    # Of the largest noise the uniform is known up to half a piece.
    torch.testing.assert_close(noise.exp2(), exact.exp2(), rtol=1e-5, atol=0.51 / (1 << 23))


@pytest.mark.parametrize(("tau", "p"), [(0.5, 0.3), (0.5, 1e-3), (1.0, 0.01), (0.7, 1e-3)])
def test_draws_have_the_conditional_law(tau: float, p: float) -> None:
    """Of two categories with probabilities 1 - p and p: given the first, the mean weight of the second.

    The ratio R of two exponentials has the density (1 + R)^-2; the weight is w / (1 + w) with
    w = (1 + R / p)^(-1/tau), up to the factor that the first one's noise is divided by 1 - p too.
    """

    def mean_weight(p: float) -> float:
        def integrand(log_r: float) -> float:
            r = np.exp(log_r)
            w = (1 + r / p) ** (-1 / tau)
            return float(w / (1 + w) * r / (1 + r) ** 2)

        return float(integrate.quad(integrand, -60, 60, points=[np.log(p), 0.0], epsabs=1e-14, limit=500)[0])

    rows = 60_000
    logits = torch.tensor([np.log1p(-p), np.log(p)], dtype=torch.float32, device=DEVICE).expand(rows, 2)
    soft = launch.forward(logits.contiguous(), key(), replace(gumbel_rao(tau, 4), soft=True))
    weights = soft.value[soft.indices == 0, 1].cpu()
    require_law(mean_is(weights, mean_weight(p)))
    require_rejected(mean_is(weights, mean_weight(1.5 * p)))


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("categories", LENGTHS)
def test_every_temperature_equals_the_reference(tau: float, categories: int) -> None:
    logits = example(5, categories)
    logits[4, 1:] -= 200
    assert_equals_reference(gapped.GumbelRao(tau=tau, samples=5), logits)


@pytest.mark.slow_if(lambda tau, is_long, **_: is_long and tau != 0.7)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # The interpreter's, where a GPU has -inf.
@pytest.mark.parametrize(
    ("tau", "filling", "is_long"),
    [(tau, filling, False) for tau in TAUS for filling in (-torch.inf, -1e9)]
    + [(0.5, -torch.inf, True), (0.7, -1e9, True), (1.0, -torch.inf, True)],
)
def test_masked_categories_get_nothing_at_all(
    tau: float, filling: float, is_long: bool, request: pytest.FixtureRequest
) -> None:
    if is_long:
        request.getfixturevalue("small_chunks")
    logits = example(5, 37)
    logits[0, 3:] = logits[4, ::2] = filling
    sample = assert_equals_reference(gapped.GumbelRao(tau=tau, samples=3), logits)
    soft = launch.forward(logits, key(), replace(gumbel_rao(tau, 3), soft=True)).value
    gradient = backward(logits, sample, incoming(5, 37), gumbel_rao(tau, 3))
    for result in (soft, gradient):
        assert not result[0, 3:].any()
        assert not result[4, ::2].any()
        assert not result[1].any()
        assert result[0].any()
    # With all mass on one category there is nothing to move.
    assert not gradient[2].any()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("samples", "at_index"), [(1, False), (4, False), (9, False), (6, True)])
def test_chunks_and_batches_of_draws_equal_one_block(
    samples: int, at_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, fused = example(4, 37), gumbel_rao(0.7, samples)
    grad = incoming(4) if at_index else incoming(4, 37)
    sample = launch.forward(logits, key(), replace(fused, soft=True))
    chunked = backward(logits, sample, grad, fused, at_index=at_index)
    monkeypatch.setattr(runner, "LONGEST_BLOCK", 4096)
    torch.testing.assert_close(chunked, backward(logits, sample, grad, fused, at_index=at_index))
    soft = torch.empty_like(logits)
    launch._average_draws(logits, sample.indices, None, key(), None, fused, soft)
    torch.testing.assert_close(sample.value, soft)


@pytest.mark.parametrize("categories", [7, 5000])
def test_a_temperature_for_each_row_equals_a_row_by_row_loop(categories: int) -> None:
    """Also where a number would have a kernel of its own."""
    taus = torch.tensor([0.5, 0.1, 1.0, 2.0], device=DEVICE)
    logits, grad = incoming(4, categories), incoming(4, categories)
    sample = launch.forward(logits, key(), gumbel_rao(taus, 2))
    together = backward(logits, sample, grad, gumbel_rao(taus, 2))
    for row in (0, 2):
        alone = backward(logits, sample, grad, gumbel_rao(taus[row].item(), 2))
        torch.testing.assert_close(together[row], alone[row], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "categories", "kind"),
    [
        *((dtype, 10, kind) for dtype in (torch.bfloat16, torch.float16) for kind in ("plain", "reinmax")),
        (torch.bfloat16, 5000, "plain"),
    ],
)
def test_half_precision_is_computed_in_float32_and_rounded_once(
    dtype: torch.dtype, categories: int, kind: str
) -> None:
    logits, grad = example(2, categories).to(dtype), incoming(2, categories).to(dtype)
    soft = replace(gumbel_rao(0.5, 3), soft=True)
    if kind == "reinmax":
        soft = gapped.ReinMaxRao(tau=0.5, samples=3).fused()
    sample, exact = launch.forward(logits, key(), soft), launch.forward(logits.float(), key(), soft)
    assert torch.equal(sample.indices, exact.indices)
    gradient = backward(logits, sample, grad, soft)
    pairs = (
        (sample.value, exact.value),
        (gradient, backward(logits.float(), exact, grad.float(), soft)),
    )
    for half, full in pairs:
        assert half.dtype == dtype
        # One unit in the last place where the interpreter truncates; sums of float32 in another order.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(half.float(), full, rtol=1.01 * eps, atol=max(eps * 6e-5, 1e-6))


@pytest.mark.parametrize(
    ("dtype", "hard"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
)
def test_memory_is_the_sample_and_the_gradient(dtype: torch.dtype, hard: bool) -> None:
    logits, grad = example(1, 10_000).to(dtype), incoming(1, 10_000).to(dtype)
    fused = replace(gumbel_rao(0.5, 2), soft=not hard)
    sample = launch.forward(logits, key(), fused)
    known = logits, grad, sample.value, sample.indices
    peaks = (
        peak_of(lambda: launch.forward(logits, key(), fused), logits),
        peak_of(lambda: backward(logits, sample, grad, fused), *known),
    )
    assert sample.value.dtype == backward(logits, sample, grad, fused).dtype == dtype
    assert all(logits.nbytes <= peak < 1.025 * logits.nbytes for peak in peaks)


@pytest.mark.parametrize("samples", [1, 6, 16, 33])
@pytest.mark.parametrize("categories", [3, 40])
def test_draws_of_few_rows_are_shared_out(
    samples: int, categories: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws of one program are spread over several, and so added up in another order."""
    fused = gumbel_rao(0.5, samples)
    logits, grad = example(6, categories), incoming(6, categories)
    logits[5, 1] = torch.nan
    sample = launch.forward(logits, key(), fused, dense=False)
    alone = backward(logits, sample, grad, fused)
    monkeypatch.setattr(rao, "SPREAD_ELEMENTS", 1 << 17)
    launch._rao.cache_clear()
    assert rao.shares_of(*logits.shape) == 8
    spread = backward(logits, sample, grad, fused)
    launch._rao.cache_clear()
    torch.testing.assert_close(spread, alone, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert spread[5].isnan().all()
    assert spread[0].any()
