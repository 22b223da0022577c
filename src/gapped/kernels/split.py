"""The backward pass of long rows, each split over several programs that stay in touch.

A program keeps its part of the row in registers: it reads the part, sums, tells the other programs of its row
and hears from them, and writes. So logits and gradient are read once, whatever the cache holds, where
`streamed_backward_kernel` reads them twice.

Programs that wait for each other must all be running. Those of a row have consecutive numbers, and a GPU
starts programs in the order of their numbers (the scans of CUB rely on it too). So a program waits only for
ones that run already or are next in line, and it is enough that one row's programs fit on the GPU beside each
other. Kernels on other streams may take places, but each has at most one row there that cannot go on. Where
a row might not fit, or Triton is older than 3.5, `launch` leaves the row to `streamed_backward_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.parts import GST, REINMAX, exp2, level
from gapped.kernels.streamed import centres, gradient, row_gap, weights, write

_SIGN = tl.constexpr(1 << 31)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tell(p_words, s_part, s_sum, s_dot):
    """Publish two sums of a part in one word, so that no other number has to say that they are there.

    A word is 0 before. The first sum is not negative, and its sign bit is set: the word is negative now.
    """
    s_high = (s_sum.to(tl.uint32, bitcast=True) | _SIGN).to(tl.uint64) << 32
    s_word = (s_high | s_dot.to(tl.uint32, bitcast=True).to(tl.uint64)).to(tl.int64, bitcast=True)
    tl.atomic_xchg(p_words + s_part, s_word, sem="relaxed")


@triton.jit
def _hear(p_words, PARTS: tl.constexpr, LANES: tl.constexpr):
    """The two sums of the row, added in the same order whichever part came first."""
    b_parts = tl.arange(0, LANES)
    b_inside = b_parts < PARTS
    b_words = tl.zeros([LANES], tl.int64)
    while tl.max(tl.where(b_inside, b_words, -1), 0) >= 0:
        # An atomic operation that changes nothing reads what is there now, not what a cache holds.
        b_words = tl.atomic_or(p_words + b_parts, 0, mask=b_inside, sem="relaxed")
    b_sums = ((b_words >> 32).to(tl.uint32) & (_SIGN - 1)).to(tl.float32, bitcast=True)
    b_dots = b_words.to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.sum(tl.where(b_inside, b_sums, 0.0), 0), tl.sum(tl.where(b_inside, b_dots, 0.0), 0)


@triton.jit
def _again(b_x, FAST: tl.constexpr):
    """Values in float32, converted once more: a half takes up half of the registers while a program waits.

    The compiler must not see that the result is known, or else that is what it keeps.
    """
    if FAST and b_x.dtype.primitive_bitwidth == 16:
        b_x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2
        )
    return b_x.to(tl.float32)


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every"])
def split_backward_kernel(
    p_logits,
    p_index,
    p_stats,
    p_grad,
    p_seed,
    p_tau,
    p_gap,
    p_out,
    p_words,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau_every,
    s_gap_every,
    s_tau,
    s_gap,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    WAITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`p_words` are two zeros for each part. Without `WAITS` a program ends where it would begin to wait."""
    s_program = tl.program_id(0)
    s_row = (s_program // PARTS).to(tl.int64)
    s_part = s_program % PARTS
    s_start = s_part * BLOCK
    p_logits += s_row * s_stride
    p_grad += s_row * s_grad_stride
    p_out += s_row * s_categories
    p_words += s_row * (2 * PARTS)
    b_columns = s_start + tl.arange(0, BLOCK)
    b_inside = b_columns < s_categories
    b_logits = tl.load(
        p_logits + b_columns, mask=b_inside, other=-float("inf"), eviction_policy="evict_first"
    )
    s_index = tl.load(p_index + s_row).to(tl.int32)
    if AT_INDEX:
        b_grad = tl.where(b_columns == s_index, tl.load(p_grad).to(tl.float32), 0.0)
    else:
        b_grad = tl.load(p_grad + b_columns, mask=b_inside, other=0.0, eviction_policy="evict_first")
    if s_index >= s_categories:
        s_nothing = tl.where(s_index > s_categories, float("nan"), 0.0)
        write(p_out, b_columns, tl.zeros([BLOCK], tl.float32) + s_nothing, s_categories)
    else:
        s_shift = tl.load(p_stats + 2 * s_row)
        s_second = tl.load(p_stats + 2 * s_row + 1)
        s_tau = level(p_tau, s_tau, s_tau_every, s_row, s_row >= 0, TAU_PER_ROW)
        s_seed = tl.load(p_seed)
        s_level = s_tau
        if MODE == GST:
            s_level = row_gap(
                p_gap, s_gap, s_gap_every, p_logits, s_row, s_index, s_shift, s_second, s_categories,
                EXPECTED_GAP, GAP_PER_ROW,
            )  # fmt: skip
        b_shifted = b_logits.to(tl.float32) - s_shift
        b_weight = weights(
            b_shifted, b_columns, s_categories, s_seed, s_row, s_index, s_second, s_level, s_tau, MODE, FAST
        )
        s_sum = tl.sum(b_weight, 0)
        s_dot = tl.sum(b_weight * b_grad.to(tl.float32), 0)
        s_plain_dot = s_dot
        if MODE == REINMAX:
            s_plain_dot = tl.sum(exp2(b_shifted * _LOG2_E, FAST) * b_grad.to(tl.float32), 0)
        if PARTS > 1:
            _tell(p_words, s_part, s_sum, s_dot)
            if MODE == REINMAX:
                _tell(p_words + PARTS, s_part, s_sum, s_plain_dot)
            if WAITS:
                s_sum, s_dot = _hear(p_words, PARTS, LANES)
                if MODE == REINMAX:
                    _, s_plain_dot = _hear(p_words + PARTS, PARTS, LANES)
        if WAITS:
            s_scale, s_mean, s_plain, s_plain_mean = centres(
                s_sum, s_dot, s_plain_dot, s_second, p_grad, s_index, MODE, AT_INDEX
            )
            if MODE == REINMAX:
                b_shifted = _again(b_logits, FAST) - s_shift
            b_out = gradient(
                b_weight, b_shifted, _again(b_grad, FAST), b_columns == s_index, s_scale, s_mean, s_plain,
                s_plain_mean, s_tau, MODE, FAST,
            )  # fmt: skip
            write(p_out, b_columns, b_out, s_categories)
