"""The fused kernels against their references: output and gradient, awkward shapes, poisoned buffers.

Without a GPU they run in Triton's interpreter. The same tests run on a GPU with `pytest -m gpu`.
"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
from statistical import chi_squared, counts_of, require_law, require_rejected
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import gapped
from gapped import simplex
from gapped.kernels import launch
from gapped.kernels.launch import Fused
from gapped.pathwise.base import Draw, Pathwise
from gapped.pathwise.carry import carry

triton = pytest.importorskip("triton", reason="the kernels need Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


def noise(rows: int, categories: int, draw: int | None = None) -> Tensor:
    """What the kernels draw: Gumbels, or the exponentials of one Gumbel-Rao draw."""
    from gapped.kernels.fused import noise_kernel

    out = torch.full((rows, categories), torch.nan, device=DEVICE)
    grid, blocks = launch._blocks(rows, categories)
    noise_kernel[grid](key(), out, rows, categories, draw or 0, RAO=draw is not None, **blocks)
    return out


def reference(estimator: Pathwise, logits: Tensor, index: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the plain implementation, for the index and the noise that the kernel used."""
    rows, categories = logits.shape
    shifted = simplex.shift(logits)
    extra = None
    if isinstance(estimator, gapped.GumbelSoftmax):
        extra = shifted + noise(rows, categories)
    elif isinstance(estimator, gapped.DecoupledGumbelSoftmax):
        extra = noise(rows, categories)
    elif isinstance(estimator, gapped.GumbelRao):
        log_e = torch.stack([noise(rows, categories, draw) for draw in range(SAMPLES)]).log()
        where = simplex.place(index, categories).expand(SAMPLES, rows, 1)
        winner = log_e.gather(-1, where)
        extra = torch.logaddexp(log_e - simplex.log_softmax(logits), winner).scatter(-1, where, winner).neg()
    points, weights = estimator.points(shifted, Draw(index, extra))
    leaf = logits.clone().requires_grad_()
    carry(torch.zeros_like(logits), estimator.carrier(leaf, Draw(index)), points, weights).backward(grad)
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("categories", [1, 2, 3, 10, 63, 64, 65, 1000])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_value_and_gradient_equal_the_reference(name: str, categories: int) -> None:
    estimator = ESTIMATORS[name]
    logits = example(37, categories)
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    fused = estimator.fused()
    assert fused is not None
    value, index = launch.forward(logits, key(), fused)
    assert torch.equal(value, simplex.one_hot(index.long(), categories, torch.float32))
    assert index[1] == categories
    assert bool((index[[0, 2, 3]] < categories).all())
    if name in ("gumbel-softmax", "decoupled"):
        tau = getattr(estimator, "tau_forward", 1.0)
        expected = simplex.argmax_index(simplex.shift(logits) / tau + noise(37, categories))
        assert torch.equal(index.long(), expected)
    found = launch.backward(logits, index, key(), grad, fused)
    torch.testing.assert_close(found, reference(estimator, logits, index.long(), grad), **TOLERANCE)


@pytest.mark.parametrize("name", ["gst", "straight-through", "reinmax", "gumbel-softmax"])
def test_tensor_options_equal_a_row_by_row_loop(name: str) -> None:
    logits = example(8, 5)
    grad = torch.ones_like(logits).cumsum(-1)
    taus = torch.linspace(0.3, 2.0, 8, device=DEVICE)
    gaps = torch.linspace(0.0, 3.0, 8, device=DEVICE)
    _, index = launch.forward(logits, key(), Fused(name, taus))
    together = launch.backward(logits, index, key(), grad, Fused(name, taus, gap=gaps))
    for row in range(8):
        fused = Fused(name, taus[row].item(), gap=gaps[row].item())
        alone = launch.backward(logits, index, key(), grad, fused)
        torch.testing.assert_close(together[row], alone[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    logits, fused = example(20, 10).to(dtype), Fused("gst", 0.5, gap=1.0)
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    value, index = launch.forward(logits, key(), fused)
    assert value.dtype == dtype
    assert set(value.flatten().tolist()) <= {0.0, 1.0}
    _, same = launch.forward(logits.float(), key(), fused)
    assert torch.equal(index, same)
    exact = launch.backward(logits.float(), index, key(), grad.float(), fused)
    found = launch.backward(logits, index, key(), grad, fused)
    if DEVICE.type == "cpu":
        # The interpreter truncates to bfloat16 where a GPU rounds: one unit in the last place.
        torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0.0)
    else:
        assert torch.equal(found, exact.to(dtype))


def test_strided_rows_equal_contiguous_ones() -> None:
    wide = example(20, 24)
    view, fused = wide[:, 3:13], Fused("gst", 0.5, gap=1.0)
    assert not view.is_contiguous()
    grad = torch.randn(10, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE).t()
    value, index = launch.forward(view, key(), fused)
    plain_value, plain_index = launch.forward(view.contiguous(), key(), fused)
    assert torch.equal(value, plain_value)
    assert torch.equal(index, plain_index)
    found = launch.backward(view, index, key(), grad, fused)
    assert torch.equal(found, launch.backward(view.contiguous(), index, key(), grad.contiguous(), fused))


def test_nan_rows_come_out_as_nan_and_neighbours_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer starts as NaN here: an element that is not written would show in the sound rows."""
    plain = torch.empty

    def poisoned(*shape: object, **options: object) -> Tensor:
        made: Tensor = plain(*shape, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(10**6)

    monkeypatch.setattr(torch, "empty", poisoned)
    logits = example(9, 5)
    logits[5, 2] = torch.nan
    grad = torch.ones_like(logits).cumsum(-1)
    for estimator in ESTIMATORS.values():
        fused = estimator.fused()
        assert fused is not None
        value, index = launch.forward(logits, key(), fused)
        found = launch.backward(logits, index, key(), grad, fused)
        for result in (value, found):
            assert result[5].isnan().all()
            assert result[[0, 1, 2, 3, 4, 6, 7, 8]].isfinite().all()
        assert not value[1].any()
        assert not found[1].any()


@pytest.mark.parametrize("name", ["gst", "gumbel-softmax"])
def test_samples_follow_the_logits(name: str) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, -torch.inf, 0.0], device=DEVICE)
    count = 40_000
    _, index = launch.forward(logits.expand(count, 5).contiguous(), key(), Fused(name, 1.0))
    counts = counts_of(index.long().cpu(), 5)
    require_law(chi_squared(counts, logits.double().softmax(-1).cpu()))
    require_rejected(chi_squared(counts, (logits.double() / 1.5).softmax(-1).cpu()))


def test_streams_differ_between_rows_and_keys() -> None:
    first = noise(64, 16)
    assert first.unique().numel() > 0.99 * first.numel()
    uniform = Fused("straight-through", 1.0)
    flat = torch.zeros(4096, 64, device=DEVICE)
    one, other = (launch.forward(flat, key(k), uniform)[1] for k in (1, 2))
    assert 0 < (one == other).float().mean() < 0.05
    draws = torch.stack([noise(64, 16, draw) for draw in range(8)])
    assert draws.unique().numel() > 0.99 * draws.numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="dispatch to the kernels happens on CUDA only")
def test_the_public_functions_use_the_kernels_on_a_gpu() -> None:
    logits = torch.randn(128, 10, device="cuda", requires_grad=True)
    before = launch.launches
    z = gapped.gst(logits, tau=0.5, hard=True)
    assert launch.launches == before + 1
    z.square().sum().backward()
    assert logits.grad is not None
    gapped.gst(logits.double(), tau=0.5, hard=True)
    gapped.gst(logits, tau=0.5, hard=False)
    assert launch.launches == before + 1


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
