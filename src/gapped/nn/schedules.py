"""Temperature schedules for any training loop: `Linear`, `Exponential`, `Cosine`.

Each goes from `start` at step 0 to `end` at step `steps`, and stays there. `schedule(step)` is a temperature;
`schedule.apply(model, step)` sets it in every gapped layer inside of the model.

>>> from gapped import nn
>>> model, schedule = torch.nn.Sequential(nn.Sample("gst")), Linear(1.0, 0.5, steps=100)
>>> for step in range(101):
...     tau = schedule.apply(model, step)
>>> model[0].tau, schedule(50), schedule(1000)
(0.5, 0.75, 0.5)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from gapped.checks import check_count, check_level
from gapped.errors import reject
from gapped.nm_masks import Mask
from gapped.nn.layers import Estimated


@dataclass(frozen=True)
class Schedule(ABC):
    """A temperature for each step of training."""

    start: float
    """The temperature at step 0."""
    end: float
    """The temperature from step `steps` on."""
    steps: int

    def __post_init__(self) -> None:
        check_level("start", self.start, positive=True)
        check_level("end", self.end, positive=True)
        check_count("steps", self.steps)

    def __call__(self, step: int) -> float:
        """The temperature at `step`, counted from 0."""
        return float(self.between(min(max(step / self.steps, 0.0), 1.0)))

    def apply(self, module: torch.nn.Module, step: int) -> float:
        """Set the temperature of every gapped layer inside of `module` to that of `step`, and return it."""
        layers = [each for each in module.modules() if isinstance(each, Estimated | Mask)]
        if not layers:
            raise reject(
                "module", f"a {type(module).__name__} without gapped layers", "one with gapped.nn.Sample"
            )
        tau = self(step)
        for layer in layers:
            layer.tau = tau
        return tau

    @abstractmethod
    def between(self, share: float) -> float:
        """The temperature after this `share` of the steps, from 0 to 1."""


class Linear(Schedule):
    """Equal steps: ``start + (end - start) * share``."""

    def between(self, share: float) -> float:
        return self.start + (self.end - self.start) * share


class Exponential(Schedule):
    """Equal factors: ``start * (end / start) ** share``, as in most papers that anneal."""

    def between(self, share: float) -> float:
        return self.start * math.exp(math.log(self.end / self.start) * share)


class Cosine(Schedule):
    """Half a cosine wave: slow at both ends."""

    def between(self, share: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2
