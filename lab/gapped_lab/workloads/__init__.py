"""Models that people train with a discrete choice inside, each with its incumbents and with estimators.

A workload is a function `train(cell, seed)` that yields numbers as it trains, and *cells* by setting: a cell
holds a way to choose and the sizes, and all cells of a setting train equally many steps on equal data.
`gapped.compare` trains them, keeps the records, and gives one verdict per setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from gapped.errors import reject, suggestion
from gapped_lab.recipe_files import WORKLOAD_TITLES

Cells = Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """A training function and its cells: `settings(quick)` has them by setting and label."""

    train: Callable[[Any, int], Iterator[dict[str, float]]]
    settings: Callable[[bool], Mapping[str, Cells]]


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

    Released layers draw from torch's default generator, and so does everything here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng([0] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield device


class Meter:
    """Milliseconds of a training step, and the memory that the GPU held at most."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.steps, self._start = device, 0.0, 0, 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> None:
        self._wait()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds += time.perf_counter() - self._start

    def numbers(self) -> dict[str, float]:
        """What is to be yielded beside the losses."""
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self.device) / 2**20 if on_gpu else 0.0
        return {"ms_a_step": 1e3 * self.seconds / max(self.steps, 1), "mib": memory}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
