"""MVE's gradient in one pass: logits, index and incoming gradient are read once, the gradient written once.

The reciprocals 1/(s + p_i + p_j) of a row, K x K numbers, are computed once and stay in registers; a product
with the weights p_i p_j/(s + p_i + p_j) is one with them between two with p. Everything is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import load_rows, normalise, reciprocal, row_block, store_rows
from gapped.kernels.sampling.surrogates import level

# The least number that is divided by, and the least probability that counts: the reciprocal of a smaller one may
# be infinite.
_LEAST = tl.constexpr(1e-37)
# The least probability of the drawn category: its reciprocal may be squared and summed.
_LEAST_DRAWN = tl.constexpr(1e-30)


@triton.jit
def _ratio(b_a, b_b, FAST: tl.constexpr):
    """a / b, and 0 where b is zero or nearly."""
    b_counts = b_b > _LEAST
    return tl.where(b_counts, b_a * reciprocal(tl.where(b_counts, b_b, 1.0), FAST), 0.0)


@triton.jit
def _total(b_x):
    """The sum of each row, as a column."""
    return tl.sum(b_x, 1)[:, None]


@triton.jit
def _square(b_x):
    """The square of each row's length, as a column."""
    return _total(b_x * b_x)


@triton.jit
def _any(b_flags):
    """Whether any flag is set, with the same answer for all threads, so that a loop may end by it.

    A row's sum may differ between threads, in its last bit: each adds its own product, not rounded, to the
    rounded ones of others. Threads that compared it would not always leave a loop together, and then wait for
    each other for ever.
    """
    return tl.max(b_flags.to(tl.int32)) > 0


@triton.jit
def _spread(b_x, THREADS: tl.constexpr):
    """Rows ``(R, K)`` as ``(K / THREADS, R, THREADS)``: consecutive entries belong to one thread."""
    b_x = tl.reshape(b_x, (b_x.shape[0], THREADS, b_x.shape[1] // THREADS))
    return tl.permute(b_x, (2, 0, 1))


@triton.jit
def _along(b_x, ALONG: tl.constexpr):
    """A number for each column of a matrix; for the axes of matrices see `_reciprocals`."""
    return _spread(b_x, ALONG)[:, None, :, None, :]


@triton.jit
def _down(b_x, DOWN: tl.constexpr):
    """A number for each row of a matrix."""
    return _spread(b_x, DOWN)[None, :, :, :, None]


@triton.jit
def _product(b_matrix, b_x, ALONG: tl.constexpr):
    """The product of each row's matrix with its vector."""
    b_sums = tl.sum(tl.sum(b_matrix * _along(b_x, ALONG), 0), 3)
    return tl.reshape(tl.permute(b_sums, (1, 2, 0)), b_x.shape)


@triton.jit
def _reciprocals(b_p, b_s, DOWN: tl.constexpr, ALONG: tl.constexpr, FAST: tl.constexpr):
    """1/(s + p_i + p_j) for all pairs of categories of each row, with a diagonal of zeros.

    A matrix is cut into `DOWN` times `ALONG` tiles, one for each thread. The entries of a tile are on the first
    axes, column and row, where registers lie; the rows of the batch and the tiles on the last, where threads do.
    So most of a product's sum is a thread's own.
    """
    b_p = tl.maximum(b_p, _LEAST)
    b_numbers = tl.broadcast_to(tl.arange(0, b_p.shape[1])[None, :], b_p.shape)
    b_others = _down(b_numbers, DOWN) != _along(b_numbers, ALONG)
    return tl.where(b_others, reciprocal(_down(b_p + b_s, DOWN) + _along(b_p, ALONG), FAST), 0.0)


@triton.jit
def _potential(
    b_p, b_s, b_y, b_mean, b_exists,
    SMOOTH: tl.constexpr, STEPS: tl.constexpr, LEFT: tl.constexpr, DOWN: tl.constexpr, ALONG: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """R u for the solution of A u = y, up to a constant, with names as in `gapped.pathwise.mve`.

    There the constant direction is filled, here nothing leaves its complement: y has a sum of zero, up to
    rounding, and so has every residual. Steps end when no row of the program has more than `LEFT` of its first
    residual's square, or at `STEPS`; a row that is done waits for the others. The square is the plain one: in the
    norm that the steps go by, categories much rarer than others would hide what is left of these.
    """
    b_matrix = _reciprocals(b_p, b_s, DOWN, ALONG, FAST)
    b_q = tl.where(b_exists, _product(b_matrix, b_p, ALONG), 0.0)
    b_degree = b_p * b_q
    b_d, b_r = b_degree, b_y
    if SMOOTH:
        b_q += _ratio(b_p, b_s + 2 * b_p, FAST)
        b_count = _total(b_q)
        b_rho = _ratio(b_q, b_count, FAST)
        b_d += b_s * b_q * (1 - b_rho)
        b_degree += b_s * b_q
        b_r -= b_rho * (b_s * b_mean)
        # What is left of its sum is rounding, and belongs where the matrix is large.
        b_r -= b_d * _ratio(_total(b_r), _total(b_d), FAST)
    b_inverse = _ratio(1.0, b_d, FAST)
    b_v = tl.zeros_like(b_r)
    b_direction = b_inverse * b_r
    b_size = _total(b_r * b_direction)
    # Relative to the largest entry, whose square alone may underflow.
    b_unit = reciprocal(tl.maximum(tl.max(tl.abs(b_r), 1), _LEAST)[:, None], FAST)
    b_left = _square(b_r * b_unit)
    b_least = LEFT * b_left
    s_step = 0
    while (s_step < STEPS) & _any(b_exists & (b_left > b_least)):
        b_image = b_degree * b_direction - b_p * _product(b_matrix, b_p * b_direction, ALONG)
        if SMOOTH:
            b_image -= b_s * b_q * _total(b_rho * b_direction)
        b_length = _ratio(b_size, _total(b_direction * b_image), FAST)
        b_length = tl.where(b_left > b_least, b_length, 0.0)
        b_v += b_length * b_direction
        b_r -= b_length * b_image
        b_scaled = b_inverse * b_r
        b_before = b_size
        b_size = _total(b_r * b_scaled)
        b_left = _square(b_r * b_unit)
        b_direction = b_scaled + _ratio(b_size, b_before, FAST) * b_direction
        s_step += 1
    if SMOOTH:
        # The constant part of u; of what R makes of it, half of it is left out.
        b_c = _ratio(b_mean - _total(b_q * b_v), b_count, FAST)
        b_v = (2 * (b_s + b_p) * b_v + b_c * b_s) * _ratio(0.5, b_s + 2 * b_p, FAST)
    else:
        b_v *= 0.5
    return b_v


@triton.jit
def _gradient(
    b_p, b_g, b_selected, b_s,
    SMOOTH: tl.constexpr, STEPS: tl.constexpr, LEFT: tl.constexpr, DOWN: tl.constexpr, ALONG: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits for probabilities, incoming gradient and selection of each row."""
    # The drawn category has a share however small its probability is at a temperature below 1.
    b_p = tl.where(b_selected, tl.maximum(b_p, _LEAST_DRAWN), b_p)
    b_exists = b_p > _LEAST
    b_p = tl.where(b_exists, b_p, 0.0)
    # What stands at a category that does not exist may be anything.
    b_g = tl.where(b_exists, b_g, 0.0)
    # The squares in the steps must not underflow: the solution is linear in g.
    b_largest = tl.minimum(tl.maximum(tl.max(tl.abs(b_g), 1), _LEAST), 1.0 / _LEAST)[:, None]
    b_g *= reciprocal(b_largest, FAST)
    b_drawn = _total(tl.where(b_selected, b_p, 0.0))
    b_scale = tl.where(b_exists, _ratio(1.0, b_s + b_p + b_drawn, FAST), 0.0)
    b_y = tl.where(b_selected, 0.0, b_g * b_p * b_scale)
    b_y = tl.where(b_selected, -_total(b_y), b_y) + b_s * b_g * b_scale
    b_mean = _total(b_g * b_scale)
    b_v = _potential(b_p, b_s, b_y, b_mean, b_exists, SMOOTH, STEPS, LEFT, DOWN, ALONG, FAST)
    b_own = _ratio(b_drawn, b_s + 2 * b_drawn, FAST) * _total(tl.where(b_selected, b_g, 0.0))
    # Next to a probability of 1 digits are kept: v is relative to its mean, which is that category's,
    # and 1 - p is the sum of the others.
    b_v -= _total(b_p * b_v)
    b_rest = tl.where(b_selected, _total(tl.where(b_selected, 0.0, b_p)), -b_p)
    return b_largest * (b_p * (b_v - _total(b_p * b_v)) + b_own * b_rest)


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_gap_every"])
def flow_kernel(
    p_logits, p_index, p_grad, p_seed, p_tau, p_gap, p_out, s_rows, s_categories, s_inner, s_stride, s_step,
    s_grad_stride, s_grad_step, s_tau_every, s_gap_every, s_tau, s_gap,
    TAU_PER_ROW: tl.constexpr, GAP_PER_ROW: tl.constexpr, AT_INDEX: tl.constexpr, SMOOTH: tl.constexpr,
    STEPS: tl.constexpr, LEFT: tl.constexpr, DOWN: tl.constexpr, ALONG: tl.constexpr, FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """`short_rows.backward_kernel` of MVE, with its arguments; the gap is the smoothing, 0 unless `SMOOTH`.

    Rows lie one after the other.
    """
    block = row_block(s_rows, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, block, s_stride, -float("inf")).to(tl.float32)
    b_index = tl.load(p_index + block.rows, mask=block.row_inside, other=0).to(tl.int32)
    b_selected = block.columns[None, :] == b_index[:, None]
    if AT_INDEX:
        b_one = tl.load(p_grad + block.rows, mask=block.row_inside, other=0.0).to(tl.float32)
        b_grad = tl.where(b_selected, b_one[:, None], 0.0)
    else:
        b_grad = load_rows(p_grad, block, s_grad_stride, 0.0).to(tl.float32)
    b_tau = level((p_tau, s_tau, s_tau_every), block.rows, block.row_inside, TAU_PER_ROW)[:, None]
    b_s = level((p_gap, s_gap, s_gap_every), block.rows, block.row_inside, GAP_PER_ROW)[:, None]
    # A row without a law is computed as if it had one: minima and maxima pass over a NaN.
    b_lost = (b_index > s_categories)[:, None] | (b_s != b_s) | (b_tau != b_tau)
    b_logits = tl.where(b_lost, 0.0, b_logits)
    b_s = tl.where(b_lost, 0.0, b_s)
    b_tau = tl.where(b_lost, 1.0, b_tau)
    b_top = tl.max(b_logits, 1)
    b_shifted = b_logits - tl.where(b_top == -float("inf"), 0.0, b_top)[:, None]
    b_p = normalise(b_shifted / b_tau)
    b_out = _gradient(b_p, b_grad, b_selected, b_s, SMOOTH, STEPS, LEFT, DOWN, ALONG, FAST)
    b_out = tl.where((b_index == s_categories)[:, None], 0.0, b_out)
    b_out = tl.where(b_lost, float("nan"), b_out)
    store_rows(p_out, block, s_categories, b_out)
