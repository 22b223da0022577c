"""Shared by tests of kernels: the device, estimators, examples, the kernels' noise, and the plain reference.

Without a GPU kernels run in Triton's interpreter. The same tests run on a GPU with `pytest -m gpu`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from conftest import seeded
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("triton") is None:
    pytest.skip("the kernels need Triton", allow_module_level=True)

import triton
import triton.language as tl

import gapped
from gapped import simplex
from gapped.kernels import runner
from gapped.kernels.primitives import gumbel, row_block, row_uniforms, store_rows
from gapped.kernels.sampling import launch, long, rao, strips
from gapped.kernels.sampling.rao import log2_uniform, rao_bits
from gapped.pathwise import Draw, Outcome

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# For `pytestmark`: the files that run kernels belong to `pytest -m gpu` where there is a GPU.
GPU_MARKS = [pytest.mark.gpu] if torch.cuda.is_available() else []
if DEVICE.type == "cpu":
    # The interpreter takes milliseconds for every program, whatever its size.
    runner.BLOCK = rao.BLOCK = (1 << 16, 4)
    runner.PROGRAMS = 1
    long.SEGMENT_BYTES = 1 << 16
    rao.VECTOR = 32
    strips.FORWARD_WARPS, strips.FEWEST_STRIPS = 64, 1
    strips.HELD_SIMPLE = strips.HELD_OTHERS = 1 << 12
    strips.HELD_WARPS, strips.TILES, strips.SEGMENT = (
        256,
        {4: (256, 2, 1), 2: (256, 2, 1)},
        2048,
    )
# The examples have few rows, and tests of their own for what that changes.
rao.SPREAD_ELEMENTS = 0


ESTIMATORS: dict[str, gapped.Pathwise] = {
    "gst": gapped.GST(tau=0.5, gap=1.2),
    "gst-expected": gapped.GST(tau=0.7, gap=gapped.expected_gap),
    "gst-auto": gapped.GST(tau=0.7, gap="auto"),
    "nz-gst": gapped.GST(tau=0.8, gap=0.7, detach=False),
    "gapmax": gapped.GapMax(),
    "gapmax-tempered": gapped.GapMax(tau=1.3),
    "straight-through": gapped.StraightThrough(tau=0.5),
    "reinmax": gapped.ReinMax(tau=1.3),
    "gumbel-softmax": gapped.GumbelSoftmax(tau=0.5),
    "decoupled": gapped.DecoupledGumbelSoftmax(tau=0.6, tau_forward=1.5),
    "gumbel-rao": gapped.GumbelRao(tau=0.5, samples=6),
}
FUSED: dict[str, Any] = {name: estimator.fused() for name, estimator in ESTIMATORS.items()}
# All but the NZ ablation have a kernel for long rows.
LONG = tuple(name for name in ESTIMATORS if name != "nz-gst")
# Rows side by side: Gumbel-Rao copies, and the NZ ablation has a kernel for short rows only.
NATIVE = tuple(name for name in ESTIMATORS if name not in ("gumbel-rao", "nz-gst"))
# A kernel accumulates in float32 in another order than its reference.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


def example(rows: int, categories: int) -> Tensor:
    """Logits of ordinary rows; the second is empty, the third has one category, the fourth is steep."""
    logits = 2 * torch.randn(rows, categories, generator=seeded(7))
    if rows > 3:
        logits[1] = -torch.inf
        logits[2, 1:] = -torch.inf
        logits[3] *= 100
    return logits.to(DEVICE)


def side_by_side(*shape: int) -> Tensor:
    """Logits ``(*outer, S, K)`` that lie as ``(*outer, K, S)``, with rows of every kind."""
    *outer, inner, categories = shape
    rows = example(inner * torch.Size(outer).numel(), categories)
    return rows.view(shape).transpose(-1, -2).contiguous().transpose(-1, -2)


def incoming(*shape: int) -> Tensor:
    """A gradient at the sample."""
    return torch.randn(shape, generator=seeded(1)).to(DEVICE)


def key(value: int = 11) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=DEVICE)


def make_strips_small(patch: pytest.MonkeyPatch) -> None:
    """Side by side, rows of more than 8 categories are long, and read 8 at a time; tiles have 16 categories.

    The first tile is written before the last one is summed.
    """
    sizes = {"LONGEST_HELD": 8, "FORWARD_WARPS": 1, "PIECES": 2, "MOST_BYTES": 64}
    sizes |= {"HELD_SIMPLE": 0, "HELD_OTHERS": 0, "TILE_BYTES": 64, "SEGMENT": 16, "AHEAD": 1}
    for name, value in (sizes | {"TILES": {4: (1, 1, 1), 2: (1, 1, 1)}}).items():
        patch.setattr(strips, name, value)


def backward(logits: Tensor, sample: launch.Forward, grad: Tensor, fused: Any, **how: Any) -> Tensor:
    """The gradient of the logits after `launch.forward(logits, key(), fused)` returned `sample`."""
    return launch.backward(logits, sample.indices, sample.stats, key(), grad, fused, **how)


@triton.jit
def _noise_kernel(
    p_seed, p_out, s_rows, s_categories, s_block, CONDITIONAL: tl.constexpr, DRAW: tl.constexpr,
    FINE: tl.constexpr, FAST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    block = row_block(s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_element = block.rows[:, None] * s_categories + block.columns[None, :]
    s_seed = tl.load(p_seed)
    if CONDITIONAL:
        b_columns = block.columns[None, :]
        b_bits = rao_bits(s_seed, block.rows[:, None], b_columns, b_columns * 0 + s_block, FAST)
        b_noise = -log2_uniform(b_bits[DRAW], FAST)
    else:
        b_noise = gumbel(s_seed, b_element, FAST, FINE)
    store_rows(p_out, block, s_categories, b_noise)


def noise(rows: int, categories: int, draw: int | None = None, fine: bool | None = None) -> Tensor:
    """The kernels' Gumbel noise; with `draw` the exponentials of that Gumbel-Rao draw, of mean 1 / ln 2.

    It is `fine` where rows are long.
    """
    out = torch.full((rows, categories), torch.nan, device=DEVICE)
    programs, block = runner.partition(rows, categories)
    flags = {"CONDITIONAL": draw is not None, "DRAW": (draw or 0) % 4}
    fine = categories > runner.LONGEST_BLOCK if fine is None else fine
    flags |= {"FINE": fine, "FAST": out.is_cuda, **block}
    _noise_kernel[(programs,)](key(), out, rows, categories, (draw or 0) // 4, **flags)
    return out


@triton.jit
def _uniform_kernel(p_seed, p_out, s_rows, BLOCK: tl.constexpr):
    block = row_block(s_rows, 1, BLOCK, 2)
    b_u, _ = row_uniforms(tl.load(p_seed), block.rows)
    tl.store(p_out + block.rows, b_u, mask=block.row_inside)


def uniforms(rows: int) -> Tensor:
    """The kernels' uniforms, one for each row."""
    out = torch.full((rows,), torch.nan, dtype=torch.float64, device=DEVICE)
    _uniform_kernel[(1,)](key(), out, rows, BLOCK=runner.power(rows))
    return out


def _reference(
    estimator: gapped.Pathwise, logits: Tensor, index: Tensor, grad: Tensor, fine: bool
) -> tuple[Tensor, Tensor]:
    """Soft sample and gradient of the plain implementation, for the index and the noise of the kernel."""
    rows, categories = logits.shape
    exists = (index < categories).unsqueeze(-1)
    relative = torch.where(exists, simplex.shift(logits), 0.0)
    extra = None
    if isinstance(estimator, gapped.GumbelSoftmax):
        extra = simplex.shift(relative + noise(rows, categories, fine=fine))
    elif isinstance(estimator, gapped.DecoupledGumbelSoftmax):
        extra = -noise(rows, categories, fine=fine)
    elif isinstance(estimator, gapped.GumbelRao):
        draws = range(estimator.samples)
        log_e = torch.stack([noise(rows, categories, draw) for draw in draws]).double().log()
        where = simplex.place(index, categories).expand(len(draws), rows, 1)
        winner = log_e.gather(-1, where)
        log_p = simplex.log_softmax(logits.double())
        extra = torch.logaddexp(log_e - log_p, winner).scatter(-1, where, winner).neg().float()
    gradient = estimator.points(relative, Draw(index.clamp(max=categories - 1), extra))
    gradient = gradient._replace(points=torch.where(exists, gradient.points, 0.0))
    leaf = logits.clone().requires_grad_()
    estimator.attach(leaf, Outcome(torch.zeros_like(logits), index, gradient)).backward(grad)
    assert leaf.grad is not None
    return gradient.points.mean(0), leaf.grad


def assert_equals_reference(estimator: gapped.Pathwise, logits: Tensor) -> launch.Forward:
    """Draw a sample; compare its gradient, and the soft sample if there is one, with the reference.

    The incoming gradient lies in memory as the logits do.
    """
    fused, grad = estimator._fused, torch.empty_like(logits).copy_(incoming(*logits.shape))
    assert fused is not None
    sample = launch.forward(logits, key(), fused)
    index, matrix = sample.indices.long(), logits.reshape(-1, logits.shape[-1])
    fine = launch.has_stats(logits.shape[-1], launch.axes_of(logits, fused))
    soft_reference, reference_gradient = _reference(
        estimator, matrix, index, grad.reshape(matrix.shape), fine
    )
    gradient = backward(logits, sample, grad, fused)
    torch.testing.assert_close(gradient, reference_gradient.view(logits.shape), **TOLERANCE)
    if estimator.has_surrogate:
        soft = launch.forward(logits, key(), replace(fused, soft=True))
        assert torch.equal(soft.indices, sample.indices)
        torch.testing.assert_close(soft.value, soft_reference.view(logits.shape), **TOLERANCE)
    return sample
