"""A sample known by its index alone, for look-ups and routing, where most of a one-hot vector is idle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapped import simplex
from gapped.errors import reject
from gapped.kernels import launch
from gapped.once import once
from gapped.pathwise.carry import jacobian_product

if TYPE_CHECKING:
    from gapped.pathwise.base import Points

__all__ = ["Choice", "fused_choice", "plain_choice"]


@dataclass(frozen=True)
class Choice:
    r"""One category per row, and ways to use it that send the estimator's gradient to the logits.

    With the one-hot sample :math:`D` that is never written,

    - `select`: the rows :math:`D V` of a table :math:`V`, as an embedding look-up;
    - `gate`: the entry :math:`D_i = 1` of the chosen category itself, to be multiplied with what a router's
      chosen branch returns. What the other branches would have returned counts as zero.
    """

    index: Tensor
    """The chosen categories, int64, ``(*rows)``. A row without categories has index `K`, one with a NaN
    or +inf `K + 1`."""
    _logits: Tensor = field(repr=False)
    _pull: Callable[[Tensor, Tensor, bool], Tensor] = field(repr=False)
    """The gradient of the logits for one of the sample, dense or at the chosen entries only."""

    def select(self, table: Tensor) -> Tensor:
        """``table[index]`` for a table of shape ``(K, *rest)``: ``(*rows, *rest)``.

        >>> import gapped
        >>> logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]], requires_grad=True)
        >>> g = torch.Generator().manual_seed(0)
        >>> gapped.gst_index(logits, generator=g).select(torch.tensor([10.0, 20.0]))
        tensor([20., 10.], grad_fn=<_SelectBackward>)
        """
        categories = self._logits.shape[-1]
        if not isinstance(table, Tensor) or table.dim() == 0 or table.shape[0] != categories:
            came = (
                f"shape {tuple(table.shape)}" if isinstance(table, Tensor) else f"type {type(table).__name__}"
            )
            raise reject(
                "table", f"an object of {came}", f"a tensor with {categories} rows, one per category"
            )
        if not table.is_floating_point():
            accepted = "a floating-point tensor; for others take table[choice.index]"
            raise reject("table", f"a tensor of {table.dtype}", accepted)
        return _Select.apply(self._logits, table, self)  # type: ignore[no-any-return, no-untyped-call]

    def gate(self) -> Tensor:
        """Ones, ``(*rows)``, in the dtype of the logits; zero in a row without categories."""
        return _Gate.apply(self._logits, self)  # type: ignore[no-any-return, no-untyped-call]

    def _only_sampled(self, values: Tensor) -> Tensor:
        """`values`, but zero where a row has no sample and NaN where it holds a NaN."""
        categories = self._logits.shape[-1]
        index = self.index.view((*self.index.shape, *(1 for _ in values.shape[self.index.dim() :])))
        values = torch.where(index == categories, 0.0, values)
        return torch.where(index > categories, torch.nan, values)


def fused_choice(rows: Tensor, kernel: launch.Fused, key: Tensor) -> Choice:
    """A choice drawn by the kernels."""
    _, index, stats = launch.forward(rows.detach(), key, kernel, dense=False)
    version = rows._version if rows.requires_grad else None

    def pull(logits: Tensor, grad: Tensor, at_index: bool) -> Tensor:
        # What was saved when the choice was used, autograd looks after; the logits are older than that.
        if rows._version != version:
            raise RuntimeError("gapped: the logits of a choice were changed in place after it was drawn")
        return launch.backward(logits, index, stats, key, grad, kernel, at_index=at_index)

    return Choice(index.view(rows.shape[:-1]).long(), rows, pull)


def plain_choice(rows: Tensor, index: Tensor, points: Callable[[], Points]) -> Choice:
    """A choice drawn by torch; the surrogate's points are computed when a gradient is."""

    def pull(logits: Tensor, grad: Tensor, at_index: bool) -> Tensor:
        found, weights = points()
        grad = grad.to(found.dtype)
        if at_index:
            where = simplex.place(index, logits.shape[-1])
            grad = torch.zeros_like(found[0]).scatter(-1, where, grad.unsqueeze(-1))
        return jacobian_product(grad, found, weights).to(logits.dtype)

    return Choice(index, rows, pull)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, table: Tensor, choice: Choice) -> Tensor:
        ctx.choice = choice
        ctx.save_for_backward(logits, table)
        return choice._only_sampled(table[choice.index.clamp(max=table.shape[0] - 1)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        logits, table = ctx.saved_tensors
        choice: Choice = ctx.choice
        categories, width = table.shape[0], math.prod(table.shape[1:])

        def for_logits(grad: Tensor) -> Tensor:
            flat = grad.reshape(*choice.index.shape, width)
            return choice._pull(logits, (flat @ table.reshape(categories, width).mT).to(logits.dtype), False)

        def for_table(grad: Tensor) -> Tensor:
            flat = choice._only_sampled(grad.reshape(*choice.index.shape, width))
            where = choice.index.clamp(max=categories - 1)
            summed: Tensor = torch.ops.aten.embedding_dense_backward(flat, where, categories, -1, False)
            return summed.view_as(table)

        needed = zip((for_logits, for_table), ctx.needs_input_grad, strict=False)
        first, second = (once(product, logits, grad) if asked else None for product, asked in needed)
        return first, second, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, choice: Choice) -> Tensor:
        ctx.choice = choice
        ctx.save_for_backward(logits)
        return choice._only_sampled(torch.ones(choice.index.shape, dtype=logits.dtype, device=logits.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        choice: Choice = ctx.choice
        return once(lambda grad: choice._pull(logits, grad, True), logits, grad), None
