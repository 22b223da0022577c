"""Gumbel-Rao and ReinMax-Rao given the drawn category: sizes, conditional noise, kernels for both lengths.

Given that category i is drawn, and with exponential noise E, the surrogate's weight of category j is
w_j = (E_j / p_j + E_i)^(-1/tau), and E_i^(-1/tau) for i itself: `simplex.conditional_gumbel` in another form.
The point of draw s is q_s = w_s / sum w_s, and m_s is the mean of the incoming gradient g under it. The soft
sample is the mean of the points, and the gradient of the logits is sum_s q_s (g - m_s) / (samples tau). There
g is relative to its entry at the selected category, so that nothing is lost where all mass is on that one.

ReinMax-Rao has the draws of Gumbel-Rao at (p + D)/2 with the one-hot D, and the gradient
2 sum_s q_s (g - m_s) / (samples tau) - p (g - <p, g>) / 2. The weights of a draw, relative to the selected
category's, depend on 1/p of the others alone, and (p + D)/2 doubles those: all else is as for Gumbel-Rao.

A row that fits into a block is read once. A program reads a longer row in chunks: once for the sums of every
batch of draws, which its threads add up apart, and once more for the result of all draws, which it writes in
the dtype of the row. So noise is drawn twice, and of each draw three numbers are kept.

No two elements share noise, which is drawn again wherever it is needed. These kernels spend their time on
it, so each instruction counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import LOG2_E, drop_absent, exp2, load_key, log2, reciprocal, safe_reciprocal
from gapped.kernels.runner import partition, power
from gapped.kernels.sampling.long import chunk, fill, gradient_chunk, row_of_sample, write
from gapped.kernels.sampling.surrogates import level

# `gapped bench --work rao --constant` tries other values of these constants on a GPU.
# Rows in one block: elements and warps of a program, and into how many pieces a row of float32 is cut. A
# thread holds neighbours of every piece, so with more pieces fewer threads share a row and exchange its sums.
BLOCK, PIECES = (256, 1), 2
# Registers of a thread, for these and longer rows: four of its kind then share a scheduler.
REGISTERS = 128
# `SPREAD_ELEMENTS` fill the GPU. With fewer, a block of `SPREAD_BLOCK` shares the draws of a row.
SPREAD_ELEMENTS, SPREAD_BLOCK = 1 << 17, 512
# Longer rows: warps of a program, elements of a chunk for each thread, and the most draws for one reading of
# the row.
WARPS, VECTOR, DRAWS = 4, 4, 12


def shares_of(rows: int, categories: int) -> int:
    """Over how many copies of a row its conditional draws are spread.

    Where rows are few, a program with one row would take long for all draws while most of the GPU is idle.
    """
    columns = power(categories)
    free = min(SPREAD_ELEMENTS // max(rows * columns, 1), SPREAD_BLOCK // columns, 8)
    return 1 << max(free.bit_length() - 1, 0)


def block_of(rows: int, categories: int, size: int) -> tuple[int, dict[str, Any]]:
    """How many programs there are for rows that fit into a block, and the sizes of the launch.

    `size` is the number of bytes of an element.
    """
    programs, sizes = partition(rows, categories, BLOCK)
    columns = sizes.pop("BLOCK_COLUMNS")
    # A thread reads 16 bytes at a time, whatever they hold.
    pieces = min(max(PIECES * size // 4, 1), columns)
    flags = {**sizes, "PIECES": pieces, "WIDTH": columns // pieces}
    shares = shares_of(rows, categories)
    if shares > 1:
        # One warp: sums over a row stay within it, and the shares hide each other's waiting.
        return rows, flags | {"BLOCK_ROWS": shares, "SPREAD": True, "num_warps": 1}
    return programs, flags | {"SPREAD": False, "maxnreg": REGISTERS}


def power_of(tau: Any) -> int:
    """1/tau where that is 1 or 2: then weights are powers of a reciprocal. Else 0, for a tensor as well."""
    return {1.0: 1, 0.5: 2}.get(tau, 0) if isinstance(tau, int | float) else 0


def batches_of(samples: int) -> tuple[int, dict[str, Any]]:
    """How many times a long row is read for the sums of its draws, and the sizes of the launch."""
    batches = -(-samples // DRAWS)
    # Bits come for four draws at a time.
    batch = samples if batches == 1 else -(-samples // (4 * batches)) * 4
    block = 32 * WARPS * VECTOR
    flags = {"BATCH": batch, "VECTOR": VECTOR, "BLOCK": block}
    return batches, flags | {"num_warps": WARPS, "maxnreg": REGISTERS}


# Rounds of Philox. Seven are the fewest that pass all of BigCrush; the usual ten are these and a margin
# (Salmon, Moraes, Dror, Shaw 2011).
ROUNDS = tl.constexpr(7)
_WIDE = "{{ .reg .b64 t; mul.wide.u32 t, $2, {}; mov.b64 {{$1, $0}}, t; }}"
_A, _B = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
_TIMES_A, _TIMES_B = tl.constexpr(_WIDE.format(0xD2511F53)), tl.constexpr(_WIDE.format(0xCD9E8D57))
# `log2_uniform` as instructions. The last one is executed for the smallest noise only.
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

    Row and draws meet the column in the third round only: the rounds before are computed once for a row, or
    once for all draws. The last word of the counter is odd; other noise has an even one.
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

    Beyond 2^90 it is so large that E_i does not count, and logarithms add up: the rest, over tau, is
    subtracted. With a `POWER` such weights are below 2^-60 and taken for 0 (squaring underflows by itself).
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


class Given(NamedTuple):
    """The values that all draws share. A block's axes are pieces of a row, rows, and elements of a piece."""

    seed: tl.tensor
    rows: tl.tensor
    columns: tl.tensor
    index: tl.tensor
    """The selected category of each row."""
    odds: tl.tensor
    drop: tl.tensor
    slope: tl.tensor
    grad: tl.tensor


@triton.jit
def _total(b_x):
    """Sums of the rows, first within each thread."""
    return tl.sum(tl.sum(b_x, 0), 1)[None, :, None]


@triton.jit
def _add_draws(
    b_sum, given, b_block, b_left, DRAWS: tl.constexpr, MASKED: tl.constexpr, SOFT: tl.constexpr,
    POWER: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add q (g - m), or q alone, of up to four draws; with `MASKED` only of those that are left."""
    b_bits = rao_bits(given.seed, given.rows, given.columns, b_block, FAST)
    b_own_bits = rao_bits(given.seed, given.rows, given.index, b_block, FAST)
    for s_draw in tl.static_range(DRAWS):
        b_winner = rao_winner(b_own_bits[s_draw], POWER, FAST)
        b_weight = rao_weight(b_bits[s_draw], b_winner, given.odds, given.drop, given.slope, POWER, FAST)
        b_norm = reciprocal(_total(b_weight), FAST)
        b_share = tl.where(b_left > s_draw, b_norm, 0.0) if MASKED else b_norm
        if SOFT:
            b_sum += b_weight * b_share
        else:
            b_mean = _total(b_weight * given.grad) * b_norm
            b_sum += b_weight * (given.grad * b_share - b_mean * b_share)
    return b_sum


@triton.jit(do_not_specialize=["s_rows", "s_tau_every", "s_samples"])
def rao_kernel(
    p_logits,
    p_index,
    p_grad,
    p_seed,
    p_tau,
    p_out,
    s_rows,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau_every,
    s_tau,
    s_samples,
    TAU_PER_ROW: tl.constexpr,
    POWER: tl.constexpr,
    LEFT: tl.constexpr,
    SOFT: tl.constexpr,
    AT_INDEX: tl.constexpr,
    FAST: tl.constexpr,
    REINMAX: tl.constexpr,
    SPREAD: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`LEFT` is the remainder of the samples by four. A `SOFT` sample has no use for `p_grad`.

    `REINMAX` says that it is ReinMax-Rao, which has no soft sample.
    With `SPREAD` a program has copies of one row instead of rows, each with its share of the draws.
    """
    b_copy = tl.arange(0, BLOCK_ROWS)
    if SPREAD:
        b_row = tl.program_id(0).to(tl.int64) + b_copy * 0
    else:
        b_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + b_copy
    b_exists = b_row < s_rows
    b_index = tl.load(p_index + b_row, mask=b_exists, other=s_categories).to(tl.int32)[None, :, None]
    b_tau = level((p_tau, s_tau, s_tau_every), b_row, b_exists, TAU_PER_ROW)[None, :, None]
    b_row, b_exists = b_row[None, :, None], b_exists[None, :, None]
    b_columns = (tl.arange(0, PIECES) * WIDTH)[:, None, None] + tl.arange(0, WIDTH)[None, None, :]
    b_inside = b_exists & (b_columns < s_categories)
    b_drawn = b_exists & (b_index < s_categories)
    b_selected = b_columns == b_index
    b_logits = tl.load(p_logits + b_row * s_stride + b_columns, mask=b_inside, other=-float("inf"))
    # Rows without a sample are computed with other numbers, and their result replaced.
    b_logits = tl.where(b_drawn, b_logits.to(tl.float32), 0.0)
    b_grad = b_logits
    if AT_INDEX:
        b_one = tl.load(p_grad + b_row, mask=b_drawn, other=0.0).to(tl.float32)
        b_grad = tl.where(b_selected, 0.0, -b_one)
    elif not SOFT:
        p_row = p_grad + b_row * s_grad_stride
        b_one = tl.load(p_row + b_index, mask=b_drawn, other=0.0).to(tl.float32)
        b_grad = tl.load(p_row + b_columns, mask=b_inside & b_drawn, other=0.0).to(tl.float32) - b_one
    b_grad = drop_absent(b_grad, b_logits)
    b_shifted = (b_logits - tl.max(tl.max(b_logits, 0), 1)[None, :, None]) * LOG2_E
    b_log2_odds = log2(_total(exp2(b_shifted, FAST)), FAST) - b_shifted
    b_slope = -1.0 / b_tau
    b_halved = b_log2_odds + 1.0 if REINMAX else b_log2_odds
    b_odds, b_drop = rao_odds(b_halved, b_selected, b_slope, POWER, FAST)
    given = Given(load_key(p_seed), b_row, b_columns, b_index, b_odds, b_drop, b_slope, b_grad)
    b_sum = tl.zeros_like(b_odds)
    b_block = b_index * 0
    if SPREAD:
        b_block += b_copy[None, :, None]
        for _ in range(0, (s_samples + 4 * BLOCK_ROWS - 1) // (4 * BLOCK_ROWS)):
            b_left = s_samples - 4 * b_block
            b_sum = _add_draws(b_sum, given, b_block, b_left, 4, True, SOFT, POWER, FAST)
            b_block += BLOCK_ROWS
    else:
        for _ in range(0, s_samples // 4):
            b_sum = _add_draws(b_sum, given, b_block, 4, 4, False, SOFT, POWER, FAST)
            b_block += 1
        if LEFT > 0:
            b_sum = _add_draws(b_sum, given, b_block, LEFT, LEFT, False, SOFT, POWER, FAST)
    b_unit = 1.0 / s_samples if SOFT else b_slope / -s_samples
    if REINMAX:
        b_unit *= 2.0
    b_unit = tl.where(b_index < s_categories, b_unit, tl.where(b_index > s_categories, float("nan"), 0.0))
    b_out = b_sum * b_unit
    if SPREAD:
        b_out = tl.broadcast_to(tl.sum(b_out, 1)[:, None, :], b_out.shape)
        b_inside &= (b_copy == 0)[None, :, None]
    if REINMAX:
        # Once the copies are added up. In rows without a sample g is 0, and so is this.
        b_p = exp2(-b_log2_odds, FAST)
        b_out -= 0.5 * b_p * (b_grad - _total(b_p * b_grad))
    p_to = p_out + b_row * s_categories + b_columns
    tl.store(p_to, b_out.to(p_out.dtype.element_ty), mask=b_inside)


@triton.jit
def _bits(row, b_columns, s_batch, BATCH: tl.constexpr, FAST: tl.constexpr):
    """Bits of each draw of a batch."""
    BLOCKS: tl.constexpr = (BATCH + 3) // 4
    b_block = b_columns * 0 + s_batch * BLOCKS
    b_bits = ()
    for s_block in tl.static_range(BLOCKS):
        b_bits = b_bits + rao_bits(row.seed, row.number, b_columns, b_block + s_block, FAST)
    return b_bits


@triton.jit
def _chunk_odds(p_logits, s_start, row, POWER: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """Columns, logits and `rao_odds` of a chunk."""
    b_columns, b_logits = chunk(p_logits, s_start, row.categories, -float("inf"), BLOCK)
    b_log2_odds = tl.log2(row.second) - (b_logits - row.shift) * LOG2_E
    b_odds, b_drop = rao_odds(b_log2_odds, b_columns == row.index, -1.0 / row.tau, POWER, FAST)
    return b_columns, b_logits, b_odds, b_drop


@triton.jit
def _sum_neighbours(b_x, VECTOR: tl.constexpr):
    """Sums of neighbours, which one thread has."""
    return tl.sum(tl.reshape(b_x, [b_x.shape[0] // VECTOR, VECTOR]), 1)


@triton.jit
def _sums(
    p_logits, p_grad, s_one, s_winners, row, s_batch, SOFT: tl.constexpr, AT_INDEX: tl.constexpr,
    POWER: tl.constexpr, BATCH: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sums of the weights in each draw of a batch, and of weights times gradient."""
    b_zero = tl.zeros([BLOCK // VECTOR], tl.float32)
    b_sums = (b_zero,) * BATCH
    b_dots = (b_zero,) * BATCH
    for s_start in range(0, row.categories, BLOCK):
        b_columns, b_logits, b_odds, b_drop = _chunk_odds(p_logits, s_start, row, POWER, BLOCK, FAST)
        b_bits = _bits(row, b_columns, s_batch, BATCH, FAST)
        b_grad = b_odds
        if not SOFT:
            b_grad = gradient_chunk(p_grad, b_logits, s_start, row, AT_INDEX, BLOCK) - s_one
        b_new_sums = ()
        b_new_dots = ()
        for i in tl.static_range(BATCH):
            b_weight = rao_weight(b_bits[i], s_winners[i], b_odds, b_drop, -1.0 / row.tau, POWER, FAST)
            b_new_sums = b_new_sums + (b_sums[i] + _sum_neighbours(b_weight, VECTOR),)
            b_dot = b_zero if SOFT else _sum_neighbours(b_weight * b_grad, VECTOR)
            b_new_dots = b_new_dots + (b_dots[i] + b_dot,)
        b_sums = b_new_sums
        b_dots = b_new_dots
    return b_sums, b_dots


@triton.jit(do_not_specialize=["s_tau_every", "s_samples", "s_first"])
def streamed_rao_kernel(
    p_logits,
    p_index,
    p_stats,
    p_grad,
    p_seed,
    p_tau,
    p_draws,
    p_out,
    s_categories,
    s_stride,
    s_grad_stride,
    s_tau_every,
    s_tau,
    s_samples,
    s_first,
    TAU_PER_ROW: tl.constexpr,
    POWER: tl.constexpr,
    SOFT: tl.constexpr,
    AT_INDEX: tl.constexpr,
    IN_PLACE: tl.constexpr,
    FAST: tl.constexpr,
    BATCH: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`p_draws` has room for three numbers of every draw: the winner's noise, its share of Z, m times that.

    A `SOFT` sample has no use for `p_grad`. `IN_PLACE` says that the result takes the place of the logits.
    """
    s_row = tl.program_id(0).to(tl.int64)
    s_batches = (s_samples + BATCH - 1) // BATCH
    p_logits += s_row * s_stride
    p_grad += s_row * s_grad_stride
    p_draws += s_row * (3 * BATCH * s_batches)
    p_out += s_row * s_categories
    s_index = tl.load(p_index + s_row).to(tl.int32)
    row = row_of_sample(
        s_row, s_first, s_categories, s_index, p_stats, p_seed, (p_tau, s_tau, s_tau_every), TAU_PER_ROW
    )
    if s_index >= s_categories:
        fill(p_out, tl.where(s_index > s_categories, float("nan"), 0.0), s_categories, BLOCK)
    else:
        s_unit = 1.0 / s_samples
        s_one = s_unit
        if not SOFT:
            s_unit = s_unit / row.tau
            s_one = tl.load(p_grad + (0 if AT_INDEX else s_index)).to(tl.float32)
        for s_batch in range(s_batches):
            s_bits = _bits(row, s_index, s_batch, BATCH, FAST)
            s_winners = [rao_winner(s_word, POWER, FAST) for s_word in s_bits]
            b_sums, b_dots = _sums(
                p_logits, p_grad, s_one, s_winners, row, s_batch, SOFT, AT_INDEX, POWER, BATCH, VECTOR, BLOCK,
                FAST,
            )  # fmt: skip
            for i in tl.static_range(BATCH):
                s_draw = s_batch * BATCH + i
                s_norm = safe_reciprocal(tl.sum(b_sums[i], 0))
                s_share = tl.where(s_draw < s_samples, s_norm * s_unit, 0.0)
                tl.store(p_draws + 3 * s_draw, s_winners[i])
                tl.store(p_draws + 3 * s_draw + 1, s_share)
                if not SOFT:
                    tl.store(p_draws + 3 * s_draw + 2, tl.sum(b_dots[i], 0) * s_norm * s_share)
        # One thread has written these numbers, all are going to read them.
        tl.debug_barrier()
        for s_start in range(0, s_categories, BLOCK):
            b_columns, b_logits, b_odds, b_drop = _chunk_odds(p_logits, s_start, row, POWER, BLOCK, FAST)
            b_grad = b_odds
            if not SOFT:
                b_grad = gradient_chunk(p_grad, b_logits, s_start, row, AT_INDEX, BLOCK) - s_one
            b_sum = tl.zeros([BLOCK], tl.float32)
            for s_batch in range(s_batches):
                b_bits = _bits(row, b_columns, s_batch, BATCH, FAST)
                p_draw = p_draws + 3 * BATCH * s_batch
                for i in tl.static_range(BATCH):
                    s_winner = tl.load(p_draw + 3 * i)
                    b_weight = rao_weight(b_bits[i], s_winner, b_odds, b_drop, -1.0 / row.tau, POWER, FAST)
                    b_share = tl.load(p_draw + 3 * i + 1)
                    if not SOFT:
                        b_share = b_grad * b_share - tl.load(p_draw + 3 * i + 2)
                    b_sum += b_weight * b_share
            if IN_PLACE:
                # Nothing of this chunk is written before every thread has read its part.
                tl.debug_barrier()
            write(p_out, b_columns, b_sum, s_categories)
