"""The backward pass of rows side by side: each strip of them is split over several programs.

Each has some of the categories of all rows of its strip, keeps them in registers, and exchanges sums with the
others as in `split_rows`, whose rules for who may wait for whom hold here too. So logits and gradient are read
once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gapped.kernels.primitives import LOG2_E, exp2, row_starts
from gapped.kernels.runner import power, run
from gapped.kernels.sampling.long_launch import Call
from gapped.kernels.sampling.long_rows import centres, gradient, row_gap, row_of_sample, weights
from gapped.kernels.sampling.row_layout import Rows
from gapped.kernels.sampling.split_rows import again, publish, unpack
from gapped.kernels.sampling.strip_sizes import LEAST_BYTES, MOST_BYTES, _narrowed
from gapped.kernels.sampling.strips import lawful, strip_of, write_strip
from gapped.kernels.sampling.surrogates import REINMAX

# Rows of a strip; elements that a program holds, its warps and the registers of a thread; programs of a strip.
ROWS, SIMPLE, OTHERS = 16, (8192, 16, 64), (4096, 8, 128)
MOST_SEGMENTS = 32


def backward_sizes(count: int, categories: int, size: int, mode: str) -> tuple[int, dict[str, Any]]:
    """The number of strips, and the sizes of the launch; `SEGMENTS` is how many programs share a strip."""
    held, warps, registers = SIMPLE if mode in ("gst", "straight-through") else OTHERS
    width = ROWS
    while 2 * power(categories) * width <= held and width * size < MOST_BYTES:
        width *= 2
    width = _narrowed(width, count, size)
    while categories * width > held * MOST_SEGMENTS and width * size > LEAST_BYTES:
        width //= 2
    block = min(power(categories), held // width)
    segments = -(-categories // block)
    sizes = {"SEGMENTS": segments, "SLOTS": power(segments), "BLOCK": block, "STRIP": width}
    return -(-count // width), sizes | {"num_warps": warps, "maxnreg": registers}


def backward(rows: Rows, grads: Rows, mode: str, call: Call) -> None:
    """Write gradients, for a comparison with `strip_tiles`."""
    strips, sizes = backward_sizes(rows.number, rows.tensor.shape[-1], rows.tensor.element_size(), mode)
    device = rows.tensor.device
    shape = (strips, 2, sizes["SEGMENTS"], sizes["STRIP"])
    words = torch.zeros(shape, dtype=torch.int64, device=device)
    where = (rows.number, rows.tensor.shape[-1], *rows[2:], grads.stride, grads.step, *call.every)
    flags = call.flags | sizes | {"WAITS": True}
    pointers, programs = (*call.pointers, words), strips * sizes["SEGMENTS"]
    run(strip_backward_kernel, programs, pointers, where, call.numbers, flags)


@triton.jit
def _collect(p_words, SEGMENTS: tl.constexpr, SLOTS: tl.constexpr, STRIP: tl.constexpr):
    """Wait for the two sums of each row, added in the same order whichever segment came first."""
    b_segments = tl.arange(0, SLOTS)[None, :]
    p_words += b_segments * STRIP + tl.arange(0, STRIP)[:, None]
    b_words = tl.zeros([STRIP, SLOTS], tl.int64)
    b_inside = (b_segments < SEGMENTS) & (tl.arange(0, STRIP)[:, None] >= 0)
    while tl.max(tl.where(b_inside, b_words, -1)) >= 0:
        # An atomic operation that changes nothing reads what is there now, once for all threads.
        b_words = tl.atomic_or(p_words, 0, mask=b_inside, sem="relaxed")
    b_sums, b_dots = unpack(b_words, b_segments < SEGMENTS)
    return tl.sum(b_sums, 1), tl.sum(b_dots, 1)


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every"])
def strip_backward_kernel(
    p_logits,
    p_index,
    p_stats,
    p_grad,
    p_seed,
    p_tau,
    p_gap,
    p_out,
    p_words,
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
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    WAITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
):
    """`p_words` are two zeros for each row of a segment; without `WAITS`: see `split_backward_kernel`."""
    s_program = tl.program_id(0)
    s_strip = s_program // SEGMENTS
    s_segment = s_program % SEGMENTS
    strip = strip_of(s_strip, s_rows, STRIP)
    s_step = tl.cast(s_step, tl.int64)
    s_grad_step = tl.cast(s_grad_step, tl.int64)
    s_out = tl.cast(s_inner, tl.int64)
    b_columns = s_segment * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_inside = strip.inside & (b_columns < s_categories)
    p_from = row_starts(p_logits, strip.rows, s_stride, s_inner) + b_columns * s_step
    b_logits = tl.load(p_from, mask=b_inside, other=-float("inf"), eviction_policy="evict_first")
    b_index = tl.load(p_index + strip.number).to(tl.int32)
    # What is read of single rows must be there: a row that does not exist is the last one again, and one
    # without a sample has some category. `lawful` overwrites what comes of it.
    s_last = s_categories - 1
    b_number = tl.reshape(strip.number, [STRIP])
    if AT_INDEX:
        p_one = p_grad + strip.number
        b_grad = tl.where(b_columns == b_index, tl.load(p_one).to(tl.float32), 0.0)
    else:
        p_one = row_starts(p_grad, b_number, s_grad_stride, s_inner)
        p_from = row_starts(p_grad, strip.rows, s_grad_stride, s_inner) + b_columns * s_grad_step
        b_grad = tl.load(p_from, mask=b_inside, other=0.0, eviction_policy="evict_first")
    row = row_of_sample(
        strip.number, 0, s_categories, tl.minimum(b_index, s_last), p_stats, p_seed, (p_tau, s_tau, s_tau_every),
        TAU_PER_ROW,
    )  # fmt: skip
    p_first = row_starts(p_logits, b_number, s_stride, s_inner)
    b_gap = row_gap((p_gap, s_gap, s_gap_every), p_first, row, MODE, EXPECTED_GAP, GAP_PER_ROW, s_step)
    b_shifted = b_logits.to(tl.float32) - row.shift
    b_weight = weights(b_shifted, b_columns, row, b_gap, MODE, FAST)
    b_sum = tl.sum(b_weight, 1)
    b_dot = tl.sum(b_weight * b_grad.to(tl.float32), 1)
    b_plain_dot = b_dot
    if MODE == REINMAX:
        b_plain_dot = tl.sum(exp2(b_shifted * LOG2_E, FAST) * b_grad.to(tl.float32), 1)
    if SEGMENTS > 1:
        p_words += s_strip.to(tl.int64) * (2 * SEGMENTS * STRIP)
        b_places = s_segment * STRIP + tl.arange(0, STRIP)
        publish(p_words, b_places, b_sum, b_dot)
        if MODE == REINMAX:
            publish(p_words + SEGMENTS * STRIP, b_places, b_sum, b_plain_dot)
        if WAITS:
            b_sum, b_dot = _collect(p_words, SEGMENTS, SLOTS, STRIP)
            if MODE == REINMAX:
                _, b_plain_dot = _collect(p_words + SEGMENTS * STRIP, SEGMENTS, SLOTS, STRIP)
    if WAITS:
        b_centres = centres(
            row, b_sum[:, None], b_dot[:, None], b_plain_dot[:, None], p_one, MODE, AT_INDEX, s_grad_step
        )
        if MODE == REINMAX:
            b_shifted = again(b_logits, FAST) - row.shift
        b_out = gradient(b_weight, b_shifted, again(b_grad, FAST), b_columns, row, b_centres, MODE, FAST)
        p_to = row_starts(p_out, strip.rows, s_out * s_categories, s_inner)
        write_strip(p_to, b_columns, lawful(b_out, b_index, s_categories), s_categories, s_out, strip.inside)
