"""A value forward, an estimated gradient backward.

Such a gradient is an estimator's choice: it has a value, but no derivative. Each function below returns its
`value` bit for bit and refuses a second derivative with a message that says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from gapped.checks import batched_with, has_tangent, in_eager_mode, is_known_finite, requires_grad
from gapped.errors import TWICE
from gapped.simplex import blocks, needs_blocks

Weights = float | tuple[float, ...] | Tensor
"""Weights of points: one number for all, one for each, or a tensor that broadcasts against `(*rows, K)`."""
Product = Callable[[Tensor, Tensor, Weights], Tensor]
"""`product(grad, points, weights)`: the gradient of the logits, linear in `grad`, row by row."""

Pull = Callable[..., Tensor]
"""`pull(grad, like, *tensors)`: the gradient of the logits, in the dtype of `like`."""

_R = TypeVar("_R")


class Points(NamedTuple):
    """Where a sample's gradient comes from: see `with_points`."""

    points: Tensor
    """Points of the simplex, `(m, *rows, K)`. A category that does not exist has -0.0, one that is merely too
    unlikely for a float 0.0: `jacobian_product` ignores the incoming gradient of the former alone."""
    weights: Weights
    """Their weights."""
    product: Product | None = None
    r"""What is done with them, if it is not :math:`\sum_m w_m J(q_m) g`."""


def is_differentiated(logits: Tensor) -> bool:
    """Whether a derivative with respect to these logits, or this temperature, is wanted.

    A forward-mode derivative is refused. There is none, and without an error it would seem to be zero.
    """
    if has_tangent(logits):
        raise NotImplementedError("gapped: an estimated gradient has no forward-mode derivative (jvp)")
    return torch.is_grad_enabled() and requires_grad(logits)


def versions(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    """How often each tensor was changed in place; those made in inference mode do not count it."""
    return tuple(0 if each.is_inference() else each._version for each in tensors if each is not None)


def first_order(
    product: Callable[..., _R], anchor: Tensor | tuple[Tensor, ...], grad: Tensor, *rest: Any
) -> _R:
    """The gradients `product(grad, *rest)`, a tensor or a tuple of tensors and None, of first order only.

    They stay connected to the inputs that they depend on, through these or an `anchor` that depends on them,
    and to the incoming gradient `grad`. So a second derivative is an error; else it would silently be zero.
    """
    if not torch.is_grad_enabled():
        return _one_by_one(product, grad, *rest)
    with torch.no_grad():
        gradients: Any = _one_by_one(product, grad, *rest)
    anchors = anchor if isinstance(anchor, tuple) else (anchor,)

    def connect(gradient: Tensor | None) -> Any:
        return None if gradient is None else _FirstOrder.apply(gradient, grad, *anchors)  # type: ignore[no-untyped-call]

    return tuple(map(connect, gradients)) if isinstance(gradients, tuple) else connect(gradients)  # type: ignore[return-value]


def _one_by_one(product: Callable[..., _R], grad: Tensor, *rest: Any) -> _R:
    """`product(grad, *rest)`, called for each gradient where autograd carries a batch of them.

    `torch.autograd.grad(..., is_grads_batched=True)` does, which allows neither kernels nor writing in place.
    """
    if torch.compiler.is_compiling() or not functorch.is_legacy_batchedtensor(grad):
        return product(grad, *rest)
    torch._C._vmapmode_increment_nesting()
    level = torch._C._vmapmode_decrement_nesting()
    grads = torch._remove_batch_dim(grad, level, 1, 0)
    # Out of the batch: inside of it nothing random may be drawn again.
    torch._C._vmapmode_decrement_nesting()
    try:
        products: Any = [product(each, *rest) for each in grads]
    finally:
        torch._C._vmapmode_increment_nesting()

    def batch(entries: Any) -> Tensor | None:
        if entries[0] is None:
            return None
        return torch._add_batch_dim(torch.stack(entries), 0, level)

    if isinstance(products[0], tuple):
        return tuple(batch(entries) for entries in zip(*products, strict=True))  # type: ignore[return-value]
    return batch(products)  # type: ignore[return-value]


_F = TypeVar("_F", bound=type[torch.autograd.Function])


def transformable(function: _F) -> _F:
    """Give a Function with `setup_context` rules for function transforms, and keep its signature ready.

    torch asks for the signature of `forward` at every call, which takes 60 µs instead of 2.
    """
    function.generate_vmap_rule = True
    function.forward.__signature__ = inspect.signature(function.forward)  # type: ignore[attr-defined]
    return function


def apply_in_eager_mode(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`, which takes a third longer to ask once more whether a transform is active."""
    return super(torch.autograd.Function, function).apply(*inputs)  # type: ignore[misc]


@transformable
class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, grad: Tensor, *anchors: Tensor) -> Tensor:
        # A fresh view: autograd forbids returning an input as it is.
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        raise RuntimeError(TWICE)


def with_points(
    value: Tensor, logits: Tensor, points: Tensor, weights: Weights, product: Product | None = None
) -> Tensor:
    r"""Return `value`, bit for bit, as a function of `logits` with gradient :math:`\sum_m w_m J(q_m) g`.

    A `product` of an estimator's own takes the place of that sum.

    Shapes: `value` and `logits` `(*rows, K)`, `points` `(m, *rows, K)`. `value` must be the caller's to
    give away: outside of compilers and function transforms, it is what is returned. For the backward pass
    `points` and `weights` are kept and nothing else, so sample and logits may be changed in place.
    """
    if isinstance(weights, Tensor):
        return with_pull(value, logits, partial(_pull_points, product, None), points, weights)
    return with_pull(value, logits, partial(_pull_points, product, weights), points)


def with_pull(value: Tensor, logits: Tensor, pull: Pull, *tensors: Tensor | None) -> Tensor:
    """Return `value`, bit for bit, as a function of `logits` with the gradient `pull(grad, like, *tensors)`.

    `value` must be the caller's to give away, as in `with_points`. `like` has the dtype of `logits`, and no
    entries. The `tensors`, which nobody else may change, are kept for the backward pass.
    """
    # A tensor of a subclass is a view, which autograd does not let us give away.
    if in_eager_mode() and not value._is_view():
        return apply_in_eager_mode(_WithPull, logits, value, pull, *tensors)[0]  # type: ignore[no-any-return]
    return _TransformedWithPull.apply(logits, value, pull, *tensors)[0]  # type: ignore[no-any-return, no-untyped-call]


def _pull_points(
    product: Product | None,
    numbers: Weights | None,
    grad: Tensor,
    like: Tensor,
    points: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    either = weights if numbers is None else numbers
    assert either is not None
    return jacobian_product(grad, points, either, like, product)


def jacobian_product(
    grad: Tensor, points: Tensor, weights: Weights, like: Tensor, product: Product | None = None
) -> Tensor:
    r"""The sum :math:`\sum_m w_m J(q_m) g`, or the given `product`, in the dtype of `like`.

    It is computed in the dtype of `points`. The incoming gradient may be anything at categories that do not
    exist, NaN and infinity too.
    """
    if not needs_blocks(points):
        return pull_points(_existing(grad.to(points.dtype), points), points, weights, product).to(like.dtype)
    product = product or _product
    categories = points.shape[-1]
    result = torch.empty(grad.shape, dtype=like.dtype, device=points.device)
    out, grad = result.view(-1, categories), grad.reshape(-1, categories)
    points = points.reshape(len(points), -1, categories)
    if isinstance(weights, Tensor):
        weights = weights.expand(*result.shape[:-1], 1).reshape(-1, 1)
    for rows in blocks(len(out), points.numel() // max(len(out), 1)):
        these = weights[rows] if isinstance(weights, Tensor) else weights
        own = points[:, rows]
        out[rows] = product(_existing(grad[rows].to(points.dtype), own), own, these)
    return result


def pull_points(grad: Tensor, points: Tensor, weights: Weights, product: Product | None = None) -> Tensor:
    """`jacobian_product` where every category exists, for an incoming gradient of the points' dtype."""
    return (product or _product)(grad, points, weights)


def _existing(grad: Tensor, points: Tensor) -> Tensor:
    """The incoming gradient, 0 at categories that do not exist: 0 times NaN would be NaN."""
    if is_known_finite(grad):
        return grad
    first = points[0]
    return torch.where((first == 0) & first.signbit(), 0.0, grad)


def less_half_of_last(grad: Tensor, points: Tensor, weights: Weights) -> Tensor:
    """The points with their weights, and the last one, whatever these are, with -1/2: a second order."""
    return _product(grad, points[:-1], weights) + _weighted(grad, points[-1], -0.5)


def pair_slopes(points: Tensor, weights: Weights, product: Product | None = None) -> Tensor:
    r"""The slopes :math:`\sum_m w_m q_m (1 - q_m)` of the first entries of pairs, in their own logits.

    Shapes: `points` `(m, *rows, 2)`; the result `(*rows)`. It is the entry of :math:`\sum_m w_m J(q_m)`
    that counts where nothing depends on the second entries, and their logits are fixed. A `product` of an
    estimator's own has such an entry, too.
    """
    if product is not None:
        first = (torch.arange(2, device=points.device) == 0).to(points.dtype).expand(points.shape[1:])
        # The entries of a gradient sum to 0, and the second one is computed without a difference from 1.
        return -product(first, points, weights)[..., 1]
    products = points[..., 0] * points[..., 1]
    if isinstance(weights, tuple):
        first, *others = (each * weight for each, weight in zip(products, weights, strict=True))
        total: Tensor = sum(others, first)
        return total
    return products.sum(0) * (weights.squeeze(-1) if isinstance(weights, Tensor) else weights)


def _product(grad: Tensor, points: Tensor, weights: Weights) -> Tensor:
    if isinstance(weights, tuple):
        first, *others = (
            _weighted(grad, point, weight) for point, weight in zip(points, weights, strict=True)
        )
        return sum(others, first)
    if points.shape[0] == 1:
        return _weighted(grad, points[0], weights)
    # Point by point, so that a point at a corner of the simplex adds exactly nothing.
    return (points * weights * (grad - (points * grad).sum(-1, keepdim=True))).sum(0)


def _weighted(grad: Tensor, point: Tensor, weight: float | Tensor) -> Tensor:
    # J(q) g = q (g - <q, g>) is what torch's softmax does in its own backward, in one pass.
    product: Tensor = torch._softmax_backward_data(grad, point, -1, grad.dtype)
    if isinstance(weight, Tensor):
        return product * weight
    return product if weight == 1 else product.mul_(weight)


class _WithPull(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, value: Tensor, pull: Pull, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(value)
        ctx.set_materialize_grads(False)
        # An output without entries, saved for the backward pass: what depends on it depends on the logits.
        anchor = logits.new_empty(0)
        ctx.pull = pull
        ctx.save_for_backward(anchor, *tensors)
        return value, anchor

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
        anchor, *tensors = ctx.saved_tensors
        gradient = None if grad is None else first_order(ctx.pull, anchor, grad, anchor, *tensors)
        return gradient, None, None, *(None for _ in tensors)


@transformable
class _TransformedWithPull(_WithPull):
    """`_WithPull` in the form that compilers and function transforms understand."""

    @staticmethod
    def forward(  # type: ignore[override]
        logits: Tensor, value: Tensor, pull: Pull, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # A copy: autograd forbids returning an input as it is, and changing a view of one in place.
        return batched_with(value, *tensors).clone(), logits.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.pull = inputs[2]
        ctx.save_for_backward(output[1], *inputs[3:])


def with_gradient(value: Tensor, logits: Tensor, gradient: Tensor, keep: bool = False) -> Tensor:
    """Return `value`, bit for bit, as a function of `logits` whose derivative is `gradient`.

    `value` has the shape `batch`; `logits` and `gradient` are `(*batch, *variables, K)` and each example
    depends on its own logits alone. Whatever `value` depends on besides keeps its own gradient. `keep=True`
    hides the gradient from saved-tensor hooks, such as activation checkpointing.
    """
    hidden = (gradient,) if keep and in_eager_mode() else gradient
    value = batched_with(value, gradient)
    return _WithGradient.apply(value, logits, hidden)[0]  # type: ignore[no-any-return, no-untyped-call]


def _per_example(grad: Tensor, gradient: Tensor) -> Tensor:
    grad = grad.to(gradient.dtype)
    return grad.reshape(grad.shape + (1,) * (gradient.dim() - grad.dim())) * gradient


@transformable
class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor, logits: Tensor, gradient: Tensor | tuple[Tensor]) -> tuple[Tensor, Tensor]:
        # A copy, and an output without entries for the backward pass: both inputs may be changed in place.
        return value.clone(), logits.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        gradient = inputs[2]
        ctx.hidden = gradient if isinstance(gradient, tuple) else None
        ctx.save_for_backward(output[1], *(() if ctx.hidden else (gradient,)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor, None]:
        anchor, *saved = ctx.saved_tensors
        (gradient,) = ctx.hidden or saved
        return grad, first_order(_per_example, anchor, grad, gradient), None


def handle(logits: Tensor) -> Tensor:
    """A tensor without entries of its own in the place of `logits`: its gradient is theirs.

    Later in-place writes to the logits do not affect it.
    """
    return _Handle.apply(logits)  # type: ignore[no-any-return, no-untyped-call]


@transformable
class _Handle(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor) -> Tensor:
        return logits.new_empty(()).expand(logits.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
