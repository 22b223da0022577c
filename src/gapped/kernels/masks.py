"""Masks: subsets of groups of up to eight elements, as in N:M masks, and their gradients.

The reference is `gapped.subsets.enumeration`, with the gapped logits of `gapped.subsets.subset_sampling`. A
program has many groups, and goes through their subsets one by one.

A subset is an integer whose bit `j` says whether element `j` belongs to it. Groups are contiguous, so that
each lies within a thread, if it has up to four elements, and sums over it stay in registers. Arithmetic is in
float32, running sums in float64; scores are logarithms to the base 2. Nothing is read or written but logits,
samples, gradients and one byte per group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapped.checks import note_backend
from gapped.gradient import first_order
from gapped.kernels.primitives import (
    INF,
    LOG2_E,
    exp2,
    load_rows,
    row_block,
    row_uniforms,
    safe_reciprocal,
    store_rows,
)
from gapped.kernels.runner import partition, run
from gapped.kernels.sampling.surrogates import lawless
from gapped.simplex import draw_key

# Elements of a block and warps that share it; None, the default, for `runner.BLOCK`.
BLOCK: tuple[int, int] | None = None


@triton.constexpr_function
def _size(subset):
    """How many elements a subset has."""
    return subset.bit_count()


@triton.jit
def _is_lawless(b_logits):
    """Groups with a NaN or +inf. Minima and maxima pass over a NaN on a GPU, sums do not."""
    return tl.sum(lawless(b_logits).to(tl.int32), 1) > 0


@triton.jit
def _scores(b_logits, b_lawless):
    """Logits relative to the largest of their group, to the base 2; zeros in a group without a law."""
    b_logits = tl.where(b_lawless[:, None], 0.0, b_logits)
    b_top = tl.max(b_logits, 1)
    return (b_logits - tl.where(b_top == -INF, 0.0, b_top)[:, None]) * LOG2_E


@triton.jit
def group_uniforms(s_seed, BLOCK_ROWS: tl.constexpr):
    """A float64 uniform in [0, 1) for each group of a program: each call of Philox gives two.

    One of them is for the lower half of the groups, the other for the upper half, as threads have groups.
    """
    b_pairs = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS // 2) + tl.arange(0, BLOCK_ROWS // 2)
    b_lower, b_upper = row_uniforms(s_seed, b_pairs)
    return tl.reshape(tl.permute(tl.join(b_lower, b_upper), (1, 0)), [BLOCK_ROWS])


@triton.jit
def _has(s_subset, b_columns):
    return (((s_subset >> b_columns) & 1) == 1)[None, :]


@triton.jit
def _sum(s_subset, b_columns, b_values):
    """The sum of a subset's values in each group."""
    return tl.sum(tl.where(_has(s_subset, b_columns), b_values, 0.0), 1)


@triton.jit
def _largest(b_scores, b_columns, N: tl.constexpr, M: tl.constexpr):
    """The largest sum over a subset of `N` elements; 0 where none exists."""
    b_largest = tl.sum(tl.zeros_like(b_scores), 1) - INF
    for s_subset in tl.static_range(2**M):
        if _size(s_subset) == N:
            b_largest = tl.maximum(b_largest, _sum(s_subset, b_columns, b_scores))
    return tl.where(b_largest == -INF, 0.0, b_largest)


@triton.jit
def _nth_largest(b_scores, b_columns, N: tl.constexpr, M: tl.constexpr):
    """The `N`-th largest score: of all subsets' smallest elements, the largest."""
    b_level = tl.sum(tl.zeros_like(b_scores), 1) - INF
    for s_subset in tl.static_range(2**M):
        if _size(s_subset) == N:
            b_smallest = tl.min(tl.where(_has(s_subset, b_columns), b_scores, INF), 1)
            b_level = tl.maximum(b_level, b_smallest)
    return b_level


@triton.jit
def _draw(b_scores, b_columns, b_u, N: tl.constexpr, M: tl.constexpr, FAST: tl.constexpr):
    """The first subset whose running sum of weights exceeds a uniform times their total; 0 if none exists."""
    b_largest = _largest(b_scores, b_columns, N, M)
    b_total = b_u * 0.0
    for s_subset in tl.static_range(2**M):
        if _size(s_subset) == N:
            b_total += exp2(_sum(s_subset, b_columns, b_scores) - b_largest, FAST).to(tl.float64)
    # Less by a rounding than the total, which the last running sum equals.
    b_threshold = b_u * b_total * 0.99999999999999
    b_running = b_u * 0.0
    b_chosen = b_running.to(tl.int32)
    for s_subset in tl.static_range(2**M):
        if _size(s_subset) == N:
            b_weight = exp2(_sum(s_subset, b_columns, b_scores) - b_largest, FAST)
            b_running += b_weight.to(tl.float64)
            b_wins = (b_running > b_threshold) & (b_weight > 0) & (b_chosen == 0)
            b_chosen = tl.where(b_wins, s_subset, b_chosen)
    return b_chosen


@triton.jit
def _surrogate(
    b_scores, b_selected, b_columns, s_rate, s_gap, N: tl.constexpr, M: tl.constexpr, GAPPED: tl.constexpr
):
    """The scores whose marginals carry the gradient, at the temperature 1 / `s_rate`."""
    if GAPPED:
        b_level = _nth_largest(b_scores, b_columns, N, M)[:, None]
        b_raised, b_lowered = tl.maximum(b_scores, b_level), tl.minimum(b_scores, b_level - s_gap * LOG2_E)
        b_scores = tl.where(b_selected, b_raised, b_lowered)
    return b_scores * s_rate


@triton.jit
def _expect(b_scores, b_columns, b_values, N: tl.constexpr, M: tl.constexpr, FAST: tl.constexpr):
    """The subsets' largest logit, the reciprocal of the sum of their weights, and their mean value."""
    b_largest = _largest(b_scores, b_columns, N, M)
    b_total = tl.zeros_like(b_largest)
    b_mean = tl.zeros_like(b_largest)
    for s_subset in tl.static_range(2**M):
        if _size(s_subset) == N:
            b_weight = exp2(_sum(s_subset, b_columns, b_scores) - b_largest, FAST)
            b_total += b_weight
            b_mean += b_weight * _sum(s_subset, b_columns, b_values)
    b_scale = safe_reciprocal(b_total)
    return b_largest, b_scale, b_mean * b_scale


@triton.jit
def _covariance_product(b_scores, b_columns, b_values, N: tl.constexpr, M: tl.constexpr, FAST: tl.constexpr):
    """The covariances of the selections times the values."""
    b_largest, b_scale, b_mean = _expect(b_scores, b_columns, b_values, N, M, FAST)
    b_out = tl.zeros_like(b_scores)
    for s_subset in tl.static_range(2**M):
        if _size(s_subset) == N:
            b_weight = exp2(_sum(s_subset, b_columns, b_scores) - b_largest, FAST) * b_scale
            b_share = b_weight * (_sum(s_subset, b_columns, b_values) - b_mean)
            b_out += tl.where(_has(s_subset, b_columns), b_share[:, None], 0.0)
    return b_out


@triton.jit
def _marginals(b_scores, b_columns, N: tl.constexpr, M: tl.constexpr, FAST: tl.constexpr):
    """The probability that each element is selected."""
    b_largest, b_scale, _ = _expect(b_scores, b_columns, tl.zeros_like(b_scores), N, M, FAST)
    b_out = tl.zeros_like(b_scores)
    for s_subset in tl.static_range(2**M):
        if _size(s_subset) == N:
            b_weight = exp2(_sum(s_subset, b_columns, b_scores) - b_largest, FAST) * b_scale
            b_out += tl.where(_has(s_subset, b_columns), b_weight[:, None], 0.0)
    return b_out


@triton.jit(do_not_specialize=["s_rows"])
def mask_forward_kernel(
    p_logits,
    p_seed,
    p_value,
    p_chosen,
    s_rows,
    s_tau,
    s_gap,
    N: tl.constexpr,
    M: tl.constexpr,
    GAPPED: tl.constexpr,
    SOFT: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Draw a subset of `N` of `M` elements in each row; `SOFT` writes the surrogate instead of the sample."""
    block = row_block(s_rows, M, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, block, M, -INF).to(tl.float32)
    b_lawless = _is_lawless(b_logits)
    b_scores = _scores(b_logits, b_lawless)
    b_u = group_uniforms(tl.load(p_seed), BLOCK_ROWS)
    b_chosen = _draw(b_scores, block.columns, b_u, N, M, FAST)
    b_exists = (b_scores > -INF).to(tl.int32)
    # Of no more than N elements all are selected.
    b_certain = tl.sum(b_exists, 1) <= N
    b_chosen = tl.where(b_certain, tl.sum(b_exists << block.columns[None, :], 1), b_chosen)
    tl.store(p_chosen + block.rows, b_chosen.to(tl.uint8), mask=block.row_inside)
    b_selected = ((b_chosen[:, None] >> block.columns[None, :]) & 1) == 1
    b_value = b_selected.to(tl.float32)
    if SOFT:
        b_scores = _surrogate(b_scores, b_selected, block.columns, 1.0 / s_tau, s_gap, N, M, GAPPED)
        b_value = tl.where(b_certain[:, None], b_value, _marginals(b_scores, block.columns, N, M, FAST))
    b_value = tl.where(b_lawless[:, None], float("nan"), b_value)
    store_rows(p_value, block, M, b_value)


@triton.jit(do_not_specialize=["s_rows"])
def mask_backward_kernel(
    p_logits,
    p_chosen,
    p_grad,
    p_out,
    s_rows,
    s_tau,
    s_gap,
    N: tl.constexpr,
    M: tl.constexpr,
    GAPPED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The covariances under the surrogate's logits times the gradient, over the temperature."""
    block = row_block(s_rows, M, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, block, M, -INF).to(tl.float32)
    b_grad = load_rows(p_grad, block, M, 0.0).to(tl.float32)
    b_chosen = tl.load(p_chosen + block.rows, mask=block.row_inside, other=0).to(tl.int32)
    b_lawless = _is_lawless(b_logits)
    b_scores = _scores(b_logits, b_lawless)
    b_grad = tl.where(b_scores > -INF, b_grad, 0.0)
    b_certain = tl.sum((b_scores > -INF).to(tl.int32), 1) <= N
    b_selected = ((b_chosen[:, None] >> block.columns[None, :]) & 1) == 1
    s_rate = 1.0 / s_tau
    b_scores = _surrogate(b_scores, b_selected, block.columns, s_rate, s_gap, N, M, GAPPED)
    b_out = _covariance_product(b_scores, block.columns, b_grad, N, M, FAST) * s_rate
    b_out = tl.where(b_certain[:, None], 0.0, b_out)
    b_out = tl.where(b_lawless[:, None], float("nan"), b_out)
    store_rows(p_out, block, M, b_out)


class Options(NamedTuple):
    """The options of a call."""

    k: int
    """How many elements of a group are selected."""
    tau: float
    gap: float | None
    """The gap of GST; None for SIMPLE."""
    soft: bool = False
    """Whether the sample is the surrogate itself."""


def forward(rows: Tensor, key: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """A sample, and the subsets as bytes, ``(groups,)``: bit `j` stands for element `j`."""
    value = torch.empty_like(rows, memory_format=torch.contiguous_format)
    chosen = torch.empty(rows.shape[:-1].numel(), dtype=torch.uint8, device=rows.device)
    pointers = (rows.contiguous(), key, value, chosen)
    _run(mask_forward_kernel, pointers, options, SOFT=options.soft)
    return value, chosen


def backward(rows: Tensor, chosen: Tensor, grad: Tensor, options: Options) -> Tensor:
    """The gradient of the logits."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _run(mask_backward_kernel, (rows.contiguous(), chosen, grad.contiguous(), out), options)
    return out


def _run(kernel: Any, pointers: tuple[Tensor, ...], options: Options, **flags: bool) -> None:
    """Launch a kernel over the groups of its first tensor, if there are any."""
    groups, size = pointers[0].shape[:-1].numel(), pointers[0].shape[-1]
    if groups:
        programs, block = partition(groups, size, BLOCK)
        # Groups come in pairs that share their noise.
        block["BLOCK_ROWS"] = max(block["BLOCK_ROWS"], 2)
        # As floats: a whole number would be compiled as such.
        numbers = float(options.tau), float(options.gap or 0.0)
        named = {"N": options.k, "M": size, "GAPPED": options.gap is not None, **flags}
        named |= {"FAST": pointers[0].is_cuda, **block}
        run(kernel, programs, pointers, (groups,), numbers, named)


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, key: Tensor, options: Options) -> Tensor:
        value, chosen = forward(rows, key, options)
        ctx.options = options
        ctx.save_for_backward(rows, chosen)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows, chosen = ctx.saved_tensors

        def product(grad: Tensor) -> Tensor:
            return backward(rows, chosen, grad, ctx.options)

        return first_order(product, rows, grad), None, None


# The kernels as operators that a compiler puts into its graph without looking inside. These are the fields
# of `Options`.
_OPTIONS = "int k, float tau, float? gap, bool soft"


@torch.library.custom_op(
    "gapped::mask",
    mutates_args=(),
    schema=f"(Tensor rows, Tensor key, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _mask(rows: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return forward(rows, key, Options(*options))


@_mask.register_fake
def _(rows: Tensor, key: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    groups = rows.numel() // rows.shape[-1]
    return rows.new_empty(rows.shape), rows.new_empty((groups,), dtype=torch.uint8)


@torch.library.custom_op(
    "gapped::mask_backward",
    mutates_args=(),
    schema=f"(Tensor rows, Tensor chosen, Tensor grad, {_OPTIONS}) -> Tensor",
)
def _mask_backward(rows: Tensor, chosen: Tensor, grad: Tensor, *options: Any) -> Tensor:
    return backward(rows, chosen, grad, Options(*options))


@_mask_backward.register_fake
def _(rows: Tensor, *rest: Any) -> Tensor:
    return rows.new_empty(rows.shape)


def _save_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, _, *ctx.options = inputs
    ctx.save_for_backward(rows, output[1])


def _pull_mask(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    gradient = torch.ops.gapped.mask_backward(*ctx.saved_tensors, grad, *ctx.options)
    return gradient, None, *(None for _ in ctx.options)


_mask.register_autograd(_pull_mask, setup_context=_save_mask)


def sample(rows: Tensor, options: Options, generator: torch.Generator | None) -> Tensor:
    """A sample of groups ``(*rows, m)`` that carries its gradient."""
    key = draw_key(rows, generator)
    note_backend("triton")
    if torch.compiler.is_compiling():
        value: Tensor = torch.ops.gapped.mask(rows, key, *options)[0]
        return value
    return _Sample.apply(rows, key, options)  # type: ignore[no-any-return]
