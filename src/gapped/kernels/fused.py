"""Hard samples in one pass forward and one pass backward, for rows that fit into a block.

The forward pass reads the logits and writes the sample and its index. The backward pass reads logits,
index and incoming gradient and writes the gradient; noise is not stored but drawn again from the same
counter-based key. Arithmetic is in float32 whatever the dtype of the logits, running sums in float64.

Prefixes: ``p_`` pointers, ``b_`` values of a block, ``s_`` scalars of the launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["MODES", "backward_kernel", "forward_kernel", "noise_kernel"]

MODES = {"gst": 0, "straight-through": 1, "reinmax": 2, "gumbel-softmax": 3, "decoupled": 4, "gumbel-rao": 5}
_GUMBEL = tl.constexpr(3)
_DECOUPLED = tl.constexpr(4)
_RAO = tl.constexpr(5)
_REINMAX = tl.constexpr(2)
_GST = tl.constexpr(0)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_GAP_GUARD = tl.constexpr(1e-5)


@triton.jit
def _uniform(b_bits):
    """Uniforms in (0, 1) of 24 bits; never 0 or 1, so that both logarithms below are finite."""
    b_u = ((b_bits >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return tl.minimum(b_u, 0.99999994)


@triton.jit
def _counters(b_rows, b_columns, s_categories):
    """The two halves of an element's 64-bit number."""
    b_element = b_rows[:, None] * s_categories + b_columns[None, :]
    return (b_element & 0xFFFFFFFF).to(tl.uint32), (b_element >> 32).to(tl.uint32)


@triton.jit
def _gumbel(s_seed, b_rows, b_columns, s_categories):
    b_low, b_high = _counters(b_rows, b_columns, s_categories)
    b_zero = b_low * 0
    b_bits, _, _, _ = tl.philox(s_seed, b_low, b_high, b_zero, b_zero)
    return -tl.log(-tl.log(_uniform(b_bits)))


@triton.jit
def _row_uniform(s_seed, b_rows):
    """One float64 uniform in [0, 1) per row, of 53 bits."""
    b_low = (b_rows & 0xFFFFFFFF).to(tl.uint32)
    b_high = (b_rows >> 32).to(tl.uint32)
    b_a, b_b, _, _ = tl.philox(s_seed, b_low, b_high, b_low * 0, b_low * 0)
    return ((b_a >> 5).to(tl.float64) * 67108864.0 + (b_b >> 6).to(tl.float64)) * 1.1102230246251565e-16


@triton.jit
def _load_rows(p, b_rows, b_columns, s_stride, b_inside, other):
    return tl.load(p + b_rows[:, None] * s_stride + b_columns[None, :], mask=b_inside, other=other)


@triton.jit
def _shifted(b_logits):
    """Logits relative to the largest of their row; a row without categories stays -inf."""
    b_top = tl.max(b_logits, 1)
    return b_logits - tl.where(b_top == -float("inf"), 0.0, b_top)[:, None]


@triton.jit
def _normalised(b_shifted):
    b_weights = tl.exp(b_shifted)
    b_total = tl.sum(b_weights, 1)
    return b_weights / tl.where(b_total == 0, 1.0, b_total)[:, None]


@triton.jit
def _through(b_point, b_grad):
    """J(q) g."""
    return b_point * (b_grad - tl.sum(b_point * b_grad, 1)[:, None])


@triton.jit
def _level(p_level, s_level, b_rows, b_row_inside, PER_ROW: tl.constexpr):
    if PER_ROW:
        b_level = tl.load(p_level + b_rows, mask=b_row_inside, other=1.0)
    else:
        b_level = tl.zeros_like(b_rows).to(tl.float32) + s_level
    # A negative level becomes NaN, and so does its row.
    return tl.where(b_level >= 0, b_level, float("nan"))


@triton.jit
def forward_kernel(
    p_logits,
    p_seed,
    p_tau_forward,
    p_value,
    p_index,
    s_rows,
    s_categories,
    s_stride,
    s_tau_forward,
    MODE: tl.constexpr,
    TAU_FORWARD_PER_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    b_rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_columns = tl.arange(0, BLOCK_COLUMNS)
    b_row_inside = b_rows < s_rows
    b_inside = b_row_inside[:, None] & (b_columns < s_categories)[None, :]
    b_logits = _load_rows(p_logits, b_rows, b_columns, s_stride, b_inside, -float("inf")).to(tl.float32)
    b_nan = tl.sum((b_logits != b_logits).to(tl.int32), 1) > 0
    b_shifted = _shifted(b_logits)
    s_seed = tl.load(p_seed)
    if (MODE == _GUMBEL) or (MODE == _DECOUPLED):
        b_tau = _level(p_tau_forward, s_tau_forward, b_rows, b_row_inside, TAU_FORWARD_PER_ROW)
        b_scores = b_shifted / b_tau[:, None] + _gumbel(s_seed, b_rows, b_columns, s_categories)
        b_best = tl.max(b_scores, 1)
        b_wins = (b_scores == b_best[:, None]) & (b_shifted > -float("inf"))
    else:
        b_weights = tl.exp(b_shifted)
        b_running = tl.cumsum(b_weights.to(tl.float64), 1)
        b_total = tl.max(b_running, 1)
        b_threshold = _row_uniform(s_seed, b_rows) * b_total
        # A category without weight never wins, however the running sum was rounded.
        b_wins = (b_running > b_threshold[:, None]) & (b_weights > 0)
    b_index = tl.min(tl.where(b_wins, b_columns[None, :], s_categories), 1)
    b_value = (b_columns[None, :] == b_index[:, None]).to(tl.float32)
    b_value = tl.where(b_nan[:, None], float("nan"), b_value)
    p_out = p_value + b_rows[:, None] * s_categories + b_columns[None, :]
    tl.store(p_out, b_value.to(p_value.dtype.element_ty), mask=b_inside)
    tl.store(p_index + b_rows, b_index, mask=b_row_inside)


@triton.jit
def _one_rao(b_acc, b_bits, b_log2_p, b_selected, b_grad, b_sharpness, s_share):
    """Add one conditional draw. With unit exponentials E, the surrogate is in proportion to 1 for the
    winner i and to (1 + E_j / (p_j E_i))^(-1/tau) for the others; everything below is in base 2."""
    b_e = tl.log2(-tl.log2(_uniform(b_bits)))
    b_winner = tl.sum(tl.where(b_selected, b_e, 0.0), 1)
    b_x = b_e - b_log2_p - b_winner[:, None]
    b_lag = tl.maximum(b_x, 0.0) + tl.log2(1.0 + tl.exp2(-tl.abs(b_x)))
    b_weight = tl.where(b_selected, 1.0, tl.exp2(-b_lag * b_sharpness))
    b_total = tl.sum(b_weight, 1)
    b_point = b_weight / tl.where(b_total == 0, 1.0, b_total)[:, None]
    return b_acc + s_share * _through(b_point, b_grad)


@triton.jit
def backward_kernel(
    p_logits,
    p_index,
    p_grad,
    p_seed,
    p_tau,
    p_gap,
    p_out,
    s_rows,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau,
    s_gap,
    s_samples,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    DETACHED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    b_rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_columns = tl.arange(0, BLOCK_COLUMNS)
    b_row_inside = b_rows < s_rows
    b_inside = b_row_inside[:, None] & (b_columns < s_categories)[None, :]
    b_logits = _load_rows(p_logits, b_rows, b_columns, s_stride, b_inside, -float("inf")).to(tl.float32)
    b_grad = _load_rows(p_grad, b_rows, b_columns, s_grad_stride, b_inside, 0.0).to(tl.float32)
    b_index = tl.load(p_index + b_rows, mask=b_row_inside, other=0)
    b_selected = b_columns[None, :] == b_index[:, None]
    b_tau = _level(p_tau, s_tau, b_rows, b_row_inside, TAU_PER_ROW)[:, None]
    b_shifted = _shifted(b_logits)
    if MODE == _GST:
        if EXPECTED_GAP:
            b_p = tl.sum(tl.where(b_selected, _normalised(b_shifted), 0.0), 1) * (1 - _GAP_GUARD)
            b_small = b_p < 0.0046
            b_quotient = -tl.log(1.0 - b_p) / tl.where(b_small, 1.0, b_p)
            b_gap = tl.where(b_small, 1.0 + b_p * (0.5 + b_p / 3.0), b_quotient)
        else:
            b_gap = _level(p_gap, s_gap, b_rows, b_row_inside, GAP_PER_ROW)
        b_perturbed = tl.where(b_selected, 0.0, tl.minimum(b_shifted, -b_gap[:, None]))
        b_out = _through(_normalised(b_perturbed / b_tau), b_grad) / b_tau
        if not DETACHED:
            # Only logits that are neither raised nor lowered move by themselves, all relative to the largest.
            b_moves = (b_shifted < -b_gap[:, None]) & (b_index[:, None] != b_columns[None, :])
            b_out = tl.where(b_moves, b_out, 0.0)
            b_largest = (b_shifted == 0).to(tl.float32)
            b_ties = tl.maximum(tl.sum(b_largest, 1), 1.0)
            b_out -= b_largest * (tl.sum(b_out, 1) / b_ties)[:, None]
    elif MODE == _REINMAX:
        b_half = (_normalised(b_shifted / b_tau) + b_selected.to(tl.float32)) / 2
        b_out = 2 * _through(b_half, b_grad) - _through(_normalised(b_shifted), b_grad) / 2
    elif MODE == _GUMBEL:
        b_scores = b_shifted + _gumbel(tl.load(p_seed), b_rows, b_columns, s_categories)
        b_out = _through(_normalised(_shifted(b_scores) / b_tau), b_grad) / b_tau
    elif MODE == _DECOUPLED:
        b_scores = b_shifted / b_tau + _gumbel(tl.load(p_seed), b_rows, b_columns, s_categories)
        b_out = _through(_normalised(_shifted(b_scores)), b_grad) / b_tau
    elif MODE == _RAO:
        b_total = tl.sum(tl.exp(b_shifted), 1)
        b_log2_p = (b_shifted - tl.log(tl.where(b_total == 0, 1.0, b_total))[:, None]) * _LOG2_E
        b_low, b_high = _counters(b_rows, b_columns, s_categories)
        s_seed = tl.load(p_seed)
        b_sharpness = 1.0 / b_tau
        b_one = b_low * 0 + 1
        b_acc = tl.zeros_like(b_grad)
        for s_block in range(0, tl.cdiv(s_samples, 4)):
            b_0, b_1, b_2, b_3 = tl.philox(s_seed, b_low, b_high, b_low * 0 + s_block, b_one)
            s_left = s_samples - 4 * s_block
            b_acc = _one_rao(b_acc, b_0, b_log2_p, b_selected, b_grad, b_sharpness, 1.0)
            b_acc = _one_rao(
                b_acc, b_1, b_log2_p, b_selected, b_grad, b_sharpness, (s_left > 1).to(tl.float32)
            )
            b_acc = _one_rao(
                b_acc, b_2, b_log2_p, b_selected, b_grad, b_sharpness, (s_left > 2).to(tl.float32)
            )
            b_acc = _one_rao(
                b_acc, b_3, b_log2_p, b_selected, b_grad, b_sharpness, (s_left > 3).to(tl.float32)
            )
        b_out = b_acc * (b_sharpness / s_samples)
    else:
        b_out = _through(_normalised(b_shifted / b_tau), b_grad) / b_tau
    # Minima and maxima pass over a NaN on a GPU: its row is marked here.
    b_nan = tl.sum((b_logits != b_logits).to(tl.int32), 1) > 0
    b_out = tl.where(b_nan[:, None], float("nan"), b_out)
    p_to = p_out + b_rows[:, None] * s_categories + b_columns[None, :]
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=b_inside)


@triton.jit
def noise_kernel(
    p_seed,
    p_out,
    s_rows,
    s_categories,
    s_draw,
    RAO: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The noise of the other kernels, written out for tests: Gumbels, or the exponentials of one Rao draw."""
    b_rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_columns = tl.arange(0, BLOCK_COLUMNS)
    b_inside = (b_rows < s_rows)[:, None] & (b_columns < s_categories)[None, :]
    s_seed = tl.load(p_seed)
    if RAO:
        b_low, b_high = _counters(b_rows, b_columns, s_categories)
        b_0, b_1, b_2, b_3 = tl.philox(s_seed, b_low, b_high, b_low * 0 + s_draw // 4, b_low * 0 + 1)
        s_lane = s_draw % 4
        b_bits = tl.where(s_lane == 0, b_0, tl.where(s_lane == 1, b_1, tl.where(s_lane == 2, b_2, b_3)))
        b_noise = -tl.log2(_uniform(b_bits)) * _LN_2
    else:
        b_noise = _gumbel(s_seed, b_rows, b_columns, s_categories)
    tl.store(p_out + b_rows[:, None] * s_categories + b_columns[None, :], b_noise, mask=b_inside)
