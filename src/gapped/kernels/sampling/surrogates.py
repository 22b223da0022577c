"""What the kernels of short and long rows share: estimators by number, temperatures, gaps, conditional draws."""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import exp2, log2

MODES = {"gst": 0, "straight-through": 1, "reinmax": 2, "gumbel-softmax": 3, "decoupled": 4, "gumbel-rao": 5}
GST = tl.constexpr(MODES["gst"])
REINMAX = tl.constexpr(MODES["reinmax"])
GUMBEL = tl.constexpr(MODES["gumbel-softmax"])
DECOUPLED = tl.constexpr(MODES["decoupled"])
RAO = tl.constexpr(MODES["gumbel-rao"])
_GAP_GUARD = tl.constexpr(1e-5)


@triton.jit
def lawless(b_logits):
    """Which logits leave their row without a law: NaN and +inf."""
    return ~(b_logits < float("inf"))


@triton.jit
def level(source, b_rows, b_inside, PER_ROW: tl.constexpr):
    """A temperature or gap for each row: a number, or a tensor with one entry for every `s_every` rows."""
    p_level, s_level, s_every = source
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
