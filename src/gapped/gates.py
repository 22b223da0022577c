"""Gates: samples that are 0 or 1 and carry a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import (
    GATES,
    check_fit,
    check_generator,
    check_mask,
    check_scores,
    is_known_finite,
    note_backend,
)
from gapped.errors import reject
from gapped.gradient import is_differentiated, pair_slopes, with_pull
from gapped.kernels.sampling.fused import Fused
from gapped.pathwise import Pathwise, resolve_pathwise


def gate(
    logits: Tensor,
    *,
    estimator: Pathwise | str | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Gates: Bernoulli samples that carry a gradient, one number each.

    Arguments:
        logits: Log-odds φ, of any shape. Odds of -inf and +inf are legal: such a gate is 0 or 1 for certain,
            with a gradient of 0. NaN gives NaN.
        estimator: A pathwise one, as an object or its text; None is the default, GapMax. Options of an object
            that are tensors broadcast against the logits' shape.
        mask: Booleans that broadcast against the logits. Gates where it is False do not exist: they are 0,
            with a gradient of 0.
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        A tensor of the shape and dtype of `logits` that carries the gradient: exactly 0 or 1, with
        P(1) = σ(φ), or a number in between if the estimator is soft.

    A gate is the first of a pair of categories with the logits (φ, 0), and its gradient is the estimator's
    for that pair. Where q_m is the mass of "on" in the estimator's points of the simplex, and w_m their
    weights, a gradient g at the gate becomes Σ_m w_m q_m (1 - q_m) g at the logit. Straight-through is
    σ'(φ/τ) g/τ, and Gumbel-softmax the binary concrete relaxation, σ((φ + L)/τ) with logistic noise L, as in
    torch's `RelaxedBernoulli`.

    >>> logits = torch.tensor([-9.0, 0.0, 9.0], requires_grad=True)
    >>> gates = gate(logits, generator=torch.Generator().manual_seed(0))
    >>> gates.detach()
    tensor([0., 0., 1.])
    >>> gates.sum().backward()
    >>> logits.grad[1] > logits.grad[0]
    tensor(True)

    References: Maddison, Mnih, Teh (2017) and Jang, Gu, Poole (2017) for the relaxation.
    """
    return resolve_pathwise(estimator).gate(logits, mask=mask, generator=generator)


def draw(
    estimator: Pathwise, logits: Tensor, mask: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Gates of these log-odds that carry the estimator's gradient: see `gapped.Pathwise.gate`."""
    check_scores(logits)
    check_mask(mask, logits)
    check_generator(generator, logits)
    for name in estimator.levels:
        check_fit(name, getattr(estimator, name), logits.shape, GATES)
    odds = simplex.masked(logits, mask)
    if estimator.has_learned_tau() or not estimator.is_rowwise():
        return estimator.sample(simplex.pairs(odds), generator=generator)[..., 0]
    kernel = _kernel(estimator, odds)
    if kernel is not None:
        from gapped.kernels import gates

        return gates.gate(odds, kernel, generator)
    value, slopes = _gates(estimator, odds.detach(), generator, is_differentiated(odds))
    return value if slopes is None else with_pull(value, odds, _pull, slopes)


def _pull(grad: Tensor, like: Tensor, slopes: Tensor) -> Tensor:
    return (grad.to(slopes.dtype) * slopes).to(like.dtype)


def _kernel(estimator: Pathwise, odds: Tensor) -> Fused | None:
    """The arguments of the fused kernels if they draw these gates, else None."""
    kernel = estimator.kernel(odds.unsqueeze(-1))
    if kernel is None:
        return None
    why_not = None
    if not estimator.has_gate_kernel:
        why_not = f"{type(estimator).__name__} has no kernel for gates"
    elif torch.compiler.is_compiling() or estimator.draw == "argmax":
        where = "in compiled code" if torch.compiler.is_compiling() else "for their argmax"
        why_not = f"gates have no kernel {where}"
    if why_not is None:
        return kernel
    if estimator.backend == "triton":
        raise reject("backend", "triton", f"torch or auto here: {why_not}")
    note_backend("torch")
    return None


def _gates(
    estimator: Pathwise, odds: Tensor, generator: torch.Generator | None, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gates, and the slopes of their gradients if wanted: one number each, whatever the estimator."""
    # A closed form that is inherited need not be that of the points.
    in_closed_form = estimator.hard and "gate_slopes" in vars(type(estimator))
    # How many intermediate numbers there are for each gate at a time.
    numbers = 8 if in_closed_form else 2
    if not simplex.needs_blocks(odds, numbers):
        if in_closed_form:
            return _gates_in_closed_form(estimator, odds, generator, wants_gradient)
        value, _, gradient = estimator.outcome(simplex.pairs(odds), generator, wants_gradient)
        return value[..., 0].contiguous(), None if gradient is None else pair_slopes(*gradient)
    flat, value = odds.reshape(-1), torch.empty(odds.shape, dtype=odds.dtype, device=odds.device)
    slopes = torch.empty_like(value, dtype=simplex.computed(flat[:0]).dtype) if wants_gradient else None
    for block in simplex.blocks(odds.numel(), numbers):
        own = estimator.of_rows(odds.shape, block)
        value.view(-1)[block], own_slopes = _gates(own, flat[block], generator, wants_gradient)
        if slopes is not None and own_slopes is not None:
            slopes.view(-1)[block] = own_slopes
    return value, slopes


def _gates_in_closed_form(
    estimator: Pathwise, odds: Tensor, generator: torch.Generator | None, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    numbers = simplex.computed(odds)
    on = numbers >= 0 if estimator.draw == "argmax" else simplex.draw_gates(numbers, generator)
    value = on.to(odds.dtype)
    if not is_known_finite(numbers):
        value = torch.where(odds.isnan(), odds, value)
    if not wants_gradient:
        return value, None
    # On a CPU a product takes a tenth of the time of torch.where.
    lead = numbers * (2 * on.to(numbers.dtype) - 1)
    return value, estimator.gate_slopes(lead.unsqueeze(-1)).squeeze(-1)
