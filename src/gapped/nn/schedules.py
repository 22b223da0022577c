"""Temperature schedules for any training loop: `Linear`, `Exponential`, `Cosine`, and `CAGE`.

The first three go from `start` at step 0 to `end` at step `steps`, and stay there. `schedule(step)` is a
temperature; `schedule.apply(model, step)` sets it in every gapped layer inside of the model. `CAGE` goes by
how sure the model is, not by steps.

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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gapped import simplex
from gapped.checks import check_count, check_level, check_logits
from gapped.docstrings import describing
from gapped.errors import reject
from gapped.nn.layers import Estimated, Mask

_documented = describing(
    {
        "start": "The temperature at step 0.",
        "end": "The temperature from step `steps` on.",
        "steps": "How many steps lie between the two.",
    }
)


def _set(module: torch.nn.Module, tau: float) -> float:
    """Set the temperature of every gapped layer inside of `module`, and return it."""
    layers = [each for each in module.modules() if isinstance(each, Estimated | Mask)]
    if not layers:
        raise reject(
            "module", f"a {type(module).__name__} without gapped layers", "one with gapped.nn.Sample"
        )
    for layer in layers:
        layer.tau = tau
    return tau


@_documented
@dataclass(frozen=True)
class Schedule(ABC):
    """A temperature for each step of training; base class of the schedules."""

    start: float
    end: float
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
        return _set(module, self(step))

    @abstractmethod
    def between(self, share: float) -> float:
        """The temperature after this `share` of the steps, from 0 to 1."""


@_documented
class Linear(Schedule):
    """Temperature schedule of equal steps.

    At step n it is start + (end - start) n/steps.
    """

    def between(self, share: float) -> float:
        return self.start + (self.end - self.start) * share


@_documented
class Exponential(Schedule):
    """Temperature schedule of equal factors, as in most papers that anneal.

    At step n it is start (end/start)^(n/steps).
    """

    def between(self, share: float) -> float:
        return self.start * math.exp(math.log(self.end / self.start) * share)


@_documented
class Cosine(Schedule):
    """Temperature schedule of half a cosine wave: slow at both ends.

    At step n it is end + (start - end) (1 + cos(π n/steps))/2.
    """

    def between(self, share: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2


@dataclass
class CAGE:
    """Temperature by confidence: high while the model hesitates, then low.

    Arguments:
        start: The temperature of a model whose probabilities are equal.
        end: The temperature of one that is sure.
        momentum: The weight of earlier calls in the running mean, from 0 to less than 1.

    With c the mean over all rows of the largest of K probabilities, and its running mean from 1/K on::

        τ = start + (end - start) (running mean of c - 1/K) / (1 - 1/K)

    K counts the categories of a row that exist.

    The author takes the category of the largest logit forward, and straight-through backward:
    `nn.Sample("straight-through:draw=argmax")`. Then the forward pass in training is that of inference,
    whatever the temperature. The running mean is kept on the host, so that every call waits for the device.

    >>> from gapped import nn
    >>> model, schedule = nn.Sample("straight-through:draw=argmax"), CAGE()
    >>> schedule.apply(model, torch.zeros(8, 16))
    3.0

    References: Kim (2026).
    """

    start: float = 3.0
    end: float = 0.5
    momentum: float = 0.99
    progress: float = field(default=0.0, init=False)
    """How far the running mean is from 1/K, 0, to 1."""

    def __post_init__(self) -> None:
        check_level("start", self.start, positive=True)
        check_level("end", self.end, positive=True)
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise reject("momentum", self.momentum, "a number from 0 to less than 1")

    def apply(self, module: torch.nn.Module, logits: Tensor) -> float:
        """Set the temperature in every gapped layer inside of `module`, once `logits` are counted in."""
        check_logits(logits, -1)
        rows = simplex.computed(logits.detach())
        largest, least = rows.softmax(-1).amax(-1), 1 / (rows > -torch.inf).sum(-1)
        shares = torch.where(least < 1, (largest - least) / (1 - least), 1.0)
        # Rows without a law say nothing.
        shares = shares[largest.isfinite()]
        if shares.numel():
            self.progress = self.momentum * self.progress + (1 - self.momentum) * float(shares.mean())
        return _set(module, self.start + (self.end - self.start) * self.progress)
