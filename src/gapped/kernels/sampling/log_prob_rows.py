"""The gradient of a drawn category's log-probability with respect to long rows of logits."""

from __future__ import annotations

import triton
import triton.language as tl

from gapped.kernels.primitives import LOG2_E, exp2
from gapped.kernels.sampling.long_rows import chunk, write
from gapped.kernels.sampling.surrogates import level

# Elements of a program and its warps.
BLOCK, WARPS = 4096, 8


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

    `p_law` is what `long_rows` writes there. Each of `s_blocks` programs has a part of a row.
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
