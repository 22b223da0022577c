"""Estimators by number, temperatures and gaps, for the kernels of rows of any length and of gates."""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import LN_2, TINY, exp2, log2, reciprocal

SECOND_ORDER = ("reinmax", "gapmax", "gapmax-tempered")
"""Modes whose gradient has two points: half of softmax's product is subtracted from that of the surrogate."""
SIMPLE = ("gst", "straight-through")
"""Modes whose weights take one exponential and few registers."""
_NAMES = (
    "gst",
    "gst-auto",
    "straight-through",
    "gumbel-softmax",
    "decoupled",
    "gumbel-rao",
    "reinmax-rao",
    *SECOND_ORDER,
)
MODES = {name: number for number, name in enumerate(_NAMES)}
GST = tl.constexpr(MODES["gst"])
GST_AUTO = tl.constexpr(MODES["gst-auto"])
GUMBEL = tl.constexpr(MODES["gumbel-softmax"])
DECOUPLED = tl.constexpr(MODES["decoupled"])
REINMAX = tl.constexpr(MODES["reinmax"])
GAPMAX = tl.constexpr(MODES["gapmax"])
GAPMAX_TEMPERED = tl.constexpr(MODES["gapmax-tempered"])
# Modes from this one on have two points.
TWO_POINTS = tl.constexpr(MODES[SECOND_ORDER[0]])
_GAP_GUARD = tl.constexpr(1e-5)
# A category whose probability has this base-2 logarithm has no mass.
_LEAST_LOG2 = tl.constexpr(-1.5e3)


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
def log2_odds(b_log2_p, FAST: tl.constexpr):
    """The base-2 logarithm of a losing category's expected odds: `simplex.log_expected_odds`."""
    b_log2_p = tl.maximum(b_log2_p, -1e30)
    return b_log2_p + log2_odds_ratio(b_log2_p, 1.0 - exp2(b_log2_p, FAST), FAST)


@triton.jit
def log2_odds_ratio(b_log2_p, b_rest, FAST: tl.constexpr):
    """The term that `log2_odds` adds to log2 p, by log2 p and 1 - p."""
    # Next to 1 the quotient has no digits left of the fast exponential; the series of -log(1 - x) does.
    b_near = b_rest < 0.25
    b_square = tl.where(b_near, 1.0, b_rest * b_rest)
    b_series = b_rest * 0.1 + 1.0 / 9
    for n in tl.static_range(7):
        b_series = b_rest * b_series + 1.0 / (8 - n)
    b_quotient = (b_log2_p * -LN_2 - b_rest) * reciprocal(b_square, FAST)
    return log2(tl.where(b_near, b_series, b_quotient), FAST)


@triton.jit
def halfway_odds(b_half, b_log2_half, b_slope, MODE: tl.constexpr, FAST: tl.constexpr):
    """A losing category's odds in GapMax: `simplex.halfway_odds` to the power of `b_slope`, that is 1/tau.

    They are given by half of its probability and the base-2 logarithm of that, which may be infinite.
    """
    b_rest = 1.0 - b_half
    # One multiply-add: the surprise -log(p/2) less the rest.
    b_lead = tl.maximum(b_log2_half, _LEAST_LOG2) * -LN_2 - b_rest
    b_odds = b_half * b_lead * reciprocal(b_rest * b_rest, FAST)
    if MODE == GAPMAX_TEMPERED:
        # Odds below the smallest normal number are those of a category without mass: exactly 0.
        b_power = exp2(log2(tl.maximum(b_odds, TINY), FAST) * b_slope, FAST)
        b_odds = tl.where(b_odds < TINY, b_odds * 0.0, b_power)
    return b_odds
