"""Launching the kernels of the score-function estimators: the rule for when they apply, and one call each."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped.kernels.blocks import partition
from gapped.kernels.launch import LONGEST_BLOCK, Fused, draw_key, refusal, row_matrix
from gapped.kernels.runner import run

# What the rule is asked about: a plain sample.
_PLAIN = Fused("straight-through", 1.0)


def applies(logits: Tensor) -> bool:
    """Whether the kernels take the place of torch: on a GPU, outside of compilers and function transforms."""
    if not logits.is_cuda or torch.compiler.is_compiling():
        return False
    known = logits.dtype == torch.float32 and logits.shape[-1] <= LONGEST_BLOCK
    return known and refusal(logits, _PLAIN) is None


def draw(logits: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
    """`samples` independent draws for each row, ``(samples, *rows)``."""
    from gapped.kernels.scores import draw_kernel

    rows, count, stride = row_matrix(logits)
    categories = logits.shape[-1]
    index = torch.empty((samples, *logits.shape[:-1]), dtype=torch.int64, device=logits.device)
    key = draw_key(logits, generator)
    if count:
        programs, flags = partition(count, categories)
        run(draw_kernel, programs, (rows, key, index), (count, categories, stride, samples), (), flags)
    return index


def one_hot(index: Tensor, categories: int) -> Tensor:
    """The twin of `gapped.simplex.one_hot`, in float32."""
    from gapped.kernels.scores import one_hot_kernel

    value = torch.empty(*index.shape, categories, dtype=torch.float32, device=index.device)
    if index.numel():
        programs, flags = partition(index.numel(), categories)
        run(one_hot_kernel, programs, (index.contiguous(), value), (index.numel(), categories), (), flags)
    return value


def score(logits: Tensor, index: Tensor, signal: Tensor) -> Tensor:
    """The mean of s (D - p): logits ``(*batch, *variables, K)``, signals ``(n, *batch)``."""
    from gapped.kernels.scores import score_kernel

    rows, count, stride = row_matrix(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    categories = logits.shape[-1]
    if count:
        examples = signal[0].numel()
        programs, flags = partition(count, categories)
        pointers = (rows, index.contiguous(), signal.contiguous(), out)
        sizes = (count, categories, stride, count // examples, examples, len(signal))
        run(score_kernel, programs, pointers, sizes, (), flags)
    return out


def tree_index(logits: Tensor, noise: Tensor) -> Tensor:
    """The two leaves that `noise` ``(*rows, nodes)`` leads to, ``(2, *rows)``."""
    from gapped.kernels.scores import tree_index_kernel

    rows, count, stride = row_matrix(logits)
    categories = logits.shape[-1]
    index = torch.empty((2, *logits.shape[:-1]), dtype=torch.int64, device=logits.device)
    if count:
        programs, flags = partition(count, categories)
        pointers = (rows, noise.contiguous(), index)
        sizes = (count, categories, stride, noise.shape[-1])
        run(tree_index_kernel, programs, pointers, sizes, (), {"DEPTH": depth(categories), **flags})
    return index


def tree_gradient(logits: Tensor, index: Tensor, signal: Tensor) -> Tensor:
    """The gradient of such a pair whose costs differ by `signal`, ``batch``."""
    from gapped.kernels.scores import tree_gradient_kernel

    rows, count, stride = row_matrix(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    categories = logits.shape[-1]
    if count:
        programs, flags = partition(count, categories)
        pointers = (rows, index.contiguous(), signal.contiguous(), out)
        sizes = (count, categories, stride, count // signal.numel())
        run(tree_gradient_kernel, programs, pointers, sizes, (), {"DEPTH": depth(categories), **flags})
    return out


def depth(categories: int) -> int:
    """How many decisions lead to one of so many leaves of a balanced tree."""
    return (categories - 1).bit_length()
