r"""What is kept of a stream of gradients: moments, never the gradients themselves.

With :math:`g` a gradient, :math:`\mu` and :math:`\Sigma` its mean and covariance and :math:`e` the target,
the stream estimates, from groups of independent gradients,

- :math:`\mu` and the entries' variances, by Welford's recursion in float64;
- :math:`\operatorname{tr}\Sigma^2 = \mathbb{E}\langle a, b\rangle^2` for independent :math:`a, b`, each a
  difference of two gradients over :math:`\sqrt 2`;
- the variance :math:`u^\top\Sigma\,u` along :math:`u = \delta/\|\delta\|`, :math:`\delta = \mu - e`: that of
  each group along the mean error of the groups before it, which weigh as much as they have gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gapped.diagnostics.moments import Moments

LEAST = 8
"""The smallest group: four pairs."""


class GradientStream:
    """Moments of gradients ``(d,)`` that come in groups, and of their errors if there is a target."""

    def __init__(self, size: int, device: torch.device, target: Tensor | None = None) -> None:
        one = torch.zeros((), device=device)
        self.target = target
        self.gradient = Moments(torch.zeros(size, device=device))
        self.distance = Moments(one)
        """Squared distances from the mean of the group, made as large as those from the mean."""
        self.overlap = Moments(one)
        self.error = Moments(one)
        """Squared distances from the target."""
        self.cosine = Moments(one)
        """Inner products of unit gradients with the target; zero gradients give zero."""
        self._along = one.double()
        self._weight = 0

    @torch.no_grad()
    def add(self, group: Tensor) -> None:
        """Add at least `LEAST` independent gradients, ``(n, d)``."""
        group = group.double()
        count = group.shape[0]
        if self.target is not None:
            self._compare(group, self.target)
        self.gradient.merge(group)
        self.distance.merge((group - group.mean(0)).square().sum(1) * (count / (count - 1)))
        half = count // 2
        pairs = (group[: 2 * half : 2] - group[1::2]) / math.sqrt(2)
        squares = (pairs @ pairs.T).square()
        self.overlap.merge((squares.sum() - squares.diagonal().sum()).view(1) / (half * (half - 1)))

    def _compare(self, group: Tensor, target: Tensor) -> None:
        self.error.merge((group - target).square().sum(1))
        self.cosine.merge(torch.nn.functional.normalize(group, dim=1, eps=1e-300) @ target)
        if self.count:
            direction = torch.nn.functional.normalize(self.gradient.mean - target, dim=0, eps=1e-300)
            self._along = self._along + (group @ direction).var() * self.count
            self._weight += self.count

    @property
    def count(self) -> int:
        """How many gradients have come."""
        return int(self.gradient.count)

    @property
    def variance(self) -> float:
        """The total variance, the trace of the covariance."""
        return float(self.gradient.variance.sum())

    @property
    def along(self) -> float:
        """The variance of gradients along their mean error; 0 if there was a single group."""
        return float(self._along) / max(self._weight, 1)
