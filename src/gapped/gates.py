"""Gates: samples that are 0 or 1 and carry a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped.pathwise import Pathwise
from gapped.registry import resolve_pathwise


def gate(
    logits: Tensor,
    tau: float | Tensor = 1.0,
    hard: bool = False,
    *,
    estimator: Pathwise | str | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Gates: Bernoulli samples that carry a gradient, one number each.

    Soft by default, as torch's `F.gumbel_softmax` is: pass `hard=True` for zeros and ones.

    Arguments:
        logits: Log-odds φ, of any shape. Odds of -inf and +inf are legal: such a gate is 0 or 1 for certain,
            with a gradient of 0. NaN gives NaN.
        tau: Temperature τ, a positive number or a tensor that broadcasts against the logits' shape.
        hard: True returns exactly 0 or 1, with P(1) = σ(φ); False the surrogate, from 0 to 1.
        estimator: A pathwise one, as an object or as text; None is the recommended default. Text and None are
            taken at `tau` and `hard`; an object has its own, and arguments that say otherwise are refused.
        mask: Booleans that broadcast against the logits. Gates where it is False do not exist: they are 0,
            with a gradient of 0.
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        A tensor of the shape and dtype of `logits` that carries the gradient.

    A gate is the first of a pair of categories with the logits (φ, 0), and its gradient is the estimator's
    for that pair. Where q_m is the mass of "on" in the estimator's points of the simplex, and w_m their
    weights, a gradient g at the gate becomes Σ_m w_m q_m (1 - q_m) g at the logit. Straight-through is
    σ'(φ/τ) g/τ, and Gumbel-softmax the binary concrete relaxation, σ((φ + L)/τ) with logistic noise L, as in
    torch's `RelaxedBernoulli`.

    >>> logits = torch.tensor([-9.0, 0.0, 9.0], requires_grad=True)
    >>> gates = gate(logits, tau=0.5, hard=True, generator=torch.Generator().manual_seed(0))
    >>> gates.detach()
    tensor([0., 0., 1.])
    >>> gates.sum().backward()
    >>> logits.grad[1] > logits.grad[0]
    tensor(True)

    References: Maddison, Mnih, Teh (2017) and Jang, Gu, Poole (2017) for the relaxation.
    """
    return resolve_pathwise(estimator, tau, hard).gate(logits, mask=mask, generator=generator)
