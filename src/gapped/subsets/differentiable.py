"""The law's functions in the graph: each derivative is again a function of the law."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from gapped.checks import batched_with
from gapped.gradient import Weights, first_order, transformable
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


def with_marginals(
    value: Tensor, logits: Tensor, scores: Tensor, weight: Weights, k: int, backend: str
) -> Tensor:
    """Return `value` as a function of `logits` whose gradient is that of the marginals at `scores`.

    The gradient is the covariance matrix at `scores` times the incoming gradient, times `weight`. It cannot
    be differentiated again. Only `scores` and `weight` are kept for the backward pass.
    """
    return _WithMarginals.apply(logits, value, scores, weight, k, backend)[0]  # type: ignore[no-any-return, no-untyped-call]


class _OfScores(torch.autograd.Function):
    """A function of scores and a size that keeps the scores for its derivatives."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        scores, ctx.k = inputs
        ctx.save_for_backward(scores)


class _Dual(_OfScores):
    """One that has a forward-mode derivative as well."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        _OfScores.setup_context(ctx, inputs, output)
        ctx.save_for_forward(inputs[0])


@transformable
class _Marginals(_OfScores):
    @staticmethod
    def forward(scores: Tensor, k: int) -> Tensor:
        return law.marginals(scores, k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        return law.covariance_product(grad, scores, ctx.k), None


class _DualMarginals(_Dual, _Marginals):
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


class _DualLogNormaliser(_Dual, _LogNormaliser):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *rest: Any) -> Tensor:
        (scores,) = ctx.saved_tensors
        # The tangent of an element that does not exist may be anything.
        return (marginals_of(scores, ctx.k) * torch.where(scores == -torch.inf, 0.0, tangent)).sum(-1)


@transformable
class _WithMarginals(torch.autograd.Function):
    @staticmethod
    def forward(
        logits: Tensor, value: Tensor, scores: Tensor, weight: Weights, k: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        # An output without entries, saved for the backward pass: what depends on it depends on the logits.
        return batched_with(value, scores, weight).clone(), logits.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, _, scores, weight, ctx.k, ctx.backend = inputs
        ctx.number = None if isinstance(weight, Tensor) else weight
        ctx.save_for_backward(output[1], scores, *([weight] if ctx.number is None else []))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor, None, None, None, None, None]:
        anchor, scores, *tensors = ctx.saved_tensors
        weight = tensors[0] if tensors else ctx.number

        def product(grad: Tensor) -> Tensor:
            product = law.covariance_product(grad, scores, ctx.k, backend=ctx.backend)
            return cast(Tensor, (product if ctx.number == 1 else product * weight).to(anchor.dtype))

        return first_order(product, anchor, grad), None, None, None, None, None
