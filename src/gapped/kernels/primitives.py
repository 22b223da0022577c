"""Functions that kernels of several operations call: noise by counter, and blocks of rows.

Prefixes in kernels: ``p_`` pointers, ``b_`` values of a block, ``s_`` scalars of the launch or of a row.
Noise is a function of a key and of the number of the row or element it belongs to, so a backward pass draws
it again instead of reading it. The last word of the counter separates the streams of one key.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))
# The smallest normal number.
TINY = tl.constexpr(1.1754943508222875e-38)
# The last word of a counter; the conditional draws of Gumbel-Rao have another.
_FORWARD = tl.constexpr(0)


@triton.jit
def _instruction(ASSEMBLY: tl.constexpr, b_x):
    return tl.inline_asm_elementwise(ASSEMBLY, "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2(b_x, FAST: tl.constexpr):
    """Base-2 logarithm: one instruction on a GPU, with an absolute error of 2^-22 near 1.

    The argument must be a normal number: handling others would take three more instructions.
    """
    return _instruction("lg2.approx.ftz.f32 $0, $1;", b_x) if FAST else tl.log2(b_x)


@triton.jit
def exp2(b_x, FAST: tl.constexpr):
    """Base-2 exponential: one instruction on a GPU, which gives 0 for results below 2^-126."""
    return _instruction("ex2.approx.ftz.f32 $0, $1;", b_x) if FAST else tl.exp2(b_x)


@triton.jit
def exponential(b_bits, FAST: tl.constexpr, FINE: tl.constexpr = False):
    """Exponential noise of mean 1 / ln 2, that is -log2 of a uniform; never 0, never inf.

    The uniform is the middle of one of 2^23 equal pieces of (0, 1); with `FINE` those next to 1, which
    give the smallest noise, are cut into 512 each. The smallest of K such numbers occurs twice with a chance
    of about K / 2^24, or K / 2^33.
    """
    # In [1, 2), made of the bits themselves: converting an integer is as slow as a logarithm.
    b_f = ((b_bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    # Exact, and so is the difference from 1.
    b_rest = b_f - 0.999999940395355224609375
    b_small = b_rest
    if FINE:
        # The nine bits that are left, again as a number in [1, 2).
        b_low = (((b_bits & 0x1FF) << 14) | 0x3F800000).to(tl.float32, bitcast=True)
        b_small = (b_f - 1.0) + (b_low - 0.9990234375) * 1.1920928955078125e-7
    # Near 0 the fast logarithm has no digits left, the series has all of them.
    b_series = b_small * (LOG2_E + b_small * (LOG2_E / 2 + b_small * (LOG2_E / 3)))
    return tl.where(b_rest < 0.00390625, b_series, -log2(1.0 - b_rest, FAST))


@triton.jit
def words(b_number):
    """The lower and the upper half of a 64-bit number."""
    return (b_number & 0xFFFFFFFF).to(tl.uint32), (b_number >> 32).to(tl.uint32)


@triton.jit
def gumbel(s_seed, b_element, FAST: tl.constexpr, FINE: tl.constexpr = False):
    """Gumbel noise of the elements numbered `b_element`, between -2.9 and 22.9.

    Equal scores go to the first of them. That is one row in 4096 of 4096 equal logits; longer ones are
    `FINE`, so that of a row of 128,256 it is one in 67,000.
    """
    b_low, b_high = words(b_element)
    b_bits, _, _, _ = tl.philox(s_seed, b_low, b_high, b_low * 0, b_low * 0 + _FORWARD)
    return -log2(exponential(b_bits, FAST, FINE) * LN_2, FAST) * LN_2


@triton.jit
def load_key(p_key):
    """The key of a call: one 64-bit integer, or the two 32-bit ones that a framework without others has."""
    return tl.load(p_key.to(tl.pointer_type(tl.int64), bitcast=True))


@triton.jit
def row_uniforms(s_seed, b_rows):
    """Two float64 uniforms in [0, 1) per row, of 53 bits each."""
    b_low, b_high = words(b_rows)
    b_a, b_b, b_c, b_d = tl.philox(s_seed, b_low, b_high, b_low * 0, b_low * 0 + _FORWARD)
    b_first = ((b_a >> 5).to(tl.float64) * 67108864.0 + (b_b >> 6).to(tl.float64)) * 1.1102230246251565e-16
    b_second = ((b_c >> 5).to(tl.float64) * 67108864.0 + (b_d >> 6).to(tl.float64)) * 1.1102230246251565e-16
    return b_first, b_second


class RowBlock(NamedTuple):
    """Rows and columns of a program, and masks of those that exist."""

    rows: tl.tensor
    columns: tl.tensor
    row_inside: tl.tensor
    inside: tl.tensor


@triton.jit
def row_block(s_rows, s_categories, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The block of this program."""
    b_rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_columns = tl.arange(0, BLOCK_COLUMNS)
    b_row_inside = b_rows < s_rows
    b_inside = b_row_inside[:, None] & (b_columns < s_categories)[None, :]
    return RowBlock(b_rows, b_columns, b_row_inside, b_inside)


@triton.jit
def row_starts(p, b_rows, s_stride, s_inner=1):
    """Pointers to the first categories of rows, ``(rows, 1)``.

    Groups of `s_inner` rows lie side by side, and a group begins `s_stride` after the one before it.
    """
    return p + ((b_rows // s_inner).to(tl.int64) * s_stride + b_rows % s_inner)[:, None]


@triton.jit
def load_rows(p, block, s_stride, other, s_inner=1, s_step=1):
    """A block of rows placed as in `row_starts`, whose categories are `s_step` apart."""
    p_from = row_starts(p, block.rows, s_stride, s_inner) + block.columns[None, :].to(tl.int64) * s_step
    return tl.load(p_from, mask=block.inside, other=other)


@triton.jit
def store_rows(p, block, s_stride, b_values, s_inner=1, s_step=1):
    """Write a block of rows placed as in `load_rows`."""
    p_to = row_starts(p, block.rows, s_stride, s_inner) + block.columns[None, :].to(tl.int64) * s_step
    tl.store(p_to, b_values.to(p.dtype.element_ty), mask=block.inside)


@triton.jit
def drop_absent(b_grad, b_logits):
    """An incoming gradient, 0 at categories that do not exist, where the caller may give any value."""
    return tl.where(b_logits == -float("inf"), tl.zeros_like(b_grad), b_grad)


@triton.jit
def safe_reciprocal(b_total):
    """The reciprocal of a sum of weights, 1 for a row without any."""
    return 1.0 / tl.where(b_total == 0, 1.0, b_total)


@triton.jit
def reciprocal(b_x, FAST: tl.constexpr):
    """1/x of a normal number: one instruction on a GPU. Undefined for 0."""
    return _instruction("rcp.approx.ftz.f32 $0, $1;", b_x) if FAST else safe_reciprocal(b_x)


@triton.jit
def normalise(b_shifted):
    """Softmax of rows whose largest entry is 0; all zeros for a row without categories."""
    b_weights = tl.exp(b_shifted)
    return b_weights * safe_reciprocal(tl.sum(b_weights, 1))[:, None]


@triton.jit
def exceeds(b_running, b_threshold, b_weights):
    """Which categories an inverse CDF may choose: those whose running sum is above the threshold."""
    # The sum may exceed the last running sum by some roundings: then the last category must win.
    b_threshold = b_threshold * 0.99999999999999
    # A category without weight never wins, however the running sum was rounded.
    return (b_running > b_threshold[:, None]) & (b_weights > 0)
