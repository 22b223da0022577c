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
from gapped.checks import (
    check_logits,
    check_mask,
    check_table,
    in_eager_mode,
    is_autocast,
    without_autocast,
)
from gapped.errors import reject
from gapped.gradient import first_order, row_entries
from gapped.kernels import backend
from gapped.pathwise import Pathwise
from gapped.vocabulary.head import rows_of_a_chunk, slices, uncompiled


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
        return _product(sample.reshape(rows, categories), tables).view((*shape, *rest))
    step = rows_of_a_chunk(soft, categories, logits.device, has_kernel) if soft.is_rowwise() else rows
    step = max(step // groups, 1) * groups
    seeds = backend.draw_key(logits, generator, -(-rows // step)).tolist()
    tau = soft.tau if soft.has_learned_tau() else None
    logits = logits if shape else logits.unsqueeze(0)
    result, _ = _Mix.apply(partial(_samples, soft, seeds, step), logits, tables, tau, mask, *soft.tensors)  # type: ignore[no-untyped-call]
    return result.view((*shape, *rest))  # type: ignore[no-any-return]


def _dtype_of_product(logits: Tensor, table: Tensor) -> torch.dtype:
    """The dtype of the table, or what autocast says for a product."""
    if is_autocast(logits.device) and torch.float64 not in (logits.dtype, table.dtype):
        return torch.get_autocast_dtype(logits.device.type)
    return table.dtype


def _product(sample: Tensor, tables: Tensor) -> Tensor:
    """A sample ``(rows, K)``, group after group in each of them, times the tables ``(groups, K, width)``."""
    groups, categories, width = tables.shape
    by_group = sample.to(tables.dtype).view(len(sample) // groups, groups, categories).transpose(0, 1)
    return (by_group @ tables).transpose(0, 1).reshape(len(sample), width)


def _samples(
    estimator: Pathwise, seeds: list[int], step: int, logits: Tensor, mask: Tensor | None, tau: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The rows of each block, their logits, detached, and their soft sample as a function of these.

    A temperature `tau` takes the place of the estimator's own.
    """
    estimator, shape = estimator if tau is None else replace(estimator, tau=tau), logits.shape[:-1]
    for seed, rows in zip(seeds, slices(shape.numel(), step), strict=True):
        own = estimator.of_rows(shape, rows)
        leaf = row_entries(logits, shape, rows, 1).detach().requires_grad_(torch.is_grad_enabled())
        masked = simplex.masked(leaf, None if mask is None else row_entries(mask, shape, rows, 1))
        generator = torch.Generator(logits.device).manual_seed(seed)
        kernel = own.kernel(masked)
        if kernel is not None:
            from gapped.kernels.sampling import launch

            yield rows, leaf, launch.sample(masked, kernel, generator)
        else:
            yield rows, leaf, own.sample_in_torch(masked, generator)


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
            for rows, _, sample in samples(logits, mask, None):
                result[rows] = _product(sample, tables)
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
    tables = tables.detach().requires_grad_(ctx.needs_input_grad[2])
    tau = None if tau is None else tau.detach().requires_grad_()
    shared = [leaf for leaf in (tables, tau) if leaf is not None and leaf.requires_grad]
    for_logits = logits.new_empty(len(grad), logits.shape[-1])
    # Added up in float32 or float64, and rounded once.
    sums = [torch.zeros_like(simplex.computed(leaf)) for leaf in shared]
    with torch.enable_grad():
        for rows, leaf, sample in ctx.samples(logits, mask, tau):
            found = torch.autograd.grad(_product(sample, tables), [leaf, *shared], grad[rows])
            for_logits[rows] = found[0]
            for total, own in zip(sums, found[1:], strict=True):
                total += own
    for_shared = {leaf: total.to(leaf.dtype) for leaf, total in zip(shared, sums, strict=True)}
    return for_logits.view(logits.shape), for_shared.get(tables), None if tau is None else for_shared[tau]
