"""The law's functions in the graph: each derivative is again a function of the law."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.gradient import transformable
from gapped.subsets import conditional_bernoulli as law


def marginals_of(scores: Tensor, k: int) -> Tensor:
    """`conditional_bernoulli.marginals`, differentiable as often as wanted."""
    function = _Marginals if torch.compiler.is_compiling() else _DualMarginals
    return function.apply(scores, k)  # type: ignore[no-any-return, no-untyped-call]


def log_normaliser_of(scores: Tensor, k: int) -> Tensor:
    """`conditional_bernoulli.log_normaliser`, differentiable as often as wanted."""
    # Compilers do not take functions with a forward-mode derivative.
    function = _LogNormaliser if torch.compiler.is_compiling() else _DualLogNormaliser
    return function.apply(scores, k)  # type: ignore[no-any-return, no-untyped-call]


class _OfScores(torch.autograd.Function):
    """A function of scores and a size that keeps the scores for its derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        scores, ctx.k = inputs
        ctx.save_for_backward(scores)
        if not torch.compiler.is_compiling():
            ctx.save_for_forward(scores)


@transformable
class _Marginals(_OfScores):
    @staticmethod
    def forward(scores: Tensor, k: int) -> Tensor:
        return law.marginals(scores, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return law.covariance_product(grad, scores, ctx.k), None


class _DualMarginals(_Marginals):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *rest: Any) -> Tensor:
        (scores,) = ctx.saved_tensors
        return law.covariance_product(tangent, scores, ctx.k)


@transformable
class _LogNormaliser(_OfScores):
    @staticmethod
    def forward(scores: Tensor, k: int) -> Tensor:
        return law.log_normaliser(scores, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * marginals_of(scores, ctx.k), None


class _DualLogNormaliser(_LogNormaliser):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *rest: Any) -> Tensor:
        (scores,) = ctx.saved_tensors
        # The tangent of an element that does not exist may be anything.
        return (marginals_of(scores, ctx.k) * torch.where(scores == -torch.inf, 0.0, tangent)).sum(-1)
