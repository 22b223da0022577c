"""N:M sparsity masks: so many ones in each group of entries, drawn or learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_count, check_level, check_logits, is_integer
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
        estimator: "simple", "gst", "gst:gap=1.2" or a `gapped.GST` object, as for `gapped.subset`; None is
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
    n, m = _check_groups(logits.shape[-1], n, m, "logits")
    groups = torch.unflatten(logits, -1, (-1, m))
    estimator = "simple" if estimator is None else estimator
    return subset(groups, n, tau, hard, estimator=estimator, generator=generator).flatten(-2)


class Mask(torch.nn.Module):
    """Module that learns which n of each m entries of a weight to keep.

    It holds a logit for each entry, zeros at first. While training, a call draws a mask that carries the
    gradient; in eval mode it returns the most probable one, without a gradient. To begin with the largest
    weights, write their magnitudes into `logits`.

    Arguments:
        shape: The shape of the weight, whose last axis is a multiple of `m`; a number is that of a vector.
        n: How many entries of each group are kept.
        m: The size of a group of consecutive entries.
        tau: Temperature of the gradient; it may be set while training, but it is not learned.
        hard: True for masks of zeros and ones, False for the surrogate.
        estimator: "simple", "gst", "gst:gap=1.2" or a `gapped.GST` object, as for `gapped.subset`; None is
            "simple".

    >>> mask = Mask((2, 8), n=2, m=4)
    >>> mask.tau = 0.5
    >>> (torch.ones(2, 8) * mask()).sum()
    tensor(8., grad_fn=<SumBackward0>)
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        n: int,
        m: int,
        tau: float | Tensor = 1.0,
        hard: bool = True,
        *,
        estimator: str | GST | None = None,
    ) -> None:
        super().__init__()
        # The gradient has no derivative by its temperature: a Parameter would be stored, and refused later.
        check_level("tau", tau, positive=True)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        if not shape:
            raise reject("shape", shape, "the shape of a weight, with at least one axis")
        n, m = _check_groups(shape[-1], n, m, "shape")
        self.logits = torch.nn.Parameter(torch.zeros(*shape))
        self.n, self.m, self.tau, self.hard, self.estimator = n, m, tau, hard, estimator

    def forward(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw a mask of the module's `shape`; in eval mode, return the most probable one.

        Arguments:
            generator: Where random numbers come from; None is torch's default generator.

        Returns:
            The mask. It carries a gradient to the module's `logits`, except in eval mode.
        """
        if self.training:
            return nm_mask(
                self.logits,
                self.n,
                self.m,
                self.tau,
                self.hard,
                estimator=self.estimator,
                generator=generator,
            )
        # Relative to the largest: a group without a law is NaN as a whole.
        groups = simplex.shift(simplex.computed(torch.unflatten(self.logits.detach(), -1, (-1, self.m))))
        best = torch.zeros_like(groups).scatter(-1, groups.topk(self.n).indices, 1.0)
        best = best.masked_fill(groups == -torch.inf, 0.0)
        return best.masked_fill(groups.isnan(), torch.nan).flatten(-2).to(self.logits.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.logits.shape)}, n={self.n}, m={self.m}, tau={self.tau}, hard={self.hard}"


def _check_groups(entries: int, n: object, m: object, name: str) -> tuple[int, int]:
    """`n` and `m`, once it is checked that so many entries are groups of `m`, of which `n` are kept."""
    check_count("m", m)
    assert is_integer(m)
    n, m = check_size("n", n, int(m)), int(m)
    if entries % m:
        raise reject(name, f"a last axis of {entries}", f"a multiple of m={m}")
    return n, m
