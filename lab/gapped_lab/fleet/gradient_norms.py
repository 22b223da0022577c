"""Norms of the gradients of chosen weights along training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.linalg import vector_norm


class GradientNorms:
    """Sums over the steps of an epoch, run by run: of a gradient's norm, and of how often it is exactly zero.

    They are tensors on the weights' device, and nothing is read back before the epoch ends: a captured step
    adds to them.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        def zeros(weight: Tensor) -> Tensor:
            return torch.zeros(len(weight), dtype=torch.float64, device=weight.device)

        self.norms = {name: zeros(weight) for name, weight in weights.items()}
        self.zeros = {name: zeros(weight) for name, weight in weights.items()}

    def clear(self) -> None:
        for total in self.state():
            total.zero_()

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a step's gradient, whose first axis is the run axis."""
        # In float64, where no square of a float32 number is lost: the norm is zero if every entry is.
        norm = vector_norm(gradient.flatten(1), dim=1, dtype=torch.float64)
        self.norms[name] += norm
        self.zeros[name] += norm == 0

    def means(self, steps: int) -> dict[str, Tensor]:
        """For each weight its mean norm, and the share of steps at which it is zero, ``(R,)`` each."""
        means = {f"{name}_gradient_norm": total / steps for name, total in self.norms.items()}
        return means | {f"{name}_gradient_zero": total / steps for name, total in self.zeros.items()}

    def state(self) -> list[Tensor]:
        return [*self.norms.values(), *self.zeros.values()]
