"""Launching the kernels: the rule for when they apply, and a function for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gapped.kernels.runner import partition, run
from gapped.kernels.sampling.launch import LONGEST_BLOCK, Fused, draw_key, refusal
from gapped.kernels.sampling.row_layout import row_matrix

# The rule for samples holds here, too; a plain one stands for all.
_PLAIN = Fused("straight-through", 1.0)


def applies(logits: Tensor) -> bool:
    """Whether the kernels take the place of torch: on a GPU, outside of compilers and function transforms."""
    if not logits.is_cuda or torch.compiler.is_compiling():
        return False
    if logits.dtype != torch.float32 or logits.shape[-1] > LONGEST_BLOCK:
        return False
    return refusal(logits, _PLAIN) is None


def draw(logits: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` independent draws for each row, ``(samples, *rows)``."""
    from gapped.kernels.scores.score_kernels import draw_kernel

    index = torch.empty((samples, *logits.shape[:-1]), dtype=torch.int64, device=logits.device)
    _run(draw_kernel, logits, (draw_key(logits, generator), index), (samples,))
    return index


def one_hot(index: Tensor, categories: int) -> Tensor:
    """The twin of `gapped.simplex.one_hot`, in float32."""
    from gapped.kernels.scores.score_kernels import one_hot_kernel

    value = torch.empty(*index.shape, categories, dtype=torch.float32, device=index.device)
    if index.numel():
        programs, flags = partition(index.numel(), categories)
        run(one_hot_kernel, programs, (index.contiguous(), value), (index.numel(), categories), (), flags)
    return value


def score(logits: Tensor, index: Tensor, signal: Tensor) -> Tensor:
    """The mean of s (D - p): logits ``(*batch, *variables, K)``, signals ``(n, *batch)``."""
    from gapped.kernels.scores.score_kernels import score_kernel

    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    examples = signal[0].numel()
    sizes = (_rows_for_each(examples, logits), examples, len(signal))
    _run(score_kernel, logits, (index.contiguous(), signal.contiguous(), out), sizes)
    return out


def tree_index(logits: Tensor, noise: Tensor) -> Tensor:
    """The two leaves that `noise` ``(*rows, nodes)`` leads to, ``(2, *rows)``."""
    from gapped.kernels.scores.score_kernels import tree_index_kernel

    index = torch.empty((2, *logits.shape[:-1]), dtype=torch.int64, device=logits.device)
    pointers = (noise.contiguous(), index)
    _run(tree_index_kernel, logits, pointers, (noise.shape[-1],), DEPTH=depth(logits.shape[-1]))
    return index


def tree_gradient(logits: Tensor, index: Tensor, signal: Tensor) -> Tensor:
    """The gradient of a pair of leaves whose costs differ by `signal`, ``batch``."""
    from gapped.kernels.scores.score_kernels import tree_gradient_kernel

    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    pointers = (index.contiguous(), signal.contiguous(), out)
    sizes = (_rows_for_each(signal.numel(), logits),)
    _run(tree_gradient_kernel, logits, pointers, sizes, DEPTH=depth(logits.shape[-1]))
    return out


def depth(categories: int) -> int:
    """How many decisions lead to one of so many leaves of a balanced tree."""
    return (categories - 1).bit_length()


def _rows_for_each(examples: int, logits: Tensor) -> int:
    return logits.shape[:-1].numel() // max(examples, 1)


def _run(
    kernel: Any, logits: Tensor, pointers: tuple[Tensor, ...], sizes: tuple[int, ...], **flags: int
) -> None:
    """Launch a kernel over the rows of `logits`, if there are any."""
    rows, count, stride = row_matrix(logits)
    categories = logits.shape[-1]
    if count:
        programs, block = partition(count, categories)
        run(kernel, programs, (rows, *pointers), (count, categories, stride, *sizes), (), flags | block)
