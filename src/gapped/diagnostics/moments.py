"""Streaming mean and variance of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Mean and unbiased variance of a stream of equal-shaped tensors, element by element.

    Welford's recursion in float64: no sample is kept, and no difference of large squares is taken.
    Its tensors stay where they are, so that updates can be part of a captured graph.
    """

    def __init__(self, like: Tensor) -> None:
        self.count = torch.zeros((), dtype=torch.float64, device=like.device)
        self.mean = torch.zeros_like(like, dtype=torch.float64)
        self.scatter = torch.zeros_like(like, dtype=torch.float64)

    @torch.no_grad()
    def add(self, sample: Tensor) -> None:
        self.count += 1
        delta = sample.double() - self.mean
        self.mean += delta / self.count
        self.scatter += delta * (sample - self.mean)

    @torch.no_grad()
    def merge(self, samples: Tensor) -> None:
        """Add several samples, along a leading axis, at once."""
        samples = samples.double()
        mean, count = samples.mean(0), samples.shape[0]
        delta, total = mean - self.mean, self.count + count
        self.scatter += (samples - mean).square().sum(0) + delta.square() * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count += count

    @property
    def variance(self) -> Tensor:
        return self.scatter / (self.count - 1)

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def tensors(self) -> list[Tensor]:
        return [self.count, self.mean, self.scatter]
