"""Conditional draws of Gumbel-Rao: their noise, and the weights they give the categories.

Given that category i is drawn, and with exponential noise E, the surrogate's weight of category j is
(E_j / p_j + E_i)^(-1/tau), and E_i^(-1/tau) for i itself: `simplex.conditional_gumbel` in another form. Every
element has noise of its own, drawn again wherever it is needed. It is what these kernels spend their time on,
so each instruction counts (`benchmarks/count_instructions.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import LOG2_E, exp2, log2, reciprocal

# Rounds of Philox. Seven are the fewest that pass all of BigCrush; the usual ten are these and a margin
# (Salmon, Moraes, Dror, Shaw 2011).
ROUNDS = tl.constexpr(7)
_WIDE = "{{ .reg .b64 t; mul.wide.u32 t, $2, {}; mov.b64 {{$1, $0}}, t; }}"
_A, _B = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_TIMES_A, _TIMES_B = tl.constexpr(_WIDE.format(0xD2511F53)), tl.constexpr(_WIDE.format(0xCD9E8D57))
# What `log2_uniform` says. The last instruction is executed for the smallest noise only.
_LOG2_UNIFORM = tl.constexpr(
    "{ .reg .f32 u, s; .reg .pred p; sub.f32 u, 0f40000000, $1; fma.rn.f32 s, $1, $1, 0fBF7FFFFE; "
    "setp.lt.f32 p, $1, 0f3F808000; lg2.approx.ftz.f32 $0, u; @p mul.f32 $0, s, 0fBF38AA3B; }"
)


@triton.jit
def _product(b_x, FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr, FAST: tl.constexpr):
    """The high and the low word of a product: one instruction, of which the compiler would make two."""
    if FAST:
        b_words = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", [b_x], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
    else:
        b_wide = b_x.to(tl.uint64) * FACTOR
        b_words = (b_wide >> 32).to(tl.uint32), b_wide.to(tl.uint32)
    return b_words


@triton.jit
def rao_bits(s_seed, b_row, b_column, b_block, FAST: tl.constexpr):
    """Bits for four conditional draws of each element, by Philox 4x32.

    Row and draws meet the column in the third round only: what comes before is computed once for a row, or
    once for all draws. The last word of the counter is odd; that of other noise is 0.
    """
    b_0 = b_column.to(tl.uint32)
    b_1 = b_row.to(tl.uint32)
    b_2 = b_block.to(tl.uint32)
    b_3 = ((b_row >> 32) * 2 + 1).to(tl.uint32)
    s_low = s_seed.to(tl.uint32)
    s_high = (s_seed >> 32).to(tl.uint32)
    for s_round in tl.static_range(ROUNDS):
        b_a = _product(b_0, _A, _TIMES_A, FAST)
        b_b = _product(b_2, _B, _TIMES_B, FAST)
        b_0 = b_b[0] ^ b_1 ^ (s_low + (s_round * 0x9E3779B9) % 0x100000000)
        b_2 = b_a[0] ^ b_3 ^ (s_high + (s_round * 0xBB67AE85) % 0x100000000)
        b_1 = b_b[1]
        b_3 = b_a[1]
    return b_0, b_1, b_2, b_3


@triton.jit
def log2_uniform(b_bits, FAST: tl.constexpr):
    """The base-2 logarithm of a uniform, exponential noise but for its sign; never 0, never -inf.

    The uniform is 2 - f, a multiple of 2^-23. Near 1, where the fast logarithm has no digits left, it is half
    a piece smaller, as in `primitives.exponential`: for 1 - r it is -(r + r^2 / 2) log2(e) but for a relative
    error below 2^-17, and 2 r + r^2 is (1 + r)^2 - 1, which one instruction rounds once.
    """
    # In [1, 2), made of the bits themselves.
    b_f = ((b_bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    if FAST:
        # Else the compiler would keep the outcomes of many comparisons, at more than an instruction each.
        b_log = tl.inline_asm_elementwise(_LOG2_UNIFORM, "=f,f", [b_f], tl.float32, is_pure=True, pack=1)
    else:
        b_series = ((b_f - 1.0) * (b_f + 1.0) + 1.1920928955078125e-7) * (-LOG2_E / 2)
        b_log = tl.where(b_f < 1.00390625, b_series, tl.log2(2.0 - b_f))
    return b_log


@triton.jit
def rao_odds(b_log2_odds, b_selected, b_slope, POWER: tl.constexpr, FAST: tl.constexpr):
    """1/p, and a logarithm to subtract, as `rao_weight` takes them; 0 and 0 for the selected category.

    Beyond 2^90 it is so large that E_i does not count, and logarithms add up: the rest, over tau, is what to
    subtract. With a `POWER` such weights are below 2^-60 and taken for 0, which a square is without more ado.
    """
    b_odds = exp2(tl.minimum(b_log2_odds, 90.0), FAST)
    b_drop = b_odds
    if POWER == 0:
        b_drop = tl.where(b_selected, 0.0, tl.minimum(90.0 - b_log2_odds, 0.0) * b_slope)
    elif POWER == 1:
        b_odds = tl.where(b_log2_odds > 90.0, float("inf"), b_odds)
    return tl.where(b_selected, 0.0, b_odds), b_drop


@triton.jit
def rao_winner(b_bits, POWER: tl.constexpr, FAST: tl.constexpr):
    """The noise of the selected category as `rao_weight` takes it."""
    b_noise = log2_uniform(b_bits, FAST)
    return reciprocal(b_noise, FAST) if POWER == 0 else b_noise


@triton.jit
def rao_weight(b_bits, b_winner, b_odds, b_drop, b_slope, POWER: tl.constexpr, FAST: tl.constexpr):
    """Weights of one conditional draw, up to a factor that all categories of a row have in common.

    `POWER` is 1/tau if that is 1 or 2, which saves a logarithm, else 0. Then the weights are relative to the
    selected category's, (1 + E_j / (p_j E_i))^(-1/tau), which neither overflow nor all vanish; `b_slope` is
    -1/tau.
    """
    b_noise = log2_uniform(b_bits, FAST)
    if POWER == 0:
        b_weight = exp2(log2(1.0 + b_noise * (b_odds * b_winner), FAST) * b_slope - b_drop, FAST)
    else:
        b_weight = reciprocal(b_noise * b_odds + b_winner, FAST)
        if POWER == 2:
            b_weight = b_weight * b_weight
    return b_weight
