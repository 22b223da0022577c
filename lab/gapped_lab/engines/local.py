"""The local engine: one fleet after the other, in this process."""

from __future__ import annotations

from collections.abc import Sequence

from gapped.comparison.records import Record
from gapped_lab.environment import current, pick_device
from gapped_lab.planning import conclude, prepare, remaining
from gapped_lab.recipe import Recipe
from gapped_lab.store import Store
from gapped_lab.training import Settings, attempt, check_data


class Local:
    """This process, on one device."""

    leads = True
    restarts = False

    def __init__(self, device: str) -> None:
        self.device = pick_device(device)

    def run(self, recipes: Sequence[Recipe], store: Store, settings: Settings) -> list[Record]:
        with store.occupied(), current(self.device):
            work = prepare(recipes, store)
            pending = remaining(work, store)
            check_data(pending, settings.data_dir)
            settings.callbacks.start(pending)
            for fleet in pending:
                store.keep(fleet.key, attempt(fleet, self.device, store, settings))
                settings.callbacks.done(fleet)
            return conclude(work, store)
