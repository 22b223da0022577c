"""Models that people train with a discrete choice inside, each with its incumbents and with estimators.

A workload is a function `train(cell, seed)` that yields numbers as it trains, and *cells* by setting: a cell
holds a way to choose and the sizes, and all cells of a setting train equally many steps on equal data.
`gapped.compare` trains them, keeps the records, and gives one verdict per setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from gapped.errors import reject, suggestion
from gapped_lab.fleet.capture import Captured
from gapped_lab.recipe_files import WORKLOAD_TITLES

Cells = Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """A training function and its cells: `settings(quick)` has them by setting and label."""

    train: Callable[[Any, int], Iterator[dict[str, float]]]
    settings: Callable[[bool], Mapping[str, Cells]]


def sizes_of(quick: bool, quickly: dict[str, Any], on_a_cpu: dict[str, Any]) -> dict[str, Any]:
    """The sizes that differ from those for a GPU: of a quick run, or where there is no GPU."""
    return quickly if quick else {} if torch.cuda.is_available() else on_a_cpu


def find_workload(name: str) -> Workload:
    """The workload of that name."""
    if name not in WORKLOAD_TITLES:
        raise reject(
            "workload", name, f"one of {', '.join(WORKLOAD_TITLES)}{suggestion(name, WORKLOAD_TITLES)}"
        )
    module = import_module(f"gapped_lab.workloads.{name.replace('-', '_')}")
    return Workload(module.train, module.settings)


@contextmanager
def seeded(seed: int) -> Iterator[torch.device]:
    """A block whose random numbers come from `seed`, on the device to train on; the state before returns.

    Released layers draw from torch's default generator, and so does everything here. Products of matrices
    may round their factors to ten bits, as convolutions do.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = torch.get_float32_matmul_precision()
    with torch.random.fork_rng([0] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        torch.set_float32_matmul_precision("high")
        try:
            yield device
        finally:
            torch.set_float32_matmul_precision(precision)


class Training:
    """Steps of Adam on what `losses(count)` yields, one after the other, with the rates of `rates`.

    `count` has the number of the step, `(1,)`, for `at`. On a GPU a step is recorded as a CUDA graph, unless
    `recorded` is false: the losses must then not look at values.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Tensor], Iterable[Tensor]],
        rates: Tensor,
        *,
        clip: float = 0.0,
        decay: float = 0.0,
        recorded: bool = True,
    ) -> None:
        self.model, self.losses, self.clip, self.steps, self.seconds = model, losses, clip, 0, 0.0
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        device = self._parameters[0].device
        self._on_gpu = device.type == "cuda"
        self._rates, self._count = rates.to(device), torch.zeros(1, dtype=torch.long, device=device)
        self._rate = torch.zeros((), device=device)
        self._optimiser = torch.optim.AdamW(
            self._parameters, self._rate, weight_decay=decay, capturable=self._on_gpu, fused=self._on_gpu
        )
        self._step: Callable[[], None] = self._plain
        if self._on_gpu and recorded:
            self._start()
            self._step = Captured(self._plain, torch.cuda.default_generators[0], self._state)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)

    def __call__(self, steps: int) -> dict[str, float]:
        """Train so many steps: the milliseconds of one, least over all calls, and the GPU's memory."""
        self.model.train()
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        seconds, first = time.perf_counter() - start, self.steps == 0
        self.steps += steps
        self.seconds = seconds / steps if first else min(self.seconds, seconds / steps)
        memory = torch.cuda.max_memory_allocated() / 2**20 if self._on_gpu else 0.0
        return {"ms_a_step": 1e3 * self.seconds, "mib": memory}

    def _plain(self) -> None:
        self._rate.copy_(at(self._rates, self._count))
        for loss in self.losses(self._count):
            self._optimiser.zero_grad()
            loss.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(self._parameters, self.clip)
            self._optimiser.step()
        self._count += 1

    def _start(self) -> None:
        """Make the optimiser's state, which is 0, so that it can be put back after a recording."""
        for each in self._parameters:
            each.grad = torch.zeros_like(each)
        self._optimiser.step()
        for tensor in self._moments():
            tensor.zero_()

    def _moments(self) -> list[Tensor]:
        return [tensor for state in self._optimiser.state.values() for tensor in state.values()]

    def _state(self) -> Sequence[Tensor]:
        return [self._count, *self.model.parameters(), *self.model.buffers(), *self._moments()]

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def at(values: Tensor, count: Tensor) -> Tensor:
    """The entry of a tensor at a place that is a tensor, without looking at it."""
    return values.index_select(0, count)[0]


def falling(rate: float, steps: int, warmup: int = 0) -> Tensor:
    """Learning rates that rise for `warmup` steps, and fall to a hundredth as half a cosine."""
    step = torch.arange(steps, dtype=torch.float64)
    fall = 0.01 + 0.99 * (1 + torch.cos(torch.pi * (step - warmup) / max(steps - warmup, 1))) / 2
    return (rate * torch.where(step < warmup, (step + 1) / max(warmup, 1), fall)).float()
