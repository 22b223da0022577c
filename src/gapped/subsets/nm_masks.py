"""N:M sparsity masks: n ones in each group of m entries."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped.checks import check_count, check_logits, is_integer
from gapped.errors import reject
from gapped.pathwise.gst import GST
from gapped.subsets.subset_sampling import check_size, subset


def nm_mask(
    logits: Tensor,
    n: int,
    m: int,
    tau: float | Tensor = 1.0,
    hard: bool = True,
    *,
    estimator: str | GST | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a mask that keeps n of each m consecutive entries on the last axis.

    Arguments:
        logits: One logit per entry, θ below. The last axis is a multiple of `m`.
        n: How many entries of each group are kept.
        m: The size of a group of consecutive entries.
        tau: Temperature of the gradient, a positive number or a tensor that broadcasts against the shape of
            the groups, `(*logits.shape[:-1], logits.shape[-1] // m)`.
        hard: True returns zeros and ones, False the surrogate.
        estimator: "simple", "gst:gap=1" or a `gapped.GST` object, as for `gapped.subset`; None is
            "simple".
        generator: Where random numbers come from; None is torch's default generator.

    Returns:
        The mask, a tensor of the shape and dtype of `logits` that carries the gradient.

    Each group is a `gapped.subset` of its own: the kept set S of a group has a probability in proportion to
    Π_{i ∈ S} exp(θ_i).

    A free logit for each of the possible masks of a group, as in MaskLLM, which has six for 2:4, is a
    categorical choice: `gapped.gst(choices, tau, hard) @ options`. Here a mask's logit is the sum of the
    logits of its entries: `m` parameters for each group instead of `m` choose `n`.

    - Cost: where a group has no more than 70 masks they are enumerated, with one uniform per group; on CUDA,
      for groups of up to 8, by one kernel forward and one backward.

    >>> g = torch.Generator().manual_seed(0)
    >>> nm_mask(torch.zeros(2, 8), 2, 4, generator=g).unflatten(-1, (-1, 4)).sum(-1)
    tensor([[2., 2.],
            [2., 2.]])

    References: Fang et al. (2024), MaskLLM; Ahmed, Zeng, Niepert, Van den Broeck (2023), SIMPLE.
    """
    check_logits(logits)
    n, m = check_groups(logits.shape[-1], n, m, "logits")
    groups = torch.unflatten(logits, -1, (-1, m))
    estimator = "simple" if estimator is None else estimator
    return subset(groups, n, tau, hard, estimator=estimator, generator=generator).flatten(-2)


def check_groups(entries: int, n: object, m: object, name: str) -> tuple[int, int]:
    """`n` and `m` as integers, once it is checked that `entries` divide into groups of `m` that keep `n`."""
    check_count("m", m)
    assert is_integer(m)
    n, m = check_size("n", n, int(m)), int(m)
    if entries % m:
        raise reject(name, f"a last axis of {entries}", f"a multiple of m={m}")
    return n, m
