"""A soft sample times a table, as `Pathwise.mix` returns it, without ever holding the sample.

The rows are cut into blocks. The soft sample of a block is drawn, multiplied with the table and dropped, as
in activation checkpointing: the backward pass draws it again from the seed of its block. The gradients of
all blocks are written into one tensor, which `torch.utils.checkpoint` would have to concatenate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_logits, check_mask, check_table, in_eager_mode, is_autocast, without_autocast
from gapped.errors import reject
from gapped.gradient import first_order
from gapped.pathwise import Pathwise
from gapped.simplex import row_entries, slices
from gapped.vocabulary import uncompiled
from gapped.vocabulary.head import FEWEST_ROWS, rows_of_a_chunk

# In torch so many blocks are enough.
BLOCKS = 32


@uncompiled
def mix(
    estimator: Pathwise,
    logits: Tensor,
    table: Tensor,
    dim: int,
    mask: Tensor | None,
    generator: torch.Generator | None,
) -> Tensor:
    """The soft samples of the rows of logits times a table: see `gapped.Pathwise.mix`."""
    if not estimator.has_surrogate:
        accepted = "one with soft samples; for hard ones there is choose(logits).select(table)"
        raise reject("estimator", type(estimator).__name__, accepted)
    check_logits(logits, dim)
    check_mask(mask, logits, dim)
    if dim not in (-1, logits.dim() - 1):
        mask = None if mask is None else mask.movedim(dim, -1)
    soft = replace(estimator, hard=False) if estimator.hard else estimator
    logits, soft = soft.prepare(logits, dim, None, generator)
    has_kernel = soft.kernel(logits) is not None
    is_grouped = check_table(table, logits.shape)
    if table.device != logits.device:
        raise reject("table", f"a tensor on {table.device}", f"one on {logits.device}, as the logits")
    shape, rest, categories = logits.shape[:-1], table.shape[1 + is_grouped :], logits.shape[-1]
    rows, groups = shape.numel(), shape[-1] if is_grouped else 1
    tables = table.reshape(groups, categories, rest.numel()).to(_dtype_of_product(logits, table))
    if not in_eager_mode() or logits.is_meta:
        sample = soft.sample(logits, mask=mask, generator=generator)
        result = _by_group(sample.to(tables.dtype).reshape(rows, categories), groups) @ tables
        return result.transpose(0, 1).reshape((*shape, *rest))
    step = max(_rows_of_a_block(soft, rows, logits, has_kernel) // groups, 1) * groups
    seeds = simplex.draw_key(logits, generator, -(-rows // step)).tolist()
    tau = soft.tau if soft.has_learned_tau() else None
    logits = logits if shape else logits.unsqueeze(0)
    result, _ = _Mix.apply(partial(_samples, soft, seeds, step), logits, tables, tau, mask, *soft.tensors)  # type: ignore[no-untyped-call]
    return result.view((*shape, *rest))  # type: ignore[no-any-return]


def _rows_of_a_block(estimator: Pathwise, rows: int, logits: Tensor, has_kernel: bool) -> int:
    """How many rows share a seed. So a change of this rule changes what a seed draws."""
    categories = logits.shape[-1]
    most = rows_of_a_chunk(estimator, categories, logits.device, has_kernel)
    if has_kernel:
        return most
    if not estimator.is_rowwise():
        return rows
    # A block needs little memory beside the gradient of the logits. Gumbel-Rao has a point for each draw.
    fewest = max(rows // BLOCKS, FEWEST_ROWS, simplex.BLOCK // categories)
    return min(most, fewest // getattr(estimator, "samples", 1))


def _dtype_of_product(logits: Tensor, table: Tensor) -> torch.dtype:
    """The dtype of the table, or what autocast says for a product."""
    if is_autocast(logits.device) and torch.float64 not in (logits.dtype, table.dtype):
        return torch.get_autocast_dtype(logits.device.type)
    return table.dtype


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """Rows ``(n, width)``, group after group in each of them, as ``(groups, n / groups, width)``."""
    return rows.view(len(rows) // groups, groups, rows.shape[-1]).transpose(0, 1)


def _samples(
    estimator: Pathwise,
    seeds: list[int],
    step: int,
    logits: Tensor,
    mask: Tensor | None,
    tau: Tensor | None,
    with_graph: bool,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The rows of each block, their logits, detached, and their soft sample, in the graph of these if wanted.

    A temperature `tau` takes the place of the estimator's own.
    """
    estimator, shape = estimator if tau is None else replace(estimator, tau=tau), logits.shape[:-1]
    for seed, rows in zip(seeds, slices(shape.numel(), step), strict=True):
        leaf = row_entries(logits, shape, rows, 1).detach().requires_grad_(with_graph)
        generator = torch.Generator(logits.device).manual_seed(seed)
        with torch.set_grad_enabled(with_graph):
            own = estimator.of_rows(shape, rows)
            masked = simplex.masked(leaf, None if mask is None else row_entries(mask, shape, rows, 1))
            kernel = own.kernel(masked)
            if kernel is not None:
                from gapped.kernels.sampling import launch

                sample = launch.sample(masked, kernel, generator)
            else:
                sample = own.sample_in_torch(masked, generator)
        yield rows, leaf, sample


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        samples: Callable[..., Iterator[tuple[slice, Tensor, Tensor]]],
        logits: Tensor,
        tables: Tensor,
        tau: Tensor | None,
        mask: Tensor | None,
        *levels: Tensor,
    ) -> tuple[Tensor, Tensor]:
        result = tables.new_empty(logits.shape[:-1].numel(), tables.shape[-1])
        with without_autocast(logits.device):
            for rows, _, sample in samples(logits, mask, None, False):
                own = _by_group(sample.to(tables.dtype), len(tables))
                torch.bmm(own, tables, out=_by_group(result[rows], len(tables)))
        ctx.samples = samples
        # With an output without entries: what depends on it depends on the logits. And with temperatures and
        # gaps, so that autograd notices if they are changed before the backward pass.
        anchor = logits.new_empty(0)
        ctx.save_for_backward(anchor, logits, tables, tau, mask, *levels)
        return result, anchor

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
        anchor, *tensors = ctx.saved_tensors
        with without_autocast(grad.device):
            gradients = first_order(_gradients, anchor, grad, ctx, *tensors[:4])
        return None, *gradients, *(None for _ in tensors[3:])


def _gradients(
    grad: Tensor, ctx: Any, logits: Tensor, tables: Tensor, tau: Tensor | None, mask: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of logits, tables and temperature."""
    groups, grad = len(tables), grad.contiguous()
    tau = None if tau is None else tau.detach().requires_grad_()
    for_logits = logits.new_empty(len(grad), logits.shape[-1])
    # Added up in float32 or float64, and rounded once.
    for_tables = torch.zeros_like(simplex.computed(tables)) if ctx.needs_input_grad[2] else None
    for_tau = None if tau is None else torch.zeros_like(simplex.computed(tau))
    for rows, leaf, sample in ctx.samples(logits, mask, tau, True):
        own = _by_group(grad[rows], groups)
        for_sample = tables.new_empty(sample.shape)
        torch.bmm(own, tables.mT, out=_by_group(for_sample, groups))
        leaves = [leaf] if tau is None else [leaf, tau]
        for_logits[rows], *others = torch.autograd.grad(sample, leaves, for_sample.to(sample.dtype))
        if for_tau is not None:
            for_tau += others[0]
        if for_tables is not None:
            weights = _by_group(sample.detach().to(tables.dtype), groups).mT
            if for_tables.dtype == tables.dtype:
                for_tables.baddbmm_(weights, own)
            else:
                for_tables += weights @ own
    return (
        for_logits.view(logits.shape),
        None if for_tables is None else for_tables.to(tables.dtype),
        None if for_tau is None or tau is None else for_tau.to(tau.dtype),
    )
