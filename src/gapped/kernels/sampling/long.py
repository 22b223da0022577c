"""Rows too long for a block: sizes, and kernels that read a row in chunks or share it between programs.

Forward, every lane (a position in the chunks) keeps its own running maximum and sum, so threads exchange
nothing until the row is read. Then one lane is drawn by its share of the row, and one of that lane's few
elements by its share of the lane: the row is read once and written once.

Backward, the gradient needs sums of the whole row before it can be written. `split_backward_kernel` splits a
row over several programs. Each keeps its segment in registers: it reads the segment, computes sums, publishes
them, waits for the sums of the row's other segments, and writes. So logits and gradient are read once,
whatever the cache holds. Longer rows take `streamed_backward_kernel`: one program computes the sums in a
first pass and writes the gradient in a second one, in reverse order, so that it begins with chunks that the
cache still holds.

Programs that wait for each other must all be running. Those of a row have consecutive numbers, and a GPU
starts programs in the order of their numbers (the scans of CUB rely on it too). So a program waits only for
ones that run already or are next in line, and it is enough that one row's programs fit on the GPU beside each
other. Kernels on other streams may take places, but each has at most one row there that cannot go on.
`most_segments` says how many fit.

On an H200 the backward pass of GST takes 1.81 ms split and 2.25 streamed for 8,192 rows of 128,256 in
bfloat16, the vocabularies of language models; for 8,192 rows of 32,000 in float32, whose second reading comes
from the cache, 0.79 and 0.80.

`p_stats` keeps two numbers of each row from the forward for the backward pass: the largest logit, and the sum
of weights relative to it; with Gumbel noise, the best score instead of the sum. `p_law` is for a choice whose
logits are not kept: the log-probability of the drawn category, and the logarithm of the sum of exponentials
that the law is normalised by.

The rows of a launch may be a part of those that share a key: `s_first` is the number of the first. Noise
depends on a row's number among all of them, temperatures and gaps are given for the rows of the launch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import (
    LN_2,
    LOG2_E,
    drop_absent,
    exp2,
    gumbel,
    load_key,
    row_uniforms,
    safe_reciprocal,
)
from gapped.kernels.runner import power
from gapped.kernels.sampling.surrogates import (
    DECOUPLED,
    GAPMAX,
    GST,
    GST_AUTO,
    GUMBEL,
    REINMAX,
    SECOND_ORDER,
    SIMPLE,
    TWO_POINTS,
    halfway_odds,
    lawless,
    level,
    log2_odds,
    selected_gap,
)

if TYPE_CHECKING:
    import torch

# Elements of a chunk and warps that share it: the fastest on an H200 (`gapped bench --constant`).
CHUNK, WARPS = 4096, 16
# With `FEW_ROWS` or fewer, most of the GPU is idle and a program waits for its memory: larger chunks.
FEW_ROWS, FEW_CHUNK, FEW_WARPS = 128, 8192, 32
# Backward, rows that cannot be split are read twice. Few large programs leave them in the cache.
BACKWARD_CHUNK, BACKWARD_WARPS = 16384, 32
# Bytes of logits in a segment, and warps of its program. With so few registers one more program fits on a
# multiprocessor; only simple weights need no more. The fastest on an H200 (`gapped bench --constant`).
SEGMENT_BYTES, SEGMENT_WARPS, REGISTERS, MOST_REGISTERS = 16384, 8, 64, 128
# With two points, a warp for so many logits: a thread has weights and halves of all while it waits.
WARP_LOGITS = 1024
# No more segments to a row, so that a large GPU works on several rows at a time.
MOST_SEGMENTS = 32
# The gradient of log-probabilities: elements of a program and its warps.
LAW_BLOCK, LAW_WARPS = 4096, 8
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Farther from the largest logit than any that counts, and not too large to be divided by a temperature.
_FAR = tl.constexpr(1e30)
NORMAL = tl.constexpr("")
_SIGN = tl.constexpr(1 << 31)


def chunk_sizes(rows: int, categories: int) -> dict[str, int]:
    """The sizes of the launch of a forward pass."""
    chunk, warps = (FEW_CHUNK, FEW_WARPS) if rows <= FEW_ROWS else (CHUNK, WARPS)
    return {"CHUNKS": power(-(-categories // chunk)), "BLOCK": chunk, "num_warps": warps}


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
    sizes = {"SEGMENTS": segments, "SLOTS": power(segments), "BLOCK": block, "num_warps": SEGMENT_WARPS}
    if mode in SECOND_ORDER:
        sizes["num_warps"] = max(block // WARP_LOGITS, 1)
    return segments, sizes | {"maxnreg": REGISTERS if mode in SIMPLE else MOST_REGISTERS}


class Row(NamedTuple):
    """The row of a program once the sample is drawn."""

    place: tl.tensor
    """Its number in the launch."""
    number: tl.tensor
    """Its number among the rows that share the key."""
    categories: tl.tensor
    seed: tl.tensor
    index: tl.tensor
    shift: tl.tensor
    """The largest logit."""
    second: tl.tensor
    """The second number of `p_stats`: a sum of weights, or the best score."""
    tau: tl.tensor


@triton.jit
def chunk(p, s_start, s_categories, other, BLOCK: tl.constexpr, EVICTION: tl.constexpr = NORMAL):
    """Columns and float32 values of one chunk of a row; `EVICTION` tells the cache whether to keep them."""
    b_columns = s_start + tl.arange(0, BLOCK)
    b_values = tl.load(p + b_columns, mask=b_columns < s_categories, other=other, eviction_policy=EVICTION)
    return b_columns, b_values.to(tl.float32)


@triton.jit
def write(p, b_columns, b_values, s_categories):
    """Store one chunk of a row, bypassing the cache: nothing reads the output again."""
    b_values = b_values.to(p.dtype.element_ty)
    tl.store(p + b_columns, b_values, mask=b_columns < s_categories, cache_modifier=".cs")


@triton.jit
def gradient_chunk(
    p, b_logits, s_start, row, AT_INDEX: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr = NORMAL
):
    """The incoming gradient of a chunk of logits; it may be given at the selected category alone."""
    if AT_INDEX:
        b_grad = tl.where(s_start + tl.arange(0, BLOCK) == row.index, tl.load(p).to(tl.float32), 0.0)
    else:
        _, b_grad = chunk(p, s_start, row.categories, 0.0, BLOCK, EVICTION)
        b_grad = drop_absent(b_grad, b_logits)
    return b_grad


@triton.jit
def fill(p, s_value, s_categories, BLOCK: tl.constexpr):
    for s_start in range(0, s_categories, BLOCK):
        write(p, s_start + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32) + s_value, s_categories)


@triton.jit
def row_of_sample(s_row, s_first, s_categories, s_index, p_stats, p_seed, tau, TAU_PER_ROW: tl.constexpr):
    """The row as the forward pass left it."""
    s_shift = tl.load(p_stats + 2 * s_row)
    s_second = tl.load(p_stats + 2 * s_row + 1)
    s_tau = level(tau, s_row, s_row >= 0, TAU_PER_ROW)
    s_seed = load_key(p_seed)
    return Row(s_row, s_first + s_row, s_categories, s_seed, s_index, s_shift, s_second, s_tau)


@triton.jit
def row_gap(
    source, p_logits, row, MODE: tl.constexpr, EXPECTED: tl.constexpr, PER_ROW: tl.constexpr, s_step=1
):
    """The gap of GST, unused by the other estimators. Categories are `s_step` apart."""
    s_gap = row.tau
    if MODE == GST:
        if EXPECTED:
            p_selected = p_logits + row.index * s_step
            s_logit = tl.load(p_selected, mask=row.index < row.categories, other=0.0).to(tl.float32)
            s_gap = selected_gap(tl.exp(s_logit - row.shift) * safe_reciprocal(row.second))
        else:
            s_gap = level(source, row.place, row.place >= 0, PER_ROW)
    return s_gap


@triton.jit
def weights(b_shifted, b_columns, row, s_gap, MODE: tl.constexpr, FAST: tl.constexpr):
    """The surrogate's weights of logits relative to the row's largest: neither all tiny nor any huge."""
    s_sharpness = LOG2_E / row.tau
    if MODE == GST:
        b_scores = tl.where(b_columns == row.index, 0.0, tl.minimum(b_shifted, -s_gap))
    elif MODE == GST_AUTO:
        b_odds = log2_odds(b_shifted * LOG2_E - tl.log2(row.second), FAST)
        b_scores = tl.where(b_columns == row.index, 0.0, b_odds * LN_2)
    elif MODE == GUMBEL:
        b_noise = gumbel(row.seed, row.number * row.categories + b_columns, FAST, True)
        b_scores = b_shifted + b_noise - row.second
    else:
        b_scores = b_shifted
    if MODE >= GAPMAX:
        b_half = halves(b_shifted, row, FAST)
        b_odds = halfway_odds(b_half, _log2_halves(b_shifted, row), 1 / row.tau, MODE, FAST)
        b_weights = tl.where(b_columns == row.index, 1.0, b_odds)
    else:
        b_exponents = b_scores * s_sharpness
        if MODE == DECOUPLED:
            # The largest logit has a score of at least -2.9, and no score is above 22.9: no shift is needed.
            b_exponents += gumbel(row.seed, row.number * row.categories + b_columns, FAST, True) * LOG2_E
        b_weights = exp2(b_exponents, FAST)
    return b_weights


@triton.jit
def _log2_halves(b_shifted, row):
    return b_shifted * LOG2_E - (tl.log2(row.second) + 1.0)


@triton.jit
def halves(b_shifted, row, FAST: tl.constexpr):
    """Half of the probabilities of logits relative to the row's largest."""
    return exp2(_log2_halves(b_shifted, row), FAST)


@triton.jit
def centres(row, s_sum, s_dot, s_half_dot, p_grad, MODE: tl.constexpr, AT_INDEX: tl.constexpr, s_step=1):
    """Factor and mean gradient of the surrogate, and mean gradient of softmax, for `gradient`.

    `s_half_dot` is the sum of `halves` times gradient.
    """
    s_scale = safe_reciprocal(s_sum)
    s_mean = s_dot * s_scale
    if MODE == REINMAX:
        p_selected = p_grad
        if not AT_INDEX:
            p_selected += row.index * s_step
        s_mean = (s_mean + tl.load(p_selected).to(tl.float32)) / 2
    elif MODE >= GAPMAX:
        s_scale *= 2.0 / row.tau
    else:
        s_scale /= row.tau
    return s_scale, s_mean, 2.0 * s_half_dot


@triton.jit
def gradient(b_weight, b_shifted, b_grad, b_columns, row, s_centres, MODE: tl.constexpr, FAST: tl.constexpr):
    """The gradient of the logits: the points' Jacobians times the gradient of the sample."""
    s_scale, s_mean, s_plain_mean = s_centres
    b_first = b_weight * s_scale
    if MODE == REINMAX:
        # The first point is the mean of the surrogate and the one-hot sample, and counts twice.
        b_first += (b_columns == row.index).to(tl.float32)
    b_out = b_first * (b_grad - s_mean)
    if MODE >= TWO_POINTS:
        b_out -= halves(b_shifted, row, FAST) * (b_grad - s_plain_mean)
    return b_out


@triton.jit
def _grow(b_sum, b_lead):
    """Sums relative to a running maximum, with one more element: `b_lead` is how far above it that is."""
    b_weight = tl.exp(-tl.abs(b_lead))
    return tl.where(b_lead > 0, b_sum * b_weight + 1.0, b_sum + b_weight)


@triton.jit
def _shares(b_sum, b_lead):
    """Sums of lanes relative to the row's maximum; a lane's maximum exceeds it by `b_lead`."""
    return tl.where(b_sum > 0, b_sum * tl.exp(b_lead), 0.0)


@triton.jit
def add_scores(b_max, b_best, b_where, b_logits, b_noise, b_columns):
    """Lanes after a chunk with noise: their largest logit, their best score, and the column that has it.

    Scores are relative to the largest logit that their lane has seen, times the temperature of the noise:
    whatever came before, the noise of a winner keeps its digits.
    """
    b_top = tl.maximum(b_max, b_logits)
    b_best += b_max - b_top
    b_scores = b_noise + (b_logits - b_top)
    b_where = tl.where(b_scores > b_best, b_columns, b_where)
    return b_top, tl.maximum(b_best, b_scores), b_where


@triton.jit
def add_weights(b_max, b_sum, b_where, b_logits, b_columns, ARGMAX: tl.constexpr):
    """Lanes after a chunk: their largest logit, their sum of weights, and with `ARGMAX` that logit's column.

    A lane that has seen nothing has the lowest finite maximum: then -inf adds nothing and cannot be NaN.
    """
    b_lead = b_logits - b_max
    if ARGMAX:
        # The lowest finite logit does not exceed a lane's initial maximum, but it may be its first.
        b_where = tl.where((b_lead > 0) | ((b_lead == 0) & (b_sum == 0)), b_columns, b_where)
    return tl.maximum(b_max, b_logits), _grow(b_sum, b_lead), b_where


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every", "s_tau_forward_every", "s_first"])
def streamed_forward_kernel(
    p_logits,
    p_seed,
    p_tau,
    p_gap,
    p_tau_forward,
    p_value,
    p_index,
    p_stats,
    p_law,
    s_categories,
    s_stride,
    s_tau_every,
    s_gap_every,
    s_tau_forward_every,
    s_tau,
    s_gap,
    s_tau_forward,
    s_first,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    TAU_FORWARD_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    ARGMAX: tl.constexpr,
    SOFT: tl.constexpr,
    DENSE: tl.constexpr,
    LAW: tl.constexpr,
    FAST: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s_row = tl.program_id(0).to(tl.int64)
    p_logits += s_row * s_stride
    p_value += s_row * s_categories
    s_number = s_first + s_row
    s_seed = load_key(p_seed)
    s_tau = level((p_tau, s_tau, s_tau_every), s_row, s_row >= 0, TAU_PER_ROW)
    b_lanes = tl.arange(0, BLOCK)
    b_broken = tl.zeros([BLOCK], tl.int32)
    b_max = tl.zeros([BLOCK], tl.float32) + LOWEST
    b_where = tl.zeros([BLOCK], tl.int32) + s_categories
    if (MODE == GUMBEL) or (MODE == DECOUPLED):
        tau_forward = (p_tau_forward, s_tau_forward, s_tau_forward_every)
        s_tau_forward = level(tau_forward, s_row, s_row >= 0, TAU_FORWARD_PER_ROW)
        b_best = tl.zeros([BLOCK], tl.float32) - float("inf")
        b_sum = tl.zeros([BLOCK], tl.float32)
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = chunk(p_logits, s_start, s_categories, -float("inf"), BLOCK)
            b_broken |= lawless(b_logits).to(tl.int32)
            b_noise = gumbel(s_seed, s_number * s_categories + b_columns, FAST, True)
            if LAW:
                b_sum = _grow(b_sum, tl.minimum(b_logits - b_max, _FAR) / s_tau_forward)
            b_max, b_best, b_where = add_scores(
                b_max, b_best, b_where, b_logits, b_noise * s_tau_forward, b_columns
            )
            if DENSE and not SOFT:
                write(p_value, b_columns, tl.zeros([BLOCK], tl.float32), s_categories)
        s_shift = tl.max(b_max, 0)
        b_best += b_max - s_shift
        s_best = tl.max(b_best, 0)
        s_index = tl.min(tl.where(b_best == s_best, b_where, s_categories), 0)
        s_second = s_best
        s_total = tl.sum(_shares(b_sum, tl.maximum(b_max - s_shift, -_FAR) / s_tau_forward), 0)
        b_broken |= (s_tau_forward != s_tau_forward).to(tl.int32)
    else:
        s_tau_forward = 1.0
        b_sum = tl.zeros([BLOCK], tl.float32)
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = chunk(p_logits, s_start, s_categories, -float("inf"), BLOCK)
            b_broken |= lawless(b_logits).to(tl.int32)
            b_max, b_sum, b_where = add_weights(b_max, b_sum, b_where, b_logits, b_columns, ARGMAX)
            if DENSE and not SOFT:
                write(p_value, b_columns, tl.zeros([BLOCK], tl.float32), s_categories)
        s_shift = tl.max(b_max, 0)
        b_share = _shares(b_sum, b_max - s_shift)
        b_running = tl.cumsum(b_share.to(tl.float64), 0)
        s_total = tl.max(b_running, 0)
        if ARGMAX:
            s_index = tl.min(tl.where(b_max == s_shift, b_where, s_categories), 0)
        else:
            s_u, s_v = row_uniforms(s_seed, s_number)
            s_lane = tl.min(tl.where((b_running > s_u * s_total) & (b_share > 0), b_lanes, BLOCK), 0)
            # The lane's own elements, one from each chunk.
            b_own_columns = s_lane + tl.arange(0, CHUNKS) * BLOCK
            b_own_inside = (b_own_columns < s_categories) & (s_lane < BLOCK)
            b_own_logits = tl.load(p_logits + b_own_columns, mask=b_own_inside, other=-float("inf"))
            b_own_logits = b_own_logits.to(tl.float32)
            s_own_max = tl.max(tl.where(b_lanes == s_lane, b_max, LOWEST), 0)
            b_own_weight = tl.exp(b_own_logits - s_own_max)
            b_own_running = tl.cumsum(b_own_weight.to(tl.float64), 0)
            b_own_wins = (b_own_running > s_v * tl.max(b_own_running, 0)) & (b_own_weight > 0)
            s_index = tl.min(tl.where(b_own_wins, b_own_columns, s_categories), 0)
        s_second = s_total.to(tl.float32)
    s_broken = tl.max(b_broken, 0) > 0
    s_index = tl.where(s_broken, s_categories + 1, s_index)
    tl.store(p_index + s_row, s_index)
    tl.store(p_stats + 2 * s_row, s_shift)
    tl.store(p_stats + 2 * s_row + 1, s_second)
    if LAW:
        s_lawful = s_index < s_categories
        s_log_sum = tl.log(tl.where(s_lawful, s_total.to(tl.float32), 1.0))
        s_top = tl.where(s_lawful, s_shift, 0.0)
        s_logit = tl.load(p_logits + s_index, mask=s_lawful, other=0.0).to(tl.float32)
        s_log_prob = (s_logit - s_top) / s_tau_forward - s_log_sum
        s_nothing = tl.where(s_broken, float("nan"), 0.0)
        tl.store(p_law + 2 * s_row, tl.where(s_lawful, s_log_prob, s_nothing))
        tl.store(p_law + 2 * s_row + 1, s_top / s_tau_forward + s_log_sum)
    row = Row(s_row, s_number, s_categories, s_seed, s_index, s_shift, s_second, s_tau)
    if DENSE:
        if s_index > s_categories:
            fill(p_value, float("nan"), s_categories, BLOCK)
        elif SOFT:
            if s_index == s_categories:
                fill(p_value, 0.0, s_categories, BLOCK)
            else:
                s_own_gap = row_gap(
                    (p_gap, s_gap, s_gap_every), p_logits, row, MODE, EXPECTED_GAP, GAP_PER_ROW
                )
                b_sum = tl.zeros([BLOCK], tl.float32)
                for s_start in range(0, s_categories, BLOCK):
                    b_columns, b_logits = chunk(p_logits, s_start, s_categories, -float("inf"), BLOCK)
                    b_sum += weights(b_logits - s_shift, b_columns, row, s_own_gap, MODE, FAST)
                s_scale = safe_reciprocal(tl.sum(b_sum, 0))
                for s_start in range(0, s_categories, BLOCK):
                    b_columns, b_logits = chunk(p_logits, s_start, s_categories, -float("inf"), BLOCK)
                    b_weight = weights(b_logits - s_shift, b_columns, row, s_own_gap, MODE, FAST)
                    write(p_value, b_columns, b_weight * s_scale, s_categories)
        elif s_index < s_categories:
            # The zero at this place was written by another thread.
            tl.debug_barrier()
            tl.store(p_value + s_index, (s_tau * 0 + 1.0).to(p_value.dtype.element_ty))


@triton.jit(do_not_specialize=["s_tau_every", "s_gap_every", "s_first"])
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
    s_first,
    MODE: tl.constexpr,
    TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr,
    EXPECTED_GAP: tl.constexpr,
    AT_INDEX: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`IN_PLACE` says that the gradient takes the place of the logits."""
    s_row = tl.program_id(0).to(tl.int64)
    p_logits += s_row * s_stride
    p_grad += s_row * s_grad_stride
    p_out += s_row * s_categories
    s_index = tl.load(p_index + s_row).to(tl.int32)
    row = row_of_sample(
        s_row, s_first, s_categories, s_index, p_stats, p_seed, (p_tau, s_tau, s_tau_every), TAU_PER_ROW
    )
    if s_index >= s_categories:
        fill(p_out, tl.where(s_index > s_categories, float("nan"), 0.0), s_categories, BLOCK)
    else:
        s_own_gap = row_gap((p_gap, s_gap, s_gap_every), p_logits, row, MODE, EXPECTED_GAP, GAP_PER_ROW)
        b_sum = tl.zeros([BLOCK], tl.float32)
        b_dot = b_sum
        b_half_dot = b_sum
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits = chunk(p_logits, s_start, s_categories, -float("inf"), BLOCK, "evict_last")
            b_shifted = b_logits - row.shift
            b_grad = gradient_chunk(p_grad, b_logits, s_start, row, AT_INDEX, BLOCK, "evict_last")
            b_weight = weights(b_shifted, b_columns, row, s_own_gap, MODE, FAST)
            b_sum += b_weight
            b_dot += b_weight * b_grad
            if MODE >= TWO_POINTS:
                b_half_dot += halves(b_shifted, row, FAST) * b_grad
        s_sum, s_dot, s_half_dot = tl.sum(b_sum, 0), tl.sum(b_dot, 0), tl.sum(b_half_dot, 0)
        s_centres = centres(row, s_sum, s_dot, s_half_dot, p_grad, MODE, AT_INDEX)
        s_last = (s_categories - 1) // BLOCK * BLOCK
        for s_done in range(0, s_categories, BLOCK):
            s_start = s_last - s_done
            b_columns, b_logits = chunk(p_logits, s_start, s_categories, -float("inf"), BLOCK, "evict_first")
            b_shifted = b_logits - row.shift
            b_grad = gradient_chunk(p_grad, b_logits, s_start, row, AT_INDEX, BLOCK, "evict_first")
            b_weight = weights(b_shifted, b_columns, row, s_own_gap, MODE, FAST)
            b_out = gradient(b_weight, b_shifted, b_grad, b_columns, row, s_centres, MODE, FAST)
            if IN_PLACE:
                # Nothing of this chunk is written before every thread has read its part.
                tl.debug_barrier()
            write(p_out, b_columns, b_out, s_categories)


@triton.jit
def publish(p_words, s_place, s_sum, s_dot):
    """Publish two sums of a segment in one word, so that no flag is needed to say that they are there.

    A word is 0 before. The first sum is never negative, so its sign bit marks the word: it is negative after.
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
def _plus(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _sums(b_a, b_b, b_c, FAST: tl.constexpr):
    """Three sums; threads exchange them at once. The interpreter would take long for that."""
    if FAST:
        return tl.reduce((b_a, b_b, b_c), 0, _plus)
    else:
        return tl.sum(b_a, 0), tl.sum(b_b, 0), tl.sum(b_c, 0)


@triton.jit
def _collect(p_words, WORDS: tl.constexpr, SEGMENTS: tl.constexpr, SLOTS: tl.constexpr, FAST: tl.constexpr):
    """The sums of the row, added in the same order whichever segment came first.

    Each segment has published `WORDS` words, two if there is a third sum; one loop waits for all. `SLOTS` is
    the number of segments, rounded up to a power of two.
    """
    b_slots = tl.arange(0, WORDS * SLOTS)
    b_segments, b_is_first = b_slots % SLOTS, b_slots < SLOTS
    b_inside = b_segments < SEGMENTS
    p_slots = p_words + b_slots // SLOTS * SEGMENTS + b_segments
    b_words = tl.zeros([WORDS * SLOTS], tl.int64)
    while tl.max(tl.where(b_inside, b_words, -1), 0) >= 0:
        # An atomic operation that changes nothing reads memory and not a cache.
        b_words = tl.atomic_or(p_slots, 0, mask=b_inside, sem="relaxed")
    b_sums, b_dots = unpack(b_words, b_inside)
    if WORDS == 1:
        s_dot = tl.sum(b_dots, 0)
        return tl.sum(b_sums, 0), s_dot, s_dot
    else:
        b_sums, b_last = tl.where(b_is_first, b_sums, 0.0), tl.where(b_is_first, 0.0, b_dots)
        return _sums(b_sums, tl.where(b_is_first, b_dots, 0.0), b_last, FAST)


@triton.jit
def again(b_x, FAST: tl.constexpr):
    """Values in float32, converted once more: a half takes up half of the registers while a program waits.

    The compiler must not see that the result is known, or else it keeps the result.
    """
    if FAST and b_x.dtype.primitive_bitwidth == 16:
        b_x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2
        )
    return b_x.to(tl.float32)


@triton.jit
def _weigh(b_logits, b_grad, b_columns, row, s_own_gap, MODE: tl.constexpr, FAST: tl.constexpr):
    """Relative logits, their weights, and the sums of weights, of weights and of halves times gradient."""
    b_shifted, b_grad = b_logits.to(tl.float32) - row.shift, b_grad.to(tl.float32)
    b_weight = weights(b_shifted, b_columns, row, s_own_gap, MODE, FAST)
    if MODE >= TWO_POINTS:
        sums = _sums(b_weight, b_weight * b_grad, halves(b_shifted, row, FAST) * b_grad, FAST)
    else:
        s_dot = tl.sum(b_weight * b_grad, 0)
        sums = (tl.sum(b_weight, 0), s_dot, s_dot)
    return b_shifted, b_weight, sums[0], sums[1], sums[2]


@triton.jit
def _finish(
    p_words, p_grad, p_out, b_logits, b_grad, b_columns, weighted, row, s_segment,
    MODE: tl.constexpr, AT_INDEX: tl.constexpr, FAST: tl.constexpr,
    SEGMENTS: tl.constexpr, SLOTS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Exchange the sums with the row's other segments, and write the gradient."""
    b_shifted, b_weight, s_sum, s_dot, s_half_dot = weighted
    if SEGMENTS > 1:
        publish(p_words, s_segment, s_sum, s_dot)
        if MODE >= TWO_POINTS:
            publish(p_words + SEGMENTS, s_segment, s_sum, s_half_dot)
        if WAITS:
            WORDS: tl.constexpr = 2 if MODE >= TWO_POINTS else 1
            s_sum, s_dot, s_half_dot = _collect(p_words, WORDS, SEGMENTS, SLOTS, FAST)
    if WAITS:
        s_centres = centres(row, s_sum, s_dot, s_half_dot, p_grad, MODE, AT_INDEX)
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
    have published, and their sums depend on all that they read of the logits.
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
        weighted = _weigh(b_logits, b_grad, b_columns, row, s_own_gap, MODE, FAST)
        s_dot = weighted[3]
        # A sum is the same for all threads of a program, which get it from shared memory.
        if (s_dot != s_dot) & (not AT_INDEX):
            # The gradient of a category that does not exist counts for nothing. If it is not finite, its
            # product with the weight 0 is NaN, and so is the sum. Only then is each element read again and
            # checked; each branch finishes by itself, so that the other one needs no registers for this.
            b_logits = tl.load(p_logits + b_columns, mask=b_inside, other=-float("inf"))
            if not AT_INDEX:
                b_grad = drop_absent(tl.load(p_grad + b_columns, mask=b_inside, other=0.0), b_logits)
            weighted = _weigh(b_logits, b_grad, b_columns, row, s_own_gap, MODE, FAST)
            _finish(
                p_words, p_grad, p_out, b_logits, b_grad, b_columns, weighted, row, s_segment,
                MODE, AT_INDEX, FAST, SEGMENTS, SLOTS, WAITS,
            )  # fmt: skip
        else:
            _finish(
                p_words, p_grad, p_out, b_logits, b_grad, b_columns, weighted, row, s_segment,
                MODE, AT_INDEX, FAST, SEGMENTS, SLOTS, WAITS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["s_tau_forward_every"])
def log_prob_backward_kernel(
    p_logits,
    p_index,
    p_law,
    p_grad,
    p_tau_forward,
    s_categories,
    s_blocks,
    s_tau_forward_every,
    s_tau_forward,
    TAU_FORWARD_PER_ROW: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Logits of a law at a temperature become (e_i - p) u / tau for a gradient u of each log-probability.

    `streamed_forward_kernel` wrote `p_law`. Each of `s_blocks` programs has a part of a row.
    """
    s_row = (tl.program_id(0) // s_blocks).to(tl.int64)
    s_start = (tl.program_id(0) % s_blocks) * BLOCK
    p_logits += s_row * s_categories
    s_index = tl.load(p_index + s_row).to(tl.int32)
    s_log_sum = tl.load(p_law + 2 * s_row + 1)
    s_tau = level((p_tau_forward, s_tau_forward, s_tau_forward_every), s_row, s_row >= 0, TAU_FORWARD_PER_ROW)
    b_columns, b_logits = chunk(p_logits, s_start, s_categories, -float("inf"), BLOCK, "evict_first")
    b_p = exp2((b_logits / s_tau - s_log_sum) * LOG2_E, FAST)
    b_out = ((b_columns == s_index).to(tl.float32) - b_p) * (tl.load(p_grad + s_row).to(tl.float32) / s_tau)
    b_out = tl.where(s_index == s_categories, 0.0, b_out)
    b_out = tl.where(s_index > s_categories, float("nan"), b_out)
    # Nothing is written before every thread has read its part.
    tl.debug_barrier()
    write(p_logits, b_columns, b_out, s_categories)
