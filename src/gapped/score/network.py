"""A small network that a trained estimator can make for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from gapped.checks import in_eager_mode
from gapped.errors import reject


class Perceptron(torch.nn.Module):
    """One hidden layer, from all that an example has to one number; it learns its width at its first call.

    Its last layer starts at zero, so that an estimator starts as it would without the network.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.inner: torch.nn.Module = torch.nn.LazyLinear(hidden)
        self.outer: torch.nn.Module = torch.nn.Linear(hidden, 1)
        for parameter in self.outer.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, x: Tensor, batch: torch.Size) -> Tensor:
        """Numbers of shape `batch` for `x` of shape ``(*batch, ...)``."""
        return self.layers(x.flatten(len(batch))).squeeze(-1)

    def layers(self, x: Tensor) -> Tensor:
        # In the layers' own precision, whatever the caller's is.
        dtype = next(self.outer.parameters()).dtype
        y: Tensor = self.outer(torch.tanh(self.inner(x.to(dtype))))
        return y


def check_width(network: torch.nn.Module | None) -> None:
    """Raise where a perceptron would have to learn its width while a compiler or a transform follows."""
    if (
        isinstance(network, Perceptron)
        and isinstance(network.inner, torch.nn.LazyLinear)
        and not in_eager_mode()
    ):
        accepted = "one that an ordinary call has given its width, or a torch.nn.Module"
        raise reject("network", "a number of hidden units, inside of a transform or compiled", accepted)


def network_of(network: torch.nn.Module | int) -> torch.nn.Module:
    """The network itself, or a perceptron with so many hidden units."""
    if isinstance(network, torch.nn.Module):
        return network
    if isinstance(network, bool) or not isinstance(network, int) or network < 1:
        raise reject("network", network, "a torch.nn.Module, or a number of hidden units")
    return Perceptron(network)
