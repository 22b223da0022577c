"""A categorical sample that is stored as an index, for look-ups and routers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import batched_with, check_table, in_eager_mode, is_autocast
from gapped.gradient import (
    Points,
    Product,
    apply_in_eager_mode,
    first_order,
    handle,
    is_differentiated,
    jacobian_product,
    transformable,
    versions,
    with_pull,
)
from gapped.kernels import backend
from gapped.kernels.sampling.fused import AVERAGED, Fused

if TYPE_CHECKING:
    from gapped.pathwise import Pathwise

Pull = Callable[..., Tensor]
"""``pull(logits, index, grad, at_index, *tensors)``: the gradient of the logits for one of the sample, which
is dense and may be overwritten, or, with `at_index`, given at the selected entries only."""


class NoTensor:
    """Something drawn by its index: where it is taken for a tensor, one line says what to take instead."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor | int | float):
            raise TypeError(self._advice())
        return self is other

    def __getattr__(self, name: str) -> Any:
        if name[0] != "_" and hasattr(Tensor, name):
            raise AttributeError(f"{name}: {self._advice()}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __matmul__(self, other: object) -> NoReturn:
        raise TypeError(self._advice())

    @classmethod
    def __torch_function__(cls, *arguments: Any) -> NoReturn:
        raise TypeError(cls._advice())

    @classmethod
    def _advice(cls) -> str:
        return f"gapped: a {cls.__name__} is no tensor; take select(table), or index, which has no gradient"


@dataclass(frozen=True, eq=False)
class Choice(NoTensor):
    """One category per row, by its index, with the gradient of an estimator.

    `gapped.choose(logits)` returns it. It stands for the one-hot sample, which is never written.
    `gapped.choose(logits, k=1)` returns `gapped.Choices`, which have `weights` and `log_prob` too.
    """

    _drawn: Tensor
    """The index, ``(*rows)``, in the dtype in which it was drawn."""
    _logits: Tensor
    _pull: Pull
    _tensors: tuple[Tensor | None, ...]
    """The tensors that the gradient depends on besides logits and index."""
    _versions: tuple[int, ...] = ()
    """Versions of logits and tensors when the choice was drawn, if some of them are the caller's own."""

    def __repr__(self) -> str:
        return f"Choice(index={self.index})"

    @property
    def index(self) -> Tensor:
        """The selected categories, int64, `(*rows)`.

        A row without categories has index `K`, one with a NaN or +inf `K + 1`.
        """
        # A copy: what the caller writes into it must not change what was drawn.
        return self._drawn.to(torch.int64, copy=True)

    def select(self, table: Tensor) -> Tensor:
        """The rows of `table` that the categories select, as an embedding look-up.

        - One table for all rows: `(K, *rest)` gives `table[index]`, `(*rows, *rest)`.
        - One table for each group, as in a product quantizer: for logits `(..., G, K)`, whose group axis
          comes just before the categories, a table `(G, K, *rest)` gives `(..., G, *rest)`.

        A table is read as one for each group if it has at least three axes, of which the first two are the
        last two of the logits, and as one for all rows otherwise. Where kernels drew the choice, the table's
        gradient is added up in any order, unless `torch.use_deterministic_algorithms(True)` is set.

        >>> import gapped
        >>> logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]], requires_grad=True)
        >>> choice = gapped.choose(logits, generator=torch.Generator().manual_seed(0))
        >>> choice.select(torch.tensor([10.0, 20.0]))
        tensor([20., 10.], grad_fn=<_SelectBackward>)
        >>> choice.select(torch.tensor([[[10.0], [20.0]], [[30.0], [40.0]]])).flatten()
        tensor([20., 30.], grad_fn=<ViewBackward0>)
        """
        is_grouped = check_table(table, self._logits.shape)
        self._check_versions()
        if not self._tensors:
            return _look_up(table, self._drawn, self._logits.shape[-1], is_grouped)
        inputs = (self._logits, table, self._drawn, is_grouped, self._pull, *self._tensors)
        if in_eager_mode():
            return apply_in_eager_mode(_Select, *inputs)  # type: ignore[no-any-return]
        return _TransformedSelect.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]

    def gate(self) -> Tensor:
        """Ones, `(*rows)`, in the dtype of the logits; zero in a row without categories.

        They are to be multiplied with the results of the branches that were picked. Those of the other
        branches count as zero.
        """
        self._check_versions()
        ones = _gate_of(self._logits, self._drawn)
        if not self._tensors:
            return ones
        return attach(ones, self._logits, self._drawn, self._pull, *self._tensors)

    def _check_versions(self) -> None:
        # Autograd checks these tensors from the first use of the choice on, but not before it.
        if self._versions and self._versions != versions((self._logits, *self._tensors)):
            raise RuntimeError(
                "gapped: the logits, temperatures or gaps of a choice were changed after it was drawn"
            )


def choose(
    estimator: Pathwise, logits: Tensor, dim: int, mask: Tensor | None, generator: torch.Generator | None
) -> Choice:
    """Draw one category per row: see `gapped.Pathwise.choose`."""
    estimator.check_choice()
    rows, fitted = estimator.prepare(logits, dim, mask, generator)
    kernel, wants_gradient = fitted.kernel(rows), is_differentiated(rows)
    rows = rows if wants_gradient else rows.detach()
    if kernel is not None:
        return _choose_by_kernel(rows, kernel, generator, wants_gradient)
    _, index, gradient = fitted.outcome(rows.detach(), generator, wants_gradient, dense=False)
    return with_points(rows, index, gradient)


def with_points(rows: Tensor, index: Tensor, gradient: Points | None) -> Choice:
    """A choice of the categories `index` whose gradient, if it has one, comes from points of the simplex."""
    if gradient is None:
        return Choice(index, rows, _pull_points, ())
    points, weights, product = gradient
    pull = _pull_points if product is None else partial(_pull_points, product=product)
    if isinstance(weights, Tensor):
        return Choice(index, handle(rows), pull, (points, weights))
    return Choice(index, handle(rows), partial(pull, number=weights), (points,))


def _choose_by_kernel(
    rows: Tensor, kernel: Fused, generator: torch.Generator | None, wants_gradient: bool
) -> Choice:
    from gapped.kernels.sampling import launch

    key = launch.key_of(rows, kernel, generator)
    logits = launch.readable(rows, kernel)
    _, index, stats = launch.forward(logits, key, kernel, dense=False)
    # A tuple: torch reads its own sizes slowly.
    index = index.view(tuple(rows.shape[:-1]))
    if not wants_gradient:
        return Choice(index, rows, _pull_points, ())
    tensors = (stats, key, *kernel.tensors)
    return Choice(index, logits, partial(_pull_kernel, kernel), tensors, versions((logits, *tensors)))


def _pull_kernel(
    kernel: Fused, logits: Tensor, index: Tensor, grad: Tensor, at_index: bool, *tensors: Any
) -> Tensor:
    from gapped.kernels.sampling import launch

    stats, key = tensors[:2]
    # Short rows are read as a whole before they are written, except where draws are averaged.
    is_read = kernel.mode not in AVERAGED and stats is None and logits.is_contiguous()
    out = grad if is_read and not at_index and grad.is_contiguous() else None
    return launch.backward(logits, index, stats, key, grad, kernel, at_index=at_index, out=out)


def _pull_points(
    logits: Tensor,
    index: Tensor,
    grad: Tensor,
    at_index: bool,
    points: Tensor,
    weights: Tensor | None = None,
    *,
    number: float | tuple[float, ...] = 1.0,
    product: Product | None = None,
) -> Tensor:
    dense = grad
    if at_index:
        where = simplex.place(index, points.shape[-1])
        dense = torch.zeros_like(points[0]).scatter(-1, where, grad.to(points.dtype).unsqueeze(-1))
    return jacobian_product(dense, points, number if weights is None else weights, grad, product)


def _only_sampled(values: Tensor, index: Tensor, categories: int) -> Tensor:
    """`values`, but zero where a row has no sample and NaN where it holds a NaN."""
    index = index.view((*index.shape, *(1 for _ in values.shape[index.dim() :])))
    values = torch.where(index == categories, 0.0, values)
    return torch.where(index > categories, torch.nan, values)


def _places(index: Tensor, categories: int, groups: int) -> Tensor:
    """The row that each index selects in the tables of all groups, one after the other."""
    where = index.clamp(max=categories - 1)
    return where if groups == 1 else where + categories * torch.arange(groups, device=index.device)


def _look_up(table: Tensor, index: Tensor, categories: int, is_grouped: bool) -> Tensor:
    table, index = table.flatten(0, 1) if is_grouped else table, index.long()
    where = _places(index, categories, table.shape[0] // categories)
    rows = table.index_select(0, where.reshape(-1))
    return _only_sampled(rows.view(index.shape + table.shape[1:]), index, categories)


def _at_sample(grad: Tensor, table: Tensor, categories: int, is_grouped: bool) -> Tensor:
    """The gradient at the one-hot sample ``(*rows, K)``, by that at the selected rows ``(*rows, *rest)``."""
    # A backward pass inside of autocast must not round the gradient to half precision.
    if is_autocast(grad.device):
        with torch.autocast(grad.device.type, enabled=False):
            return _at_sample(grad, table, categories, is_grouped)
    first = 1 + is_grouped
    rest = table.dim() - first
    if rest != 1:
        width = math.prod(table.shape[first:])
        table = table.reshape(*table.shape[:first], width)
        grad = grad.reshape(*grad.shape[: grad.dim() - rest], width)
    if not is_grouped:
        return grad @ table.mT
    rows = grad.shape[:-1]
    # Nothing to reshape, which takes the host a while, where rows have a single axis beside that of groups.
    if len(rows) != 2:
        grad = grad.reshape(math.prod(rows[:-1]), *grad.shape[-2:])
    by_group, tables = grad.transpose(0, 1), table.mT
    if in_eager_mode():
        # Written where it belongs: the transposed product would have to be copied.
        dense = grad.new_empty((*grad.shape[:-1], categories))
        torch.bmm(by_group, tables, out=dense.transpose(0, 1))
    else:
        dense = torch.bmm(by_group, tables).transpose(0, 1)
    return dense if len(rows) == 2 else dense.reshape(*rows, categories)


def _gate_of(logits: Tensor, index: Tensor) -> Tensor:
    ones = torch.ones(index.shape, dtype=logits.dtype, device=logits.device)
    return _only_sampled(ones, index, logits.shape[-1])


def attach(value: Tensor, logits: Tensor, index: Tensor, pull: Pull, *tensors: Tensor | None) -> Tensor:
    """`value` at the drawn categories, which is given away, as a function of the logits."""
    # Detached: compilers take no tensor twice.
    return with_pull(value, logits, partial(_pull_at_index, pull), logits.detach(), index, *tensors)


def _pull_at_index(
    pull: Pull, grad: Tensor, like: Tensor, logits: Tensor, index: Tensor, *tensors: Tensor | None
) -> Tensor:
    return pull(logits, index, grad, True, *tensors)


def _summed(grad: Tensor, table: Tensor, index: Tensor, categories: int, is_grouped: bool) -> Tensor:
    """The gradient of the tables, by that at the selected rows."""
    if backend.takes_table(table, index) and not torch.are_deterministic_algorithms_enabled():
        from gapped.kernels import tables

        return tables.gradient(grad, index, table, categories, is_grouped)
    index, entries = index.long(), math.prod(table.shape[: 1 + is_grouped])
    width = math.prod(table.shape[1 + is_grouped :])
    flat = _only_sampled(grad.reshape(*index.shape, width), index, categories)
    where = _places(index, categories, entries // categories)
    # In half precision a sum of many rows would not move any more.
    sums: Tensor = torch.ops.aten.embedding_dense_backward(simplex.computed(flat), where, entries, -1, False)
    return sums.view_as(table).to(table.dtype)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        table: Tensor,
        index: Tensor,
        is_grouped: bool,
        pull: Pull,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        _save(ctx, (logits, table, index, is_grouped, pull, *tensors))
        if not backend.takes_table(table, index):
            return _look_up(table, index, ctx.categories, is_grouped)
        from gapped.kernels import tables

        return tables.select(table, index, ctx.categories, is_grouped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *rest: Any) -> tuple[Tensor | None, ...]:
        logits, table, index, *tensors = ctx.saved_tensors
        nothing = (None,) * (len(ctx.needs_input_grad) - 2)
        if grad is None:
            return None, None, *nothing
        wants_logits, wants_table, *_ = ctx.needs_input_grad
        for_logits = for_table = None
        if wants_logits:
            for_logits = first_order(_for_logits, (logits, table), grad, ctx, logits, table, index, tensors)
        if wants_table:
            for_table = first_order(_summed, logits, grad, table, index, ctx.categories, ctx.is_grouped)
        return for_logits, for_table, *nothing


def _for_logits(
    grad: Tensor, ctx: Any, logits: Tensor, table: Tensor, index: Tensor, tensors: list[Tensor | None]
) -> Tensor:
    dense = _at_sample(grad, table, ctx.categories, ctx.is_grouped).to(logits.dtype)
    return cast(Tensor, ctx.pull(logits, index, dense, False, *tensors))


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    logits, table, index, is_grouped, pull, *tensors = inputs
    ctx.is_grouped, ctx.pull, ctx.categories = is_grouped, pull, logits.shape[-1]
    # Logits whose values the gradient does not depend on are a `handle`, kept for the graph alone.
    ctx.save_for_backward(logits, table, index, *tensors)


@transformable
class _TransformedSelect(_Select):
    """`_Select` in the form that compilers and function transforms understand."""

    @staticmethod
    def forward(  # type: ignore[override]
        logits: Tensor, table: Tensor, index: Tensor, is_grouped: bool, pull: Pull, *tensors: Tensor | None
    ) -> Tensor:
        return batched_with(_look_up(table, index, logits.shape[-1], is_grouped), *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, inputs)
