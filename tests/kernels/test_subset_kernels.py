"""The kernels for subsets of any size against enumeration and against torch in float64.

The interpreter runs one row after the other, so there are few rows, and tiles are small.
"""

from __future__ import annotations

from typing import Any

import pytest
import subset_enumeration
import torch
from conftest import assert_close, seeded
from kernel_cases import DEVICE, GPU_MARKS, incoming, key, tl, triton
from torch import Tensor

import gapped
from gapped import simplex
from gapped.kernels import backend, subsets
from gapped.kernels.backend import without_subsets
from gapped.kernels.primitives import row_block, store_rows
from gapped.kernels.runner import power
from gapped.kernels.subsets import subset_bits
from gapped.subsets import conditional_bernoulli as law

pytestmark = GPU_MARKS

# Sums of float32 numbers; what they approximate is computed in float64.
CLOSE = 2e-6
# All sizes of rows up to ten, and some of larger ones.
SIZES = [(n, k) for n in range(2, 11) for k in range(1, n)]
LARGE = [(33, 5), (129, 120)]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(subsets, "TILE", 128)


def scores_of(n: int, *scales: float) -> Tensor:
    """A row for each scale."""
    rows = torch.randn(len(scales), n, generator=seeded(n)) * torch.tensor(scales).unsqueeze(-1)
    return simplex.shift(rows).to(DEVICE)


def awkward(n: int) -> Tensor:
    """Rows of scores: equal ones, a far one, absent ones, only one, none, NaN."""
    scores = scores_of(n, 0.0, 1.0, 2.0, 1.0, 1.0, 1.0)
    scores[1], scores[1, 0] = -1e10, 0.0
    scores[2, 1::3] = -torch.inf
    scores[3, 1:] = -torch.inf
    scores[4] = -torch.inf
    scores[5] = torch.nan
    return scores


@pytest.mark.slow_if(lambda n: n in (8, 10))
@pytest.mark.parametrize("n", [2, 3, 5, 8, 10])
def test_every_size_equals_enumeration(n: int) -> None:
    scores, grad = scores_of(n, 1.0), incoming(1, n)
    theta, weight = scores[0].double().cpu(), grad[0].double().cpu()
    for k in range(1, n):
        exact = subset_enumeration.enumerate_law(theta, k)
        assert_close(subsets.log_normaliser(scores, k)[0].cpu(), exact.log_normaliser.float(), CLOSE)
        expected = subset_enumeration.marginals(theta, k)
        assert_close(subsets.marginals(scores, k)[0].cpu().double(), expected, CLOSE)
        expected = subset_enumeration.covariances(theta, k) @ weight
        assert_close(subsets.covariance_product(grad, scores, k)[0].cpu().double(), expected, CLOSE)


@pytest.mark.slow_if(lambda n, k: n == 129)
@pytest.mark.parametrize(("n", "k"), [(9, 4), *LARGE])
def test_long_and_awkward_rows_equal_torch_in_float64(n: int, k: int) -> None:
    scores = torch.cat([awkward(n), scores_of(n, 30.0)])
    grad = incoming(*scores.shape)
    exact = scores.double()
    for ours, theirs in (
        (subsets.marginals(scores, k), law.marginals(exact, k)),
        (subsets.covariance_product(grad, scores, k), law.covariance_product(grad.double(), exact, k)),
        (subsets.log_normaliser(scores, k), law.log_normaliser(exact, k)),
    ):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=CLOSE, equal_nan=True)


def test_the_gradient_of_what_does_not_exist_does_not_matter() -> None:
    scores = awkward(9)[:5]
    absent = scores == -torch.inf
    product = subsets.covariance_product(torch.where(absent, torch.nan, incoming(5, 9)), scores, 4)
    assert product.isfinite().all()
    assert not product[absent].any()
    assert not product[3:].any()


def test_a_constant_in_the_gradient_costs_no_digits() -> None:
    scores, grad = scores_of(33, 1.0), incoming(1, 33)
    product, shifted = (subsets.covariance_product(each, scores, 5) for each in (grad, grad + 1024))
    assert_close(product, shifted, 1e-4)
    assert_close(product.sum(-1), torch.zeros(1, device=DEVICE), CLOSE)


def test_how_many_points_sums_take() -> None:
    """The exact probability of all aliases of k is below float32's resolution, for equal odds."""
    for n, k in [*SIZES, *LARGE, (1024, 64), (1024, 512), (8192, 4096)]:
        binomial = torch.distributions.Binomial(n, torch.tensor(k / n, dtype=torch.float64))
        sizes = torch.arange(n + 1, dtype=torch.float64)
        alias = (sizes != k) & ((sizes - k) % (2 * subsets.frequencies(n, k)) == 0)
        p = binomial.log_prob(sizes).exp()
        assert p[alias].sum() < 1e-9 * p[k]
    assert subsets.frequencies(1024, 64) == 32


@pytest.mark.skipif(DEVICE.type != "cuda", reason="takes minutes in the interpreter")
@pytest.mark.parametrize(("n", "k"), [(1024, 64), (1024, 512), (8192, 4096)])
def test_thousands_of_elements(n: int, k: int) -> None:
    scores = torch.cat([awkward(n)[:3], scores_of(n, 1.0, 0.1)])
    grad, exact = incoming(*scores.shape), scores.double()
    assert_close(subsets.marginals(scores, k).double(), law.marginals(exact, k), 5e-6)
    expected = law.covariance_product(grad.double(), exact, k)
    assert_close(subsets.covariance_product(grad, scores, k).double(), expected, 1e-5)
    generator = torch.Generator(DEVICE).manual_seed(1)
    chosen = subsets.draw(scores.repeat(2000, 1), k, generator).view(2000, 5, n)
    assert (chosen.sum(-1) == k).all()
    # Each mean within six standard deviations, for all of 40,000 elements.
    p = law.marginals(exact, k)
    slack = 6 * (p * (1 - p) / 2000).sqrt() + 0.01
    assert ((chosen.double().mean(0) - p).abs() < slack).all()


# Samples.


@triton.jit
def _bits_kernel(p_seed, p_out, s_rows, s_attempt, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    block = row_block(s_rows, BLOCK_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    b_words = subset_bits(tl.load(p_seed), block.rows, s_attempt, BLOCK_ROWS, BLOCK_COLUMNS)
    store_rows(p_out, block, BLOCK_COLUMNS, b_words.to(tl.int64))


def replayed(scores: Tensor, k: int, most: int = 60) -> Tensor:
    """The first of several attempts that gives `k` elements, from the kernel's noise, row by row."""
    rows, n = scores.shape
    rare, _ = subsets._rare(scores, k)
    words = (rare.abs().double() * 2**32).floor()
    chosen = torch.full_like(scores, -1.0)
    size = {"BLOCK_ROWS": power(rows), "BLOCK_COLUMNS": max(power(n), 4)}
    for attempt in reversed(range(most)):
        bits = torch.empty(rows, size["BLOCK_COLUMNS"], dtype=torch.int64, device=DEVICE)
        _bits_kernel[(1,)](key(), bits, rows, attempt, **size)
        subset = ((rare < 0) ^ ((bits[:, :n] & 0xFFFFFFFF) < words)).float()
        chosen = torch.where((subset.sum(-1) == k).unsqueeze(-1), subset, chosen)
    return chosen


def drawn(scores: Tensor, k: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(subsets, "draw_key", lambda *_: key())
    return subsets.draw(scores, k)


@pytest.mark.parametrize(("n", "k"), [(9, 4), (33, 30)])
def test_the_first_attempt_with_k_elements_is_taken(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of(n, *[1.0] * 18, 20.0)
    chosen = drawn(scores, k, monkeypatch)
    assert chosen.dtype == torch.bool
    assert torch.equal(chosen.float(), replayed(scores, k))


@pytest.mark.slow_if(lambda n, k: n == 129)
@pytest.mark.parametrize(("n", "k"), [(9, 4), (129, 120)])
def test_subsets_of_awkward_rows(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = awkward(n)
    chosen = drawn(scores, k, monkeypatch)
    assert chosen[:3].sum(-1).tolist() == [k, k, min(k, int(scores[2].isfinite().sum()))]
    assert chosen[1, 0]
    assert not chosen[scores == -torch.inf].any()
    assert chosen[3].nonzero().flatten().tolist() == [0]


@pytest.mark.slow_if(lambda n: n in (8, 10))
@pytest.mark.parametrize("n", range(2, 11))
def test_the_law_of_an_attempt_that_is_taken(n: int) -> None:
    """Exactly: independent rare events, given that k elements are chosen, have the law of the subsets."""
    scores = scores_of(n, 3.0)
    for k in range(1, n):
        rare, _ = subsets._rare(scores, k)
        words = (rare[0].abs().double() * 2**32).floor().cpu()
        p = torch.where(rare[0].cpu() < 0, 2**32 - words, words) / 2**32
        # About k elements are chosen, so k is a probable number.
        assert abs(p.sum() - k) < 0.05
        exact = subset_enumeration.enumerate_law(scores[0].double().cpu(), k)
        weights = torch.where(exact.subsets == 1, p, 1 - p).prod(-1)
        assert (weights / weights.sum() - exact.p).abs().sum() < 1e-6


# Through the public functions.


def pulled(logits: Tensor, k: int, **how: Any) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    sample = gapped.subset(leaf, k, 0.7, **how)
    return sample.detach(), torch.autograd.grad(sample, leaf, incoming(*logits.shape).to(logits.dtype))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_subset_with_the_backend_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample, gradient and surrogate of GST; torch computes the same for the subset that was drawn."""
    logits = torch.randn(3, 12, generator=seeded(2)).to(DEVICE, dtype)
    mask = torch.arange(12, device=DEVICE) != 3
    estimator = gapped.GST(gap=1.2, backend="triton")
    sample, gradient = pulled(logits, 4, estimator=estimator, mask=mask)
    assert gapped.backend_used() == "triton"
    assert sample.dtype == gradient.dtype == dtype
    assert (sample.sum(-1) == 4).all()
    soft, slope = pulled(logits, 4, hard=False, estimator=estimator, mask=mask)
    monkeypatch.setattr(law, "draw", lambda *_, **__: sample == 1)
    plain = gapped.GST(gap=1.2, backend="torch")
    same, expected = pulled(logits, 4, estimator=plain, mask=mask)
    assert gapped.backend_used() == "torch"
    assert torch.equal(same, sample)
    tolerance = CLOSE if dtype == torch.float32 else 1e-2
    assert_close(gradient, expected, tolerance)
    assert not gradient[:, 3].any()
    assert_close(soft.float().sum(-1), torch.full((3,), 4.0, device=DEVICE), 4 * tolerance)
    assert slope.isfinite().all()


def test_a_second_derivative_of_the_sample_is_refused() -> None:
    logits = torch.zeros(1, 12, device=DEVICE).requires_grad_()
    sample = gapped.subset(logits, 4, estimator=gapped.GST(gap=1.0, backend="triton"))
    (gradient,) = torch.autograd.grad((sample**3).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()


def test_marginals_are_differentiated_by_kernels_once_and_by_torch_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: where a result must be differentiable, torch computes it."""
    runs = law.runs_on_kernels
    backends: list[bool] = []

    def recorded(*tensors: Any, backend: str = "auto") -> bool:
        why_not = without_subsets(tensors[0], *tensors[2:])
        backends.append(why_not is None)
        return runs(*tensors, backend="torch" if why_not else "triton")

    monkeypatch.setattr(law, "runs_on_kernels", recorded)
    logits, weight = scores_of(9, 1.0)[0].requires_grad_(), incoming(9)
    p = gapped.subsets.marginals(logits, 4)
    (once,) = torch.autograd.grad(p, logits, weight, retain_graph=True)
    assert backends == [True, True]
    (graph,) = torch.autograd.grad(p, logits, weight, create_graph=True)
    (twice,) = torch.autograd.grad(graph, logits, weight)
    assert backends[2:4] == [False] * len(backends[2:4])
    assert len(backends) > 2
    exact = logits.detach().double().cpu().requires_grad_()
    value = subset_enumeration.marginals(exact, 4)
    (first,) = torch.autograd.grad(value, exact, weight.double().cpu(), create_graph=True)
    (second,) = torch.autograd.grad(first, exact, weight.double().cpu())
    for ours, theirs in ((p, value), (once, first), (twice, second)):
        assert_close(ours.detach().double().cpu(), theirs.detach(), CLOSE)


def test_when_the_kernels_apply() -> None:
    scores = torch.zeros(2, 12, device=DEVICE)
    assert law.runs_on_kernels(scores, 4) == scores.is_cuda
    assert law.runs_on_kernels(scores, 4, backend="triton")
    assert not law.runs_on_kernels(scores, 4, backend="torch")
    # Nothing to choose.
    assert not law.runs_on_kernels(scores, 12, backend="triton")
    for refused, why in (
        (scores.double(), "float64"),
        (torch.zeros(1, backend.LONGEST_SUBSET + 1, device=DEVICE), "at most 8192 elements"),
        (scores.clone().requires_grad_(), "cannot be differentiated"),
    ):
        with pytest.raises(gapped.GappedError, match=f"backend: got 'triton', expected torch or .*{why}"):
            law.runs_on_kernels(refused, 4, backend="triton")
    assert subsets.draw(torch.zeros(0, 12, device=DEVICE), 4).shape == (0, 12)
    assert subsets.log_normaliser(torch.zeros(0, 12, device=DEVICE), 4).shape == (0,)
