"""ReinMax-Rao in the kernel of Gumbel-Rao: the gradient for its noise in float64, and where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from conftest import through_softmax
from kernel_cases import DEVICE, GPU_MARKS, TOLERANCE, backward, example, incoming, key, noise
from torch import Tensor

import gapped
from gapped.kernels.sampling import launch, rao
from gapped.kernels.sampling.fused import refusal

pytestmark = [*GPU_MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# 1/2 and 1 have kernels without a logarithm; the tensor has a temperature for each row.
TAUS = (0.5, 0.7, 1.0, torch.tensor([0.5, 0.3, 1.0, 2.0, 0.7]))


@pytest.fixture
def spread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the draws of a row are spread over copies of it."""
    if request.param:
        monkeypatch.setattr(rao, "SPREAD_ELEMENTS", 1 << 17)
    # Launches are kept, with the sizes that were set when they were made.
    launch._rao.cache_clear()
    yield request.param
    launch._rao.cache_clear()


@cache
def noises(rows: int, categories: int, samples: int) -> list[Tensor]:
    """The exponentials of each draw."""
    return [noise(rows, categories, draw).double() for draw in range(samples)]


def reference(estimator: gapped.ReinMaxRao, logits: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """2 mean_m J(q_m) g / tau - J(p) g / 2 in float64, each row that has a category by itself.

    With exponential noise E, and i selected, q_m is proportional to (E_j / c_j + E_i)^(-1/tau), and to
    E_i^(-1/tau) at i itself, where c is the middle between p and the sample.
    """
    rows, categories = logits.shape
    taus = torch.as_tensor(estimator.tau, dtype=torch.float64, device=DEVICE).expand(rows)
    expected = torch.zeros(rows, categories, dtype=torch.float64, device=DEVICE)
    for row in (index < categories).nonzero().flatten().tolist():
        chosen, exists = int(index[row]), logits[row] > -torch.inf
        # A gradient at a category that does not exist may be anything.
        p, g, tau = torch.softmax(logits[row].double(), -1), grad[row].double()[exists], float(taus[row])
        middle = p / 2
        middle[chosen] += 0.5
        slope = -through_softmax(p[exists], g) / 2
        for each in noises(rows, categories, estimator.samples):
            times = (each[row] / middle + each[row, chosen]).log()
            times[chosen] = each[row, chosen].log()
            q = torch.softmax(-times[exists] / tau, -1)
            slope += 2 * through_softmax(q, g, tau) / estimator.samples
        expected[row, exists] = slope
    return expected


def drawn(estimator: gapped.ReinMaxRao, logits: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Categories, and the kernel's gradient."""
    fused = estimator._fused
    sample = launch.forward(logits, key(), fused)
    index = sample.indices.long()
    one_hot = torch.arange(logits.shape[-1], device=DEVICE) == index.unsqueeze(-1)
    lawful = index <= logits.shape[-1]
    assert torch.equal(sample.value[lawful], one_hot[lawful].to(logits.dtype))
    return index, backward(logits, sample, grad, fused)


@pytest.mark.parametrize(
    ("categories", "samples", "spread"),
    [(1, 3, False), (2, 1, False), (3, 9, True), (63, 5, False), (65, 6, True), (1000, 2, False)],
    indirect=["spread"],
)
def test_the_gradient_is_the_formula_s(categories: int, samples: int, spread: bool) -> None:
    logits, grad = example(5, categories), incoming(5, categories)
    logits[4, 1:] -= 200
    assert (rao.shares_of(5, categories) > 1) == spread
    for tau in TAUS:
        level: Any = tau.to(DEVICE) if isinstance(tau, Tensor) else tau
        estimator = gapped.ReinMaxRao(tau=level, samples=samples)
        index, gradient = drawn(estimator, logits, grad)
        expected = reference(estimator, logits, index, grad)
        torch.testing.assert_close(gradient.double(), expected, **TOLERANCE)
        # Nothing moves where there is one category, or none.
        assert not gradient[1:3].any()
        assert gradient[0].any() == (categories > 1)


def test_masked_categories_and_rows_without_a_law() -> None:
    """A gradient at masked categories does not count; a row with a NaN or +inf has one."""
    logits, grad = example(7, 37), incoming(7, 37)
    logits[0, 3:] = logits[4, ::2] = -torch.inf
    logits[5, 1], logits[6, 2] = torch.nan, torch.inf
    grad[logits == -torch.inf] = torch.nan
    for tau in (0.5, 0.7, 1.0):
        estimator = gapped.ReinMaxRao(tau=tau, samples=5)
        index, gradient = drawn(estimator, logits, grad)
        assert index[[1, 5, 6]].tolist() == [37, 38, 38]
        expected = reference(estimator, logits, index, grad)
        torch.testing.assert_close(gradient[:5].double(), expected[:5], **TOLERANCE)
        assert not gradient[0, 3:].any()
        assert not gradient[1:3].any()
        assert not gradient[4, ::2].any()
        assert gradient[5:].isnan().all()


def test_digits_next_to_a_probability_of_one() -> None:
    """The gradient of rare categories keeps its digits, and so does what they take from the selected one."""
    logits = torch.tensor([[0.0, -18.0, -25.0, -40.0]], device=DEVICE).repeat(3, 1)
    grad = torch.tensor([[1000.0, 1001.0, 999.0, 1002.0]], device=DEVICE).repeat(3, 1)
    for tau in (0.7, 1.0):
        estimator = gapped.ReinMaxRao(tau=tau, samples=6)
        index, gradient = drawn(estimator, logits, grad)
        assert not index.any()
        expected = reference(estimator, logits, index, grad)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-20)


@pytest.mark.parametrize("spread", [True], indirect=True)
@pytest.mark.usefixtures("spread")
def test_the_gradient_at_the_index_and_given_the_argmax() -> None:
    logits, one = example(6, 12), incoming(6)
    logits[5, 1] = torch.nan
    for draw in ("sample", "argmax"):
        fused = gapped.ReinMaxRao(tau=0.7, samples=6, draw=draw)._fused
        sample = launch.forward(logits, key(), fused, dense=False)
        index = sample.indices.long()
        if draw == "argmax":
            assert torch.equal(index[[0, 2, 3, 4]], logits.argmax(-1)[[0, 2, 3, 4]])
        dense = torch.zeros_like(logits).scatter(-1, index.clamp(max=11).unsqueeze(-1), one.unsqueeze(-1))
        expected = backward(logits, sample, dense, fused)
        gradient = backward(logits, sample, one, fused, at_index=True)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert gradient[0].any()


def test_long_rows_and_gates_have_no_kernel() -> None:
    fused = gapped.ReinMaxRao().fused()
    assert refusal(torch.zeros(2, 4096, device=DEVICE), fused) is None
    logits = torch.zeros(2, 4097, device=DEVICE, requires_grad=True)
    with pytest.raises(gapped.GappedError, match="ReinMax-Rao has no kernel for rows longer than 4096"):
        gapped.reinmax_rao(logits, backend="triton")
    with pytest.raises(gapped.GappedError, match="ReinMaxRao has no kernel for gates"):
        gapped.ReinMaxRao(backend="triton").gate(logits)
    for use in (gapped.reinmax_rao, gapped.ReinMaxRao(samples=2).gate):
        (gradient,) = torch.autograd.grad(use(logits)[:, 0].sum(), logits)
        assert gapped.backend_used() == "torch"
        assert gradient.isfinite().all()
    gapped.reinmax_rao(logits[:, :9], samples=2, backend="triton")[:, 0].sum().backward()
    assert gapped.backend_used() == "triton"
