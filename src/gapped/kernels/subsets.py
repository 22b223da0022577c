"""Subsets of `k` of `n` elements: choices of blocks of rows, and sums over subsets of one row each.

The reference is `gapped.subsets.conditional_bernoulli`, with the same functions and arguments, for 0 < k < n.

As in `gapped.subsets`, a subset is the result of independent choices, given that `k` are made, with
scores shifted so that about `k` are made on average. Each element then has one *rare* event, of probability
P <= 1/2: to be chosen, or not to be chosen. It is held as one number, -P where the rare event is not to be
chosen, and 0 for an element that does not exist.

- A sample makes all choices at once, and again until there are `k` of them. That is about the most probable
  number, so it takes some 2.5 times as many attempts as the standard deviation of that number.
- A sum over all subsets of `k` elements is a coefficient of the product of (1 - P + P w) over the elements,
  with 1/w for w where the rare event is not to be chosen. The product is evaluated at 2 F points w of the
  unit circle, and the coefficient is their Fourier sum. It has the coefficients of `k` plus or minus 2 F, 4 F
  and so on in it, and F is such that no float32 notices (`frequencies`). One of w and its
  conjugate suffices; neither 1 nor -1 is among them, so no factor is 0, and leaving out an element is a
  division.
"""

from __future__ import annotations

from functools import cache
from math import log1p
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapped.kernels.primitives import INF, load_rows, reciprocal, row_block, store_rows, words
from gapped.kernels.runner import partition, power, run
from gapped.simplex import draw_key

# Of sums over subsets: the warps of a program, and the elements times points of the unit circle that it
# computes at once. The default.
WARPS = 4
TILE = 1024
# Aliases of the size of a subset have a probability of at most exp(-25), 1e-11.
_ALIAS = 25.0
_PI = tl.constexpr(3.141592653589793)
# The last word of a counter separates the noise of subsets from other noise, as in `primitives`; odd ones
# belong to Gumbel-Rao.
_SUBSETS = tl.constexpr(4)
# The rare event of a certain choice: never drawn, without weight in a sum, but with a sign.
_NEVER = tl.constexpr(2.0**-100)
# Halvings of the interval of the shift, which is at most 64 + 1 + log n long.
_HALVINGS = tl.constexpr(14)
# The results of the sums.
NORMALISER = tl.constexpr(0)
MARGINALS = tl.constexpr(1)
COVARIANCES = tl.constexpr(2)


@triton.jit
def _count(b_condition):
    return tl.sum(b_condition.to(tl.int32), 1)


@triton.jit
def _kth_largest(b_scores, s_k):
    """The `s_k`-th largest score of each row, bit by bit."""
    b_bits = b_scores.to(tl.int32, bitcast=True)
    # Unsigned integers in the order of the numbers whose bits they are.
    b_keys = (b_bits ^ ((b_bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    b_key = tl.sum(b_bits * 0, 1).to(tl.uint32)
    b_bit = (b_key + 1) << 31
    for _ in range(32):
        b_next = b_key | b_bit
        b_bit = b_bit >> 1
        b_key = tl.where(_count(b_keys >= b_next[:, None]) >= s_k, b_next, b_key)
    b_bits = b_key.to(tl.int32, bitcast=True)
    return (b_bits ^ ((~b_bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _shift(b_relative, s_k, s_elements):
    """The shift of scores relative to the `s_k`-th largest, for about `s_k` choices on average."""
    # At the lower end the first k are chosen for certain; at the upper end less than one of the others is.
    b_low = tl.max(b_relative, 1) * 0.0 - 64.0
    b_high = b_low * 0.0 + 1.0 + tl.log(s_elements.to(tl.float32))
    for _ in range(_HALVINGS):
        b_middle = (b_low + b_high) * 0.5
        b_distance = tl.minimum(b_middle[:, None] - b_relative, 80.0)
        b_is_low = tl.sum(1.0 / (1.0 + tl.exp(b_distance)), 1) > s_k
        b_low = tl.where(b_is_low, b_middle, b_low)
        b_high = tl.where(b_is_low, b_high, b_middle)
    return (b_low + b_high) * 0.5


@triton.jit
def _rare_choices(b_scores, s_k, s_elements):
    """The rare events, the score of each row that has even odds, and which rows have something to choose."""
    b_exists = b_scores != -INF
    b_open = (_count(b_scores != b_scores) == 0) & (_count(b_exists) > s_k)
    # In the place of a row in which nothing is left to choose, one of equal scores.
    b_scores = tl.where(b_open[:, None], b_scores, 0.0)
    b_pivot = _kth_largest(b_scores, s_k)
    # Relative to the k-th: a shift by itself would have no digits left for scores of a billion.
    b_relative = tl.where(b_exists, b_scores - b_pivot[:, None], -INF)
    b_shift = tl.where(b_open, _shift(tl.where(b_open[:, None], b_relative, 0.0), s_k, s_elements), 0.0)
    b_odds = tl.exp(-tl.abs(b_relative - b_shift[:, None]))
    b_rare = tl.maximum(b_odds / (1.0 + b_odds), _NEVER)
    b_rare = tl.where(b_relative > b_shift[:, None], -b_rare, b_rare)
    b_rare = tl.where(b_exists, tl.where(b_open[:, None], b_rare, -_NEVER), 0.0)
    return b_rare, b_pivot + b_shift, b_open


@triton.jit
def subset_bits(s_seed, b_rows, s_attempt, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """A word of noise for each element."""
    b_quarter = b_rows[:, None] * (BLOCK_COLUMNS // 4) + tl.arange(0, BLOCK_COLUMNS // 4)[None, :]
    b_low, b_high = words(b_quarter)
    b_zero = b_low * 0
    b_a, b_b, b_c, b_d = tl.philox(s_seed, b_low, b_high, b_zero + s_attempt, b_zero + _SUBSETS)
    return tl.reshape(tl.join(tl.join(b_a, b_b), tl.join(b_c, b_d)), [BLOCK_ROWS, BLOCK_COLUMNS])


@triton.jit(do_not_specialize=["s_rows", "s_k"])
def subset_draw_kernel(
    p_scores, p_seed, p_chosen, s_rows, s_elements, s_k,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draw a subset of each row: zeros and ones."""
    block = row_block(s_rows, s_elements, BLOCK_ROWS, BLOCK_COLUMNS)
    b_rare, _, b_open = _rare_choices(load_rows(p_scores, block, s_elements, -INF), s_k, s_elements)
    b_usual = b_rare < 0
    # How many of 2^32 equally probable words are the rare event.
    b_threshold = (tl.abs(b_rare) * 4294967296.0).to(tl.uint32)
    s_seed = tl.load(p_seed)
    b_chosen = b_usual
    s_attempt = s_k * 0
    s_left = tl.sum(b_open.to(tl.int32), 0)
    while s_left > 0:
        b_happens = subset_bits(s_seed, block.rows, s_attempt, BLOCK_ROWS, BLOCK_COLUMNS) < b_threshold
        # Rows that have their subset keep it.
        b_chosen = tl.where(b_open[:, None], b_usual ^ b_happens, b_chosen)
        b_open = b_open & (_count(b_chosen) != s_k)
        s_left = tl.sum(b_open.to(tl.int32), 0)
        s_attempt += 1
    store_rows(p_chosen, block, s_elements, b_chosen)


@triton.jit(do_not_specialize=["s_rows", "s_k"])
def subset_rare_kernel(
    p_scores, p_rare, p_base, s_rows, s_elements, s_k,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the rare events of each row, and the logarithm of the normaliser of the choices.

    It is the law's normaliser divided by the probability of `k` choices.
    """
    block = row_block(s_rows, s_elements, BLOCK_ROWS, BLOCK_COLUMNS)
    b_scores = load_rows(p_scores, block, s_elements, -INF)
    b_rare, b_even, b_open = _rare_choices(b_scores, s_k, s_elements)
    b_usual = b_rare < 0
    # Each usual choice has its score; those that are missing from k, or too many, count as even ones.
    b_base = tl.sum(tl.where(b_usual, b_scores, 0.0).to(tl.float64), 1)
    b_base += tl.where(b_open, (s_k - _count(b_usual)) * b_even, 0.0).to(tl.float64)
    b_base -= tl.sum(tl.log(1.0 - tl.abs(b_rare)).to(tl.float64), 1)
    tl.store(p_base + block.rows, b_base, mask=block.row_inside)
    b_nan = _count(b_scores != b_scores) > 0
    store_rows(p_rare, block, s_elements, tl.where(b_nan[:, None], float("nan"), b_rare))


@triton.jit
def _product(b_re, b_im, b_other_re, b_other_im):
    return b_re * b_other_re - b_im * b_other_im, b_re * b_other_im + b_im * b_other_re


@triton.jit
def _row(p_values, s_elements, BLOCK: tl.constexpr):
    b_columns = tl.arange(0, BLOCK)
    p_row = p_values + tl.program_id(0).to(tl.int64) * s_elements
    return tl.load(p_row + b_columns, mask=b_columns < s_elements, other=0.0).to(tl.float32)


@triton.jit
def _mean_grad(b_rare, b_grad):
    """The mean gradient by the variances of the choices.

    A constant added to it changes nothing, as the size of a subset is fixed: digits are kept by removing it.
    """
    b_variance = tl.abs(b_rare) * (1.0 - tl.abs(b_rare))
    b_grad = tl.where(b_rare == 0, 0.0, b_grad)
    return tl.sum(b_variance * b_grad, 0) / tl.maximum(tl.sum(b_variance, 0), 1e-30)


@triton.jit
def _part(p_rare, p_grad, s_row, s_first, s_elements, s_mean, PART: tl.constexpr, WHAT: tl.constexpr):
    """Some elements of a row: P, the sign of its rare event, and the gradient of that event."""
    b_columns = s_first + tl.arange(0, PART)
    b_inside = b_columns < s_elements
    b_rare = tl.load(p_rare + s_row + b_columns, mask=b_inside, other=0.0)
    b_sign = tl.where(b_rare < 0, -1.0, 1.0)
    b_grad = b_rare * 0.0
    if WHAT == COVARIANCES:
        b_grad = tl.load(p_grad + s_row + b_columns, mask=b_inside, other=0.0).to(tl.float32)
        b_grad = tl.where(b_rare == 0, 0.0, b_sign * (b_grad - s_mean))
    return tl.abs(b_rare)[:, None], b_sign[:, None], b_grad[:, None]


@triton.jit
def _inverse_square(b_p, b_cosine_plus, FAST: tl.constexpr):
    """The inverse square of the absolute value of a factor 1 - P + P w, of positive terms only."""
    b_rest = 1.0 - 2.0 * b_p
    return reciprocal(b_rest * b_rest + (2.0 * b_p * (1.0 - b_p)) * b_cosine_plus, FAST)


@triton.jit(do_not_specialize=["s_k"])
def subset_sums_kernel(
    p_rare, p_grad, p_out, s_elements, s_k,
    WHAT: tl.constexpr, FREQUENCIES: tl.constexpr, PART: tl.constexpr, FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum that `WHAT` names.

    It is the logarithm of the probability of `k` choices, one number per row, or the probabilities that
    elements are chosen, or the covariances of the choices times the gradient.
    """
    s_row = tl.program_id(0).to(tl.int64) * s_elements
    b_rare = _row(p_rare, s_elements, BLOCK)
    s_exist, s_usual = tl.sum((b_rare != 0).to(tl.int32), 0), tl.sum((b_rare < 0).to(tl.int32), 0)
    s_mean = 0.0
    if WHAT == COVARIANCES:
        s_mean = _mean_grad(b_rare, _row(p_grad, s_elements, BLOCK))
    # The points w, by the halves of their angles: 1 - cos and 1 + cos have all digits.
    b_odd = 2 * tl.arange(0, FREQUENCIES) + 1
    b_half = b_odd.to(tl.float32) * (_PI / (4 * FREQUENCIES))
    b_sine, b_cosine = tl.sin(b_half), tl.cos(b_half)
    b_minus, b_plus = (-2.0 * b_sine * b_sine)[None, :], (2.0 * b_cosine * b_cosine)[None, :]
    b_cos, b_sin = b_cosine * b_cosine - b_sine * b_sine, 2.0 * b_sine * b_cosine
    # The product of all factors, and the sum over elements of gradients times P w / (1 - P + P w).
    b_re = tl.zeros([PART, FREQUENCIES], tl.float32) + 1.0
    b_im, b_sum_re, b_sum_im = b_re * 0.0, b_re * 0.0, b_re * 0.0
    for s_first in range(0, s_elements, PART):
        b_p, b_sign, b_grad = _part(p_rare, p_grad, s_row, s_first, s_elements, s_mean, PART, WHAT)
        b_re, b_im = _product(b_re, b_im, 1.0 + b_p * b_minus, (b_sign * b_p) * b_sin[None, :])
        if WHAT == COVARIANCES:
            b_inverse = _inverse_square(b_p, b_plus, FAST)
            b_both = b_grad * b_p * (1.0 - b_p)
            b_sum_re += b_inverse * (b_both * b_cos[None, :] + b_grad * b_p * b_p)
            b_sum_im += (b_sign * b_both) * (b_inverse * b_sin[None, :])
    b_re, b_im = tl.reduce((b_re, b_im), 0, _product)
    # Times the power of w that belongs to k; whole turns are left out while they are integers.
    s_excess = s_usual - tl.minimum(s_exist, s_k)
    b_angle = ((s_excess * b_odd) % (4 * FREQUENCIES)).to(tl.float32) * (_PI / (2 * FREQUENCIES))
    b_re, b_im = _product(b_re, b_im, tl.cos(b_angle), tl.sin(b_angle))
    s_total = tl.sum(b_re, 0)
    if WHAT == NORMALISER:
        tl.store(p_out + tl.program_id(0), tl.log(s_total / FREQUENCIES))
    else:
        b_re, b_im = b_re / s_total, b_im / s_total
        b_own_re, b_own_im = b_re, b_im
        if WHAT == COVARIANCES:
            b_sum_re, b_sum_im = tl.sum(b_sum_re, 0), tl.sum(b_sum_im, 0)
            s_expected = tl.sum(b_re * b_sum_re - b_im * b_sum_im, 0)
            b_own_re, b_own_im = _product(b_re, b_im, b_sum_re - s_expected, b_sum_im)
        b_a, b_b, b_c = (b_own_re * b_cos)[None, :], (b_own_im * b_sin)[None, :], b_own_re[None, :]
        b_d, b_e, b_f = (b_re * b_cos)[None, :], (b_im * b_sin)[None, :], b_re[None, :]
        for s_first in range(0, s_elements, PART):
            b_p, b_sign, b_grad = _part(p_rare, p_grad, s_row, s_first, s_elements, s_mean, PART, WHAT)
            b_inverse = _inverse_square(b_p, b_plus, FAST)
            b_both = b_p * (1.0 - b_p)
            b_term = b_both * b_a - (b_sign * b_both) * b_b + (b_p * b_p) * b_c
            if WHAT == COVARIANCES:
                b_own = b_grad * b_both
                b_term += b_inverse * (
                    (b_own * (1.0 - 2.0 * b_both)) * b_d
                    + (2.0 * b_own * b_both) * b_f
                    - (b_own * b_sign * (1.0 - 2.0 * b_p)) * b_e
                )
            b_out = tl.sum(b_inverse * b_term, 1)
            b_sign = tl.sum(b_sign, 1)
            if WHAT == COVARIANCES:
                b_out = tl.where(s_exist > s_k, b_sign * b_out, b_out * 0.0)
            else:
                b_out = tl.where(b_sign < 0, 1.0 - b_out, b_out)
            b_columns = s_first + tl.arange(0, PART)
            tl.store(p_out + s_row + b_columns, b_out, mask=b_columns < s_elements)


@cache
def frequencies(n: int, k: int) -> int:
    """How many pairs of points of the unit circle a sum over subsets takes: a power of two.

    With twice as many points, the coefficient of the size `k` contains the coefficients of sizes that are
    twice as far away, and further. Sums of independent choices of variance v exceed their mean by d with a
    probability of at most exp(-v h(d / v)), where h(u) = (1 + u) log(1 + u) - u (Bennett), and v is at most
    k (n - k) / n.
    """
    variance, count = k * (n - k) / n, 4
    while variance * _excess(2 * count / variance) < _ALIAS:
        count *= 2
    return count


def _excess(u: float) -> float:
    return (1 + u) * log1p(u) - u


def _rare(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The rare events of the elements, and the logarithm of the choices' normaliser, ``(*rows)``."""
    rare = torch.empty_like(scores, memory_format=torch.contiguous_format)
    base = torch.empty(scores.shape[:-1], dtype=torch.float64, device=scores.device)
    _choose(subset_rare_kernel, (scores.contiguous(), rare, base), k)
    return rare, base


def _choose(kernel: Any, pointers: tuple[Tensor, ...], k: int) -> None:
    """Launch a kernel that makes the choices of the rows of its first tensor, if there are any."""
    n = pointers[0].shape[-1]
    if rows := pointers[0].numel() // n:
        programs, block = partition(rows, n)
        # Noise comes four words at a time.
        block["BLOCK_COLUMNS"] = max(block["BLOCK_COLUMNS"], 4)
        run(kernel, programs, pointers, (rows, n, k), (), block)


def _sums(rare: Tensor, grad: Tensor, out: Tensor, k: int, what: Any) -> Tensor:
    """Fill `out` with a sum over all subsets."""
    n = rare.shape[-1]
    count = frequencies(n, k)
    part = min(max(TILE // count, 1), power(n))
    flags = {"WHAT": what.value, "FREQUENCIES": count, "PART": part, "FAST": rare.is_cuda}
    flags |= {"BLOCK": power(n), "num_warps": WARPS if n > 64 else 1}
    if rows := rare.numel() // n:
        run(subset_sums_kernel, rows, (rare, grad, out), (n, k), (), flags)
    return out


def draw(scores: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw a subset: a boolean tensor of the shape of `scores`."""
    chosen = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    _choose(subset_draw_kernel, (scores.contiguous(), draw_key(scores, generator), chosen), k)
    return chosen.view(torch.bool)


def marginals(scores: Tensor, k: int) -> Tensor:
    """The probability that each element is selected."""
    rare, _ = _rare(scores, k)
    return _sums(rare, rare, torch.empty_like(rare), k, MARGINALS)


def covariance_product(grad: Tensor, scores: Tensor, k: int) -> Tensor:
    """The covariances of the selections times a vector."""
    rare, _ = _rare(scores, k)
    return _sums(rare, grad.contiguous(), torch.empty_like(rare), k, COVARIANCES)


def log_normaliser(scores: Tensor, k: int) -> Tensor:
    """The logarithm of the sum of the weights of all subsets, ``(*rows)``."""
    rare, base = _rare(scores, k)
    return (base + _sums(rare, rare, torch.empty_like(base), k, NORMALISER)).to(scores.dtype)
