"""Samples of rows too long for a block: one program reads a row in pieces.

Forward, every lane of a piece keeps its own running maximum and sum, so nothing is exchanged until the row
is read. Then one lane is drawn by its share of the row, and one of that lane's few elements by its share of
the lane: the row is read once and written once. Backward, one reading gives the sums that the gradient
needs, a second one, in reverse so that it starts with what the cache still holds, writes it; rows that are
not longer than a few programs can hold are read only once (`split.py`).

`p_stats` keeps two numbers of each row from the forward for the backward pass: the largest logit, and the sum
of weights relative to it; with Gumbel noise, the best score instead of the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.parts import (
    DECOUPLED,
    GST,
    GUMBEL,
    RAO,
    REINMAX,
    capped,
    exp2,
    exponential,
    gumbel,
    lawless,
    level,
    rao_bits,
    rao_odds,
    rao_weight,
    row_uniforms,
    selected_gap,
)

# Whether the cache should expect another reading.
_ONCE = tl.constexpr(0)
_AGAIN = tl.constexpr(1)
_NEVER = tl.constexpr(2)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _piece(p, s_start, s_categories, BLOCK: tl.constexpr, other, KEEP: tl.constexpr):
    """Columns and float32 values of one piece of a row; `KEEP` tells the cache whether to expect them again."""
    b_columns = s_start + tl.arange(0, BLOCK)
    b_inside = b_columns < s_categories
    if KEEP == _AGAIN:
        b_values = tl.load(p + b_columns, mask=b_inside, other=other, eviction_policy="evict_last")
    elif KEEP == _NEVER:
        b_values = tl.load(p + b_columns, mask=b_inside, other=other, eviction_policy="evict_first")
    else:
        b_values = tl.load(p + b_columns, mask=b_inside, other=other)
    return b_columns, b_values.to(tl.float32)


@triton.jit
def write(p, b_columns, b_values, s_categories):
    """Store one piece of a row past the cache, which has better use than output."""
    b_values = b_values.to(p.dtype.element_ty)
    tl.store(p + b_columns, b_values, mask=b_columns < s_categories, cache_modifier=".cs")


@triton.jit
def _grads(
    p, s_start, s_categories, s_index, AT_INDEX: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr
):
    """One piece of the incoming gradient, which may be given at the chosen category alone."""
    if AT_INDEX:
        b_grad = tl.where(s_start + tl.arange(0, BLOCK) == s_index, tl.load(p).to(tl.float32), 0.0)
    else:
        _, b_grad = _piece(p, s_start, s_categories, BLOCK, 0.0, KEEP)
    return b_grad


@triton.jit
def _fill(p, s_value, s_categories, BLOCK: tl.constexpr):
    for s_start in range(0, s_categories, BLOCK):
        write(p, s_start + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32) + s_value, s_categories)


@triton.jit
def weights(
    b_shifted, b_columns, s_categories, s_seed, s_row, s_index, s_top, s_gap, s_tau,
    MODE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The surrogate's weights of logits relative to the row's largest: neither all tiny nor any huge."""
    s_sharpness = _LOG2_E / s_tau
    if MODE == GST:
        b_scores = tl.where(b_columns == s_index, 0.0, tl.minimum(b_shifted, -s_gap))
    elif MODE == GUMBEL:
        b_scores = b_shifted + gumbel(s_seed, s_row * s_categories + b_columns, FAST, True) - s_top
    else:
        b_scores = b_shifted
    b_exponents = b_scores * s_sharpness
    if MODE == DECOUPLED:
        # The largest logit has a score of at least -2.9, and no score is above 22.9: no shift is needed.
        b_exponents += gumbel(s_seed, s_row * s_categories + b_columns, FAST, True) * _LOG2_E
    return exp2(b_exponents, FAST)


@triton.jit
def centres(s_sum, s_dot, s_plain_dot, s_total, p_grad, s_index, MODE: tl.constexpr, AT_INDEX: tl.constexpr):
    """From a row's sums, what `gradient` takes: 1 / sum and mean gradient, of the surrogate and of softmax."""
    s_scale = capped(s_sum)
    s_mean = s_dot * s_scale
    s_plain = capped(s_total)
    if MODE == REINMAX:
        p_chosen = p_grad
        if not AT_INDEX:
            p_chosen += s_index
        s_mean = (s_mean + tl.load(p_chosen).to(tl.float32)) / 2
    return s_scale, s_mean, s_plain, s_plain_dot * s_plain


@triton.jit
def gradient(
    b_weight, b_shifted, b_grad, b_selected, s_scale, s_mean, s_plain, s_plain_mean, s_tau,
    MODE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits: the points' Jacobians times that of the sample."""
    if MODE == REINMAX:
        # The first point is the mean of the surrogate and the one-hot sample, and counts twice.
        b_twice = b_weight * s_scale + b_selected.to(tl.float32)
        b_plain = exp2(b_shifted * _LOG2_E, FAST) * s_plain
        b_out = b_twice * (b_grad - s_mean) - b_plain * (b_grad - s_plain_mean) / 2
    else:
        b_out = b_weight * (s_scale / s_tau) * (b_grad - s_mean)
    return b_out


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every", "s_tau_forward_every", "s_samples"])
def streamed_forward_kernel(
    p_logits,
    p_seed,
    p_tau,
    p_gap,
    p_tau_forward,
    p_value,
    p_index,
    p_stats,
    s_categories,
    s_stride,
    s_tau_every,
    s_gap_every,
    s_tau_forward_every,
    s_tau,
    s_gap,
    s_tau_forward,
    s_samples,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    TAU_FORWARD_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    SOFT: tl.constexpr,
    DENSE: tl.constexpr,
    FAST: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s_row = tl.program_id(0).to(tl.int64)
    p_logits += s_row * s_stride
    p_value += s_row * s_categories
    s_seed = tl.load(p_seed)
    s_tau = level(p_tau, s_tau, s_tau_every, s_row, s_row >= 0, TAU_PER_ROW)
    b_lanes = tl.arange(0, BLOCK)
    b_broken = tl.zeros([BLOCK], tl.int32)
    if (MODE == GUMBEL) or (MODE == DECOUPLED):
        s_tau_forward = level(
            p_tau_forward, s_tau_forward, s_tau_forward_every, s_row, s_row >= 0, TAU_FORWARD_PER_ROW
        )
        # Scores are relative to the largest logit that their lane has seen, times the temperature: whatever
        # came before, the noise of a winner keeps its digits.
        b_max = tl.zeros([BLOCK], tl.float32) + _LOWEST
        b_best = tl.zeros([BLOCK], tl.float32) - float("inf")
        b_where = tl.zeros([BLOCK], tl.int32) + s_categories
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = _piece(p_logits, s_start, s_categories, BLOCK, -float("inf"), _ONCE)
            b_broken |= lawless(b_logits).to(tl.int32)
            b_noise = gumbel(s_seed, s_row * s_categories + b_columns, FAST, True)
            b_top = tl.maximum(b_max, b_logits)
            b_best += b_max - b_top
            b_scores = b_noise * s_tau_forward + (b_logits - b_top)
            b_where = tl.where(b_scores > b_best, b_columns, b_where)
            b_best = tl.maximum(b_best, b_scores)
            b_max = b_top
            if DENSE and not SOFT:
                write(p_value, b_columns, tl.zeros([BLOCK], tl.float32), s_categories)
        s_shift = tl.max(b_max, 0)
        b_best += b_max - s_shift
        s_best = tl.max(b_best, 0)
        s_index = tl.min(tl.where(b_best == s_best, b_where, s_categories), 0)
        s_second = s_best
        b_broken |= (s_tau_forward != s_tau_forward).to(tl.int32)
    else:
        # A lane that has seen nothing has the lowest finite maximum: then -inf adds nothing and cannot be NaN.
        b_max = tl.zeros([BLOCK], tl.float32) + _LOWEST
        b_sum = tl.zeros([BLOCK], tl.float32)
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = _piece(p_logits, s_start, s_categories, BLOCK, -float("inf"), _ONCE)
            b_broken |= lawless(b_logits).to(tl.int32)
            b_lead = b_logits - b_max
            b_weight = tl.exp(-tl.abs(b_lead))
            b_sum = tl.where(b_lead > 0, b_sum * b_weight + 1.0, b_sum + b_weight)
            b_max = tl.maximum(b_max, b_logits)
            if DENSE and not SOFT:
                write(p_value, b_columns, tl.zeros([BLOCK], tl.float32), s_categories)
        s_shift = tl.max(b_max, 0)
        b_share = tl.where(b_sum > 0, b_sum * tl.exp(b_max - s_shift), 0.0)
        b_running = tl.cumsum(b_share.to(tl.float64), 0)
        s_total = tl.max(b_running, 0)
        s_u, s_v = row_uniforms(s_seed, s_row)
        s_lane = tl.min(tl.where((b_running > s_u * s_total) & (b_share > 0), b_lanes, BLOCK), 0)
        # The lane's own elements, one from each piece.
        b_own_columns = s_lane + tl.arange(0, PIECES) * BLOCK
        b_own_inside = (b_own_columns < s_categories) & (s_lane < BLOCK)
        b_own_logits = tl.load(p_logits + b_own_columns, mask=b_own_inside, other=-float("inf")).to(
            tl.float32
        )
        b_own_weight = tl.exp(b_own_logits - tl.max(tl.where(b_lanes == s_lane, b_max, _LOWEST), 0))
        b_own_running = tl.cumsum(b_own_weight.to(tl.float64), 0)
        b_own_wins = (b_own_running > s_v * tl.max(b_own_running, 0)) & (b_own_weight > 0)
        s_index = tl.min(tl.where(b_own_wins, b_own_columns, s_categories), 0)
        s_second = s_total.to(tl.float32)
    s_broken = tl.max(b_broken, 0) > 0
    s_index = tl.where(s_broken, s_categories + 1, s_index)
    tl.store(p_index + s_row, s_index)
    tl.store(p_stats + 2 * s_row, s_shift)
    tl.store(p_stats + 2 * s_row + 1, s_second)
    if DENSE:
        if s_index > s_categories:
            _fill(p_value, float("nan"), s_categories, BLOCK)
        elif SOFT:
            if s_index == s_categories:
                _fill(p_value, 0.0, s_categories, BLOCK)
            elif MODE == RAO:
                _streamed_rao(
                    p_logits, p_logits, p_value, s_seed, s_row, s_index, s_shift, s_second, s_tau, s_samples,
                    s_categories, SOFT=True, AT_INDEX=False, BLOCK=BLOCK, FAST=FAST,
                )  # fmt: skip
            else:
                s_level = s_tau
                if MODE == GST:
                    s_level = row_gap(
                        p_gap, s_gap, s_gap_every, p_logits, s_row, s_index, s_shift, s_second, s_categories,
                        EXPECTED_GAP, GAP_PER_ROW,
                    )  # fmt: skip
                b_sum = tl.zeros([BLOCK], tl.float32)
                for s_start in range(0, s_categories, BLOCK):
                    b_columns, b_logits = _piece(p_logits, s_start, s_categories, BLOCK, -float("inf"), _ONCE)
                    b_sum += weights(
                        b_logits - s_shift, b_columns, s_categories, s_seed, s_row, s_index, s_second, s_level,
                        s_tau, MODE, FAST,
                    )  # fmt: skip
                s_scale = capped(tl.sum(b_sum, 0))
                for s_start in range(0, s_categories, BLOCK):
                    b_columns, b_logits = _piece(p_logits, s_start, s_categories, BLOCK, -float("inf"), _ONCE)
                    b_weight = weights(
                        b_logits - s_shift, b_columns, s_categories, s_seed, s_row, s_index, s_second, s_level,
                        s_tau, MODE, FAST,
                    )  # fmt: skip
                    write(p_value, b_columns, b_weight * s_scale, s_categories)
        elif s_index < s_categories:
            # The zero at this place was written by another thread.
            tl.debug_barrier()
            tl.store(p_value + s_index, (s_tau * 0 + 1.0).to(p_value.dtype.element_ty))


@triton.jit
def row_gap(
    p_gap, s_gap, s_every, p_logits, s_row, s_index, s_shift, s_total, s_categories,
    EXPECTED: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    if EXPECTED:
        s_logit = tl.load(p_logits + s_index, mask=s_index < s_categories, other=0.0).to(tl.float32)
        s_level = selected_gap(tl.exp(s_logit - s_shift) * capped(s_total))
    else:
        s_level = level(p_gap, s_gap, s_every, s_row, s_row >= 0, PER_ROW)
    return s_level


@triton.jit
def _rao_weights(
    p_logits, s_seed, s_row, s_index, s_shift, s_log2_total, s_sharpness, s_e0, s_e1, s_e2, s_e3,
    s_start, s_block, s_categories, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Columns of a piece, and their weights in four draws."""
    b_columns, b_logits = _piece(p_logits, s_start, s_categories, BLOCK, -float("inf"), _ONCE)
    b_log2_p = (b_logits - s_shift) * _LOG2_E - s_log2_total
    b_odds, b_rest = rao_odds(b_log2_p, b_columns == s_index)
    b_drop = b_rest * s_sharpness
    b_0, b_1, b_2, b_3 = rao_bits(s_seed, s_row * s_categories + b_columns, s_block)
    b_0 = rao_weight(exponential(b_0, FAST), b_odds, b_drop, s_e0, s_sharpness, FAST)
    b_1 = rao_weight(exponential(b_1, FAST), b_odds, b_drop, s_e1, s_sharpness, FAST)
    b_2 = rao_weight(exponential(b_2, FAST), b_odds, b_drop, s_e2, s_sharpness, FAST)
    b_3 = rao_weight(exponential(b_3, FAST), b_odds, b_drop, s_e3, s_sharpness, FAST)
    return b_columns, b_0, b_1, b_2, b_3


@triton.jit
def _streamed_rao(
    p_logits, p_grad, p_out, s_seed, s_row, s_index, s_shift, s_total, s_tau, s_samples, s_categories,
    SOFT: tl.constexpr, AT_INDEX: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Conditional draws, four at a time: one reading of the row for their sums, one to add them to `p_out`.

    `p_out` is float32 here, whatever the logits are: it is added to `s_samples / 4` times.
    """
    s_sharpness = 1.0 / s_tau
    s_log2_total = tl.log2(s_total)
    s_unit = 1.0 / s_samples
    if not SOFT:
        s_unit = s_unit / s_tau
    for s_block in range(0, (s_samples + 3) // 4):
        s_w0, s_w1, s_w2, s_w3 = rao_bits(s_seed, s_row * s_categories + s_index, s_block)
        s_e0, s_e1 = 1.0 / exponential(s_w0, FAST), 1.0 / exponential(s_w1, FAST)
        s_e2, s_e3 = 1.0 / exponential(s_w2, FAST), 1.0 / exponential(s_w3, FAST)
        b_z0 = tl.zeros([BLOCK], tl.float32)
        b_z1, b_z2, b_z3, b_d0, b_d1, b_d2, b_d3 = b_z0, b_z0, b_z0, b_z0, b_z0, b_z0, b_z0
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_0, b_1, b_2, b_3 = _rao_weights(
                p_logits, s_seed, s_row, s_index, s_shift, s_log2_total, s_sharpness, s_e0, s_e1, s_e2, s_e3,
                s_start, s_block, s_categories, BLOCK, FAST,
            )  # fmt: skip
            b_z0, b_z1, b_z2, b_z3 = b_z0 + b_0, b_z1 + b_1, b_z2 + b_2, b_z3 + b_3
            if not SOFT:
                b_grad = _grads(p_grad, s_start, s_categories, s_index, AT_INDEX, BLOCK, _ONCE)
                b_d0, b_d1 = b_d0 + b_0 * b_grad, b_d1 + b_1 * b_grad
                b_d2, b_d3 = b_d2 + b_2 * b_grad, b_d3 + b_3 * b_grad
        s_left = s_samples - 4 * s_block
        s_z0, s_z1 = capped(tl.sum(b_z0, 0)), capped(tl.sum(b_z1, 0))
        s_z2, s_z3 = capped(tl.sum(b_z2, 0)), capped(tl.sum(b_z3, 0))
        s_d0, s_d1 = tl.sum(b_d0, 0) * s_z0, tl.sum(b_d1, 0) * s_z1
        s_d2, s_d3 = tl.sum(b_d2, 0) * s_z2, tl.sum(b_d3, 0) * s_z3
        s_z0, s_z1 = s_z0 * s_unit, s_z1 * tl.where(s_left > 1, s_unit, 0.0)
        s_z2, s_z3 = s_z2 * tl.where(s_left > 2, s_unit, 0.0), s_z3 * tl.where(s_left > 3, s_unit, 0.0)
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_0, b_1, b_2, b_3 = _rao_weights(
                p_logits, s_seed, s_row, s_index, s_shift, s_log2_total, s_sharpness, s_e0, s_e1, s_e2, s_e3,
                s_start, s_block, s_categories, BLOCK, FAST,
            )  # fmt: skip
            b_0, b_1, b_2, b_3 = b_0 * s_z0, b_1 * s_z1, b_2 * s_z2, b_3 * s_z3
            if SOFT:
                b_add = b_0 + b_1 + b_2 + b_3
            else:
                b_grad = _grads(p_grad, s_start, s_categories, s_index, AT_INDEX, BLOCK, _ONCE)
                b_add = b_0 * (b_grad - s_d0) + b_1 * (b_grad - s_d1)
                b_add += b_2 * (b_grad - s_d2) + b_3 * (b_grad - s_d3)
            b_inside = b_columns < s_categories
            b_before = tl.load(p_out + b_columns, mask=b_inside & (s_block > 0), other=0.0)
            tl.store(p_out + b_columns, b_before + b_add, mask=b_inside)


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every", "s_samples"])
def streamed_backward_kernel(
    p_logits,
    p_index,
    p_stats,
    p_grad,
    p_seed,
    p_tau,
    p_gap,
    p_out,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau_every,
    s_gap_every,
    s_tau,
    s_gap,
    s_samples,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s_row = tl.program_id(0).to(tl.int64)
    p_logits += s_row * s_stride
    p_grad += s_row * s_grad_stride
    p_out += s_row * s_categories
    s_index = tl.load(p_index + s_row).to(tl.int32)
    s_shift = tl.load(p_stats + 2 * s_row)
    s_second = tl.load(p_stats + 2 * s_row + 1)
    s_tau = level(p_tau, s_tau, s_tau_every, s_row, s_row >= 0, TAU_PER_ROW)
    s_seed = tl.load(p_seed)
    if s_index >= s_categories:
        _fill(p_out, tl.where(s_index > s_categories, float("nan"), 0.0), s_categories, BLOCK)
    elif MODE == RAO:
        _streamed_rao(
            p_logits, p_grad, p_out, s_seed, s_row, s_index, s_shift, s_second, s_tau, s_samples, s_categories,
            SOFT=False, AT_INDEX=AT_INDEX, BLOCK=BLOCK, FAST=FAST,
        )  # fmt: skip
    else:
        s_level = s_tau
        if MODE == GST:
            s_level = row_gap(
                p_gap, s_gap, s_gap_every, p_logits, s_row, s_index, s_shift, s_second, s_categories,
                EXPECTED_GAP, GAP_PER_ROW,
            )  # fmt: skip
        b_sum = tl.zeros([BLOCK], tl.float32)
        b_dot = b_sum
        b_plain_dot = b_sum
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = _piece(p_logits, s_start, s_categories, BLOCK, -float("inf"), _AGAIN)
            b_shifted = b_logits - s_shift
            b_grad = _grads(p_grad, s_start, s_categories, s_index, AT_INDEX, BLOCK, _AGAIN)
            b_weight = weights(
                b_shifted, b_columns, s_categories, s_seed, s_row, s_index, s_second, s_level, s_tau, MODE, FAST
            )  # fmt: skip
            b_sum += b_weight
            b_dot += b_weight * b_grad
            if MODE == REINMAX:
                b_plain_dot += exp2(b_shifted * _LOG2_E, FAST) * b_grad
        s_sum, s_dot, s_plain_dot = tl.sum(b_sum, 0), tl.sum(b_dot, 0), tl.sum(b_plain_dot, 0)
        s_scale, s_mean, s_plain, s_plain_mean = centres(
            s_sum, s_dot, s_plain_dot, s_second, p_grad, s_index, MODE, AT_INDEX
        )
        s_last = (s_categories - 1) // BLOCK * BLOCK
        for s_done in range(0, s_categories, BLOCK):
            s_start = s_last - s_done
            b_columns, b_logits = _piece(p_logits, s_start, s_categories, BLOCK, -float("inf"), _NEVER)
            b_shifted = b_logits - s_shift
            b_grad = _grads(p_grad, s_start, s_categories, s_index, AT_INDEX, BLOCK, _NEVER)
            b_weight = weights(
                b_shifted, b_columns, s_categories, s_seed, s_row, s_index, s_second, s_level, s_tau, MODE, FAST
            )  # fmt: skip
            b_out = gradient(
                b_weight, b_shifted, b_grad, b_columns == s_index, s_scale, s_mean, s_plain,
                s_plain_mean, s_tau, MODE, FAST,
            )  # fmt: skip
            write(p_out, b_columns, b_out, s_categories)
