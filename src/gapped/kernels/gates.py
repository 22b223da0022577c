"""Gates: one number read and one written forward, two read and one written backward.

The reference is `Pathwise.gate` in plain torch. The kernels compute for the pair of logits (phi, 0) of each
estimator. Noise is a function of a key and of the gate's number, so the backward pass draws it again, and
nothing is kept beside the logits and the key.

The surrogate of a gate is the softmax of two scores. It is held as the `loss`, the lesser score minus the
greater one, at most 0: with e = exp(loss) the masses are 1/(1 + e) and e/(1 + e), and their product,
the slope of either, is e/(1 + e)^2, with all digits wherever they lie.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapped.gradient import first_order
from gapped.kernels.primitives import LN_2, LOG2_E, exp2, log2, reciprocal, words
from gapped.kernels.runner import run
from gapped.kernels.sampling.fused import Fused
from gapped.kernels.sampling.rao import ROUNDS, rao_bits
from gapped.kernels.sampling.surrogates import (
    DECOUPLED,
    GAPMAX,
    GST,
    GST_AUTO,
    GUMBEL,
    MODES,
    REINMAX,
    halfway_odds,
    level,
    log2_odds_ratio,
    selected_gap,
)
from gapped.simplex import draw_key

# Gates of a program, and its warps: the default.
BLOCK = 2048
WARPS = 4
RAO = tl.constexpr(MODES["gumbel-rao"])
# The last word of a counter separates the noise of gates from other noise, as in `primitives`.
_GATES = tl.constexpr(2)


@triton.jit
def gate_bits(s_seed, BLOCK: tl.constexpr):
    """A word of noise for each gate of a program. Four neighbours share a call of Philox, and a thread."""
    b_low, b_high = words(tl.program_id(0).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    b_zero = b_low * 0
    b_a, b_b, b_c, b_d = tl.philox(s_seed, b_low, b_high, b_zero, b_zero + _GATES, ROUNDS)
    return tl.reshape(tl.join(tl.join(b_a, b_b), tl.join(b_c, b_d)), [BLOCK])


@triton.jit
def uniforms(b_bits):
    """A uniform u and 1 - u, both never 0, each with all its digits next to 0."""
    b_u = (b_bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_v = ((b_bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return b_u, b_v


@triton.jit
def _softplus2(b_x, FAST: tl.constexpr):
    """log2(1 + 2^x)."""
    return tl.maximum(b_x, 0.0) + log2(1.0 + exp2(-tl.abs(b_x), FAST), FAST)


@triton.jit
def _masses(b_loss, FAST: tl.constexpr):
    """The masses of the greater and of the lesser score."""
    b_e = exp2(b_loss * LOG2_E, FAST)
    b_greater = reciprocal(1.0 + b_e, FAST)
    return b_greater, b_e * b_greater


@triton.jit
def draw_gates(b_phi, b_bits, b_tau_forward, MODE: tl.constexpr, FAST: tl.constexpr):
    """Which gates are on, and the logistic noise of the estimators that use it, else 0."""
    b_u, b_v = uniforms(b_bits)
    if (MODE == GUMBEL) | (MODE == DECOUPLED):
        b_noise = (log2(b_u, FAST) - log2(b_v, FAST)) * LN_2
        b_on = b_phi / b_tau_forward + b_noise > 0
    else:
        # The less likely value is drawn by a uniform below its probability: a certain gate stays certain.
        _, b_rare = _masses(-tl.abs(b_phi), FAST)
        b_on = (b_phi > 0) ^ (b_u < b_rare)
        b_noise = tl.zeros_like(b_phi)
    return b_on, b_noise


@triton.jit
def _log2_other(b_lead, b_greater, FAST: tl.constexpr):
    """The base-2 logarithm of the probability of the value that was not drawn, with all digits."""
    return tl.maximum(log2(b_greater, FAST) - tl.maximum(b_lead * LOG2_E, 0.0), -1e30)


@triton.jit
def _loss(b_phi, b_on, b_noise, b_tau, b_gap, MODE: tl.constexpr, EXPECTED: tl.constexpr, FAST: tl.constexpr):
    """The surrogate's loss, and whether "on" is the greater score, for the estimators with one point."""
    # How far the value that was drawn leads; negative if it is the less likely one.
    b_lead = tl.where(b_on, b_phi, -b_phi)
    if MODE == GST:
        if EXPECTED:
            b_p, b_q = _masses(-tl.abs(b_lead), FAST)
            b_gap = selected_gap(tl.where(b_lead > 0, b_p, b_q))
        b_loss, b_first = tl.minimum(tl.minimum(-b_lead, 0.0), -b_gap) / b_tau, b_on
    elif MODE == GST_AUTO:
        b_greater, b_lesser = _masses(-tl.abs(b_phi), FAST)
        b_log2_p, b_rest = _log2_other(b_lead, b_greater, FAST), tl.where(b_lead > 0, b_greater, b_lesser)
        b_loss, b_first = (b_log2_p + log2_odds_ratio(b_log2_p, b_rest, FAST)) * LN_2 / b_tau, b_on
    elif MODE == GUMBEL:
        b_loss, b_first = -tl.abs(b_phi + b_noise) / b_tau, b_on
    elif MODE == DECOUPLED:
        b_scores = b_phi / b_tau + b_noise
        b_loss, b_first = -tl.abs(b_scores), b_scores > 0
    else:
        b_loss, b_first = -tl.abs(b_phi) / b_tau, b_phi > 0
    return b_loss, b_first


@triton.jit
def _rao_sums(s_seed, b_gates, b_phi, b_on, b_tau, s_samples, FAST: tl.constexpr):
    """Sums over conditional draws: of the mass of the value that was not drawn, and of the products.

    Given that the drawn value leads by y, its score exceeds the other by softplus(y + log v) - log u.
    """
    b_lead = tl.where(b_on, b_phi, -b_phi) * LOG2_E
    b_mass, b_product = tl.zeros_like(b_lead), tl.zeros_like(b_lead)
    for s_first in range(0, s_samples, 4):
        b_words = rao_bits(s_seed, b_gates, b_gates * 0, b_gates * 0 + s_first // 4, FAST)
        for draw in tl.static_range(4):
            b_u, b_v = uniforms(b_words[draw])
            b_excess = _softplus2(b_lead + log2(b_v, FAST), FAST) - log2(b_u, FAST)
            b_greater, b_lesser = _masses(-b_excess * LN_2 / b_tau, FAST)
            b_counts = s_first + draw < s_samples
            b_mass += tl.where(b_counts, b_lesser, 0.0)
            b_product += tl.where(b_counts, b_greater * b_lesser, 0.0)
    return b_mass, b_product


@triton.jit
def _block(s_count, BLOCK: tl.constexpr):
    """The numbers of a program's gates, and which of them exist."""
    b_gates = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return b_gates, b_gates < s_count


@triton.jit
def gate_forward_kernel(
    p_logits, p_seed, p_tau, p_gap, p_tau_forward, p_value, s_count, s_tau_every, s_gap_every,
    s_tau_forward_every, s_tau, s_gap, s_tau_forward, s_samples,
    MODE: tl.constexpr, EXPECTED_GAP: tl.constexpr, FAST: tl.constexpr, TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr, TAU_FORWARD_PER_ROW: tl.constexpr,
    SOFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw gates: zeros and ones, or with `SOFT` the mass of "on" in the surrogate."""
    s_seed = tl.load(p_seed)
    b_gates, b_inside = _block(s_count, BLOCK)
    b_phi = tl.load(p_logits + b_gates, mask=b_inside, other=0.0).to(tl.float32)
    b_forward = level(
        (p_tau_forward, s_tau_forward, s_tau_forward_every), b_gates, b_inside, TAU_FORWARD_PER_ROW
    )
    b_on, b_noise = draw_gates(b_phi, gate_bits(s_seed, BLOCK), b_forward, MODE, FAST)
    b_value = tl.where(b_on, 1.0, 0.0)
    if SOFT:
        b_tau = level((p_tau, s_tau, s_tau_every), b_gates, b_inside, TAU_PER_ROW)
        if MODE == RAO:
            b_mass, _ = _rao_sums(s_seed, b_gates, b_phi, b_on, b_tau, s_samples, FAST)
            b_value = tl.where(b_on, 1.0 - b_mass / s_samples, b_mass / s_samples)
        else:
            b_gap = level((p_gap, s_gap, s_gap_every), b_gates, b_inside, GAP_PER_ROW)
            b_loss, b_first = _loss(b_phi, b_on, b_noise, b_tau, b_gap, MODE, EXPECTED_GAP, FAST)
            b_greater, b_lesser = _masses(b_loss, FAST)
            b_value = tl.where(b_first, b_greater, b_lesser)
    b_value = tl.where(b_phi == b_phi, b_value, float("nan"))
    tl.store(p_value + b_gates, b_value.to(p_value.dtype.element_ty), mask=b_inside)


@triton.jit
def gate_backward_kernel(
    p_logits, p_grad, p_seed, p_tau, p_gap, p_tau_forward, p_out, s_count, s_tau_every, s_gap_every,
    s_tau_forward_every, s_tau, s_gap, s_tau_forward, s_samples,
    MODE: tl.constexpr, EXPECTED_GAP: tl.constexpr, FAST: tl.constexpr, TAU_PER_ROW: tl.constexpr,
    GAP_PER_ROW: tl.constexpr, TAU_FORWARD_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits: the slope of each gate, for the noise of the forward pass."""
    s_seed = tl.load(p_seed)
    b_gates, b_inside = _block(s_count, BLOCK)
    b_phi = tl.load(p_logits + b_gates, mask=b_inside, other=0.0).to(tl.float32)
    b_grad = tl.load(p_grad + b_gates, mask=b_inside, other=0.0).to(tl.float32)
    b_forward = level(
        (p_tau_forward, s_tau_forward, s_tau_forward_every), b_gates, b_inside, TAU_FORWARD_PER_ROW
    )
    b_tau = level((p_tau, s_tau, s_tau_every), b_gates, b_inside, TAU_PER_ROW)
    b_on, b_noise = draw_gates(b_phi, gate_bits(s_seed, BLOCK), b_forward, MODE, FAST)
    if MODE == RAO:
        _, b_product = _rao_sums(s_seed, b_gates, b_phi, b_on, b_tau, s_samples, FAST)
        b_slope = b_product / (b_tau * s_samples)
    elif MODE >= GAPMAX:
        # With the odds o of the value that was not drawn, the masses are 1/(1 + o) and o/(1 + o).
        b_lead = tl.where(b_on, b_phi, -b_phi)
        b_p, b_q = _masses(-tl.abs(b_phi), FAST)
        b_half = 0.5 * tl.where(b_lead > 0, b_q, b_p)
        b_odds = halfway_odds(b_half, _log2_other(b_lead, b_p, FAST) - 1.0, 1 / b_tau, MODE, FAST)
        b_first_mass = reciprocal(1.0 + b_odds, FAST)
        b_slope = 2.0 / b_tau * b_odds * b_first_mass * b_first_mass - 0.5 * b_p * b_q
    else:
        b_gap = level((p_gap, s_gap, s_gap_every), b_gates, b_inside, GAP_PER_ROW)
        b_loss, b_first = _loss(b_phi, b_on, b_noise, b_tau, b_gap, MODE, EXPECTED_GAP, FAST)
        b_greater, b_lesser = _masses(b_loss, FAST)
        if MODE == REINMAX:
            # With the tempered mass m of the value that was not drawn, 2 J is m (2 - m)/2.
            b_other = tl.where(b_first == b_on, b_lesser, b_greater)
            b_p, b_q = _masses(-tl.abs(b_phi), FAST)
            b_slope = 0.5 * (b_other * (2.0 - b_other) - b_p * b_q)
        else:
            b_slope = b_greater * b_lesser / b_tau
    b_slope = tl.where(b_phi == b_phi, b_slope, float("nan"))
    tl.store(p_out + b_gates, (b_slope * b_grad).to(p_out.dtype.element_ty), mask=b_inside)


def forward(logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
    """Draw gates."""
    value = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _run(gate_forward_kernel, logits, (key,), value, fused, SOFT=fused.soft)
    return value


def backward(logits: Tensor, grad: Tensor, key: Tensor, fused: Fused) -> Tensor:
    """The gradient of the logits."""
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _run(gate_backward_kernel, logits, (grad.contiguous(), key), out, fused)
    return out


def _run(
    kernel: Any, logits: Tensor, pointers: tuple[Tensor, ...], out: Tensor, fused: Fused, **more: Any
) -> None:
    """Launch a kernel over all gates, if there are any."""
    count = logits.numel()
    if count == 0:
        return
    # Each gate is a row to its temperature and gap.
    levels, every = fused.level_tensors(logits.unsqueeze(-1))
    flags: dict[str, Any] = {
        "MODE": MODES[fused.mode],
        "EXPECTED_GAP": fused.gap is None,
        "FAST": logits.is_cuda,
        "TAU_PER_ROW": every[0] > 0,
        "GAP_PER_ROW": every[1] > 0,
        "TAU_FORWARD_PER_ROW": every[2] > 0,
        **more,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }
    tensors = (logits.contiguous(), *pointers, *levels, out)
    run(kernel, -(-count // BLOCK), tensors, (count, *every), (*fused.numbers, fused.samples), flags)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, key: Tensor, fused: Fused) -> Tensor:
        ctx.fused = fused
        # Temperatures and gaps too, so that autograd notices if they are changed before the backward pass.
        ctx.save_for_backward(logits, key, *fused.tensors)
        return forward(logits, key, fused)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, key, *_ = ctx.saved_tensors

        def product(grad: Tensor) -> Tensor:
            return backward(logits, grad, key, ctx.fused)

        return first_order(product, logits, grad), None, None


def gate(logits: Tensor, fused: Fused, generator: torch.Generator | None) -> Tensor:
    """Gates of these log-odds, of any shape, that carry the gradient of the estimator `fused`."""
    return _Gate.apply(logits, draw_key(logits, generator), fused)  # type: ignore[no-any-return]
