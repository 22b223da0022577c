"""The local engine: one fleet after the other in this process, or several side by side in processes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gapped.checks import check_count
from gapped.comparison.records import Record
from gapped_lab.engines.processes import train_all
from gapped_lab.environment import current, pick_device
from gapped_lab.planning import conclude, prepare, remaining
from gapped_lab.recipe import Recipe
from gapped_lab.store import Store
from gapped_lab.training import Settings, attempt, check_data


class Local:
    """This machine: this process on one device, or `workers` processes on its GPUs in turn."""

    def __init__(self, device: str, workers: int = 1) -> None:
        check_count("--workers", workers)
        self.device, self.workers = pick_device(device), workers

    def run(self, recipes: Sequence[Recipe], store: Store, settings: Settings) -> list[Record]:
        with store.occupy():
            work = prepare(recipes, store)
            pending = remaining(work, store)
            check_data(pending, settings.data_dir)
            settings.callbacks.start(pending)
            if min(self.workers, len(pending)) > 1:
                train_all(pending, self.devices()[: len(pending)], store, settings)
            else:
                with current(self.device):
                    for fleet in pending:
                        store.keep(fleet.key, attempt(fleet, self.device, store, settings))
                        settings.callbacks.done(fleet)
            return conclude(work, store)

    def devices(self) -> list[torch.device]:
        """The device of each worker."""
        if self.device.type == "cpu" or self.device.index is not None:
            return [self.device] * self.workers
        gpus = torch.cuda.device_count()
        return [torch.device("cuda", worker % gpus) for worker in range(self.workers)]
