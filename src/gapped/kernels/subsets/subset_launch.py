"""Launching the kernels of subsets: when they apply, and the functions of the law that they compute.

The functions and their arguments are those of `gapped.subsets.conditional_bernoulli`, for 0 < k < n.
"""

from __future__ import annotations

from functools import cache
from math import log1p
from typing import Any

import torch
from torch import Tensor

from gapped.checks import requires_grad
from gapped.kernels.runner import partition, power, run
from gapped.kernels.sampling.launch import Fused, draw_key, refusal

LONGEST_ROW = 8192
"""A program holds the scores of a row at once."""
# Of sums over subsets: the warps of a program, and the elements times points of the unit circle that it
# computes at once. Not yet chosen by measurement.
WARPS = 4
TILE = 1024
# Aliases of the size of a subset have a probability of at most exp(-25), 1e-11.
_ALIAS = 25.0
# The rule for samples holds here, too; a plain one stands for all.
_PLAIN = Fused("straight-through", 1.0)


def refused(scores: Tensor, *others: Tensor) -> str | None:
    """Why the kernels cannot compute functions of these scores ``(*rows, n)``; None if they can."""
    if scores.shape[-1] > LONGEST_ROW:
        return f"the kernels take rows of at most {LONGEST_ROW} elements"
    if torch.compiler.is_compiling():
        return "subsets have no kernel in compiled code"
    if torch.is_grad_enabled() and any(requires_grad(each) for each in (scores, *others)):
        return "a result of the kernels cannot be differentiated"
    return refusal(scores, _PLAIN)


def draw(scores: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw a subset: a boolean tensor of the shape of `scores`."""
    from gapped.kernels.subsets.subset_kernels import subset_draw_kernel

    chosen = torch.empty(scores.shape, dtype=torch.uint8, device=scores.device)
    _choose(subset_draw_kernel, (scores.contiguous(), draw_key(scores, generator), chosen), k)
    return chosen.view(torch.bool)


def marginals(scores: Tensor, k: int) -> Tensor:
    """The probability that each element is selected."""
    from gapped.kernels.subsets.subset_kernels import MARGINALS

    rare, _ = _rare(scores, k)
    return _sums(rare, rare, torch.empty_like(rare), k, MARGINALS)


def covariance_product(grad: Tensor, scores: Tensor, k: int) -> Tensor:
    """The covariances of the selections times a vector."""
    from gapped.kernels.subsets.subset_kernels import COVARIANCES

    rare, _ = _rare(scores, k)
    return _sums(rare, grad.contiguous(), torch.empty_like(rare), k, COVARIANCES)


def log_normaliser(scores: Tensor, k: int) -> Tensor:
    """The logarithm of the sum of the weights of all subsets, ``(*rows)``."""
    from gapped.kernels.subsets.subset_kernels import NORMALISER

    rare, base = _rare(scores, k)
    return (base + _sums(rare, rare, torch.empty_like(base), k, NORMALISER)).to(scores.dtype)


@cache
def frequencies(n: int, k: int) -> int:
    """How many pairs of points of the unit circle a sum over subsets takes: a power of two.

    With twice as many points, the coefficient of the size `k` also has those of sizes that are twice as far
    away, and further. Sums of independent choices of variance v exceed their mean by d with a probability of
    at most exp(-v h(d / v)), where h(u) = (1 + u) log(1 + u) - u (Bennett), and v is at most k (n - k) / n.
    """
    variance, count = k * (n - k) / n, 4
    while variance * _excess(2 * count / variance) < _ALIAS:
        count *= 2
    return count


def _excess(u: float) -> float:
    return (1 + u) * log1p(u) - u


def _rare(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The rare events of the elements, and the logarithm of the choices' normaliser, ``(*rows)``."""
    from gapped.kernels.subsets.subset_kernels import subset_rare_kernel

    rare = torch.empty_like(scores, memory_format=torch.contiguous_format)
    base = torch.empty(scores.shape[:-1], dtype=torch.float64, device=scores.device)
    _choose(subset_rare_kernel, (scores.contiguous(), rare, base), k)
    return rare, base


def _choose(kernel: Any, pointers: tuple[Tensor, ...], k: int) -> None:
    """Launch a kernel that makes the choices of the rows of its first tensor, if there are any."""
    n = pointers[0].shape[-1]
    if rows := pointers[0].numel() // n:
        programs, block = partition(rows, n)
        # Noise comes four words at a time.
        block["BLOCK_COLUMNS"] = max(block["BLOCK_COLUMNS"], 4)
        run(kernel, programs, pointers, (rows, n, k), (), block)


def _sums(rare: Tensor, grad: Tensor, out: Tensor, k: int, what: Any) -> Tensor:
    """Fill `out` with a sum over all subsets."""
    from gapped.kernels.subsets.subset_kernels import subset_sums_kernel

    n = rare.shape[-1]
    count = frequencies(n, k)
    part = min(max(TILE // count, 1), power(n))
    flags = {"WHAT": what.value, "FREQUENCIES": count, "PART": part, "FAST": rare.is_cuda}
    flags |= {"BLOCK": power(n), "num_warps": WARPS if n > 64 else 1}
    if rows := rare.numel() // n:
        run(subset_sums_kernel, rows, (rare, grad, out), (n, k), (), flags)
    return out
