"""Polynomial programming: the mean of a power of binary variables, less a target, is minimised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gapped_lab.fleet import Task
from gapped_lab.fleet.estimator_groups import Grouped, Part
from gapped_lab.fleet.run_layers import generators
from gapped_lab.tasks import PolynomialProtocol

# The first logits are uniform, this far from zero at most.
_START = 0.01


class Logits(torch.nn.Module):
    """The logits of R runs, ``(R, 1, latents, categories)``."""

    def __init__(self, protocol: PolynomialProtocol, seeds: Sequence[int]) -> None:
        super().__init__()
        shape = (1, protocol.latents, protocol.categories)
        starts = [torch.empty(shape).uniform_(-_START, _START, generator=each) for each in generators(seeds)]
        self.logits = torch.nn.Parameter(torch.stack(starts))


class PolynomialTask(Task):
    r"""Minimise :math:`\frac1L \sum_l \mathbb E |z_l - t|^p` over the logits of L binary variables.

    :math:`z_l` is the first entry of a one-hot sample. The exact expectation is the result of a run: its
    minimum is :math:`t^p` for :math:`t < 1/2`.
    """

    row_axes = 2
    loss_name = "cost"
    model: Logits

    def __init__(self, protocol: PolynomialProtocol, seeds: Sequence[int], device: torch.device) -> None:
        self.protocol, self.steps = protocol, protocol.steps
        self.model = Logits(protocol, seeds).to(device)

    def loss(self, sampler: Grouped, generator: torch.Generator) -> Tensor:
        logits = self.model.logits.expand(-1, self.protocol.batch, -1, -1)
        return sampler.expectation(self._cost, logits, generator).mean(1)

    def evaluate(self, sampler: Grouped, generator: torch.Generator) -> dict[str, Tensor]:
        """The expected cost of each run, exactly."""
        p = torch.softmax(self.model.logits.double(), -1)
        first, second = (self._power(value) for value in (1.0, 0.0))
        return {"test_expected_cost": (p[..., 0] * first + p[..., 1] * second).mean((1, 2))}

    def _cost(self, z: Tensor, part: Part) -> Tensor:
        """Costs ``(n, r, B)`` of samples ``(n, r, B, latents, 2)``."""
        return (z[..., 0] - self.protocol.target).abs().pow(self.protocol.power).mean(-1)

    def _power(self, value: float) -> float:
        return float(abs(value - self.protocol.target) ** self.protocol.power)
