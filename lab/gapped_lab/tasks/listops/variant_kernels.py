"""Triton kernels of the estimators in `tree_variants`, which are the definitions.

A layer of a tree is too small for a launch to take longer than its neighbours wait for it: a launch for each
pass, in the place of dozens, is what counts. A program has some rows of a layer, with all of their places.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from gapped.kernels.primitives import load_rows, normalise, row_block, store_rows

LEFT = tl.constexpr(0)
RIGHT = tl.constexpr(1)
BALANCED = tl.constexpr(2)
RANDOM = tl.constexpr(3)
_EPSILON = tl.constexpr(1e-20)


@triton.jit(do_not_specialize=["s_rows", "s_places"])
def shape_kernel(
    p_scores,
    p_uniform,
    p_out,
    s_rows,
    s_places,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """The pair that a tree of a fixed shape merges; `p_uniform` matters for random ones only."""
    block = row_block(s_rows, s_places, ROWS, PLACES)
    b_exists = (load_rows(p_scores, block, s_places, -float("inf")) > -float("inf")).to(tl.int32)
    b_number = tl.cumsum(b_exists, 1)
    b_pairs = tl.sum(b_exists, 1)
    b_chosen = b_pairs * 0 + 1
    if SHAPE == RIGHT:
        b_chosen = b_pairs
    elif SHAPE == BALANCED:
        # The smallest power of two above `b_pairs`, which has at most 31 bits.
        b_power = b_pairs
        for s_bits in tl.static_range(5):
            b_power |= b_power >> (1 << s_bits)
        b_chosen = b_power + 1 - b_pairs
    elif SHAPE == RANDOM:
        b_uniform = tl.load(p_uniform + block.rows, mask=block.row_inside, other=0.0)
        b_chosen = (b_uniform * b_pairs).to(tl.int32) + 1
    b_sample = (b_number == b_chosen[:, None]) & (b_exists > 0)
    store_rows(p_out, block, s_places, b_sample.to(tl.float32))


class _Late(NamedTuple):
    """A row of `LateMaskGumbelSoftmax`."""

    y: tl.tensor
    allowed: tl.tensor
    """p / S at the places that are allowed, 0 elsewhere, where S is the sum that y is divided by."""
    total: tl.tensor
    """S."""
    tau: tl.tensor
    exists: tl.tensor


@triton.jit
def _late(p_scores, p_mask, p_noise, p_tau, block, s_places, s_every):
    b_scores = load_rows(p_scores, block, s_places, -float("inf"))
    b_noise = load_rows(p_noise, block, s_places, 1.0)
    b_tau = tl.load(p_tau + block.rows // s_every, mask=block.row_inside, other=1.0)[:, None]
    b_exists = b_scores > -float("inf")
    # Smallest normal number: a draw of 0 would make the score infinite.
    b_scores = (b_scores - tl.log(tl.maximum(b_noise, 1.1754943508222875e-38))) / b_tau
    # Finite in a row where nothing exists, too.
    b_top = tl.maximum(tl.max(b_scores, 1), -3e38)[:, None]
    b_p = normalise(b_scores - b_top)
    b_p = tl.where(load_rows(p_mask, block, s_places, 0) != 0, b_p, 0.0)
    b_kept = tl.where(b_exists, b_p + _EPSILON, 0.0)
    b_total = tl.maximum(tl.sum(b_kept, 1), _EPSILON)[:, None]
    return _Late(b_kept / b_total, b_p / b_total, b_total, b_tau, b_exists)


@triton.jit(do_not_specialize=["s_rows", "s_places", "s_every"])
def late_forward_kernel(
    p_scores,
    p_mask,
    p_noise,
    p_tau,
    p_out,
    s_rows,
    s_places,
    s_every,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """`p_noise` are exponential draws; each of `p_tau` is that of `s_every` rows."""
    block = row_block(s_rows, s_places, ROWS, PLACES)
    late = _late(p_scores, p_mask, p_noise, p_tau, block, s_places, s_every)
    b_columns = block.columns[None, :]
    b_best = late.exists & (late.y == tl.max(late.y, 1)[:, None])
    b_first = tl.min(tl.where(b_best, b_columns, PLACES), 1)[:, None]
    b_mask = late.exists & (load_rows(p_mask, block, s_places, 0) != 0)
    b_any = tl.max(b_mask.to(tl.int32), 1)[:, None] > 0
    store_rows(p_out, block, s_places, ((b_columns == b_first) & b_any).to(tl.float32))


@triton.jit(do_not_specialize=["s_rows", "s_places", "s_every"])
def late_backward_kernel(
    p_scores, p_mask, p_noise, p_tau, p_grad, p_out, s_rows, s_places, s_every,
    ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The gradient of y by that of the scores that are allowed."""
    block = row_block(s_rows, s_places, ROWS, PLACES)
    late = _late(p_scores, p_mask, p_noise, p_tau, block, s_places, s_every)
    b_grad = load_rows(p_grad, block, s_places, 0.0)
    b_grad -= tl.sum(b_grad * late.y, 1)[:, None]
    b_mean = tl.sum(late.allowed * b_grad, 1)[:, None]
    store_rows(p_out, block, s_places, late.allowed * (b_grad - late.total * b_mean) / late.tau)
