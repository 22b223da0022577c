"""The kernels for subsets of small groups against torch: the same uniforms give the same subsets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import seeded
from kernel_cases import DEVICE, GPU_MARKS, incoming, key, tl, triton
from torch import Tensor

import gapped
from gapped import simplex
from gapped.kernels import backend, masks
from gapped.kernels.masks import Options, group_uniforms
from gapped.kernels.primitives import row_block
from gapped.kernels.runner import partition
from gapped.subsets import conditional_bernoulli, subset_sampling

pytestmark = GPU_MARKS

SIZES = [(1, 1), (1, 4), (2, 4), (3, 4), (2, 5), (3, 6), (7, 8)]
every_size = pytest.mark.parametrize(("n", "m"), SIZES)
every_gap = pytest.mark.parametrize("gap", [None, 0.0, 1.2])
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}


def example(groups: int, m: int) -> Tensor:
    """Ordinary groups, and others: without elements, with one, with one missing, steep, with NaN or +inf."""
    logits = 2 * torch.randn(groups, m, generator=seeded(7))
    logits[1] = -torch.inf
    logits[2, 1:] = -torch.inf
    logits[3, m // 2] = -torch.inf
    logits[4] *= 100
    logits[5, 0] = torch.nan
    logits[6, m - 1] = torch.inf
    return logits.to(DEVICE)


def reference(logits: Tensor, sample: Tensor, grad: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """The surrogate and the gradient in torch, for the subsets of the kernel."""
    k, tau, gap, _ = options
    scores = simplex.shift(logits.float())
    if gap is not None:
        scores = subset_sampling.perturbed(scores, sample == 1, k, gap)
    surrogate = conditional_bernoulli.marginals(scores / tau, k)
    return surrogate, conditional_bernoulli.covariance_product(grad.float(), scores / tau, k) / tau


@triton.jit
def _uniform_kernel(p_seed, p_out, s_rows, BLOCK_ROWS: tl.constexpr):
    block = row_block(s_rows, 1, BLOCK_ROWS, 2)
    tl.store(p_out + block.rows, group_uniforms(tl.load(p_seed), BLOCK_ROWS), mask=block.row_inside)


def uniforms(groups: int, m: int) -> Tensor:
    """The kernel's uniforms, one for each group."""
    out = torch.full((groups,), torch.nan, dtype=torch.float64, device=DEVICE)
    programs, block = partition(groups, m)
    _uniform_kernel[(programs,)](key(), out, groups, BLOCK_ROWS=max(block["BLOCK_ROWS"], 2))
    return out


@every_size
def test_the_same_uniforms_give_the_same_subsets(n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, groups = example(300, m), 300
    value, chosen = masks.forward(logits, key(), Options(n, 1.0, None))
    u = uniforms(groups, m)
    assert 0.4 < u.mean() < 0.6
    assert len(u.unique()) == groups
    monkeypatch.setattr(simplex, "uniform", lambda *_: u)
    monkeypatch.setattr(conditional_bernoulli, "MOST_OPTIONS", 10**9)
    expected = conditional_bernoulli.draw(simplex.shift(logits), n)
    nan = logits.isnan().any(-1) | (logits == torch.inf).any(-1)
    assert torch.equal(value[~nan] == 1, expected[~nan])
    assert value[nan].isnan().all()
    bits = (chosen.long().unsqueeze(-1) >> torch.arange(m, device=DEVICE)) & 1
    assert torch.equal(bits[~nan], expected[~nan].long())


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 4), (2, 5), (7, 8)])
@every_gap
def test_surrogate_and_gradient(n: int, m: int, gap: float | None) -> None:
    logits, grad, options = example(40, m), incoming(40, m), Options(n, 0.7, gap)
    value, chosen = masks.forward(logits, key(), options)
    soft, same = masks.forward(logits, key(), options._replace(soft=True))
    assert torch.equal(chosen, same)
    gradient = masks.backward(logits, chosen, grad, options)
    surrogate, expected = reference(logits, value, grad, options)
    torch.testing.assert_close(soft, surrogate, **CLOSE)
    torch.testing.assert_close(gradient, expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits, grad, options = example(40, 4).to(dtype), incoming(40, 4).to(dtype), Options(2, 0.7, 1.0)
    value, chosen = masks.forward(logits, key(), options)
    gradient = masks.backward(logits, chosen, grad, options)
    assert value.dtype == gradient.dtype == dtype
    _, expected = reference(logits, value.float(), grad, options)
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=1e-2, atol=1e-3, equal_nan=True)


def test_groups_that_are_not_contiguous_and_none_at_all() -> None:
    wide, options = example(40, 8), Options(2, 0.7, 1.0)
    grad = incoming(8, 20).T[:, :4]
    value, chosen = masks.forward(wide[::2, :4], key(), options)
    plain, same = masks.forward(wide[::2, :4].contiguous(), key(), options)
    torch.testing.assert_close(value, plain, rtol=0, atol=0, equal_nan=True)
    ours = masks.backward(wide[::2, :4], chosen, grad, options)
    theirs = masks.backward(wide[::2, :4].contiguous(), same, grad.contiguous(), options)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    one, _ = masks.forward(example(40, 4)[7:8], key(), options)
    assert one.sum() == 2
    empty = torch.empty(0, 4, device=DEVICE)
    assert masks.backward(empty, masks.forward(empty, key(), options)[1], empty, options).numel() == 0


def test_the_sample_carries_its_gradient_once() -> None:
    logits, options = example(40, 4)[7:].requires_grad_(), Options(2, 0.7, 1.0)
    sample = masks.sample(logits, options, torch.Generator(DEVICE).manual_seed(0))
    assert gapped.backend_used() == "triton"
    assert (sample.sum(-1) == 2).all()
    grad = incoming(33, 4)
    (gradient,) = torch.autograd.grad(sample, logits, grad, create_graph=True)
    torch.testing.assert_close(
        gradient.detach(), reference(logits.detach(), sample, grad, options)[1], **CLOSE
    )
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_graph_with_the_kernel_inside() -> None:
    """As an operator of a compiled program: same key, same sample, same gradient as the plain call."""
    logits, grad, options = example(20, 4)[7:].requires_grad_(), incoming(13, 4), Options(2, 0.7, 1.2)

    def program(x: Tensor) -> Tensor:
        return torch.ops.gapped.mask(2 * x, key(), *options)[0]

    double = (2 * logits).detach()
    plain, chosen = masks.forward(double, key(), options)
    for run in (torch.compile(program, backend="aot_eager", fullgraph=True), program):
        value = run(logits)
        (gradient,) = torch.autograd.grad(value, logits, grad)
        assert torch.equal(value, plain)
        assert torch.equal(gradient, 2 * masks.backward(double, chosen, grad, options))
    torch.compiler.reset()


def test_when_the_kernels_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA alone, up to eight elements, for numbers; a call that they serve goes to them."""
    rows = torch.zeros(2, 4, device=DEVICE)
    on_gpu = DEVICE.type == "cuda"
    assert backend.takes_groups(rows, 1.0, None) == on_gpu
    assert not backend.takes_groups(rows.double(), 1.0, None)
    assert not backend.takes_groups(torch.zeros(2, 9, device=DEVICE), 1.0, None)
    assert not backend.takes_groups(rows, torch.ones(2), None)
    assert not backend.takes_groups(rows, 1.0, torch.ones(2))
    calls: list[Any] = []
    monkeypatch.setattr(subset_sampling, "takes_groups", lambda *_: True)
    monkeypatch.setattr(masks, "sample", lambda rows, options, generator: calls.append(options) or rows)
    gapped.nm_mask(rows, 2, 4, 0.5, False, estimator=gapped.GST(gap=2.0))
    gapped.nm_mask(rows, 2, 4)
    assert calls == [Options(2, 0.5, 2.0, True), Options(2, 1.0, None, False)]
