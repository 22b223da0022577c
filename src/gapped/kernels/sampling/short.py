"""Samples in one pass forward and one pass backward, for rows that fit into a block.

The forward pass reads the logits and writes the sample and its index. The backward pass reads logits,
index and incoming gradient and writes the gradient. Arithmetic is in float32 whatever the dtype of the
logits, running sums in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import (
    LN_2,
    LOG2_E,
    drop_absent,
    exceeds,
    gumbel,
    load_key,
    load_rows,
    normalise,
    row_block,
    row_uniforms,
    safe_reciprocal,
    store_rows,
)
from gapped.kernels.sampling.surrogates import (
    DECOUPLED,
    GST,
    GST_AUTO,
    GUMBEL,
    REINMAX,
    TWO_POINTS,
    halfway_odds,
    lawless,
    level,
    log2_odds,
    selected_gap,
)


@triton.jit
def _write(p, block, s_categories, s_inner, b_values):
    """Write rows in the order of the logits, without anything between them."""
    store_rows(p, block, tl.cast(s_categories, tl.int64) * s_inner, b_values, s_inner, s_inner)


@triton.jit
def _shift(b_logits):
    """Logits relative to the largest of their row; a row without categories stays -inf."""
    b_top = tl.max(b_logits, 1)
    return b_logits - tl.where(b_top == -float("inf"), 0.0, b_top)[:, None]


@triton.jit
def _jacobian_product(b_point, b_grad):
    """J(q) g."""
    return b_point * (b_grad - tl.sum(b_point * b_grad, 1)[:, None])


@triton.jit
def _log2_p(b_shifted):
    """Base-2 logarithms of the probabilities."""
    b_total = tl.sum(tl.exp(b_shifted), 1)
    return b_shifted * LOG2_E - tl.log2(tl.where(b_total == 0, 1.0, b_total))[:, None]


@triton.jit
def _gap(source, block, b_shifted, b_selected, EXPECTED: tl.constexpr, PER_ROW: tl.constexpr):
    """The gap of GST in each row."""
    if EXPECTED:
        b_gap = selected_gap(tl.sum(tl.where(b_selected, normalise(b_shifted), 0.0), 1))
    else:
        b_gap = level(source, block.rows, block.row_inside, PER_ROW)
    return b_gap[:, None]


@triton.jit
def _surrogate(
    s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE: tl.constexpr, FAST: tl.constexpr
):
    """The point of the simplex that carries the gradient, for the estimators that have just one."""
    if MODE == GST:
        b_scores = tl.where(b_selected, 0.0, tl.minimum(b_shifted, -b_gap)) / b_tau
    elif MODE == GST_AUTO:
        b_scores = tl.where(b_selected, 0.0, log2_odds(_log2_p(b_shifted), FAST) * LN_2) / b_tau
    elif MODE == GUMBEL:
        b_scores = _shift(b_shifted + gumbel(s_seed, b_element, FAST)) / b_tau
    elif MODE == DECOUPLED:
        b_scores = _shift(b_shifted / b_tau + gumbel(s_seed, b_element, FAST))
    else:
        b_scores = b_shifted / b_tau
    return normalise(b_scores)


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_gap_every", "s_tau_forward_every"])
def forward_kernel(
    p_logits,
    p_seed,
    p_tau,
    p_gap,
    p_tau_forward,
    p_value,
    p_index,
    s_rows,
    s_categories,
    s_inner,
    s_stride,
    s_step,
    s_tau_every,
    s_gap_every,
    s_tau_forward_every,
    s_tau,
    s_gap,
    s_tau_forward,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    TAU_FORWARD_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    ARGMAX: tl.constexpr,
    SOFT: tl.constexpr,
    DENSE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # Rows side by side: so the compiler knows that they come in groups, and reads several at once.
    block = row_block(s_rows // s_inner * s_inner, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, block, s_stride, -float("inf"), s_inner, s_step).to(tl.float32)
    b_shifted = _shift(b_logits)
    b_element = block.rows[:, None] * s_categories + block.columns[None, :]
    s_seed = load_key(p_seed)
    if (MODE == GUMBEL) or (MODE == DECOUPLED):
        tau_forward = (p_tau_forward, s_tau_forward, s_tau_forward_every)
        b_tau_forward = level(tau_forward, block.rows, block.row_inside, TAU_FORWARD_PER_ROW)
        b_scores = b_shifted / b_tau_forward[:, None] + gumbel(s_seed, b_element, FAST)
        b_best = tl.max(b_scores, 1)
        b_wins = (b_scores == b_best[:, None]) & (b_shifted > -float("inf"))
        # Minima and maxima pass over a NaN on a GPU, sums do not.
        b_nan = (tl.sum(lawless(b_logits).to(tl.int32), 1) > 0) | (b_tau_forward != b_tau_forward)
    elif ARGMAX:
        b_wins = b_shifted == 0.0
        b_nan = tl.sum(lawless(b_logits).to(tl.int32), 1) > 0
    else:
        b_weights = tl.exp(b_shifted)
        b_running = tl.cumsum(b_weights.to(tl.float64), 1)
        b_total = tl.sum(b_weights.to(tl.float64), 1)
        b_u, _ = row_uniforms(s_seed, block.rows)
        b_wins = exceeds(b_running, b_u * b_total, b_weights)
        b_nan = b_total != b_total
    b_index = tl.min(tl.where(b_wins, block.columns[None, :], s_categories), 1)
    b_index = tl.where(b_nan, s_categories + 1, b_index)
    tl.store(p_index + block.rows, b_index, mask=block.row_inside)
    if DENSE:
        b_selected = block.columns[None, :] == b_index[:, None]
        if SOFT:
            b_tau = level((p_tau, s_tau, s_tau_every), block.rows, block.row_inside, TAU_PER_ROW)[:, None]
            b_gap = b_tau
            if MODE == GST:
                gap = (p_gap, s_gap, s_gap_every)
                b_gap = _gap(gap, block, b_shifted, b_selected, EXPECTED_GAP, GAP_PER_ROW)
            b_value = _surrogate(s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE, FAST)
            b_value = tl.where((b_index == s_categories)[:, None], 0.0, b_value)
        else:
            b_value = b_selected.to(tl.float32)
        b_value = tl.where(b_nan[:, None], float("nan"), b_value)
        _write(p_value, block, s_categories, s_inner, b_value)


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_gap_every"])
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
    s_inner,
    s_stride,
    s_step,
    s_grad_stride,
    s_grad_step,
    s_tau_every,
    s_gap_every,
    s_tau,
    s_gap,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    DETACHED: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    # Rows side by side: so the compiler knows that they come in groups, and reads several at once.
    block = row_block(s_rows // s_inner * s_inner, s_categories, BLOCK_ROWS, BLOCK_COLUMNS)
    b_logits = load_rows(p_logits, block, s_stride, -float("inf"), s_inner, s_step).to(tl.float32)
    b_index = tl.load(p_index + block.rows, mask=block.row_inside, other=0).to(tl.int32)
    b_selected = block.columns[None, :] == b_index[:, None]
    if AT_INDEX:
        b_one = tl.load(p_grad + block.rows, mask=block.row_inside, other=0.0).to(tl.float32)
        b_grad = tl.where(b_selected, b_one[:, None], 0.0)
    else:
        b_grad = load_rows(p_grad, block, s_grad_stride, 0.0, s_inner, s_grad_step).to(tl.float32)
        b_grad = drop_absent(b_grad, b_logits)
    b_tau = level((p_tau, s_tau, s_tau_every), block.rows, block.row_inside, TAU_PER_ROW)[:, None]
    b_shifted = _shift(b_logits)
    b_element = block.rows[:, None] * s_categories + block.columns[None, :]
    s_seed = load_key(p_seed)
    if MODE >= TWO_POINTS:
        b_weights = tl.exp(b_shifted)
        b_total = tl.sum(b_weights, 1)
        b_half = b_weights * (0.5 * safe_reciprocal(b_total))[:, None]
        if MODE == REINMAX:
            b_point, b_scale = (normalise(b_shifted / b_tau) + b_selected.to(tl.float32)) / 2, 2.0
        else:
            b_log2_half = b_shifted * LOG2_E - tl.log2(tl.where(b_total == 0, 1.0, 2 * b_total))[:, None]
            b_odds = halfway_odds(b_half, b_log2_half, 1 / b_tau, MODE, FAST)
            b_odds = tl.where(b_selected, 1.0, b_odds)
            b_point, b_scale = b_odds * safe_reciprocal(tl.sum(b_odds, 1))[:, None], 2.0 / b_tau
        b_out = b_scale * _jacobian_product(b_point, b_grad)
        b_out -= b_half * (b_grad - 2.0 * tl.sum(b_half * b_grad, 1)[:, None])
    else:
        b_gap = b_tau
        if MODE == GST:
            gap = (p_gap, s_gap, s_gap_every)
            b_gap = _gap(gap, block, b_shifted, b_selected, EXPECTED_GAP, GAP_PER_ROW)
        b_point = _surrogate(s_seed, b_element, b_shifted, b_selected, b_gap, b_tau, MODE, FAST)
        b_out = _jacobian_product(b_point, b_grad) / b_tau
        if not DETACHED:
            # Only logits that are neither raised nor lowered move by themselves, all relative to the largest.
            b_moves = (b_shifted < -b_gap) & (b_index[:, None] != block.columns[None, :])
            b_out = tl.where(b_moves, b_out, 0.0)
            b_largest = (b_shifted == 0).to(tl.float32)
            b_ties = tl.maximum(tl.sum(b_largest, 1), 1.0)
            b_out -= b_largest * (tl.sum(b_out, 1) / b_ties)[:, None]
    b_out = tl.where((b_index == s_categories)[:, None], 0.0, b_out)
    b_out = tl.where((b_index > s_categories)[:, None], float("nan"), b_out)
    _write(p_out, block, s_categories, s_inner, b_out)
