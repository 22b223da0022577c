"""A callback for Lightning: the temperature by a schedule, and how categories are used, in its loggers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gapped.checks import check_count
from gapped.nn.schedules import Schedule
from gapped.nn.usage import Usage


class LayerCallback(Callback):
    """Sets the temperature of all gapped layers before each batch, and logs their use of categories.

    The values of `gapped.nn.Usage` go to the trainer's loggers, such as TensorBoard's or W&B's.

    Arguments:
        schedule: A schedule of `gapped.nn.schedules`, by the trainer's global step; None leaves the
            temperature alone.
        every: Log after so many batches, counted over all epochs.
    """

    def __init__(self, schedule: Schedule | None = None, every: int = 50) -> None:
        check_count("every", every)
        self.schedule, self.every = schedule, every

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.usage, self.batches, self.tau = Usage(pl_module), 0, 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.schedule is not None:
            self.tau = self.schedule.apply(pl_module, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1
        if self.batches % self.every == 0:
            values = self.usage.read()
            if self.schedule is not None:
                values["tau"] = self.tau
            for logger in trainer.loggers:
                logger.log_metrics(values, trainer.global_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.usage.close()
