"""k of n categories by index: one read of the logits forward, one read and one write backward.

The reference is `gapped.choices`, for the law "subset" and 1 < k < n.

Let T be the k largest logits and s the least of them. A set is T but for a set A of its elements, in whose
place stands a set B, as large, of the others. Its probability is in proportion to the product of the weights
x = exp(-|score - s|), at most 1, over A and B. So with the elementary symmetric polynomials c_m of the
weights in T and e_m of the others, the sum over all sets is Z = sum of c_m e_m: all terms are positive, and
the first one is 1.

- A draw takes the size of A and B by c_m e_m / Z, then A and B from their last element to their first one:
  element j is the last of m with a probability in proportion to x_j times the polynomial of degree m - 1 of
  those before it. That is one uniform for the size and two for each element.
- Leaving out an element divides a polynomial by 1 + x_j w: f_m = e_m - x_j f_(m-1). As x_j is at most 1, what
  rounding adds does not grow; but f_m may be much less than e_m, so for k > 8 sums are float64. The chance that
  j is in A or in B is x_j times the sum of c_(m+1) f_m over Z, the other way round for those in T, and
  covariances with the incoming gradient are derivatives of that along it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapped.kernels.primitives import load_rows, normalise, row_block, store_rows, words
from gapped.kernels.runner import power, run
from gapped.kernels.sampling.rao import ROUNDS
from gapped.simplex import draw_key

# Numbers that a warp holds: each element has one for each degree of polynomials.
ELEMENTS = 1024
# Up to this k sums are kept in float32.
NARROW = 8
_INF = tl.constexpr(float("inf"))
# The last word of a counter separates the noise of choices from other noise, as in `primitives`.
_CHOICES = tl.constexpr(6)


@triton.jit
def _entry(b_values, b_at):
    """The entry of each row that is marked; 0 where none is."""
    return tl.sum(tl.where(b_at, b_values, 0), 1)


@triton.jit
def _load_scores(p_logits, block, s_n):
    """Scores of rows, zeros in those with a NaN or +inf, and which these are."""
    b_scores = load_rows(p_logits, block, s_n, -_INF).to(tl.float32)
    b_bad = tl.max(((b_scores != b_scores) | (b_scores == _INF)).to(tl.int32), 1) > 0
    return tl.where(b_bad[:, None] & block.inside, 0.0, b_scores), b_bad


@triton.jit
def _largest(b_scores, b_columns, s_n, K: tl.constexpr, WIDTH: tl.constexpr):
    """The K largest scores of each row with their columns, ``(rows, WIDTH)``, and which these are."""
    b_places = tl.arange(0, WIDTH)[None, :]
    b_top = tl.max(b_scores, 1)[:, None] + tl.zeros([1, WIDTH], tl.float32)
    b_index = tl.zeros_like(b_top).to(tl.int32) + s_n
    b_taken = b_scores == _INF
    for s_place in range(K):
        b_left = tl.where(b_taken, -_INF, b_scores)
        b_best = tl.max(b_left, 1)
        b_exists = b_best > -_INF
        # The first of equal ones, as in `_find_largest`.
        b_equal = (b_left == b_best[:, None]) & b_exists[:, None]
        b_column = tl.min(tl.where(b_equal, b_columns[None, :], 0x7FFFFFFF), 1)
        b_taken = b_taken | (b_columns[None, :] == b_column[:, None])
        b_here = b_places == s_place
        b_top = tl.where(b_here, b_best[:, None], b_top)
        b_index = tl.where(b_here, tl.where(b_exists, b_column, s_n)[:, None], b_index)
    return b_top, b_index, b_taken


@triton.jit
def _weights(b_scores, b_least, b_exists):
    """The weights of scores; computed alike wherever they are, so that an element's is always the same."""
    return tl.where(b_exists, tl.exp(-tl.abs(b_scores - b_least[:, None])), 0.0)


@triton.jit
def _polynomials(b_x, K: tl.constexpr, WIDTH: tl.constexpr = 0):
    """The elementary symmetric polynomials of degrees 0 to K: of the weights before each, and of all.

    `WIDTH` is that of a short axis: compilers fail to scan one that has fewer entries than threads.
    """
    b_before = b_x * 0 + 1.0
    before, totals = (b_before,), (tl.sum(b_x * 0, 1) + 1.0,)
    for m in tl.static_range(K):
        b_term = b_x * before[m]
        if WIDTH > 0:
            b_places = tl.arange(0, WIDTH)
            b_is_before = b_places[None, :, None] < b_places[None, None, :]
            before = before + (tl.sum(tl.where(b_is_before, b_term[:, :, None], 0), 1),)
        else:
            # Where nothing comes before, the sum is the term itself, and the difference exactly 0.
            before = before + (tl.cumsum(b_term, 1) - b_term,)
        totals = totals + (tl.sum(b_term, 1),)
    return before, totals


@triton.jit
def _uniform(b_bits):
    """Uniforms in [0, 1) of 23 bits: their product with a number is less than that."""
    return (b_bits >> 9).to(tl.float32) * 1.1920928955078125e-7


@triton.jit
def _pick(b_x, b_before, b_below, b_last, b_threshold, COLUMNS: tl.constexpr):
    """The last of m elements, all of them before `b_last`, and the limit of the next one.

    `b_before` and `b_below` are the polynomials of degrees m and m - 1 of what comes before each element. The
    threshold is a uniform times that of degree m of what comes before `b_last`, the limit.
    """
    b_columns = tl.arange(0, COLUMNS)[None, :]
    b_term = b_x * b_below
    b_may = (b_term > 0) & (b_columns < b_last[:, None])
    # The first that exceeds; rounding may leave none, then the last that may.
    b_exceeds = b_before + b_term > b_threshold[:, None]
    b_key = tl.where(b_may, tl.where(b_exceeds, b_columns, 3 * COLUMNS - b_columns), 4 * COLUMNS)
    b_first = tl.min(b_key, 1)
    b_column = tl.where(b_first < COLUMNS, b_first, 3 * COLUMNS - b_first)
    return b_column, _entry(b_below, b_columns == b_column[:, None])


@triton.jit
def _exchange(
    b_x, b_own, b_key, p_sums, s_seed, block,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Put elements B in the places of elements A of the largest ones, at random, and write all polynomials."""
    b_places = tl.arange(0, WIDTH)[None, :]
    before, totals = _polynomials(b_x, K)
    own_before, own_totals = _polynomials(b_own, K, WIDTH)
    b_low, b_high = words(block.rows[:, None] + b_places * 0)
    b_zero = b_low * 0
    # A call of Philox for each place, for the element that is put there and the one that was.
    b_bits, b_own_bits, b_size_bits, _ = tl.philox(
        s_seed, b_low, b_high, b_zero + b_places.to(tl.uint32), b_zero + _CHOICES, ROUNDS
    )
    b_u, b_own_u = _uniform(b_bits), _uniform(b_own_bits)
    b_all = own_totals[0] * totals[0]
    for m in tl.static_range(K):
        b_all += own_totals[m + 1] * totals[m + 1]
        tl.store(p_sums + block.rows * (2 * K + 1) + m, own_totals[m + 1], mask=block.row_inside)
        tl.store(p_sums + block.rows * (2 * K + 1) + K + m, totals[m + 1], mask=block.row_inside)
    b_threshold = _entry(_uniform(b_size_bits), b_places == 0) * b_all
    b_size, b_sum = tl.sum(b_places * 0 + b_zero.to(tl.int32), 1), b_all * 0.0
    for m in tl.static_range(K):
        b_sum += own_totals[m] * totals[m]
        b_size += (b_sum <= b_threshold).to(tl.int32)
    b_last, b_own_last = b_size * 0 + BLOCK_COLUMNS, b_size * 0 + WIDTH
    b_limit, b_own_limit = b_all, b_all
    s_most = tl.max(b_size, 0)
    for step in tl.static_range(K):
        # Programs whose sets exchange fewer elements go on to those.
        if s_most >= K - step:
            b_begins, b_active = b_size == K - step, b_size >= K - step
            b_limit = tl.where(b_begins, totals[K - step], b_limit) * _entry(b_u, b_places == step)
            b_own_limit = tl.where(b_begins, own_totals[K - step], b_own_limit) * _entry(
                b_own_u, b_places == step
            )
            b_column, b_limit = _pick(
                b_x, before[K - step], before[K - step - 1], b_last, b_limit, BLOCK_COLUMNS
            )
            b_place, b_own_limit = _pick(
                b_own, own_before[K - step], own_before[K - step - 1], b_own_last, b_own_limit, WIDTH
            )
            b_there = b_active[:, None] & (b_places == b_place[:, None])
            b_key = tl.where(b_there, (2 * b_column + 1)[:, None], b_key)
            b_last, b_own_last = tl.where(b_active, b_column, b_last), tl.where(b_active, b_place, b_own_last)
    return b_key


@triton.jit(do_not_specialize=["s_rows"])
def choices_draw_kernel(
    p_logits, p_seed, p_index, p_place, p_gates, p_weights, p_sums, s_rows, s_n,
    K: tl.constexpr, WIDTH: tl.constexpr, ARGMAX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Draw K elements of each row: their columns, ascending, gates, and weights.

    With `ARGMAX` they are the largest ones, in their order. Places are twice the columns, plus 1 for those in
    B. `p_sums` gets the polynomials of the largest ones and of the others, each of degrees 1 to K, and the
    least of the largest scores.
    """
    block = row_block(s_rows, s_n, BLOCK_ROWS, BLOCK_COLUMNS)
    b_scores, b_bad = _load_scores(p_logits, block, s_n)
    b_top, b_index, b_taken = _largest(b_scores, block.columns, s_n, K, WIDTH)
    b_places = tl.arange(0, WIDTH)[None, :]
    b_open = tl.sum((b_scores > -_INF).to(tl.int32), 1) > K
    b_least = tl.where(b_open, _entry(b_top, b_places == K - 1), 0.0)
    tl.store(p_sums + block.rows * (2 * K + 1) + 2 * K, b_least, mask=block.row_inside)
    b_own = _weights(b_top, b_least, b_open[:, None] & (b_places < K)).to(p_sums.dtype.element_ty)
    b_x = _weights(b_scores, b_least, b_open[:, None] & (b_scores > -_INF) & (b_taken == 0))
    b_x = b_x.to(p_sums.dtype.element_ty)
    if ARGMAX:
        _, totals = _polynomials(b_x, K)
        _, own_totals = _polynomials(b_own, K, WIDTH)
        for m in tl.static_range(K):
            tl.store(p_sums + block.rows * (2 * K + 1) + m, own_totals[m + 1], mask=block.row_inside)
            tl.store(p_sums + block.rows * (2 * K + 1) + K + m, totals[m + 1], mask=block.row_inside)
        b_key = 2 * b_index
    else:
        b_key = _exchange(b_x, b_own, 2 * b_index, p_sums, tl.load(p_seed), block, K, WIDTH, BLOCK_COLUMNS)
        b_key = tl.sort(tl.where(b_places < K, b_key, 0x7FFFFFFF))
    b_index = b_key >> 1
    b_inside = block.row_inside[:, None] & (b_places < K)
    b_exists = b_inside & (b_index < s_n)
    # Again from the cache: the scores of the drawn ones lie anywhere in the row.
    p_from = p_logits + block.rows[:, None] * s_n + b_index
    b_chosen = tl.load(p_from, mask=b_exists, other=-_INF).to(tl.float32)
    b_lawless = b_bad[:, None]
    b_chosen = tl.where(b_lawless, 0.0, b_chosen)
    b_most = tl.max(b_chosen, 1)[:, None]
    b_weights = normalise(b_chosen - tl.where(b_most == -_INF, 0.0, b_most))
    b_gates = tl.where(b_exists, 1.0, 0.0)
    p_to = block.rows[:, None] * K + b_places
    b_key = tl.where(b_lawless, 2 * s_n + 2, b_key)
    tl.store(p_place + p_to, b_key, mask=b_inside)
    tl.store(p_index + p_to, (b_key >> 1).to(tl.int64), mask=b_inside)
    b_gates = tl.where(b_lawless, float("nan"), b_gates)
    tl.store(p_gates + p_to, b_gates.to(p_gates.dtype.element_ty), mask=b_inside)
    tl.store(p_weights + p_to, tl.where(b_lawless, float("nan"), b_weights), mask=b_inside)


@triton.jit
def _find_largest(b_scores, b_least, K: tl.constexpr):
    """Which scores are the K largest ones of their row, the first ones of those that equal the least."""
    b_greater = b_scores > b_least[:, None]
    b_equal = (b_scores == b_least[:, None]).to(tl.int32)
    b_missing = K - tl.sum(b_greater.to(tl.int32), 1)
    return b_greater | ((b_equal > 0) & (tl.cumsum(b_equal, 1) <= b_missing[:, None]))


@triton.jit(do_not_specialize=["s_rows"])
def choices_gradient_kernel(
    p_logits, p_place, p_grad, p_weights, p_sums, p_out, s_rows, s_n,
    K: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr, SECOND_ORDER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the logits by that of gates, or, `WEIGHTED`, by that of weights."""
    block = row_block(s_rows, s_n, BLOCK_ROWS, BLOCK_COLUMNS)
    b_scores, b_bad = _load_scores(p_logits, block, s_n)
    b_open = tl.sum((b_scores > -_INF).to(tl.int32), 1) > K
    p_row = p_sums + block.rows * (2 * K + 1)
    b_least = tl.load(p_row + 2 * K, mask=block.row_inside, other=0.0).to(tl.float32)
    b_one = b_least.to(p_sums.dtype.element_ty) * 0 + 1
    own_totals, totals = (b_one,), (b_one,)
    for m in tl.static_range(K):
        own_totals = own_totals + (tl.load(p_row + m, mask=block.row_inside, other=0.0),)
        totals = totals + (tl.load(p_row + K + m, mask=block.row_inside, other=0.0),)
    # The drawn ones, `(rows, WIDTH)`: the gradient at their gates, and the slope at being in A or in B.
    b_places = tl.arange(0, WIDTH)[None, :]
    b_at = block.rows[:, None] * K + b_places
    b_inside = block.row_inside[:, None] & (b_places < K)
    b_key = tl.load(p_place + b_at, mask=b_inside, other=2 * s_n).to(tl.int32)
    b_exists = b_inside & (b_key < 2 * s_n)
    # Nothing from places without an element, whatever comes there.
    b_g = tl.load(p_grad + b_at, mask=b_exists, other=0.0).to(tl.float32)
    b_own = b_g
    if WEIGHTED:
        b_w = tl.load(p_weights + b_at, mask=b_inside, other=0.0)
        b_g = b_g * b_w
        b_own = b_g - b_w * tl.sum(b_g, 1)[:, None]
    p_from = p_logits + block.rows[:, None] * s_n + (b_key >> 1)
    b_score = tl.load(p_from, mask=b_exists, other=0.0).to(tl.float32)
    b_small = _weights(b_score, b_least, b_open[:, None] & b_exists).to(p_sums.dtype.element_ty)
    b_new = (b_key & 1) == 1
    b_pull = b_small * tl.where(b_new, b_g, -b_g)
    # The slopes of the polynomials: leaving out each drawn element gives that of its weight.
    b_f = b_small * 0 + 1
    b_none = b_one * 0
    own_slopes, slopes = (b_none,), (b_none,)
    for m in tl.static_range(K):
        if m > 0:
            b_f = tl.where(b_new, totals[m][:, None], own_totals[m][:, None]) - b_small * b_f
        own_slopes = own_slopes + (tl.sum(tl.where(b_new, 0, b_pull * b_f), 1),)
        slopes = slopes + (tl.sum(tl.where(b_new, b_pull * b_f, 0), 1),)
    b_all, b_slope_of_all = b_one, b_none
    for m in tl.static_range(K):
        b_all += own_totals[m + 1] * totals[m + 1]
        b_slope_of_all += own_slopes[m + 1] * totals[m + 1] + own_totals[m + 1] * slopes[m + 1]
    # All elements.
    b_taken = _find_largest(b_scores, b_least, K)
    b_x = _weights(b_scores, b_least, b_open[:, None] & (b_scores > -_INF)).to(p_sums.dtype.element_ty)
    b_drawn = block.inside & False
    b_grad = block.inside.to(tl.float32) * 0.0
    b_direct = b_grad
    for s_place in range(K):
        b_here = b_places == s_place
        b_column = _entry(b_key, b_here) >> 1
        b_here = b_here & b_exists
        b_there = block.inside & (block.columns[None, :] == b_column[:, None])
        b_grad = tl.where(b_there, _entry(b_g, b_here)[:, None], b_grad)
        b_drawn = b_drawn | b_there
        if WEIGHTED:
            b_direct = tl.where(b_there, _entry(b_own, b_here)[:, None], b_direct)
    b_slope = tl.where(b_taken, -b_grad, b_grad)
    b_pull = b_x * b_slope
    b_f = b_x * 0 + 1
    b_f_slope, b_sum, b_sum_slope = b_x * 0, b_x * 0, b_x * 0
    for m in tl.static_range(K):
        if m > 0:
            b_own_slope = tl.where(b_taken, own_slopes[m][:, None], slopes[m][:, None])
            b_f_slope = b_own_slope - b_pull * b_f - b_x * b_f_slope
            b_f = tl.where(b_taken, own_totals[m][:, None], totals[m][:, None]) - b_x * b_f
        b_other = tl.where(b_taken, totals[m + 1][:, None], own_totals[m + 1][:, None])
        b_other_slope = tl.where(b_taken, slopes[m + 1][:, None], own_slopes[m + 1][:, None])
        b_sum += b_other * b_f
        b_sum_slope += b_other_slope * b_f + b_other * b_f_slope
    b_scale = (b_one / b_all)[:, None]
    b_chance = b_x * b_sum * b_scale
    # The covariance of being in A or in B with the sum of slopes of those that are.
    b_covariance = b_chance * (b_slope - b_slope_of_all[:, None] * b_scale) + b_x * b_sum_slope * b_scale
    b_out = tl.where(b_taken, -b_covariance, b_covariance).to(tl.float32)
    if SECOND_ORDER:
        # Whether an element is in the set, less the chance that it is.
        b_chance = b_chance.to(tl.float32)
        b_hit = b_drawn.to(tl.float32)
        b_centred = tl.where(b_taken, b_hit - 1.0 + b_chance, b_hit - b_chance)
        b_centred = tl.where(b_open[:, None] & (b_scores > -_INF), b_centred, 0.0)
        b_out = 0.5 * (b_out + b_centred * tl.sum(b_centred * b_grad, 1)[:, None])
    b_out = tl.where(b_open[:, None], b_out, 0.0) + b_direct
    store_rows(p_out, block, s_n, tl.where(b_bad[:, None], float("nan"), b_out))


def sizes_of(n: int, k: int) -> dict[str, int]:
    """The sizes of a launch for rows of n entries."""
    columns = power(n)
    elements = max(1 << (ELEMENTS // k).bit_length() - 1, 128)
    blocks = {"BLOCK_ROWS": max(elements // columns, 1), "BLOCK_COLUMNS": columns}
    return {"K": k, "WIDTH": power(k), **blocks, "num_warps": max(columns // elements, 1)}


def _launch(kernel: Any, pointers: tuple[Tensor, ...], k: int, **flags: bool) -> None:
    """Launch a kernel on the rows of its first tensor, if there are any."""
    n = pointers[0].shape[-1]
    if rows := pointers[0].numel() // n:
        sizes = sizes_of(n, k)
        run(kernel, -(-rows // sizes["BLOCK_ROWS"]), pointers, (rows, n), (), {**flags, **sizes})


@dataclass(frozen=True, eq=False)
class Drawn:
    """k elements of each row, and what `gradient` needs of the draw."""

    index: Tensor
    """Their columns, ``(*rows, k)``; n where there are fewer, n + 1 in rows with a NaN."""
    gates: Tensor
    """1 where there is an element, in the dtype of the rows."""
    weights: Tensor
    """The softmax over the elements, float32."""
    place: Tensor
    """Twice the columns, int32, plus 1 for elements that are not among the k largest."""
    sums: Tensor
    """The polynomials of each row, and the least of the k largest scores."""


def draw(rows: Tensor, k: int, generator: torch.Generator | None, argmax: bool) -> Drawn:
    """Draw k elements of each row, or, with `argmax`, take the largest."""
    shape, device = (*rows.shape[:-1], k), rows.device
    drawn = Drawn(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=rows.dtype, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(
            (*shape[:-1], 2 * k + 1), dtype=torch.float32 if k <= NARROW else torch.float64, device=device
        ),
    )
    seed = torch.empty(1, dtype=torch.int64, device=device) if argmax else draw_key(rows, generator)
    tensors = (rows.contiguous(), seed, drawn.index, drawn.place, drawn.gates, drawn.weights, drawn.sums)
    _launch(choices_draw_kernel, tensors, k, ARGMAX=argmax)
    return drawn


def gradient(
    logits: Tensor, place: Tensor, grad: Tensor, weights: Tensor | None, sums: Tensor, second_order: bool
) -> Tensor:
    """The gradient of the logits by `grad` at gates, or at weights if these are given."""
    logits, grad = logits.contiguous(), grad.contiguous()
    out = torch.empty_like(logits)
    tensors = (logits, place, grad, grad if weights is None else weights, sums, out)
    flags = {"WEIGHTED": weights is not None, "SECOND_ORDER": second_order}
    _launch(choices_gradient_kernel, tensors, place.shape[-1], **flags)
    return out
