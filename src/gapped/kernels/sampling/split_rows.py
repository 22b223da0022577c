"""The backward pass of long rows, each split over several programs that exchange their sums.

A program keeps its segment of the row in registers: it reads the segment, computes sums, publishes them, waits
for those of the row's other segments, and writes. So logits and gradient are read once, whatever the cache
holds, where `streamed_backward_kernel` reads them twice. On an H200 the backward pass of GST takes 1.81 ms
instead of 2.25 for 8,192 rows of 128,256 in bfloat16; for 8,192 rows of 32,000 in float32, whose second
reading comes from the cache, 0.79 instead of 0.80 (`benchmarks/bench_blocks.py long`).

Programs that wait for each other must all be running. Those of a row have consecutive numbers, and a GPU
starts programs in the order of their numbers (the scans of CUB rely on it too). So a program waits only for
ones that run already or are next in line, and it is enough that one row's programs fit on the GPU beside each
other. Kernels on other streams may take places, but each has at most one row there that cannot go on. Where
a row might not fit, `launch` leaves the row to `streamed_backward_kernel`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from gapped.kernels.partition import power
from gapped.kernels.primitives import LOG2_E, existing, exp2
from gapped.kernels.sampling.long_rows import centres, gradient, row_gap, row_of_sample, weights, write
from gapped.kernels.sampling.surrogates import REINMAX

if TYPE_CHECKING:
    import torch

# Bytes of logits that a program holds, and its warps. With so few registers one more program fits on a
# multiprocessor; only simple weights need no more. The fastest on an H200 (benchmarks/bench_blocks.py).
SEGMENT_BYTES, WARPS, REGISTERS = 16384, 8, 64
# The registers of other weights: as many programs fit beside each other as without the path that is rarely taken.
REINMAX_REGISTERS, MOST_REGISTERS = 80, 128
# No more segments to a row, so that a large GPU works on several rows at a time.
MOST_SEGMENTS = 32
_SIGN = tl.constexpr(1 << 31)


@cache
def most_segments(device: torch.device) -> int:
    """Into how many segments a row may be split on this device.

    A row's programs wait for each other, so all of them must fit. Every multiprocessor has room for at least
    two; half of that leaves room for other streams.
    """
    import torch

    if device.type != "cuda":
        return MOST_SEGMENTS
    return min(MOST_SEGMENTS, torch.cuda.get_device_properties(device).multi_processor_count)


def segments_of(logits: Any, mode: str) -> tuple[int, dict[str, Any]]:
    """Into how many segments a row of a tensor or array is split, and the sizes of the launch."""
    categories, size = logits.shape[-1], logits.itemsize
    block = min(power(categories), SEGMENT_BYTES // size)
    segments = -(-categories // block)
    sizes = {"SEGMENTS": segments, "SLOTS": power(segments), "BLOCK": block, "num_warps": WARPS}
    registers = MOST_REGISTERS
    if mode in ("gst", "straight-through"):
        registers = REGISTERS
    elif mode == "reinmax" and size == 4:
        registers = REINMAX_REGISTERS
    return segments, sizes | {"maxnreg": registers}


@triton.jit
def publish(p_words, s_place, s_sum, s_dot):
    """Publish two sums of a segment in one word, so that no flag is needed to say that they are there.

    A word is 0 before. The first sum is never negative, so its sign bit can mark the word: it is negative after.
    """
    s_high = (s_sum.to(tl.uint32, bitcast=True) | _SIGN).to(tl.uint64) << 32
    s_word = (s_high | s_dot.to(tl.uint32, bitcast=True).to(tl.uint64)).to(tl.int64, bitcast=True)
    tl.atomic_xchg(p_words + s_place, s_word, sem="relaxed")


@triton.jit
def unpack(b_words, b_inside):
    """The two sums in each published word; zeros where there is none."""
    b_sums = ((b_words >> 32).to(tl.uint32) & (_SIGN - 1)).to(tl.float32, bitcast=True)
    b_dots = b_words.to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(b_inside, b_sums, 0.0), tl.where(b_inside, b_dots, 0.0)


@triton.jit
def _collect(p_words, SEGMENTS: tl.constexpr, SLOTS: tl.constexpr):
    """The two sums of the row, added in the same order whichever segment came first.

    `SLOTS` is the number of segments, rounded up to a power of two.
    """
    b_segments = tl.arange(0, SLOTS)
    b_inside = b_segments < SEGMENTS
    b_words = tl.zeros([SLOTS], tl.int64)
    while tl.max(tl.where(b_inside, b_words, -1), 0) >= 0:
        # An atomic operation that changes nothing reads what is there now, not what a cache holds.
        b_words = tl.atomic_or(p_words + b_segments, 0, mask=b_inside, sem="relaxed")
    b_sums, b_dots = unpack(b_words, b_inside)
    return tl.sum(b_sums, 0), tl.sum(b_dots, 0)


@triton.jit
def again(b_x, FAST: tl.constexpr):
    """Values in float32, converted once more: a half takes up half of the registers while a program waits.

    The compiler must not see that the result is known, or else that is what it keeps.
    """
    if FAST and b_x.dtype.primitive_bitwidth == 16:
        b_x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2
        )
    return b_x.to(tl.float32)


@triton.jit
def _weighted(b_logits, b_grad, b_columns, row, s_own_gap, MODE: tl.constexpr, FAST: tl.constexpr):
    """Logits relative to the largest and their weights, the weights' sum, and their products' with the gradient.

    The last sum has ReinMax's other weights.
    """
    b_shifted = b_logits.to(tl.float32) - row.shift
    b_weight = weights(b_shifted, b_columns, row, s_own_gap, MODE, FAST)
    s_dot = tl.sum(b_weight * b_grad.to(tl.float32), 0)
    s_plain_dot = s_dot
    if MODE == REINMAX:
        s_plain_dot = tl.sum(exp2(b_shifted * LOG2_E, FAST) * b_grad.to(tl.float32), 0)
    return b_shifted, b_weight, tl.sum(b_weight, 0), s_dot, s_plain_dot


@triton.jit
def _finish(
    p_words, p_grad, p_out, b_logits, b_grad, b_columns, weighted, row, s_segment,
    MODE: tl.constexpr, AT_INDEX: tl.constexpr, FAST: tl.constexpr,
    SEGMENTS: tl.constexpr, SLOTS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Exchange the sums with the row's other segments, and write the gradient."""
    b_shifted, b_weight, s_sum, s_dot, s_plain_dot = weighted
    if SEGMENTS > 1:
        publish(p_words, s_segment, s_sum, s_dot)
        if MODE == REINMAX:
            publish(p_words + SEGMENTS, s_segment, s_sum, s_plain_dot)
        if WAITS:
            s_sum, s_dot = _collect(p_words, SEGMENTS, SLOTS)
            if MODE == REINMAX:
                _, s_plain_dot = _collect(p_words + SEGMENTS, SEGMENTS, SLOTS)
    if WAITS:
        s_centres = centres(row, s_sum, s_dot, s_plain_dot, p_grad, MODE, AT_INDEX)
        if MODE == REINMAX:
            b_shifted = again(b_logits, FAST) - row.shift
        b_out = gradient(b_weight, b_shifted, again(b_grad, FAST), b_columns, row, s_centres, MODE, FAST)
        write(p_out, b_columns, b_out, row.categories)


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every", "s_first"])
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
    s_first,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    WAITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`p_words` are two zeros for each segment. Without `WAITS` a program ends where it would begin to wait.

    The gradient may take the place of the logits: a program writes its segment once all programs of the row
    have published, and what they publish depends on all that they read of the logits.
    """
    s_program = tl.program_id(0)
    s_row = (s_program // SEGMENTS).to(tl.int64)
    s_segment = s_program % SEGMENTS
    s_start = s_segment * BLOCK
    p_logits += s_row * s_stride
    p_grad += s_row * s_grad_stride
    p_out += s_row * s_categories
    p_words += s_row * (2 * SEGMENTS)
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
        row = row_of_sample(
            s_row, s_first, s_categories, s_index, p_stats, p_seed, (p_tau, s_tau, s_tau_every), TAU_PER_ROW
        )
        s_own_gap = row_gap((p_gap, s_gap, s_gap_every), p_logits, row, MODE, EXPECTED_GAP, GAP_PER_ROW)
        weighted = _weighted(b_logits, b_grad, b_columns, row, s_own_gap, MODE, FAST)
        s_dot = weighted[3]
        # A sum is the same for all threads of a program, which get it from shared memory.
        if (s_dot != s_dot) & (not AT_INDEX):
            # What comes in at a category that does not exist counts for nothing. Where it is not finite, its product
            # with the weight 0 is NaN, and so is the sum. Only then is each element looked at, after reading it
            # again; and each branch finishes by itself, so that the other one needs no registers for this.
            b_logits = tl.load(p_logits + b_columns, mask=b_inside, other=-float("inf"))
            if not AT_INDEX:
                b_grad = existing(tl.load(p_grad + b_columns, mask=b_inside, other=0.0), b_logits)
            weighted = _weighted(b_logits, b_grad, b_columns, row, s_own_gap, MODE, FAST)
            _finish(
                p_words, p_grad, p_out, b_logits, b_grad, b_columns, weighted, row, s_segment,
                MODE, AT_INDEX, FAST, SEGMENTS, SLOTS, WAITS,
            )  # fmt: skip
        else:
            _finish(
                p_words, p_grad, p_out, b_logits, b_grad, b_columns, weighted, row, s_segment,
                MODE, AT_INDEX, FAST, SEGMENTS, SLOTS, WAITS,
            )  # fmt: skip
