"""A soft sample times a table, as `Pathwise.mix` returns it, without ever holding the sample.

Rows are cut into blocks. The soft sample of a block is drawn, multiplied with the table and dropped. The
backward pass draws it again: the noise of a block is a function of its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapped import gradient, simplex
from gapped.checks import check_table, in_eager_mode, is_autocast
from gapped.errors import reject
from gapped.gradient import connect, one_by_one
from gapped.kernels import backend
from gapped.kernels.sampling.fused import Fused
from gapped.linear import chunk_sizes
from gapped.linear.linear_choices import uncompiled
from gapped.linear.parts import seeded
from gapped.linear.row_entries import row_entries

# A block's soft sample, its gradient, and both in the dtype of the table.
_TENSORS = 4
# In torch so many blocks are enough: what a block needs is then little beside the gradient of the logits.
_BLOCKS = 32


@uncompiled
def mix(
    estimator: Any,
    is_fused: bool,
    logits: Tensor,
    table: Tensor,
    mask: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """The soft samples of ``(*rows, K)`` logits times a table, ``(*rows, *rest)``.

    The `estimator` is a `gapped.Pathwise` that returns soft samples, and `is_fused` says whether kernels draw
    them. The logits, and the mask that broadcasts to their shape, are known to be valid.
    """
    is_grouped = check_table(table, logits.shape)
    if table.device != logits.device:
        raise reject("table", f"a tensor on {table.device}", f"one on {logits.device}, as the logits")
    shape, rest = logits.shape[:-1], table.shape[2 if is_grouped else 1 :]
    groups, categories = shape[-1] if is_grouped else 1, logits.shape[-1]
    tables = table.reshape(groups, categories, rest.numel()).to(_dtype_of_product(logits, table))
    if not in_eager_mode() or logits.is_meta:
        return _dense(estimator.sample(logits, mask=mask, generator=generator), tables).view((*shape, *rest))
    logits = logits if shape else logits.unsqueeze(0)
    step = _rows_of_a_block(estimator, is_fused, logits, groups)
    keys = backend.draw_key(logits, generator, -(-logits.shape[:-1].numel() // step))
    learned = estimator.tau if estimator.has_learned_tau() else None
    blocks = _Blocks(estimator, is_fused, logits.shape[:-1], step)
    result, _ = _Mix.apply(blocks, keys, logits, tables, learned, mask)  # type: ignore[no-untyped-call]
    return result.view((*shape, *rest))  # type: ignore[no-any-return]


def _dtype_of_product(logits: Tensor, table: Tensor) -> torch.dtype:
    """The dtype of the table, or what autocast says for a product."""
    if is_autocast(logits.device) and torch.float64 not in (logits.dtype, table.dtype):
        return torch.get_autocast_dtype(logits.device.type)
    return table.dtype


def _dense(sample: Tensor, tables: Tensor) -> Tensor:
    """A sample ``(*rows, K)`` times the table or the tables ``(G, K, width)``: ``(*rows, width)``."""
    sample = sample.to(tables.dtype)
    if len(tables) == 1:
        return sample @ tables[0]
    return (sample.unsqueeze(-2) @ tables).squeeze(-2)


def _rows_of_a_block(estimator: Any, is_fused: bool, logits: Tensor, groups: int) -> int:
    """How many rows are computed at a time: a multiple of the groups, at least 1."""
    rows, categories = logits.shape[:-1].numel(), logits.shape[-1]
    if is_fused:
        most = chunk_sizes.MEMORY // (_TENSORS * logits.element_size() * categories)
        step = chunk_sizes.equal_rows(rows, most)
    elif estimator.is_divisible():
        most = chunk_sizes.rows_of_a_chunk(estimator, categories, logits.device, is_fused)
        fewest = max(rows // _BLOCKS, chunk_sizes.FEWEST_ROWS, gradient.BLOCK // categories)
        # Gumbel-Rao in torch has a point for each draw.
        step = min(most, fewest // getattr(estimator, "samples", 1))
    else:
        step = rows
    return max(step // groups, 1) * groups


class _Block(NamedTuple):
    """Some rows, and what their soft sample is drawn from."""

    rows: slice
    logits: Tensor
    """``(n, K)``, with -inf where a category does not exist."""
    estimator: Any
    """The estimator with the temperatures of these rows."""
    key: Tensor
    kernel: Fused | None

    def sample(self) -> Tensor:
        """The soft sample."""
        if self.kernel is not None:
            from gapped.kernels.sampling import launch

            return launch.forward(self.logits, self.key, self.kernel).value
        value: Tensor = self.estimator.outcome(self.logits, seeded(self.key), False).value
        return value

    def pull(self, grad: Tensor, out: Tensor, for_tau: Tensor | None, dense: bool) -> Tensor:
        """Write the gradients of logits and temperatures, by that of the soft sample, which is returned.

        A kernel returns it if `dense`, and else no entries.
        """
        if self.kernel is not None:
            from gapped.kernels.sampling import launch

            drawn = launch.forward(self.logits, self.key, self.kernel, dense=dense)
            _, index, stats = drawn
            launch.backward(self.logits, index, stats, self.key, grad, self.kernel, out=out)
            return drawn.value
        leaf, estimator = self.logits.detach().requires_grad_(), self.estimator
        leaves = [leaf]
        if for_tau is not None:
            estimator = replace(estimator, tau=estimator.tau.detach().requires_grad_())
            leaves.append(estimator.tau)
        outcome = estimator.outcome(self.logits, seeded(self.key), True)
        with torch.enable_grad():
            sample: Tensor = estimator.attach(leaf, outcome)
        for_logits, *others = torch.autograd.grad(sample, leaves, grad)
        out.copy_(for_logits)
        if for_tau is not None:
            for_tau[self.rows] = others[0]
        return sample.detach()


@dataclass(frozen=True)
class _Blocks:
    """How rows are cut into blocks."""

    estimator: Any
    is_fused: bool
    shape: torch.Size
    """That of all rows."""
    step: int
    """How many rows share a key."""

    @property
    def levels(self) -> dict[str, Tensor]:
        """The estimator's options that are tensors."""
        options = {name: getattr(self.estimator, name) for name in self.estimator.levels}
        return {name: level.detach() for name, level in options.items() if isinstance(level, Tensor)}

    def of(self, keys: Tensor, logits: Tensor, mask: Tensor | None) -> Iterator[_Block]:
        """The blocks of these logits, one after the other."""
        levels = self.levels
        for number, rows in enumerate(chunk_sizes.slices(self.shape.numel(), self.step)):
            own = row_entries(logits, self.shape, rows, 1)
            if mask is not None:
                own = own.masked_fill(~row_entries(mask, self.shape, rows, 1), -torch.inf)
            estimator = self.estimator
            if levels:
                entries = {name: row_entries(level, self.shape, rows) for name, level in levels.items()}
                estimator = replace(estimator, **entries)
            kernel = estimator.kernel(own) if self.is_fused else None
            yield _Block(rows, own, estimator, keys[number : number + 1], kernel)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: _Blocks,
        keys: Tensor,
        logits: Tensor,
        tables: Tensor,
        tau: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        groups, _, width = tables.shape
        result = tables.new_empty(blocks.shape.numel(), width)
        with torch.autocast(logits.device.type, enabled=False):
            for block in blocks.of(keys, logits, mask):
                torch.bmm(
                    _by_group(block.sample().to(tables.dtype), groups),
                    tables,
                    out=_by_group(result[block.rows], groups),
                )
        ctx.blocks = blocks
        # With an output without entries: what depends on it depends on the logits. And with temperatures and
        # gaps, so that autograd notices if they are changed before the backward pass.
        anchor = logits.new_empty(0)
        ctx.save_for_backward(anchor, keys, logits, tables, tau, mask, *blocks.levels.values())
        return result, anchor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        anchor, *tensors = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            found = one_by_one(
                lambda own: _gradients(ctx.blocks, ctx.needs_input_grad[2:5], own, *tensors[:5]), grad
            )
        with_graph = (None if each is None else connect(each, anchor, grad) for each in found)
        return None, None, *with_graph, None


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """Rows ``(n, width)``, group after group in each of them, as ``(groups, n / groups, width)``."""
    return rows.view(len(rows) // groups, groups, rows.shape[-1]).transpose(0, 1)


def _gradients(
    blocks: _Blocks,
    wanted: tuple[bool, ...],
    grad: Tensor,
    keys: Tensor,
    logits: Tensor,
    tables: Tensor,
    tau: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of logits, tables and temperatures."""
    groups, categories, _ = tables.shape
    rows, grad = blocks.shape.numel(), grad.contiguous()
    wants_logits, wants_tables, wants_tau = wanted
    for_logits = logits.new_empty(rows, categories) if wants_logits or wants_tau else None
    for_tau = simplex.computed(logits[:0]).new_empty(rows) if wants_tau else None
    # In half precision the sum is rounded once.
    dtype = tables.dtype if rows <= blocks.step else simplex.computed(tables[:0]).dtype
    for_tables = torch.zeros_like(tables, dtype=dtype) if wants_tables else None
    for block in blocks.of(keys, logits, mask):
        own = _by_group(grad[block.rows], groups)
        if for_logits is None:
            sample = block.sample()
        else:
            dense = tables.new_empty(len(block.logits), categories)
            torch.bmm(own, tables.mT, out=_by_group(dense, groups))
            sample = block.pull(dense.to(logits.dtype), for_logits[block.rows], for_tau, wants_tables)
        if for_tables is not None:
            _add_product(for_tables, _by_group(sample.to(tables.dtype), groups).mT, own)
    if for_tau is not None and tau is not None:
        for_tau = for_tau.view(blocks.shape).sum_to_size(tau.shape).to(tau.dtype)
    return (
        for_logits.view(logits.shape) if for_logits is not None and wants_logits else None,
        None if for_tables is None else for_tables.to(tables.dtype),
        for_tau,
    )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))
