"""Layers with a run axis: R independent copies of a layer, evaluated as one batched product."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One generator per seed on the CPU, so that a run's initial weights depend on its own seed alone."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def spread(module: torch.nn.Module, places: Sequence[int]) -> None:
    """Give each run of `module` the weights at its place of the present ones; equal seeds share a place."""
    for parameter in module.parameters():
        parameter.data = parameter.data[torch.tensor(places, device=parameter.device)]


class Linear(torch.nn.Module):
    """R affine maps, ``(R, B, inputs) -> (R, B, outputs)``, initialised as `torch.nn.Linear` is, or as
    Glorot and Bengio (2010) do: uniform weights, biases of zero.

    The weight is stored as ``(R, inputs, outputs)``: no transposed copy is needed in either direction.
    """

    def __init__(
        self, inputs: int, outputs: int, runs: Sequence[torch.Generator], *, glorot: bool = False
    ) -> None:
        super().__init__()
        bound = math.sqrt(6 / (inputs + outputs)) if glorot else 1 / math.sqrt(inputs)
        weights, biases = [], []
        for generator in runs:
            weight = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
            weights.append(weight.t().contiguous())
            biases.append(torch.empty(1, outputs).uniform_(-bound, bound, generator=generator))
        self.weight = torch.nn.Parameter(torch.stack(weights))
        self.bias = torch.nn.Parameter(torch.stack(biases) * (not glorot))

    def forward(self, x: Tensor) -> Tensor:
        return affine(x, self.weight, self.bias)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The maps of a `Linear` with these weights."""
    # `baddbmm` would first copy the bias to all rows. The sum takes as long in eager mode, and no time when
    # compiled: the bias is then added where the product is used.
    return torch.bmm(x, weight) + bias
