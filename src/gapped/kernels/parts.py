"""What the kernels share: noise by counter, logarithms, levels per row, the softmax's Jacobian.

Prefixes: ``p_`` pointers, ``b_`` values of a block, ``s_`` scalars of the launch or of a row.
Noise is a function of a key and of the number of what it belongs to, so a backward pass draws it again
instead of reading it. Streams of one key are kept apart by the last word of the counter.
"""

from __future__ import annotations

import triton
import triton.language as tl

MODES = {"gst": 0, "straight-through": 1, "reinmax": 2, "gumbel-softmax": 3, "decoupled": 4, "gumbel-rao": 5}
GST = tl.constexpr(MODES["gst"])
REINMAX = tl.constexpr(MODES["reinmax"])
GUMBEL = tl.constexpr(MODES["gumbel-softmax"])
DECOUPLED = tl.constexpr(MODES["decoupled"])
RAO = tl.constexpr(MODES["gumbel-rao"])

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
_GAP_GUARD = tl.constexpr(1e-5)
# The last word of a counter: what the noise is for.
_FORWARD = tl.constexpr(0)
CONDITIONAL = tl.constexpr(1)
# Rounds of Philox for the many draws of Gumbel-Rao. Seven are the fewest that pass all of BigCrush; the usual
# ten are these and a margin (Salmon, Moraes, Dror, Shaw 2011).
_ROUNDS = tl.constexpr(7)


@triton.jit
def _instruction(ASSEMBLY: tl.constexpr, b_x):
    return tl.inline_asm_elementwise(ASSEMBLY, "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2(b_x, FAST: tl.constexpr):
    """Base-2 logarithm: one instruction on a GPU, with an absolute error of 2^-22 near 1.

    The argument is a normal number. Care for others would take three instructions more, as in `exp2`.
    """
    return _instruction("lg2.approx.ftz.f32 $0, $1;", b_x) if FAST else tl.log2(b_x)


@triton.jit
def exp2(b_x, FAST: tl.constexpr):
    """Base-2 exponential: one instruction on a GPU, which gives 0 for results below 2^-126."""
    return _instruction("ex2.approx.ftz.f32 $0, $1;", b_x) if FAST else tl.exp2(b_x)


@triton.jit
def exponential(b_bits, FAST: tl.constexpr, FINE: tl.constexpr = False):
    """Exponential noise of mean 1 / ln 2, that is -log2 of a uniform; never 0, never inf.

    The uniform is the middle of one of 2^23 equal pieces of (0, 1); with `FINE` those next to 1, from which the
    smallest noise comes, are cut into 512 each. The smallest of K such numbers is there twice with a chance
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
    b_series = b_small * (_LOG2_E + b_small * (_LOG2_E / 2 + b_small * (_LOG2_E / 3)))
    return tl.where(b_rest < 0.00390625, b_series, -log2(1.0 - b_rest, FAST))


@triton.jit
def _words(b_number):
    return (b_number & 0xFFFFFFFF).to(tl.uint32), (b_number >> 32).to(tl.uint32)


@triton.jit
def gumbel(s_seed, b_element, FAST: tl.constexpr, FINE: tl.constexpr = False):
    """Gumbel noise of the elements numbered `b_element`, between -2.9 and 22.9.

    Equal scores go to the first of them. That is one row in 4096 of 4096 equal logits; longer ones are
    `FINE`, so that of a row of 128,256 it is one in 67,000.
    """
    b_low, b_high = _words(b_element)
    b_bits, _, _, _ = tl.philox(s_seed, b_low, b_high, b_low * 0, b_low * 0 + _FORWARD)
    return -log2(exponential(b_bits, FAST, FINE) * _LN_2, FAST) * _LN_2


@triton.jit
def row_uniforms(s_seed, b_rows):
    """Two float64 uniforms in [0, 1) per row, of 53 bits each."""
    b_low, b_high = _words(b_rows)
    b_a, b_b, b_c, b_d = tl.philox(s_seed, b_low, b_high, b_low * 0, b_low * 0 + _FORWARD)
    b_first = ((b_a >> 5).to(tl.float64) * 67108864.0 + (b_b >> 6).to(tl.float64)) * 1.1102230246251565e-16
    b_second = ((b_c >> 5).to(tl.float64) * 67108864.0 + (b_d >> 6).to(tl.float64)) * 1.1102230246251565e-16
    return b_first, b_second


@triton.jit
def rao_bits(s_seed, b_element, s_block):
    """Bits for four conditional draws of each element; those of the selected one are the winner's."""
    b_low, b_high = _words(b_element)
    return tl.philox(s_seed, b_low, b_high, b_low * 0 + s_block, b_low * 0 + CONDITIONAL, _ROUNDS)


@triton.jit
def rao_odds(b_log2_p, b_selected):
    """1/p up to 2^90 and the base-2 logarithm of the rest; 0 and 0 for the selected category."""
    b_rest = tl.maximum(-b_log2_p - 90.0, 0.0)
    b_odds = tl.exp2(tl.minimum(-b_log2_p, 90.0))
    return tl.where(b_selected, 0.0, b_odds), tl.where(b_selected, 0.0, b_rest)


@triton.jit
def rao_weight(b_noise, b_odds, b_drop, b_scale, b_sharpness, FAST: tl.constexpr):
    """Weights of one conditional draw, relative to the winner's.

    With exponential noise E they are (1 + E_j / (p_j E_i))^(-1/tau); `b_scale` is 1/E_i. Beyond 2^90 the
    odds are so large that the 1 does not count and logarithms add up: `b_drop` is the rest over tau.
    """
    return exp2(-log2(1.0 + b_noise * b_odds * b_scale, FAST) * b_sharpness - b_drop, FAST)


@triton.jit
def lawless(b_logits):
    """Which logits leave their row without a law: NaN and +inf."""
    return ~(b_logits < float("inf"))


@triton.jit
def level(p_level, s_level, s_every, b_rows, b_inside, PER_ROW: tl.constexpr):
    """A temperature or gap for each row: a number, or a tensor with one entry for every `s_every` rows."""
    if PER_ROW:
        b_level = tl.load(p_level + b_rows // s_every, mask=b_inside, other=1.0)
    else:
        b_level = (b_rows * 0).to(tl.float32) + s_level
    # A negative level becomes NaN, and so does its row.
    return tl.where(b_level >= 0, b_level, float("nan"))


@triton.jit
def selected_gap(b_p):
    """Lemma 1's gap for a selected probability."""
    b_p = b_p * (1 - _GAP_GUARD)
    b_small = b_p < 0.0046
    b_quotient = -tl.log(1.0 - b_p) / tl.where(b_small, 1.0, b_p)
    return tl.where(b_small, 1.0 + b_p * (0.5 + b_p / 3.0), b_quotient)


@triton.jit
def capped(b_total):
    """The reciprocal of a sum of weights, 1 for a row without any."""
    return 1.0 / tl.where(b_total == 0, 1.0, b_total)


@triton.jit
def reciprocal(b_x, FAST: tl.constexpr):
    """1/x of a normal number: one instruction on a GPU. What it is for 0 is of no use."""
    return _instruction("rcp.approx.ftz.f32 $0, $1;", b_x) if FAST else capped(b_x)
