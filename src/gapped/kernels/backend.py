"""When kernels run, and levels for them. Importing this file needs no Triton.

The file of an operation imports Triton. So whoever calls an operation asks here first, or, for samples, in
`sampling.fused`, and imports the operation's file only if the kernels apply.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec

import torch
from torch import Tensor

from gapped.checks import in_eager_mode, requires_grad
from gapped.kernels import runner

BACKENDS = ("auto", "torch", "triton")
LARGEST_GROUP = 8
"""Masks: a subset of a group fits into a byte, and all of them can be enumerated."""
LONGEST_SUBSET = 8192
"""Subsets: a program holds the scores of a row at once."""
LONGEST_CHOICES, MOST_CHOICES = 1024, 16
"""Choices of several elements: a program holds a number of each element of a row for each that is drawn."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INSTALLED = find_spec("triton") is not None


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and runs kernels on `device`: a GPU, or any device in its interpreter."""
    return _INSTALLED and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def unavailable(x: Tensor) -> str | None:
    """Why no kernel takes this tensor; None if kernels do."""
    if not _INSTALLED:
        return "Triton is not installed (pip install triton)"
    if not x.is_cuda and not runs_on(x.device):
        return f"the logits are on {x.device.type}, the kernels run on cuda"
    if x.dtype not in _DTYPES:
        return f"the logits are {x.dtype}, the kernels take float32, bfloat16 and float16"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "the call is inside of a function transform such as vmap"
    return None


def takes_groups(rows: Tensor, *levels: object) -> bool:
    """Whether the kernels in `masks` take the place of torch for groups ``(*rows, m)`` and these levels."""
    if not rows.is_cuda or rows.shape[-1] > LARGEST_GROUP:
        return False
    return not any(isinstance(level, Tensor) for level in levels) and unavailable(rows) is None


def takes_scores(logits: Tensor) -> bool:
    """Whether the kernels in `scores` take the place of torch."""
    if not logits.is_cuda or torch.compiler.is_compiling() or logits.dtype != torch.float32:
        return False
    return logits.shape[-1] <= runner.LONGEST_BLOCK and unavailable(logits) is None


def takes_choices(rows: Tensor, k: int) -> bool:
    """Whether the kernels in `choices` draw k > 1 elements of rows ``(*rows, n)`` by their indices."""
    if torch.compiler.is_compiling() or not k < rows.shape[-1] <= LONGEST_CHOICES or k > MOST_CHOICES:
        return False
    return unavailable(rows) is None


def takes_table(table: Tensor, index: Tensor) -> bool:
    """Whether the kernels in `tables` look up rows: if a kernel wrote the index, on the table's device."""
    return (
        index.dtype != torch.int64
        and table.dtype in _DTYPES
        and table.get_device() == index.get_device()
        and table.numel() > 0
        and in_eager_mode()
    )


def without_subsets(scores: Tensor, *others: Tensor) -> str | None:
    """Why the kernels in `subsets` cannot compute functions of scores ``(*rows, n)``; None if they can."""
    if scores.shape[-1] > LONGEST_SUBSET:
        return f"the kernels take rows of at most {LONGEST_SUBSET} elements"
    if torch.compiler.is_compiling():
        return "subsets have no kernel in compiled code"
    if torch.is_grad_enabled() and any(requires_grad(each) for each in (scores, *others)):
        return "a result of the kernels cannot be differentiated"
    return unavailable(scores)


def per_row(level: Tensor, logits: Tensor) -> tuple[Tensor, int]:
    """A temperature or gap as a contiguous tensor, and how many consecutive rows share each of its entries.

    A temperature of all rows, annealed in place inside of a CUDA graph, is a single entry, and one for each
    example has as many as there are examples. Kernels read these as they are: expanded to all rows, they
    would take as long to write and to read as rows of two categories.
    """
    level, rows = level.to(logits.device, torch.float32), logits.shape[:-1]
    shape = (*(1,) * (len(rows) - level.dim()), *level.shape)
    same = next((axis for axis, (n, m) in enumerate(zip(shape, rows, strict=True)) if n != m), len(rows))
    if any(n != 1 for n in shape[same:]):
        return level.expand(rows).contiguous(), 1
    return level.contiguous(), math.prod(rows[same:])
