"""MVE's gradient in one pass: logits, index and incoming gradient are read once, the gradient written once.

The weights between the categories of a row, K x K numbers, are computed once and stay in registers; each step
of conjugate gradients multiplies by them. Everything is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import load_rows, normalise, reciprocal, row_block, store_rows
from gapped.kernels.sampling.surrogates import level

# The smallest normal number: what a sum of two probabilities that are zero is divided by.
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _ratio(b_a, b_b):
    """a / b, and 0 where b is not positive."""
    return tl.where(b_b > 0, b_a / tl.where(b_b > 0, b_b, 1.0), 0.0)


@triton.jit
def _total(b_x):
    """The sum of each row, as a column."""
    return tl.sum(b_x, 1)[:, None]


@triton.jit
def _times(b_weights, b_v):
    """The product of each row's matrix, which is symmetric, with its vector."""
    # Over the first of its axes: most of such a sum lies within a thread.
    return tl.sum(b_weights * b_v[:, :, None], 1)


@triton.jit
def _shares(b_p, b_s, b_exists, FAST: tl.constexpr):
    """The weights between categories, with a diagonal of zeros, and the sums of p_j/(s + p_i + p_j)."""
    b_sums = b_p[:, :, None] + b_p[:, None, :] + b_s[:, :, None]
    b_share = b_p[:, :, None] * reciprocal(tl.maximum(b_sums, _TINY), FAST)
    b_q = tl.where(b_exists, tl.sum(b_share, 1), 0.0)
    b_columns = tl.arange(0, b_p.shape[1])
    b_other = b_columns[None, :, None] != b_columns[None, None, :]
    return tl.where(b_other, b_p[:, None, :] * b_share, 0.0), b_q


@triton.jit
def _potential(b_p, b_s, b_y, b_mean, b_exists, STEPS: tl.constexpr, LEFT: tl.constexpr, FAST: tl.constexpr):
    """The solution of A u = y as two parts, v and a constant, as in `gapped.pathwise.mve`.

    Steps end when no row of the program has more than `LEFT` of its first residual's square, or at `STEPS`.
    """
    b_weights, b_q = _shares(b_p, b_s, b_exists, FAST)
    b_degree = tl.sum(b_weights, 1)
    b_count = _total(b_q)
    b_rho = _ratio(b_q, b_count)
    b_d = b_degree + b_s * b_q * (1 - b_rho)
    b_mass = _ratio(b_d, _total(b_d))
    b_inverse = _ratio(1.0, b_d * (1 + b_mass))
    b_r = b_y - b_rho * (b_s * b_mean)
    # What is left of its sum is rounding, and belongs where the matrix is large.
    b_r -= b_mass * _total(b_r)
    b_v = tl.zeros_like(b_r)
    b_direction = b_inverse * b_r
    b_size = _total(b_r * b_direction)
    b_least = b_size * LEFT
    s_step = 0
    while (s_step < STEPS) & (tl.max(tl.max(b_size - b_least, 1), 0) > 0):
        b_image = b_degree * b_direction - _times(b_weights, b_direction)
        b_image += b_s * b_q * (b_direction - _total(b_rho * b_direction))
        b_image += b_d * _total(b_mass * b_direction)
        b_length = _ratio(b_size, _total(b_direction * b_image))
        b_v += b_length * b_direction
        b_r -= b_length * b_image
        b_before = b_size
        b_size = _total(b_r * b_inverse * b_r)
        b_direction = b_inverse * b_r + _ratio(b_size, b_before) * b_direction
        s_step += 1
    return b_v, _ratio(b_mean - _total(b_q * b_v), b_count)


@triton.jit
def _gradient(b_p, b_g, b_selected, b_s, STEPS: tl.constexpr, LEFT: tl.constexpr, FAST: tl.constexpr):
    """The gradient of the logits for probabilities, incoming gradient and selection of each row."""
    b_exists = b_p > 0
    b_sample = b_selected.to(tl.float32)
    # What stands at a category that does not exist may be anything.
    b_g = tl.where(b_exists, b_g, 0.0)
    b_drawn = _total(b_p * b_sample)
    b_scale = _ratio(tl.where(b_exists, 1.0, 0.0), b_s + b_p + b_drawn)
    b_y = b_g * (b_s + b_p) * b_scale - b_sample * _total(b_g * b_p * b_scale)
    b_v, b_c = _potential(b_p, b_s, b_y, _total(b_g * b_scale), b_exists, STEPS, LEFT, FAST)
    b_v = _ratio(b_s + b_p, b_s + 2 * b_p) * b_v + b_c * _ratio(b_s + 0 * b_p, 2 * b_s + 4 * b_p)
    b_own = _ratio(b_drawn, b_s + 2 * b_drawn) * _total(b_g * b_sample)
    # Relative to a likeliest category, as in the reference: next to a probability of 1 digits are kept.
    b_columns = tl.arange(0, b_p.shape[1])[None, :]
    b_top = tl.max(b_p, 1)[:, None]
    b_likeliest = tl.min(tl.where(b_p == b_top, b_columns, b_p.shape[1]), 1)[:, None]
    b_v -= _total(tl.where(b_columns == b_likeliest, b_v, 0.0))
    b_others = b_p * (1 - b_sample)
    b_rest = b_sample * _total(b_others) - b_others
    return b_p * (b_v - _total(b_p * b_v)) + b_own * b_rest


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_smoothing_every"])
def flow_kernel(
    p_logits, p_index, p_grad, p_tau, p_smoothing, p_out, s_rows, s_categories, s_stride, s_grad_stride,
    s_tau_every, s_smoothing_every, s_tau, s_smoothing,
    TAU_PER_ROW: tl.constexpr, SMOOTHING_PER_ROW: tl.constexpr, STEPS: tl.constexpr, LEFT: tl.constexpr,
    FAST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    block = row_block(s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, block, s_stride, -float("inf")).to(tl.float32)
    b_index = tl.load(p_index + block.rows, mask=block.row_inside, other=0).to(tl.int32)
    b_grad = load_rows(p_grad, block, s_grad_stride, 0.0).to(tl.float32)
    b_tau = level((p_tau, s_tau, s_tau_every), block.rows, block.row_inside, TAU_PER_ROW)[:, None]
    smoothing = (p_smoothing, s_smoothing, s_smoothing_every)
    b_s = level(smoothing, block.rows, block.row_inside, SMOOTHING_PER_ROW)[:, None]
    # A row without a law is computed as if it had one: minima and maxima pass over a NaN.
    b_lost = (b_index > s_categories)[:, None] | (b_s != b_s) | (b_tau != b_tau)
    b_logits = tl.where(b_lost, 0.0, b_logits)
    b_s = tl.where(b_lost, 0.0, b_s)
    b_tau = tl.where(b_lost, 1.0, b_tau)
    b_top = tl.max(b_logits, 1)
    b_shifted = b_logits - tl.where(b_top == -float("inf"), 0.0, b_top)[:, None]
    b_p = normalise(b_shifted / b_tau)
    b_selected = block.columns[None, :] == b_index[:, None]
    b_out = _gradient(b_p, b_grad, b_selected, b_s, STEPS, LEFT, FAST)
    b_out = tl.where((b_index == s_categories)[:, None], 0.0, b_out)
    b_out = tl.where(b_lost, float("nan"), b_out)
    store_rows(p_out, block, s_categories, b_out)
